"""Smaller sizes for a transformers config, chosen so that the same sharding rules apply.

Every size keeps its remainder modulo the number of ranks, and numbers of heads keep their common divisor with it. A
smaller dim is thus evenly divisible if and only if the original dim is. The ratio of query heads to key and value heads
does not change.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

VOCABULARY = ("vocab_size",)
WIDTHS = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "num_heads")
KEY_HEADS = ("num_key_value_heads",)
HEAD_DIMS = ("head_dim", "d_kv")
INNER = ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size")
EXPERTS = ("num_local_experts", "num_experts")
CHOSEN = ("num_experts_per_tok",)

TOKENS = ("input_ids", "labels", "decoder_input_ids")
ROWS = (*TOKENS, "attention_mask", "position_ids", "token_type_ids")
"""Inputs of shape [batch, tokens], by their names in transformers."""

SMALLEST = {"vocabulary": 256, "width": 64, "head": 8, "sequence": 16}

Changes = Mapping[str, tuple[int, int]]
"""{entry of a config: (size, smaller size)}"""


@dataclass(frozen=True)
class Divisors:
    """Divisors of three groups of sizes: vocabulary; widths and number of experts; sequence length."""

    vocabulary: int = 1
    width: int = 1
    sequence: int = 1


LADDER = (
    *(Divisors(vocabulary) for vocabulary in (4, 16, 64)),
    *(Divisors(64, width) for width in (2, 4, 8, 16, 32)),
    *(Divisors(64, 32, sequence) for sequence in (2, 4, 8)),
)
"""Divisors to try, in order: first those that give the largest sizes."""


def is_scalable(config: Any) -> bool:
    """Return True if a config can be made smaller.

    It must have the sizes that this module lists, and contain no config of another model.
    """
    if not hasattr(config, "get_text_config") or config.get_text_config() is not config:
        return False
    return _first(config, WIDTHS) is not None and _first(config, HEADS) is not None


def smaller(config: Any, divisors: Divisors, num_ranks: int) -> tuple[Any, Changes]:
    """Return a copy of the config with smaller sizes, and {name: (original size, smaller size)}.

    Args:
        num_ranks: number of ranks that shard tensors. Sizes keep their remainder modulo this number.
    """
    copied = copy.deepcopy(config)
    changes: dict[str, tuple[int, int]] = {}

    def change(name: str, size: int) -> None:
        was = getattr(config, name)
        if size != was:
            setattr(copied, name, size)
            changes[name] = (was, size)

    for name in _present(config, VOCABULARY):
        size = scaled_size(getattr(config, name), divisors.vocabulary, num_ranks, SMALLEST["vocabulary"])
        change(name, size)
        _keep_tokens_below(copied, size)
    if divisors.width > 1:
        for name, size in _widths(config, divisors.width, num_ranks):
            change(name, size)
        for name in _present(config, INNER):
            change(name, scaled_size(getattr(config, name), divisors.width, num_ranks, SMALLEST["width"]))
        chosen = max([1, *(getattr(config, name) for name in _present(config, CHOSEN))])
        for name in _present(config, EXPERTS):
            change(name, scaled_size(getattr(config, name), divisors.width, num_ranks, 2 * chosen))
    return copied, changes


def _widths(config: Any, divisor: int, num_ranks: int) -> Iterator[tuple[str, int]]:
    """Yield (name, smaller size) for the sizes of attention: number of heads, head width, total width."""
    (width_name, width), (heads_name, heads) = _first(config, WIDTHS), _first(config, HEADS)  # type: ignore[misc]
    kv_name, kv_heads = _first(config, KEY_HEADS) or ("", heads)
    fewer = max(
        f for f in range(1, divisor + 1)
        if divisor % f == 0 and heads % f == 0 and kv_heads % f == 0
        and _remains(heads, heads // f, num_ranks) and _remains(kv_heads, kv_heads // f, num_ranks)
    )  # fmt: skip
    own_dim = _first(config, HEAD_DIMS)
    head_dim = own_dim[1] if own_dim is not None else width // heads
    narrower = max(
        n for n in range(1, divisor // fewer + 1)
        if (divisor // fewer) % n == 0 and head_dim % (2 * n) == 0 and head_dim // n >= min(SMALLEST["head"], head_dim)
    )  # fmt: skip
    yield heads_name, heads // fewer
    if kv_name:
        yield kv_name, kv_heads // fewer
    if own_dim is not None:
        yield own_dim[0], head_dim // narrower
    exact = heads * head_dim == width
    yield (
        width_name,
        width // (fewer * narrower) if exact else scaled_size(width, divisor, num_ranks, SMALLEST["width"]),
    )


def _remains(size: int, other: int, num_ranks: int) -> bool:
    return math.gcd(size, num_ranks) == math.gcd(other, num_ranks)


def scaled_size(size: int, divisor: int, num_ranks: int, smallest: int) -> int:
    """Return a size about `divisor` times smaller, but at least `smallest`.

    The size keeps its remainder modulo `num_ranks`.

    >>> [scaled_size(size, divisor=4, num_ranks=8, smallest=256) for size in (50257, 14336, 100)]
    [12569, 3584, 100]
    """
    target = max(size // divisor, smallest)
    return size if target >= size else size - num_ranks * ((size - target) // num_ranks)


def _keep_tokens_below(config: Any, vocabulary: int) -> None:
    """Reduce ids of special tokens, such as `eos_token_id`, so that they are below the vocabulary size."""
    for name, token in list(vars(config).items()):
        if name.endswith("_token_id") and isinstance(token, int) and token >= vocabulary:
            setattr(config, name, token % vocabulary)
        elif name.endswith("_token_id") and isinstance(token, list):
            setattr(config, name, [t % vocabulary for t in token])


def _present(config: Any, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if isinstance(getattr(config, name, None), int)]


def _first(config: Any, names: tuple[str, ...]) -> tuple[str, int] | None:
    present = _present(config, names)
    return (present[0], getattr(config, present[0])) if present else None


def smaller_call(arguments: Mapping[str, Any], vocabulary: int, divisor: int, num_ranks: int) -> dict[str, Any] | None:
    """Return a call with smaller token ids and shorter sequences; None if a tensor argument is not tokens.

    Negative token ids (ignored labels) stay unchanged.
    """
    shorter = dict(arguments)
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            continue
        if name not in ROWS or value.dim() != 2:
            return None
        value = value[:, : scaled_size(value.shape[1], divisor, num_ranks, SMALLEST["sequence"])]
        shorter[name] = torch.where(value >= 0, value % vocabulary, value) if name in TOKENS else value
    return shorter
