"""A model whose `generate` is transformers' own, and whose forward runs the partitioned model."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

from autopart.common.scoped import variable
from autopart.errors import UsageError
from autopart.extras.generation.caches import TokenCache, TracedCache, TracedEncoderDecoderCache, holds_keys_only
from autopart.extras.generation.full_sequences import with_padded_tokens
from autopart.ops.key_value_cache import STORE

_TOKENS = ("decoder_input_ids", "input_ids", "inputs_embeds")
"""Inputs of a model that have one entry per token, in order of preference."""
_CACHES = (None, "static", "dynamic", "hybrid", "sliding_window")


class PartitionedModel(Protocol):
    """Interface of the partitioned model that `generate` uses."""

    def __call__(self, **inputs: Any) -> Any:
        """Return the model's output for the global batch, on every rank."""

    @property
    def keeps_stages(self) -> bool:
        """True if every call must run all pipeline stages, so that the encoder cannot run alone."""

    @property
    def shards_sequences(self) -> bool:
        """True if ranks have different tokens of a sequence (`cp`)."""

    def compare(self, options: str, samples: bool) -> None:
        """Raise InputError on all ranks if ranks have different options.

        Args:
            options: the options of `generate`, as text.
            samples: True if tokens are drawn at random. Ranks must then have equal random states too.
        """


