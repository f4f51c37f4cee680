"""Context managers that set attributes, context variables, the default dtype or autocast."""

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
    """Set attributes, given as {(object, name): value}, and restore them at the end of a `with` block.

    An attribute that was not in the object's own `__dict__` before is deleted at the end.
    """
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
    """Set a context variable, and restore its value at the end of a `with` block."""
    token = which.set(value)
    try:
        yield
    finally:
        which.reset(token)


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Set torch's default floating-point dtype inside a `with` block. None changes nothing."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def no_autocast() -> Iterator[None]:
    """Disable `torch.autocast` inside a `with` block, for programs whose graphs contain explicit casts."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
