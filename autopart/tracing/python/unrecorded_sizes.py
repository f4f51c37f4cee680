"""Operations that a `TracedSize` cannot record: `0.5 * length`, `scale() < length`, `x.shape.numel()`.

Python calls no method of an int that is the right operand of a float, and `torch.Size` has no subclasses. So during a
trace, the bytecode of the user's functions is watched for such operations. If one of them has a size as its operand,
the size must be equal in all calls, so that no program for another size is derived from the trace.

The left operand counts as a float unless it is known to be a tensor, an int or a size. Its value is read from the
frame's variables, from attributes and containers, and from what Python functions return.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any, NamedTuple

import torch

from autopart.tracing.python.size_conditions import SizeConditions, TracedFloat, TracedSize, is_unrecorded_number

_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow,
}  # fmt: skip
_UNCHANGED = frozenset({"CACHE", "RESUME", "PRECALL", "NOP", "EXTENDED_ARG", "MAKE_CELL", "COPY_FREE_VARS", "KW_NAMES"})
_OF_INTEGERS = frozenset({"ceil", "floor", "trunc", "gcd", "lcm", "isqrt", "prod", "comb", "perm", "factorial"})
"""Functions of `math` that may return an int."""
_INTEGER_FUNCTIONS = (len, int, ord, hash, id)
_FUNCTIONS_OF_NUMBERS = (max, min, sum, abs, round, pow)
"""Functions that return a float only if an argument is one."""
_SAFE_FUNCTIONS = (
    *_INTEGER_FUNCTIONS, *_FUNCTIONS_OF_NUMBERS, float, isinstance, type, divmod, sorted, tuple, list, dict, set,
    zip, enumerate, getattr, setattr, hasattr, super, iter, next, map, filter, all, any, slice, bool,
    math.ceil, math.floor, math.trunc,
)  # fmt: skip
"""Builtins that compute by methods of a size, return it unchanged, or are recorded otherwise."""
_UNKNOWN = object()

Returned = Mapping[int, Any]
"""{offset in a frame's bytecode: value that a Python function, called there, returned}."""


class StackEntry(NamedTuple):
    """Expression on the stack of the bytecode.

    `kind`: const, local, global, attribute, item, list, binary or call.
    `span`: offsets of its last instruction and of the next one.
    """

    kind: str
    name: Any = None
    parts: tuple[StackEntry | None, ...] = ()
    span: tuple[int, int] = (0, 0)


class Spot(NamedTuple):
    """An instruction to watch, with its operands.

    `kind`: "operation" with two operands; "numel" of `right`, which may be a shape; or "call" of the function `left`.
    The parts of `right` are then the function and its arguments. `left` is None if it is unknown.
    """

    left: StackEntry | None
    right: StackEntry
    kind: str = "operation"


@functools.lru_cache(maxsize=4096)
def spots_of(code: CodeType) -> Mapping[int, Spot]:
    """Return {offset of an instruction: operation to watch}.

    The operation is a call, `x.shape.numel()`, or has two operands: the left may be a float, the right a size. The
    bytecode's stack is simulated between jump targets. Operands from before a jump target are unknown.
    """
    spots: dict[int, Spot] = {}
    stack: list[StackEntry | None] = []

    def pop(count: int) -> list[StackEntry | None]:
        start = max(0, len(stack) - count)
        popped = [None] * (count - len(stack)) + stack[start:]
        del stack[start:]
        return popped

    instructions = [one for one in dis.get_instructions(code) if one.opname != "CACHE"]
    ends = [one.offset for one in instructions[1:]] + [len(code.co_code)]
    for instruction, end in zip(instructions, ends, strict=True):
        name, value, span = instruction.opname, instruction.argval, (instruction.offset, end)
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
            if value == "numel" and base is not None:
                spots[instruction.offset] = Spot(None, base, "numel")
            stack += [None] * (name == "LOAD_METHOD" or "NULL" in instruction.argrepr)
            stack.append(StackEntry("attribute", value, (base,), span))
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]"):
            stack.append(StackEntry("item", None, tuple(pop(2)), span))
        elif name in ("BUILD_LIST", "BUILD_TUPLE"):
            stack.append(StackEntry("list", None, tuple(pop(instruction.arg or 0)), span))
        elif name in ("BINARY_OP", "COMPARE_OP"):
            left, right = pop(2)
            if right is not None and right.kind != "const":
                spots[instruction.offset] = Spot(left, right)
            symbol = instruction.argrepr.rstrip("=") if name == "BINARY_OP" else ""
            stack.append(StackEntry("binary", symbol, (left, right), span))
        elif name == "CALL":
            function, *arguments = pop((instruction.arg or 0) + 1)
            if stack and stack[-1] is None:
                stack.pop()
            stack.append(call := StackEntry("call", None, (function, *arguments), span))
            if function is not None and any(one is not None and one.kind != "const" for one in arguments):
                spots[instruction.offset] = Spot(function, call, "call")
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


