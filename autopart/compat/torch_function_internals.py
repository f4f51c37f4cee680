"""Private APIs of torch for tensor subclasses with `__torch_function__`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

local_values = torch._C.DisableTorchFunctionSubclass
"""Context manager in which a sharded tensor behaves as the plain tensor of this rank's values."""

full_values = torch._C._EnableTorchFunction
"""Context manager in which sharded tensors behave as full tensors, for callbacks into user code."""


F = TypeVar("F", bound=Callable[..., Any])


def on_local_values(function: F) -> F:
    """Decorate a function so that torch treats sharded tensors in it as plain local tensors."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with local_values():
            return function(*args, **kwargs)

    return cast(F, run)


def as_class(values: torch.Tensor, kind: type[torch.Tensor], requires_grad: bool) -> Any:
    """Return a leaf tensor of class `kind` that shares the memory of `values`."""
    return torch.Tensor._make_subclass(kind, values.detach(), requires_grad)


def function_name(func: Callable[..., Any]) -> str:
    """Return the name of a torch function; for an attribute, with the prefix "get:", "set:" or "del:"."""
    name = getattr(func, "__name__", "")
    kind = {"__get__": "get:", "__set__": "set:", "__delete__": "del:"}.get(name)
    if kind is not None:
        return kind + str(getattr(func, "__self__", None).__name__)
    return name


def register_foreach(kinds: Sequence[type[torch.Tensor]]) -> None:
    """Allow torch's optimizers and clipping to use foreach kernels for these tensor classes."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for supported in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        supported += [kind for kind in kinds if kind not in supported]
