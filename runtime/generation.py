"""Text generation with a partitioned model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopart.common.extras import load_extra
from autopart.errors import UsageError
from autopart.runtime.comm.call_random import get_state
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.consistency.same_call import ComparedCall, Comparison


class GenerateMethods(nn.Module):
    """The method `generate` of a partitioned transformers model."""

    _source: Any
    _traced: Any
    _compiler: Any
    _process: Process
    _local_batch: bool

    @property
    def generation_config(self) -> Any:
        """Default options of `generate`, which belong to the original model."""
        return self._source.model.generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        self._source.model.generation_config = value

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens, like `generate` of the original transformers model. A collective call.

        Every rank passes the same arguments and gets the same tokens. The model runs in eval mode, with the current
        weights. Greedy decoding and sampling are supported. With `rng="exact"` sampling draws from torch's default
        generator, as on one device. Otherwise it draws from a generator that all ranks share.

        Raises UsageError for a model without a generation config, and for beam search, assisted generation and other
        options that are not supported.

        Example:
            tokens = pm.generate(**tokenizer(texts, return_tensors="pt", padding=True), max_new_tokens=64)
        """
        self._traced("generate()")
        if self._local_batch:
            raise UsageError(
                "generate() is not supported with local_batch=True",
                why="ranks would stop after different numbers of tokens",
                hint="parallelize(...) without local_batch, and the prompts of all ranks on every rank",
            )  # fmt: skip
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            with self._sampling_state():
                return load_extra("generation").generate(_PartitionedModel(self), self._source.model, args, kwargs)
        finally:
            for module, mode in modes:
                module.training = mode

    @contextmanager
    def _sampling_state(self) -> Iterator[None]:
        """Context manager that seeds torch's default generators equally on all ranks, unless `rng="exact"`."""
        if self._compiler.options.rng == "exact":
            yield
            return
        device = self._process.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self._compiler.draw_seed())
            yield


class _PartitionedModel:
    """A partitioned model, with the interface that the package `autopart.extras.generation` needs."""

    def __init__(self, module: Any):
        self.module, self.process = module, module._process

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    @property
    def keeps_stages(self) -> bool:
        return "pp" in self.process.groups

    @property
    def shards_sequences(self) -> bool:
        return bool(self.process.mesh.along("positions"))

    def compare(self, options: str, samples: bool) -> None:
        text = f"generate({options})"
        if samples and self.module._compiler.options.rng == "exact":
            states = [get_state(torch.device(kind)) for kind in dict.fromkeys(("cpu", self.process.device.type))]
            digest = hashlib.blake2b(b"".join(state.numpy().tobytes() for state in states), digest_size=6)
            text += f" with random state {digest.hexdigest()}"
        Comparison(ComparedCall("generate", 0, text, {}), self.process).finish_comparison()
