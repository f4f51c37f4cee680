"""Interaction with user code around calls of a partitioned model: `torch.compile`, `backward`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopart.errors import UsageError
from autopart.tracing.caller_modes import isolated_trace

outside_inference_mode: Any = isolated_trace
"""Context manager that leaves inference mode, to create objects that later calls use (parameters)."""


@functools.cache
def run_uncompiled(kind: type, methods: Sequence[str]) -> None:
    """Exclude these methods of a partitioned model from `torch.compile` of the user's code.

    They run graphs that autopart compiles itself.
    """
    reason = "stages of a partitioned model are compiled by parallelize(..., compile=True)"
    for method in methods:
        setattr(kind, method, torch.compiler.disable(getattr(kind, method), reason=reason))


@functools.cache
def explain_backward() -> None:
    """Patch `Tensor.backward` to raise a clear error for a tensor without a graph, such as a step's loss."""
    torch_backward = Tensor.backward

    @functools.wraps(torch_backward)
    def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.requires_grad or self.grad_fn is not None:
            return torch_backward(self, *args, **kwargs)
        try:
            return torch_backward(self, *args, **kwargs)
        except RuntimeError as error:
            raise UsageError(
                "backward() is called on a tensor that requires no gradient",
                why=f"the loss of pm.step(...) is detached, because step() has run the backward already ({error})",
                hint="loss = pm.step(**batch) without backward(); or loss = pm(**batch), and loss.backward()",
            ) from error

    Tensor.backward = backward  # type: ignore[method-assign]
