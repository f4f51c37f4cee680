"""A model whose `generate` is transformers' own, and whose forward calls run the partitioned model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

from autopart.common.scoped import variable
from autopart.errors import UsageError
from autopart.extras.generation.caches import TokenCache, TracedCache, TracedEncoderDecoderCache
from autopart.ops.key_value_cache import STORE

_MODES = ("greedy_search", "sample")


def generate(call: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run transformers' `model.generate(*args, **kwargs)`, in which `call(**inputs)` is the model's forward."""
    check_model(model)
    return _generating(call, model).generate(*args, **kwargs)


def check_model(model: nn.Module) -> None:
    """Raise UsageError if a model is no transformers model that generates."""
    if not isinstance(model, GenerationMixin) or not isinstance(
        getattr(model, "generation_config", None), GenerationConfig
    ):
        raise UsageError(
            f"{type(model).__name__} cannot generate",
            why="generate() needs a transformers model with a generation config",
            hint="a model with a language-model head, such as AutoModelForCausalLM; or a loop over pm(**inputs)",
        )


def _generating(call: Callable[..., Any], model: Any) -> Any:
    """Return a shallow copy of the model with another forward. Modules and configs are shared with the model."""
    proxy = copy.copy(model)
    proxy.forward = forward = _Forward(call, model)
    proxy._prepare_cache_for_generation = forward.prepare_cache
    return proxy


class _Forward:
    """The forward of a generating model: calls the partitioned model, with a cache if transformers passes one."""

    def __init__(self, call: Callable[..., Any], model: Any):
        self.call, self.model = call, model
        self.__signature__ = inspect.signature(model.forward)  # transformers reads the names of the model's inputs
        self.cache_type = TracedEncoderDecoderCache if model.config.is_encoder_decoder else TracedCache

    def prepare_cache(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int,
        max_cache_length: int,
    ) -> None:  # fmt: skip
        """Add a cache to the arguments of the model, as `GenerationMixin._prepare_cache_for_generation` does."""
        if generation_config.use_cache:
            text_config = self.model.config.get_text_config(decoder=True)
            model_kwargs["past_key_values"] = TokenCache(text_config, max_cache_length)

    def __call__(self, **inputs: Any) -> Any:
        cache = inputs.get("past_key_values")
        if cache is None:
            return self.call(**inputs)
        tokens = next(
            inputs[name] for name in ("decoder_input_ids", "input_ids", "inputs_embeds")
            if isinstance(inputs.get(name), Tensor)
        )  # fmt: skip
        traced = cache.traced(tokens.shape[1], tokens.device, self.cache_type)
        with variable(STORE, cache.store):
            outputs = self.call(**{**inputs, "past_key_values": traced})
        cache.num_tokens += tokens.shape[1]
        outputs["past_key_values"] = cache
        return outputs
