"""Key-value caches: `TokenCache` for transformers' generation loop, `TracedCache` for traced models.

Each rank stores its keys and values in a `CacheStore`. A `TokenCache` only counts the tokens, and gives transformers
the sizes of the attention masks. As for a static cache, all masks cover the full length of the cache, so that one
program serves all tokens. A layer with a sliding window has a cache of full length too, and its mask excludes earlier
tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

from autopart.compat.torch_internals import register_node
from autopart.ops.key_value_cache import CacheStore
from autopart.ops.operators import autopart_ops
from autopart.tracing.with_loss import LocalCache

LENGTH_STEP = 64
"""Cache lengths are multiples of this number, so that few programs serve all lengths."""


def padded_length(length: int) -> int:
    """Return the smallest multiple of `LENGTH_STEP` that is at least `length`."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def holds_keys_only(config: Any) -> bool:
    """Return True if the caches of all layers contain only keys and values.

    The result is False for Mamba and other recurrent layers.
    """
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    return all(type(layer) in kinds for layer in DynamicCache(config=config).layers)


class _Layer(CacheLayerMixin):
    """One layer of a `TokenCache`. It reports the sizes of attention masks, but stores no tensors."""

    is_compileable = True

    def __init__(self, cache: TokenCache, is_sliding: bool):
        super().__init__()
        self.cache, self.is_sliding = cache, is_sliding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("a TokenCache has no tensors")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("a TokenCache has no tensors")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length, 0

    def get_seq_length(self) -> int:
        return self.cache.num_tokens

    def get_max_length(self) -> int:
        return self.cache.length


class TokenCache(Cache):
    """Cache object for transformers' loop in one `generate` call. It counts tokens, but has no tensors.

    Attributes:
        length: number of tokens that the caches can hold.
        num_tokens: number of tokens in the caches.
        store: keys and values of this rank.
    """

    def __init__(self, config: Any, length: int):
        self.length, self.num_tokens, self.store = padded_length(length), 0, CacheStore()
        layers = DynamicCache(config=config).layers
        sliding = [bool(getattr(layer, "is_sliding", False)) for layer in layers] or [False]
        super().__init__(layers=[_Layer(self, is_sliding) for is_sliding in sliding])

    def traced(self, num_new: int, device: torch.device, kind: type[Any]) -> Any:
        """Return the cache to pass to the model for a call with `num_new` tokens: an object of class `kind`."""
        positions = torch.arange(self.num_tokens, self.num_tokens + num_new, device=device)
        return kind(positions[None], torch.zeros(1, self.length, dtype=torch.bool, device=device))


class TracedCache(Cache, LocalCache):
    """Cache that the model gets while it is traced. Cache writes become `autopart.update_cache` operators.

    `positions` and `slots` are inputs of the program. Their first dim has size 1, so that it cannot be the batch dim.

    Args:
        positions: index in the cache of each new token, of shape [1, tokens].
        slots: tensor of shape [1, length of the cache]. Only its shape is used.
    """

    def __init__(self, positions: Tensor, slots: Tensor):
        super().__init__(layers=[])
        self.positions, self.slots = positions, slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        update, positions, length = autopart_ops.update_cache.default, self.positions[0], self.slots.shape[1]
        return update(key_states, positions, "", length), update(value_states, positions, "", length)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.positions[0, 0]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.slots.shape[1], 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.slots.shape[1]


class _Recomputed(Cache):
    """Replacement for a cross-attention cache in a trace, which caches nothing.

    Every call computes the keys and values again.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return key_states, value_states


class _NeverUpdated(dict[int, bool]):
    """Dict {layer: True if its cross-attention is cached} that ignores assignments.

    No layer ever counts as cached, so every call computes the keys and values of cross-attention again.
    """

    def __setitem__(self, layer: int, is_updated: bool) -> None: ...


class TracedEncoderDecoderCache(EncoderDecoderCache, LocalCache):
    """`TracedCache` for models with an encoder and a decoder."""

    def __init__(self, positions: Tensor, slots: Tensor):
        super().__init__(TracedCache(positions, slots), _Recomputed())
        self.is_updated = _NeverUpdated()


register_node(TracedCache, lambda cache: [cache.positions, cache.slots])
register_node(
    TracedEncoderDecoderCache, lambda cache: [cache.self_attention_cache.positions, cache.self_attention_cache.slots]
)