def check_operation(frame: FrameType, spot: Spot, conditions: SizeConditions, returned: Returned) -> None:
    """Record sizes that are operands of the next operation: they must be equal in all calls.

    Args:
        frame: the frame that runs the operation.
        spot: the operation.
        conditions: the record.
        returned: values that Python functions returned to the frame.
    """
    operands = _Operands(frame, returned)
    if spot.kind == "numel":
        _check_numel(operands, spot.right, conditions)
        return
    if spot.kind == "call":
        _check_call(operands, spot, conditions)
        return
    sizes = list(operands.sizes(spot.right))
    if sizes and operands.may_be_float(spot.left):
        for size in sizes:
            conditions.record_equal(size)


def _check_numel(operands: _Operands, operand: StackEntry, conditions: SizeConditions) -> None:
    """Record the number of elements of a `torch.Size`, whose method `numel` calls no method of a size."""
    tensor, shape = operands.value(_of_shape(operand)), operands.value(operand)
    if isinstance(tensor, torch.Tensor):
        shape = tensor.shape
    if isinstance(shape, torch.Size):
        if all(isinstance(size, int) for size in shape):
            conditions.record_equal(math.prod(int.__int__(size) for size in shape))
    elif shape is _UNKNOWN and (any(True for _ in operands.sizes(operand)) or _of_shape(operand) is not None):
        conditions.record_unknown()


def _check_call(operands: _Operands, spot: Spot, conditions: SizeConditions) -> None:
    """Record sizes that a function written in C, of numpy or of the standard library gets as arguments."""
    function, arguments = operands.value(spot.left), spot.right.parts[1:]
    if function is len:
        for value in map(operands.value, arguments):
            if isinstance(value, (tuple, list)) and any(isinstance(one, torch.Tensor) for one in value):
                conditions.record_equal(len(value))
        if any(operands.value(one) is _UNKNOWN and operands.is_tensor(one) for one in arguments):
            conditions.record_unknown()
        return
    if isinstance(function, functools.partial):  # also torch.export's replacement of `max`
        function = function.func
    module = str(getattr(function, "__module__", "")).partition(".")[0]
    is_safe = module in ("autopart", "torch") or any(function is one for one in _SAFE_FUNCTIONS)
    is_unwatched = module == "numpy" or module in sys.stdlib_module_names or _is_builtin(function)
    if is_unwatched and not is_safe and spot.left is not None and not operands.is_of_torch(spot.left):
        for argument in arguments:
            for size in operands.sizes(argument):
                conditions.record_equal(size)


