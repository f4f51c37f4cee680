"""Record of how a model's Python decides by tensor sizes, such as `if length > 512`.

A program for another sequence length can be derived from traced ones only if the Python code would decide equally. So
sizes that Python reads during a trace are `TracedSize` objects, which record each operation whose result is not a
linear function of the size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch


class SizeCondition(NamedTuple):
    """One recorded operation on sizes, with its operands and result.

    `is_checked_at_run_time`: a call with other sizes checks the condition before its ranks communicate. So programs
    can be derived even if no formula of the sizes gives `left`.

    >>> SizeCondition("gt", 77, 64, True).holds
    True
    """

    name: str
    left: int
    right: int | float
    result: int | float | bool
    is_checked_at_run_time: bool = False

    @property
    def holds(self) -> bool:
        """True if the operation on these operands gives the recorded result."""
        return bool(getattr(operator, self.name)(self.left, self.right) == self.result)


class TracedSize(int):
    """A size that Python read in a trace: an int that records operations in `conditions`."""

    conditions: list[SizeCondition]
    __hash__ = int.__hash__

    def __bool__(self) -> bool:
        return bool(_recorded("ne", self, 0))


def traced_sizes(value: Any, conditions: list[SizeCondition]) -> Any:
    """Convert the int or `torch.Size` that Python reads to `TracedSize` objects.

    Other values are returned unchanged.
    """
    if type(value) is int:
        size = TracedSize(value)
        size.conditions = conditions
        return size
    if type(value) is torch.Size:
        return torch.Size([traced_sizes(size, conditions) for size in value])
    return value


def plain_sizes(value: Any) -> Any:
    """Convert `TracedSize` objects back to ints, also in tuples, lists, dicts and sets.

    Returns the same object if it has none.
    """
    if isinstance(value, TracedSize):
        return int(value)
    if type(value) is torch.Size:
        return torch.Size([int(size) for size in value])
    if type(value) is dict:
        parts = [part for pair in value.items() for part in pair]
        plain = [plain_sizes(part) for part in parts]
        return value if _are_same(plain, parts) else dict(zip(plain[::2], plain[1::2], strict=True))
    if type(value) in (tuple, list, set):
        plain = [plain_sizes(part) for part in value]
        return value if _are_same(plain, value) else type(value)(plain)
    return value


def _are_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    return all(one is other for one, other in zip(some, others, strict=True))


def _recorded(name: str, left: Any, right: Any) -> Any:
    traced = left if isinstance(left, TracedSize) else right
    plain = [int(side) if isinstance(side, int) else side for side in (left, right)]
    if not all(type(side) in (int, float) for side in plain):
        return NotImplemented
    result = getattr(operator, name)(*plain)
    traced.conditions.append(SizeCondition(name, plain[0], plain[1], result))
    return traced_sizes(result, traced.conditions)


def _linear(name: str, left: Any, right: Any) -> Any:
    traced = left if isinstance(left, TracedSize) else right
    plain = [int(side) if isinstance(side, int) else side for side in (left, right)]
    if not all(type(side) is int for side in plain):
        return NotImplemented
    return traced_sizes(getattr(operator, name)(*plain), traced.conditions)


def _operations() -> dict[str, Callable[..., Any]]:
    methods: dict[str, Callable[..., Any]] = {}

    def add(compute: Callable[[str, Any, Any], Any], name: str, method: str, is_reflected: bool = False) -> None:
        if is_reflected:
            methods[f"__r{method}__"] = lambda self, other: compute(name, other, self)
        else:
            methods[f"__{method}__"] = lambda self, other: compute(name, self, other)

    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        add(_recorded, name, name)
    for name in ("add", "sub", "mul"):
        add(_linear, name, name)
        add(_linear, name, name, True)
    for name in ("floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor"):
        function = f"{name}_" if name in ("and", "or") else name
        add(_recorded, function, name)
        add(_recorded, function, name, True)
    methods["__divmod__"] = lambda self, other: (self // other, self % other)
    methods["__neg__"] = lambda self: 0 - self
    return methods


for _name, _method in _operations().items():
    setattr(TracedSize, _name, _method)
