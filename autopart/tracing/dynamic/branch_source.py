"""Source analysis of code that a data-dependent condition skips.

Examples: `if mask.any(): y[mask] += ...`, `if not len(token): continue`. A graph has no branches. It needs no branch
if the skippable code only writes to elements of tensors. The program then always runs the code, and writes to no
element when the model would skip the code (`data_dependent_branches.py`).

This file finds such code in the source. The skippable statements must write to elements of tensors, and later code must
not read other variables that these statements assign.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor

OUT_OF_PLACE = {"index_add", "index_put", "index_copy", "masked_fill", "scatter_add"}
_IN_PLACE = {f"{name}_" for name in OUT_OF_PLACE}
_LOOPS = ast.For, ast.While
_LEAVES = ast.Continue, ast.Return
_LEAVING = ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr
_IS_EMPTY = re.compile(r"len\([^()]*\)( (==|!=|>) 0| (<|>=) 1)?")


class Skipped(NamedTuple):
    """Code that a condition can skip: lines `first` to `last` of a file.

    The code runs if the condition in `line` has the value `runs_if`.
    """

    file: str
    line: int
    first: int
    last: int
    runs_if: bool


class _Condition(NamedTuple):
    """A condition in lines `first` to `last` of a file, and the code that it can skip.

    Args:
        skipped: the lines that the condition can skip.
        written: names of the tensors that these lines write to.
    """

    first: int
    last: int
    asked: str
    skipped: Skipped
    written: frozenset[str]

    def holds(self, frame: FrameType) -> bool:
        """Return True if a frame evaluates this condition now, and the written names are tensors in the frame."""
        return self.first <= frame.f_lineno <= self.last and all(_is_tensor(frame, name) for name in self.written)


def skipped_code_of(frame: FrameType | None) -> Skipped | None:
    """Return the code that can be skipped by the condition that a frame is evaluating.

    Returns None if the code does more than write to tensors.
    """
    condition = _condition(frame) if frame is not None else None
    return condition.skipped if condition is not None else None


def skipped_by_length(frame: FrameType) -> Skipped | None:
    """Return the code that can be skipped by the test of a length, such as `if len(x) > 0:`.

    `frame` is evaluating this test. Returns None for any other condition, or if the code does more than write to
    tensors.
    """
    condition = _condition(frame)
    return condition.skipped if condition is not None and _IS_EMPTY.fullmatch(condition.asked) else None


def _condition(frame: FrameType) -> _Condition | None:
    return next((one for one in _conditions(frame.f_code) if one.holds(frame)), None)


def _is_tensor(frame: FrameType, name: str) -> bool:
    """Return True if a name such as `y` or `self.cache` is a tensor in a frame."""
    first, *attributes = name.split(".")
    thing = frame.f_locals.get(first, frame.f_globals.get(first))
    for attribute in attributes:
        thing = getattr(thing, attribute, None)
    return isinstance(thing, Tensor)


@functools.lru_cache(64)
def _conditions(code: CodeType) -> list[_Condition]:
    """Return the conditions of a function whose skippable code only writes to tensors."""
    function, above = _source(code)
    conditions = []
    for statement, path in _ifs(function.body, ()) if function is not None else ():
        asked, runs_if = statement.test, not isinstance(statement.body[0], _LEAVES)
        while isinstance(asked, ast.UnaryOp) and isinstance(asked.op, ast.Not):
            asked, runs_if = asked.operand, not runs_if
        skipped = _skipped(statement, path)
        is_one_question = not isinstance(asked, (ast.BoolOp, ast.IfExp))
        is_on_lines_of_its_own = bool(skipped) and skipped[0].lineno > (statement.test.end_lineno or 0)
        if not (is_one_question and is_on_lines_of_its_own):
            continue
        writes = _OnlyWrites(function, skipped, statement)
        if not writes.only:
            continue
        first, last = above + skipped[0].lineno, above + (skipped[-1].end_lineno or 0)
        begin, end = above + statement.lineno, above + (statement.test.end_lineno or 0)
        lines = Skipped(code.co_filename, begin, first, last, runs_if)
        conditions.append(_Condition(begin, end, ast.unparse(asked), lines, frozenset(writes.written)))
    return conditions


def _source(code: CodeType) -> tuple[Any, int]:
    """Return a function's syntax tree, and the number of lines before the function in its file.

    Returns (None, 0) if the source is not available.
    """
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        return None, 0
    function = tree.body[0]
    return (function if isinstance(function, ast.FunctionDef) else None), first - 1


_Path = tuple[tuple[ast.AST | None, Sequence[ast.stmt]], ...]
"""For every block that encloses a statement, outermost first: (owner of the block, statements that follow)."""


def _ifs(block: Sequence[ast.stmt], path: _Path, owner: ast.AST | None = None) -> Iterator[tuple[ast.If, _Path]]:
    """Yield each `if` statement in a list of statements, with the blocks that enclose it."""
    for i, statement in enumerate(block):
        here = (*path, (owner, block[i + 1 :]))
        if isinstance(statement, ast.If):
            yield statement, here
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(statement, name, None)
            if isinstance(inner, list) and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                yield from _ifs(inner, here, statement)


def _skipped(statement: ast.If, path: _Path) -> list[ast.stmt]:
    """Return the statements that an `if` can skip; [] if it has an `else`, or can skip no statement.

    If the body of the `if` begins with `continue` or `return`, these are the statements after the `if`. Otherwise, they
    are the body.
    """
    if statement.orelse:
        return []
    leaves = statement.body[0]
    if isinstance(leaves, ast.Continue):
        loop = max(i for i, (owner, _) in enumerate(path) if isinstance(owner, _LOOPS))
        return [one for _, following in reversed(path[loop:]) for one in following]
    if isinstance(leaves, ast.Return):
        following = [one for _, following in reversed(path) for one in following]
        if any(isinstance(owner, _LOOPS) for owner, _ in path):
            return []
        end = following[-1] if following and isinstance(following[-1], ast.Return) else ast.Return(None)
        same = ast.dump(end.value or ast.Constant(None)) == ast.dump(leaves.value or ast.Constant(None))
        return [one for one in following if one is not end] if same else []
    return statement.body


class _OnlyWrites:
    """Analysis of statements that a condition can skip.

    `only` is True if the statements do nothing but write to elements of tensors.
    """

    def __init__(self, function: ast.FunctionDef, skipped: Sequence[ast.stmt], by: ast.If) -> None:
        self.may_continue = isinstance(by.body[0], ast.Continue)  # `continue` skips the rest of the loop body
        self.stored = {name for statement in skipped for name in _names(statement, ast.Store)}
        self.read_elsewhere = _Behind(function, skipped, self.stored).reads
        self.made: set[str] = set()
        self.written: set[str] = set()
        leaves = any(isinstance(node, _LEAVING) for statement in skipped for node in ast.walk(statement))
        self.only = not leaves and self._all(skipped)

    def _all(self, statements: Sequence[ast.stmt], in_loop: bool = False) -> bool:
        return all(self._writes(statement, in_loop) for statement in statements)

    def _perhaps(self, statements: Sequence[ast.stmt], in_loop: bool) -> bool:
        """Analyze statements that may not run. Names that they assign do not count as assigned afterwards."""
        before = set(self.made)
        writes = self._all(statements, in_loop)
        self.made = before
        return writes

    def _writes(self, statement: ast.stmt, in_loop: bool) -> bool:
        match statement:
            case ast.If():
                sides = statement.body, statement.orelse
                return self._reads(statement.test) and all(self._perhaps(side, in_loop) for side in sides)
            case ast.For():
                return (
                    self._reads(statement.iter) and self._makes(statement.target)
                    and self._perhaps(statement.body, in_loop=True) and not statement.orelse
                )  # fmt: skip
            case ast.With():
                items = statement.items
                return all(self._reads(item.context_expr) for item in items) and self._all(statement.body, in_loop)
            case ast.Continue():
                return in_loop or self.may_continue
            case ast.Break():
                return in_loop
            case ast.Assert() | ast.Pass() | ast.Expr(value=ast.Constant()):
                return True
            case ast.Expr():  # y.index_add_(0, index, x)
                return _method(statement.value) in _IN_PLACE and self._reads(statement.value)
            case ast.Assign():
                value = statement.value
                return self._reads(value) and all(self._assigns(target, value) for target in statement.targets)
            case ast.AugAssign():  # y[index] += x
                target = statement.target
                is_own = isinstance(target, ast.Name) and target.id in self.made and self._makes(target)
                is_part = isinstance(target, ast.Subscript) and self._assigns(target, statement.value)
                return self._reads(statement.value) and (is_own or is_part)
        return False

    def _assigns(self, target: ast.expr, value: ast.expr) -> bool:
        if isinstance(target, ast.Subscript):  # y[index] = x
            self.written.add(ast.unparse(target.value))
            return self._reads(target)
        if self._makes(target):
            return True
        is_same = isinstance(target, ast.Name) and _method(value) in OUT_OF_PLACE  # y = y.index_add(0, index, x)
        return is_same and ast.unparse(value.func.value) == target.id  # type: ignore[attr-defined]

    def _makes(self, target: ast.expr) -> bool:
        """Record the names that an assignment sets. Return True if no other code reads its targets."""
        names = _names(target, ast.Store)
        self.made |= names
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        are_names = all(isinstance(part.value if isinstance(part, ast.Starred) else part, ast.Name) for part in parts)
        return are_names and not names & self.read_elsewhere

    def _reads(self, value: ast.expr) -> bool:
        """Return False if an expression reads a variable before these statements have assigned it.

        In a loop, the variable could have a value of an earlier iteration.
        """
        return not _names(value, ast.Load) & self.stored - self.made - self.read_elsewhere


class _Behind:
    """Analysis of the code of a function outside of the statements that a condition can skip.

    `reads`: names that this code reads and whose value the skippable statements may have assigned.
    """

    def __init__(self, function: ast.FunctionDef, skipped: Sequence[ast.stmt], assigned: set[str]) -> None:
        self.skipped, self.assigned = set(map(id, skipped)), assigned
        self.reads: set[str] = set()
        self._block(function.body, assigned)

    def _block(self, block: Sequence[ast.stmt], others: set[str]) -> set[str]:
        """Analyze the statements of a block in order.

        Args:
            others: names that code outside of the skippable statements assigned before the block.

        Returns `others` and the names that the block assigns.
        """
        for statement in block:
            if id(statement) in self.skipped:
                others = others - self.assigned
                continue
            if not isinstance(statement, (ast.If, ast.With)) and self._holds_skipped(statement):
                others = others - self.assigned  # these names may have values from the previous iteration
            match statement:
                case ast.If() | ast.While():
                    self._read([statement.test], others)
                    others = others & self._block(statement.body, others) & self._block(statement.orelse, others)
                case ast.For():
                    self._read([statement.iter, statement.target], others)
                    inside = self._block(statement.body, others | _names(statement.target, ast.Store))
                    others = others & inside & self._block(statement.orelse, others)
                case ast.With():
                    self._read([item.context_expr for item in statement.items], others)
                    others = others & self._block(statement.body, others)
                case ast.Assign():
                    self._read([statement], others)
                    others = others | _names(ast.Tuple(statement.targets), ast.Store)
                case ast.AugAssign():
                    self.reads |= _names(statement.target, ast.Store) & self.assigned - others
                    self._read([statement], others)
                case _:
                    self._read([statement], others)
        return others

    def _read(self, parts: Sequence[ast.AST], others: set[str]) -> None:
        for part in parts:
            self.reads |= _names(part, ast.Load) & self.assigned - others
            for later in ast.walk(part):
                if isinstance(later, (ast.Lambda, ast.FunctionDef)):
                    self.reads |= _names(later, ast.Load) & self.assigned

    def _holds_skipped(self, statement: ast.stmt) -> bool:
        return any(id(node) in self.skipped for node in ast.walk(statement))


def _method(value: ast.expr) -> str:
    """Return the method name of a call expression such as `x.add_(y)`; "" for another expression."""
    return value.func.attr if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) else ""


def _names(tree: ast.AST, kind: type[ast.expr_context]) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, kind)}