class _Operands(NamedTuple):
    """Values and types of the expressions on a frame's stack."""

    frame: FrameType
    returned: Returned

    def value(self, operand: StackEntry | None) -> Any:
        """Return the value of an expression; `_UNKNOWN` if it cannot be read without side effects."""
        if operand is None:
            return _UNKNOWN
        if operand.kind == "const":
            return operand.name
        if operand.kind == "local":
            return self.frame.f_locals.get(operand.name, _UNKNOWN)
        if operand.kind == "global":
            return self.frame.f_globals.get(operand.name, getattr(builtins, operand.name, _UNKNOWN))
        values = [self.value(part) for part in operand.parts[:2]]
        if operand.kind == "call" and _is_builtin(values[0]):
            has_sizes = any(True for part in operand.parts for _ in self.sizes(part))
            return 0.5 if _returns_float(values[0]) and not has_sizes else _UNKNOWN  # any float: only its type matters
        first, end = operand.span
        for offset, value in self.returned.items():
            if first <= offset < end:
                return value
        if operand.kind == "attribute" and values[0] is not _UNKNOWN:
            return _attribute(values[0], operand.name)
        if operand.kind == "item" and type(values[0]) in (list, tuple, dict, torch.Size):
            try:
                return values[0][values[1]]
            except (LookupError, TypeError):
                return _UNKNOWN
        if operand.kind == "binary" and all(type(value) in (int, float) for value in values):
            try:
                return _OPERATORS[operand.name](*values)
            except (KeyError, ArithmeticError):
                return _UNKNOWN
        return _UNKNOWN

    def may_be_float(self, operand: StackEntry | None) -> bool:
        """Return False if an expression is known to be a tensor, an int or a `TracedFloat`."""
        if operand is None:
            return True
        value = self.value(operand)
        if value is not _UNKNOWN:
            return is_unrecorded_number(value)
        if self.is_tensor(operand) or operand.kind == "list" or _of_shape(operand) is not None:
            return False
        if operand.kind == "binary" and operand.name:
            are_traced = [isinstance(self.value(part), (TracedSize, TracedFloat)) for part in operand.parts]
            return not any(are_traced) and any(map(self.may_be_float, operand.parts))
        if operand.kind == "call":
            function = self.value(operand.parts[0])
            if any(function is one for one in _FUNCTIONS_OF_NUMBERS):
                return any(map(self.may_be_float, operand.parts[1:]))
            return not any(function is one for one in _INTEGER_FUNCTIONS)
        return True

    def is_tensor(self, operand: StackEntry | None) -> bool:
        """Return True if an expression is a tensor, or calls a torch function or a module."""
        if operand is None:
            return False
        value = self.value(operand)
        if value is not _UNKNOWN:
            return isinstance(value, torch.Tensor)
        if operand.kind == "call" and operand.parts[0] is not None:
            function = self.value(operand.parts[0])
            return isinstance(function, torch.nn.Module) or self.is_of_torch(operand.parts[0])
        if operand.kind in ("attribute", "item"):
            return self.is_tensor(operand.parts[0])
        return operand.kind == "binary" and any(map(self.is_tensor, operand.parts))

    def is_of_torch(self, function: StackEntry) -> bool:
        """Return True for a function of torch, such as `F.relu`, or a method of a tensor."""
        module = getattr(self.value(function), "__module__", None)
        if str(module).partition(".")[0] == "torch":
            return True
        if function.kind != "attribute" or function.parts[0] is None:
            return False
        holder = self.value(function.parts[0])
        return self.is_tensor(function.parts[0]) or getattr(holder, "__name__", "").partition(".")[0] == "torch"

    def sizes(self, operand: StackEntry | None) -> Iterator[int | float]:
        """Yield the sizes from which an expression is computed."""
        if operand is None:
            return
        value = self.value(operand)
        if isinstance(value, (TracedSize, TracedFloat)):
            yield value
            return
        tensor = self.value(_of_shape(operand))
        if isinstance(tensor, torch.Tensor):
            yield from (size for size in tensor.shape if isinstance(size, int))
        elif operand.kind in ("binary", "call", "item", "list") and value is _UNKNOWN:
            for part in operand.parts:
                yield from self.sizes(part)


def _attribute(holder: Any, name: str) -> Any:
    """Return an attribute that can be read without running Python code; else `_UNKNOWN`."""
    own = getattr(holder, "__dict__", {})
    tables = ("_parameters", "_buffers", "_modules") if isinstance(holder, torch.nn.Module) else ()
    for table in (own, *(own.get(key, {}) for key in tables)):
        if name in table:
            return table[name]
    found = getattr(type(holder), name, _UNKNOWN)
    is_computed = hasattr(type(found), "__get__") and not callable(found)
    return _UNKNOWN if is_computed else found


def _is_builtin(function: Any) -> bool:
    return isinstance(function, (type, BuiltinFunctionType))


def _returns_float(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return function is float or (getattr(function, "__module__", "") == "math" and name not in _OF_INTEGERS)
