"""Record of how a model's Python decides by tensor sizes, such as `if length > 512`.

A program for another sequence length can be derived from traced ones only if the Python code would decide equally. So
sizes that Python reads during a trace are `TracedSize` objects, which record each operation whose result is not a
linear function of the size. Floats that Python computes from sizes are `TracedFloat` objects. They record comparisons
and conversions to integers, such as `math.ceil(length / 16)`.
"""

from __future__ import annotations

import builtins
import decimal
import itertools
import math
import numbers
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import numpy
import torch

Expression = Any
"""An int or float, or a tuple (name of a function, expressions of its arguments)."""


class SizeCondition(NamedTuple):
    """One recorded operation on sizes, with its operands and result.

    `name`: the name of a function of Python's module `operator`; functions of other modules have the module in their
    name, such as `math.ceil`. `right`: None for a function of one argument. `is_checked_at_run_time`: a call with other
    sizes checks the condition before its ranks communicate. So a program for other sizes can be derived even if `left`
    is not a known function of the sizes.

    >>> SizeCondition("gt", 77, 64, True).holds
    True
    >>> SizeCondition("math.ceil", ("truediv", 77, 16), None, 5).holds
    True
    """

    name: str
    left: Expression
    right: Expression | None
    result: int | float | bool
    is_checked_at_run_time: bool = False

    @property
    def holds(self) -> bool:
        """True if the operation on these operands gives the recorded result."""
        try:
            return bool(_value((self.name, *self.operands)) == self.result)
        except (ArithmeticError, ValueError):  # such as the logarithm of zero
            return False

    @property
    def operands(self) -> tuple[Expression, ...]:
        return (self.left,) if self.right is None else (self.left, self.right)


_MODULES = {"math": math, "builtins": builtins, "int": int}


_DISTINCT = itertools.count()
"""Numbers that no two traces share: a condition on one of them holds for no other trace."""


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.rpartition(".")
    found: Callable[..., Any] = getattr(_MODULES.get(module, operator), function)
    return found


def _value(expression: Expression) -> Any:
    if not isinstance(expression, tuple):
        return expression
    name, *operands = expression
    return _function(name)(*map(_value, operands))


class SizeConditions(list[SizeCondition]):
    """The operations on sizes that one trace records.

    Args:
        replace: function (frame, name) that is called if a frame calls `int` or `float` with a size. It may raise an
            exception to repeat the trace with an `int` or `float` in the frame's module that records the call.
    """

    def __init__(self, replace: Callable[[FrameType, str], None] = lambda frame, name: None):
        super().__init__()
        self.replace = replace

    def record_equal(self, value: int | float) -> None:
        """Record that a number must be equal in all calls, because its later use cannot be recorded."""
        self.append(SizeCondition("eq", _expression(value), float(_plain(value)), True))

    def record_unknown(self) -> None:
        """Record that Python read an unknown number, so that no program for other sizes is derived."""
        self.record_equal(next(_DISTINCT) + 0.5)

    def with_constants(self, values: Any) -> Any:
        """Return values that Python reads from a constant tensor; record that they must be equal in all calls.

        They may depend on a size, which a tensor does not record: `torch.arange(length).max().item()`.
        """
        if isinstance(values, list):
            for value in values:
                self.with_constants(value)
        elif type(values) in (int, float):
            self.record_equal(values)
        return values

    def record_conversion(self, value: int | float, name: str, frame: FrameType) -> None:
        """Record that a frame converts a size to a plain `int` or `float`."""
        if not _is_torch(frame):
            self.replace(frame, name)
            self.record_equal(value)


class TracedSize(int):
    """A size that Python read in a trace: an int that records operations in `conditions`."""

    conditions: SizeConditions

    def __hash__(self) -> int:
        """Return the hash, and record that the size must be equal in all calls.

        If a dict or set does not contain the size, a look-up calls only `__hash__`, and no method that records a
        comparison.
        """
        if not _is_torch(sys._getframe(1)):
            self.conditions.record_equal(self)
        return int.__hash__(self)

    def __float__(self) -> float:
        self.conditions.record_conversion(self, "float", sys._getframe(1))
        return int.__float__(self)

    def __copy__(self) -> TracedSize:
        return self

    def __deepcopy__(self, memo: Any) -> TracedSize:
        return self

    def bit_length(self) -> Any:
        """Return the number of bits, and record the operation."""
        return _recorded("int.bit_length", self)


