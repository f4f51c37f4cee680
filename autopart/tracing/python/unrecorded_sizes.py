"""Operations that a `TracedSize` cannot record: `0.5 * length`, `0.5 < length`, `x.shape.numel()`.

Python calls no method of an int that is the right operand of a float, and `torch.Size` has no subclasses. So during a
trace, the bytecode of the user's functions is watched for such operations. If one of them has a size as its operand,
the size must be equal in all calls, so that no program for another size is derived from the trace.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from autopart.tracing.python.size_conditions import SizeConditions, TracedFloat, TracedSize

_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow,
}  # fmt: skip
_UNCHANGED = frozenset({"CACHE", "RESUME", "PRECALL", "NOP", "EXTENDED_ARG", "MAKE_CELL", "COPY_FREE_VARS", "KW_NAMES"})
_OF_INTEGERS = frozenset({"ceil", "floor", "trunc", "gcd", "lcm", "isqrt", "prod", "comb", "perm", "factorial"})
"""Functions of `math` that may return an int."""
_UNKNOWN = object()


class StackEntry(NamedTuple):
    """Expression on the stack of the bytecode.

    `kind`: const, local, global, attribute, item, binary or call.
    """

    kind: str
    name: Any = None
    parts: tuple[StackEntry | None, ...] = ()


class Spot(NamedTuple):
    """An instruction to watch: an operation with two operands.

    `left` is None for `numel()` of the shape of `right`.
    """

    left: StackEntry | None
    right: StackEntry


@functools.lru_cache(maxsize=4096)
def spots_of(code: CodeType) -> Mapping[int, Spot]:
    """Return {offset of an instruction: operation to watch}.

    The operation is `x.shape.numel()`, or may have a float as its left operand and a size as its right operand. The
    bytecode's stack is simulated between jump targets. Operations on operands from before a jump target are left out.
    """
    spots: dict[int, Spot] = {}
    stack: list[StackEntry | None] = []

    def pop(count: int) -> list[StackEntry | None]:
        missing = max(0, count - len(stack))
        popped = [None] * missing + (stack[len(stack) - (count - missing) :] if count > missing else [])
        del stack[len(stack) - (count - missing) :]
        return popped

    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if instruction.is_jump_target:
            stack.clear()
        if name in _UNCHANGED:
            continue
        if name == "LOAD_CONST":
            stack.append(StackEntry("const", value))
        elif name.startswith("LOAD_FAST") or name == "LOAD_DEREF":
            stack += [StackEntry("local", one) for one in (value if isinstance(value, tuple) else (value,))]
        elif name == "STORE_FAST_LOAD_FAST":
            pop(1)
            stack.append(StackEntry("local", value[1]))
        elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
            stack += [None] * (name == "LOAD_GLOBAL" and "NULL" in instruction.argrepr)
            stack.append(StackEntry("global", value))
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            (base,) = pop(1)
            if value == "numel" and base is not None and (tensor := _of_shape(base)) is not None:
                spots[instruction.offset] = Spot(None, tensor)
            stack += [None] * (name == "LOAD_METHOD" or "NULL" in instruction.argrepr)
            stack.append(StackEntry("attribute", value, (base,)))
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]"):
            base, _ = pop(2)
            stack.append(StackEntry("item", None, (base,)))
        elif name in ("BINARY_OP", "COMPARE_OP"):
            left, right = pop(2)
            if left is not None and right is not None and right.kind != "const":
                spots[instruction.offset] = Spot(left, right)
            symbol = instruction.argrepr.rstrip("=") if name == "BINARY_OP" else ""
            stack.append(StackEntry("binary", symbol, (left, right)))
        elif name == "CALL":
            _, *arguments = pop((instruction.arg or 0) + 1)
            if stack and stack[-1] is None:
                stack.pop()
            stack.append(StackEntry("call", None, (_, *arguments)))
        elif name == "PUSH_NULL":  # since Python 3.13, after the callable
            stack.insert(max(0, len(stack) - (sys.version_info >= (3, 13))), None)
        elif name in ("SWAP", "COPY"):
            stack.clear()
        else:
            effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
            pop(max(1, -effect) if effect <= 0 else 0)
            stack += [None] * (effect if effect > 0 else max(1, -effect) + effect)
    return spots


def _of_shape(operand: StackEntry) -> StackEntry | None:
    """Return the tensor `x` of the expression `x.shape` or `x.size()`; None for other expressions."""
    if operand.kind == "call" and operand.parts and operand.parts[0] is not None:
        method = operand.parts[0]
        return method.parts[0] if (method.kind, method.name) == ("attribute", "size") else None
    return operand.parts[0] if (operand.kind, operand.name) == ("attribute", "shape") else None


def check_operation(frame: FrameType, spot: Spot, conditions: SizeConditions) -> None:
    """Record sizes that are operands of the next operation: they must be equal in all calls."""
    if spot.left is None:
        tensor = _value_of(spot.right, frame)
        if isinstance(tensor, torch.Tensor) and all(type(size) is int for size in tensor.shape):
            conditions.record_equal(math.prod(tensor.shape))
        return
    left = _value_of(spot.left, frame)
    if isinstance(left, float) and not isinstance(left, TracedFloat):
        for size in _sizes_in(spot.right, frame):
            conditions.record_equal(size)


def _value_of(operand: StackEntry | None, frame: FrameType) -> Any:
    """Return the value of an expression of names, attributes and numbers; `_UNKNOWN` for others."""
    if operand is None:
        return _UNKNOWN
    if operand.kind == "const":
        return operand.name
    if operand.kind == "local":
        return frame.f_locals.get(operand.name, _UNKNOWN)
    if operand.kind == "global":
        return frame.f_globals.get(operand.name, getattr(builtins, operand.name, _UNKNOWN))
    values = [_value_of(part, frame) for part in operand.parts[:2]]
    if operand.kind == "attribute" and values[0] is not _UNKNOWN:
        own = getattr(values[0], "__dict__", {})
        return own.get(operand.name, getattr(type(values[0]), operand.name, _UNKNOWN))
    if operand.kind == "call" and _returns_float(values[0]) and not any(True for _ in _sizes_in(operand, frame)):
        return 0.5  # any float: only its type matters
    if operand.kind == "binary" and all(type(value) in (int, float) for value in values):
        try:
            return _OPERATORS[operand.name](*values)
        except (KeyError, ArithmeticError):
            return _UNKNOWN
    return _UNKNOWN


def _returns_float(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return function is float or (getattr(function, "__module__", "") == "math" and name not in _OF_INTEGERS)


def _sizes_in(operand: StackEntry | None, frame: FrameType) -> Iterator[int | float]:
    """Yield the sizes from which an expression is computed."""
    if operand is None:
        return
    if operand.kind in ("local", "attribute"):
        value = _value_of(operand, frame)
        if isinstance(value, (TracedSize, TracedFloat)):
            yield value
        return
    shape = operand.parts[0] if operand.kind == "item" else operand  # `x.shape[1]`, or `x.size(1)`
    tensor = _value_of(None if shape is None else _of_shape(shape), frame)
    if isinstance(tensor, torch.Tensor):
        yield from (size for size in tensor.shape if isinstance(size, int))
    if operand.kind in ("binary", "call"):
        for part in operand.parts:
            yield from _sizes_in(part, frame)