def generate(caller: PartitionedModel, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run transformers' `model.generate(*args, **kwargs)`, with the partitioned model as its forward."""
    _check_model(model)
    refused = [name for name in ("custom_generate", "past_key_values", "cache_params") if kwargs.get(name) is not None]
    if refused:
        raise UsageError(
            f"generate({refused[0]}=...) is not supported for a partitioned model",
            why="autopart runs transformers' own loop, with caches that stay on their ranks",
            hint=f"leave {refused[0]} out; {_EXPORT}",
        )  # fmt: skip
    proxy, forward = _generating(caller, model)
    with forward.only_partitioned():
        return proxy.generate(*args, **kwargs)


_EXPORT = "or export the plan (plan.export) and use transformers or vLLM"


def _check_model(model: Any) -> None:
    is_config = isinstance(getattr(model, "generation_config", None), GenerationConfig)
    if not isinstance(model, GenerationMixin) or not is_config:
        raise UsageError(
            f"{type(model).__name__} cannot generate",
            why="generate() needs a transformers model with a generation config",
            hint="a model with a head for tokens, such as AutoModelForCausalLM; or your own loop over pm(**inputs)",
        )  # fmt: skip


def _generating(caller: PartitionedModel, model: Any) -> tuple[Any, _Forward]:
    """Return (shallow copy of the model whose forward runs the partitioned model, this forward).

    The copy shares its modules, parameters and configs with the model.
    """
    proxy, kind = copy.copy(model), type(model)
    methods = {"_sample": _without_cache(kind._sample), "__module__": kind.__module__}
    proxy.__class__ = type(kind.__name__, (kind,), methods)  # transformers gets this method from the class
    proxy.forward = forward = _Forward(caller, model)
    proxy._forward_hooks, proxy._forward_pre_hooks = {}, {}  # the traced model has them
    proxy._validate_generation_mode = forward.check_options
    proxy._prepare_cache_for_generation = forward.prepare_cache
    proxy._maybe_prepare_encoder_kwargs_for_generation = forward.encode
    return proxy, forward


def _without_cache(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `GenerationMixin._sample` to leave the cache out of its results, because it has no tensors."""

    @functools.wraps(sample)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = sample(*args, **kwargs)
        if isinstance(result, Tensor):
            return result
        return type(result)(**{name: value for name, value in result.items() if name != "past_key_values"})

    return call


class _Forward:
    """Forward of a generating model, and replacements for steps of transformers' `generate`.

    A call with a `TokenCache` passes only the new tokens. Without a cache, each call passes the full sequence, padded
    on the right to a multiple of `LENGTH_STEP` tokens.
    """

    def __init__(self, caller: PartitionedModel, model: Any):
        self.caller, self.model = caller, model
        self.__signature__ = inspect.signature(model.forward)  # transformers reads the names of the model's inputs
        self.is_encoder_decoder = bool(model.config.is_encoder_decoder)
        self.text_config = model.config.get_text_config(decoder=True)
        self.encodes_again = self.is_encoder_decoder and caller.keeps_stages
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._is_running = False

    def check_options(self, mode: Any, config: Any, mode_kwargs: Mapping[str, Any]) -> None:
        """Raise UsageError for options that are not supported, InputError if ranks have different options."""
        if mode not in ("greedy_search", "sample"):
            raise UsageError(
                f"generate() does not support {mode.value.replace('_', ' ')} on a partitioned model",
                why="caches stay on their ranks, and are not reordered or cut",
                hint=f"greedy decoding or sampling (num_beams=1, no assistant model); {_EXPORT}",
            )  # fmt: skip
        if config.max_time is not None:
            raise UsageError(
                f"generate(max_time={config.max_time}) is not supported on a partitioned model",
                why="ranks would stop after different numbers of tokens", hint="max_new_tokens=",
            )  # fmt: skip
        if config.cache_implementation not in _CACHES:
            raise UsageError(
                f"generate(cache_implementation={config.cache_implementation!r}) is not supported by autopart",
                why="autopart has one kind of cache: sharded, of fixed length", hint="leave cache_implementation out",
            )  # fmt: skip
        options = ", ".join(f"{name}={value}" for name, value in sorted(config.to_diff_dict().items()))
        self.caller.compare(options, config.do_sample is True)

    def prepare_cache(
        self, config: Any, model_kwargs: dict[str, Any], mode: Any, batch_size: int, max_length: int
    ) -> None:
        """Add a `TokenCache` to the inputs. Set `use_cache=False` if this call cannot use one.

        Raises UsageError if the call needs a cache and cannot use one.
        """
        if config.use_cache is False:
            return
        cache = TokenCache(self.text_config, max_length)
        # False if transformers does not run this model with a static cache: it may compute positions from its length.
        takes_fixed_length = self.model._can_compile_fullgraph and holds_keys_only(self.text_config)
        if takes_fixed_length and not self.encodes_again and not self.caller.shards_sequences:
            model_kwargs["past_key_values"] = cache
            return
        if model_kwargs.get("inputs_embeds") is not None and not self.is_encoder_decoder:
            raise UsageError(
                "generate(inputs_embeds=...) is not supported here",
                why="it needs a cache, and autopart has none on a mesh with cp or for this model",
                hint="input_ids=; or a mesh without cp",
            )  # fmt: skip
        config.use_cache = False

    def encode(
        self, inputs: Tensor, model_kwargs: dict[str, Any], input_name: str | None, config: Any
    ) -> dict[str, Any]:
        """Run the encoder of an encoder-decoder model once, before the first token is generated.

        If every call must run all pipeline stages, the encoder runs in each call instead: the encoder's inputs are
        passed in place of its outputs.
        """
        if not self.is_encoder_decoder or model_kwargs.get("encoder_outputs") is not None:
            return model_kwargs
        if self.encodes_again:
            model_kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=inputs)
            return model_kwargs
        names = set(inspect.signature(self.model.forward).parameters)
        encoded = {
            name: value for name, value in model_kwargs.items()
            if name in names and name != "labels"  # Seq2SeqTrainer passes labels, which transformers ignores
            and not name.startswith(("decoder_", "cross_attn", "past_", "cache_", "use_cache"))
        }  # fmt: skip
        encoded[input_name or self.model.main_input_name] = inputs
        start = inputs.new_zeros((inputs.shape[0], 1), dtype=torch.int64)
        outputs = self._run(**encoded, decoder_input_ids=start, use_cache=False, return_dict=True)
        model_kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=outputs.encoder_last_hidden_state)
        return model_kwargs

    def __call__(self, **inputs: Any) -> Any:
        cache = inputs.get("past_key_values")
        tokens = next(name for name in _TOKENS if isinstance(inputs.get(name), Tensor))
        if cache is not None:
            return self._with_cache(cache, inputs[tokens], inputs)
        if self.encodes_again:
            inputs[self.model.main_input_name] = inputs.pop("encoder_outputs").last_hidden_state
        return self._with_all_tokens(tokens, inputs)

    def _with_cache(self, cache: TokenCache, tokens: Tensor, inputs: dict[str, Any]) -> Any:
        kind = TracedEncoderDecoderCache if self.is_encoder_decoder else TracedCache
        traced = cache.traced(tokens.shape[1], tokens.device, kind)
        with variable(STORE, cache.store):
            outputs = self._run(**{**inputs, "past_key_values": traced})
        cache.num_tokens += tokens.shape[1]
        outputs["past_key_values"] = cache
        return outputs

    def _with_all_tokens(self, tokens: str, inputs: dict[str, Any]) -> Any:
        length = inputs[tokens].shape[1]
        padded = with_padded_tokens(inputs, tokens, self.text_config, accepts=self.__signature__.parameters)
        outputs = self._run(**{**padded, "use_cache": False})
        if outputs.logits.shape[1] != 1:
            outputs["logits"] = outputs.logits[:, length - 1 : length]
        return outputs

    def _run(self, **inputs: Any) -> Any:
        for name, value in inputs.items():
            if type(value) is dict:  # masks by kind of layer, which transformers lists in the order of a set
                inputs[name] = dict(sorted(value.items()))
        self._is_running = True
        try:
            return self.caller(**inputs)
        finally:
            self._is_running = False

    @contextmanager
    def only_partitioned(self) -> Iterator[None]:
        """Context manager in which running a single module of the original model raises UsageError.

        Only calls of the full model run on the partitioned model.
        """

        def check(module: nn.Module, args: Any) -> None:
            if not self._is_running and (name := self._modules.get(id(module))) is not None:
                raise UsageError(
                    f"{type(self.model).__name__}.generate() runs the module '{name}' alone",
                    why="its parameters are sharded, and only calls of the full model are partitioned",
                    hint=f"your own loop over pm(**inputs); {_EXPORT}",
                )  # fmt: skip

        handle = register_module_forward_pre_hook(check)
        try:
            yield
        finally:
            handle.remove()
