"""What holds inside of a block alone: other attributes, a context variable's value, torch's default dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_ABSENT = object()


@contextmanager
def attributes(values: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Inside, modules, classes and objects have other attributes: {(object, name): value}. What one only inherited, or
    did not have, it inherits again, or has no more."""
    before = {(place, name): vars(place).get(name, _ABSENT) for place, name in values}
    for (place, name), value in values.items():
        setattr(place, name, value)
    try:
        yield
    finally:
        for (place, name), value in before.items():
            if value is _ABSENT:
                delattr(place, name)
            else:
                setattr(place, name, value)


@contextmanager
def variable(which: ContextVar[T], value: T) -> Iterator[None]:
    """Inside, a context variable has this value."""
    token = which.set(value)
    try:
        yield
    finally:
        which.reset(token)


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, torch makes floating-point tensors of this dtype; None: of the one that it makes now."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def no_autocast() -> Iterator[None]:
    """Outside of any `torch.autocast`: what it does is in a trace already."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
