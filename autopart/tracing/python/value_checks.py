"""Value checks in a model's code: `assert x.min() > 0`, and `if x.isnan().any(): raise`.

Such checks do not affect what the model computes. A trace has no values, so each condition of a check gets the truth
value for which the check passes. This truth value is determined from the source code of the condition.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

_ASKING = frozenset({"__bool__", "is_nonzero", "equal", "allclose"})
"""Functions that reduce tensors to one truth value, which Python reads."""
_CHECKING = frozenset({"_assert", "_assert_async"})
"""Functions of torch that raise if a truth value is false, and return nothing."""

Place = tuple[int | None, int | None] | tuple[int | None, int | None, str]
"""Source position of the end of an expression: (line, byte offset).

For a number that is compared (`x.item() > 0`), "item" is added.
"""


class Passing(float):
    """Stand-in for a number in a value check: each comparison returns the value that passes the check."""

    def __new__(cls, wanted: bool) -> Passing:
        number = super().__new__(cls)
        number.wanted = wanted
        return number

    wanted: bool

    def compared(self, other: object) -> bool:
        return self.wanted

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = compared
    __hash__ = float.__hash__


class Operand(NamedTuple):
    """Position of a condition in an `and` or `or`, such as `b` in `a and not b`.

    The position shows for which truth value of the condition Python also evaluates the other conditions.
    """

    is_and: bool
    is_last: bool
    is_negated: bool


def operand_of(frame: FrameType | None) -> Operand | Literal[False] | None:
    """Return the position, in an `and` or `or`, of the condition that a frame evaluates.

    Returns None if the condition is not part of an `and` or `or`. Returns False if the `and` or `or` is nested, or if
    the source is not available.
    """
    if frame is None or frame.f_lasti < 0:
        return False
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    return _operands(source).get(_end_of_question(frame)) if source else False


@functools.lru_cache(64)
def _operands(source: str) -> Mapping[Place, Operand | Literal[False]]:
    """Return {end of a condition: its position in an `and` or `or`} for a source text."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    found: dict[Place, Operand | Literal[False]] = {}
    for node in (one for one in ast.walk(tree) if isinstance(one, ast.BoolOp)):
        for i, part in enumerate(node.values):
            inner, is_negated = part, False
            while isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.Not):
                inner, is_negated = inner.operand, not is_negated
            place = inner.end_lineno, inner.end_col_offset
            operand = Operand(isinstance(node.op, ast.And), i == len(node.values) - 1, is_negated)
            is_nested = (
                place in found
                or any(isinstance(one, ast.BoolOp) for one in node.values)
                or (isinstance(inner, ast.BoolOp))
            )
            found[place] = False if is_nested else operand
    return found


def passing_answer(
    func: Callable[..., Any], tensors: Sequence[Tensor], frame: FrameType | None
) -> bool | Passing | None:  # fmt: skip
    """Return the truth value with which a condition's `assert` or `if ...: raise` passes.

    For a number in a comparison (`x.item() > 0`), returns a `Passing`. Returns None if the condition controls more than
    an error, or if the source cannot be read.

    Args:
        frame: the frame that evaluates the condition, or a torch function mode that was called for it.
    """
    name = getattr(func, "__name__", "")
    if not tensors or name not in _ASKING | _CHECKING | {"item"}:
        return None
    if name in _CHECKING:
        return True
    frame = asking_frame(frame)
    if frame is None or frame.f_lasti < 0:
        return None
    line, byte = _end_of_question(frame)
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    if name == "item" and tensors[0].dtype != torch.bool:
        wanted = _wanted(source).get((line, byte, "item"))
        return None if wanted is None else Passing(wanted)
    return _wanted(source).get((line, byte))


def check_text(frame: FrameType | None, not_the_users: tuple[str, ...]) -> str:
    """Return a check as text for notes, with the user's source line: `assert x.min() > 0 (model.py:12)`."""
    frame = asking_frame(frame)
    users_frame = frame
    while users_frame is not None and users_frame.f_code.co_filename.startswith(not_the_users):
        users_frame = users_frame.f_back
    shown = users_frame or frame
    if shown is None:
        return ""
    file, line = shown.f_code.co_filename, shown.f_lineno
    return f"{linecache.getline(file, line).strip():.80} ({Path(file).name}:{line})"


def asking_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame that evaluates a condition, skipping the frames of torch function modes."""
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame


def _end_of_question(frame: FrameType) -> tuple[int | None, int | None]:
    """Return (line, byte offset) of the end of the condition that a frame is evaluating.

    If the frame is in a call, such as `bool(x)`, the condition is the call. Otherwise it is the operand of a jump,
    which the instruction before the jump computes.
    """
    is_call = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL")
    _, line, _, byte = list(frame.f_code.co_positions())[frame.f_lasti // 2 - (not is_call)]
    return line, byte


@functools.lru_cache(64)
def _wanted(source: str) -> Mapping[Place, bool]:
    """Return {source position: truth value} for all checks in a source text.

    The position is the end of a condition, or of a part of it such as `a` in `a and b`. The check passes if the
    condition has the truth value.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    return dict(_answers(tree))


def _answers(tree: ast.AST) -> Iterator[tuple[Place, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Assert):
            yield from _parts(node.test, True)
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            yield from _parts(node.test, False)
        elif isinstance(node, ast.If) and node.orelse and isinstance(node.orelse[-1], ast.Raise):
            yield from _parts(node.test, True)
        if not (isinstance(node, ast.Try) and node.handlers):  # not a check: the code may catch the error and go on
            yield from _answers(node)


def _parts(test: ast.expr, want: bool) -> Iterator[tuple[Place, bool]]:
    """Yield the subexpressions of a condition that Python evaluates one by one: `a` and `b` of `a and b`.

    Each comes with the truth value that it must have, so that the condition has the value `want`.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand, not want)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _parts(part, want)
    else:
        yield (test.end_lineno, test.end_col_offset), want
        if isinstance(test, ast.Compare) and len(test.comparators) == 1:
            for side in (one for one in (test.left, *test.comparators) if isinstance(one, ast.Call)):
                yield (side.end_lineno, side.end_col_offset, "item"), want