class TracedFloat(float):
    """A float that Python computed from sizes in a trace. It records operations in `conditions`."""

    conditions: SizeConditions
    expression: Expression

    def __hash__(self) -> int:
        """Return the hash, and record that the number must be equal in all calls, as `TracedSize` does."""
        if not _is_torch(sys._getframe(1)):
            self.conditions.record_equal(self)
        return float.__hash__(self)

    def is_integer(self) -> bool:
        """Return True if the float has an integer value, and record the operation."""
        return bool(_recorded("eq", self, self // 1))


def _is_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "autopart")


def as_integer(value: TracedSize | TracedFloat) -> Any:
    """Return `int(value)` as a `TracedSize`, and record the conversion of a float."""
    return value if isinstance(value, TracedSize) else _recorded("builtins.int", value)


def as_float(value: TracedSize | TracedFloat) -> Any:
    """Return `float(value)` as a `TracedFloat`."""
    return value if isinstance(value, TracedFloat) else _traced(float(_plain(value)), "builtins.float", (value,))


def traced_sizes(value: Any, conditions: SizeConditions) -> Any:
    """Convert the int, tuple or `torch.Size` that Python reads to `TracedSize` objects.

    Other values are returned unchanged.
    """
    if type(value) is int:
        size = TracedSize(value)
        size.conditions = conditions
        return size
    if type(value) is torch.Size:
        return torch.Size([traced_sizes(size, conditions) for size in value])
    if type(value) is tuple:
        return tuple(traced_sizes(size, conditions) for size in value)
    return value


def plain_sizes(value: Any) -> Any:
    """Convert `TracedSize` and `TracedFloat` objects back to numbers, also in containers.

    Returns the same object if it has none.
    """
    if isinstance(value, (TracedSize, TracedFloat)):
        return _plain(value)
    if type(value) is torch.Size:
        return torch.Size([_plain(size) for size in value])
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


def _plain(value: Any) -> Any:
    """Convert a `TracedSize` or `TracedFloat` to a plain number."""
    if isinstance(value, TracedFloat):
        return float.__float__(value)
    return int.__int__(value) if isinstance(value, TracedSize) else value


def _expression(value: Any) -> Expression:
    return value.expression if isinstance(value, TracedFloat) else _plain(value)


def _conditions_of(operands: Iterable[Any]) -> SizeConditions:
    return next(one.conditions for one in operands if isinstance(one, (TracedSize, TracedFloat)))


def _are_numbers(operands: Iterable[Any]) -> bool:
    return all(type(_plain(one)) in (int, float, bool) for one in operands)


def _traced(result: Any, name: str, operands: tuple[Any, ...]) -> Any:
    """Return the result of a function of sizes: a TracedFloat with its expression, or a TracedSize."""
    conditions = _conditions_of(operands)
    if type(result) is not float:
        return traced_sizes(result, conditions)
    traced = TracedFloat(result)
    traced.conditions, traced.expression = conditions, (name, *map(_expression, operands))
    return traced


def _recorded(name: str, *operands: Any) -> Any:
    """Return the result of an operation on sizes. Record the operation, unless its result is a float."""
    if not _are_numbers(operands):
        return _with_other(name, *operands)
    result = _function(name)(*map(_plain, operands))
    if type(result) is not float:
        left, right = (*map(_expression, operands), None)[:2]
        condition = SizeCondition(name, left, right, result)
        _conditions_of(operands).append(condition)
    return _traced(result, name, operands)


def _linear(name: str, left: Any, right: Any) -> Any:
    """Return the result of an operation that is linear in a size, without recording it."""
    if not _are_numbers((left, right)):
        return _with_other(name, left, right)
    return _traced(_function(name)(_plain(left), _plain(right)), name, (left, right))


def _with_other(name: str, *operands: Any) -> Any:
    """Return NotImplemented, or the result of an operation on a size and a symbol of torch.

    Records that the size must be equal in all calls, unless the other operand is a tensor.
    """
    others = [one for one in operands if not isinstance(one, (TracedSize, TracedFloat))]
    is_never_equal = name in ("eq", "ne") and not any(map(is_unrecorded_number, others))
    if any(isinstance(one, torch.Tensor) for one in others) or is_never_equal:
        return NotImplemented
    for one in operands:
        if isinstance(one, (TracedSize, TracedFloat)):
            one.conditions.record_equal(one)
    if not any(isinstance(one, (torch.SymInt, torch.SymFloat)) for one in operands):
        return NotImplemented
    return _function(name)(*map(_plain, operands))


def is_unrecorded_number(value: Any) -> bool:
    """Return True for a left operand, such as 0.5, that calls no method of a size as its right operand."""
    kinds = (numbers.Number, decimal.Decimal, numpy.generic, torch.SymInt, torch.SymFloat, str, bytes)
    return isinstance(value, bool) or (isinstance(value, kinds) and not isinstance(value, (int, TracedFloat)))


def _to_int(value: Any) -> int:
    value.conditions.record_conversion(value, "int", sys._getframe(1))
    return int(_plain(value))


def _operations(kind: type) -> Mapping[str, Callable[..., Any]]:
    """Return {name of a special method: method} of `TracedSize` or `TracedFloat`."""
    methods: dict[str, Callable[..., Any]] = {}

    def add(compute: Callable[[str, Any, Any], Any], name: str, method: str, is_reflected: bool = False) -> None:
        if is_reflected:
            methods[f"__r{method}__"] = lambda self, other: compute(name, other, self)
        else:
            methods[f"__{method}__"] = lambda self, other: compute(name, self, other)

    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        add(_recorded, name, name)
    for name in ("add", "sub", "mul", "truediv"):
        add(_linear, name, name)
        add(_linear, name, name, True)
    for name in ("floordiv", "mod", *(("lshift", "rshift", "and", "or", "xor") if kind is TracedSize else ())):
        function = f"{name}_" if name in ("and", "or") else name
        add(_recorded, function, name)
        add(_recorded, function, name, True)
    methods["__pow__"] = lambda self, other, modulo=None: (
        _recorded("pow", self, other) if modulo is None else _recorded("pow", self, other) % modulo
    )
    add(_recorded, "pow", "pow", True)
    for method in ("floor", "ceil", "trunc"):
        methods[f"__{method}__"] = lambda self, name=f"math.{method}": _recorded(name, self)
    methods["__bool__"] = lambda self: bool(_recorded("ne", self, 0))
    methods["__int__"] = _to_int
    methods["__divmod__"] = lambda self, other: (self // other, self % other)
    methods["__rdivmod__"] = lambda self, other: (other // self, other % self)
    methods["__neg__"] = lambda self: 0 - self
    methods["__pos__"] = lambda self: self
    methods["__abs__"] = lambda self: self if self >= 0 else -self
    if kind is TracedSize:
        methods["__floor__"] = methods["__ceil__"] = methods["__trunc__"] = methods["__pos__"]
        methods["__round__"] = lambda self, digits=None: self if digits is None else round(int.__int__(self), digits)
        methods["__invert__"] = lambda self: -1 - self
    else:
        methods["__round__"] = lambda self, digits=None: (
            _recorded("builtins.round", self) if digits is None else _linear("builtins.round", self, digits)
        )  # fmt: skip
    return methods


def _unrecorded(kind: type, name: str) -> Any:
    """Return a method or property whose use records that the number must be equal in all calls."""

    def method(self: Any, *arguments: Any) -> Any:
        if not _is_torch(sys._getframe(1)):
            self.conditions.record_equal(self)
        found = getattr(_plain(self), name)
        return found(*arguments) if callable(found) else found

    return method if callable(getattr(kind, name)) else property(method)


for _kind in (TracedSize, TracedFloat):
    for _name, _method in _operations(_kind).items():
        setattr(_kind, _name, _method)
    for _name in ("__str__", "__repr__", "__format__", "real", "imag", "conjugate", "as_integer_ratio"):
        setattr(_kind, _name, _unrecorded(_kind, _name))
for _name in ("numerator", "denominator", "to_bytes", "__index__"):
    setattr(TracedSize, _name, _unrecorded(TracedSize, _name))


def recorded_functions() -> dict[tuple[Any, str], Callable[..., Any]]:
    """Return {(module, name): replacement} for functions of `math` and numpy; replacements record sizes."""
    replaced: dict[tuple[Any, str], Callable[..., Any]] = {}
    for name in ("log", "log2", "log10", "sqrt", "exp", "pow", "fmod", "remainder", "gcd", "lcm", "isqrt"):
        replaced[math, name] = _of_math(f"math.{name}", getattr(math, name))
    for name in ("ceil", "floor", "round", "rint", "trunc", "sqrt", "log", "log2", "log10", "prod", "mod", "divmod"):
        replaced[numpy, name] = _of_numpy(getattr(numpy, name))
    return replaced


def _of_math(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*operands: Any) -> Any:
        if not any(isinstance(one, (TracedSize, TracedFloat)) for one in operands):
            return function(*operands)
        result = function(*map(_plain, operands))
        if type(result) is int:
            expression = name, *map(_expression, operands)
            _conditions_of(operands).append(SizeCondition("builtins.int", expression, None, result))
        return _traced(result, name, operands)

    return call


def _of_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*operands: Any, **options: Any) -> Any:
        for operand in operands:
            for one in operand if isinstance(operand, (tuple, list)) else (operand,):
                if isinstance(one, (TracedSize, TracedFloat)):
                    one.conditions.record_equal(one)
        return function(*plain_sizes(operands), **options)

    return call
