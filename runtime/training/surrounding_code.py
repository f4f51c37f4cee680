"""Interaction with user code around calls of a partitioned model: `torch.compile` and `backward`."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopart.errors import UsageError
from autopart.tracing.caller_modes import isolated_trace

outside_inference_mode: Any = isolated_trace
"""Context manager that leaves inference mode, to create objects that later calls use (parameters)."""


def bind_calls(module: Any, model: nn.Module) -> None:
    """Exclude a partitioned model from `torch.compile`, and give its `forward` the model's signature."""
    kind: Any = type(module)
    run_uncompiled(kind, ("forward", "step", "flush"))
    module._signed_forward = forward_signed_as(kind, model)


@functools.cache
def run_uncompiled(kind: type, methods: Sequence[str]) -> None:
    """Exclude these methods of a partitioned model from `torch.compile` of the user's code.

    These methods run graphs that autopart compiles itself.
    """
    reason = "stages of a partitioned model are compiled by parallelize(..., compile=True)"
    for method in methods:
        setattr(kind, method, torch.compiler.disable(getattr(kind, method), reason=reason))
    kind.forward = SignedForward(kind.forward)  # type: ignore[attr-defined]


class SignedForward:
    """Descriptor of `forward`: `inspect.signature(pm.forward)` is the signature of the user's model.

    Libraries read it to select the columns of a dataset and the keyword arguments of a model.
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    def __get__(self, module: nn.Module | None, kind: type) -> Callable[..., Any]:
        if module is None:
            return self.function
        return types.MethodType(module.__dict__.get("_signed_forward", self.function), module)


@contextmanager
def calling_instead(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Context manager in which calls of the module run `function(module, ...)` in place of `forward`."""
    forward, module.__dict__["_signed_forward"] = module.__dict__["_signed_forward"], function
    try:
        yield
    finally:
        module.__dict__["_signed_forward"] = forward


def forward_signed_as(kind: type[nn.Module], model: nn.Module) -> Callable[..., Any]:
    """Return a copy of the function `kind.forward` that has the signature of `model.forward`."""
    function: Any = kind.forward
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a forward in C++ or TorchScript
        return function
    signed = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    signed.__dict__.update(function.__dict__)
    module = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    signed.__signature__ = signature.replace(parameters=[module, *own])  # type: ignore[attr-defined]
    return signed


@functools.cache
def explain_backward() -> None:
    """Patch `Tensor.backward` to raise a clear error for a tensor without a graph, such as `step`'s loss."""
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
