"""Code that skips an empty selection: `if index.numel() == 0: continue`.

A graph holds no such decision, and needs none where the skipped code does nothing to an empty selection: it is traced
as if something were selected. That nothing is done is checked in two places. The skipped statements may only write to
the places that the condition asks about, and make what they alone read (`Assumptions.may_be_made`); and in the graph
all that is made of the selection must end in such writes (`check_nothing_done`).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import NamedTuple

from torch import fx, nn

from autopart.errors import Refusal, TraceError
from autopart.ir.graph import module_path, operator_name, short_name, source_text
from autopart.tracing.trace_errors import path_of_frame
from autopart.tracing.with_loss import users_name

_NOTHING_IF_EMPTY = {"aten::index_put", "aten::index_add", "aten::index_copy", "aten::scatter_add"}
_OUT_OF_PLACE = {"index_add", "index_put", "index_copy"}
_IN_PLACE = {f"{name}_" for name in _OUT_OF_PLACE}


class Assumption(NamedTuple):
    """A line that asked whether a selection is empty, the path of the module whose code it is, and torch's names of
    the sizes that it asked for."""

    where: str
    path: str
    sizes: frozenset[str]


class Assumptions:
    """The lines of a model that skip empty selections, while it is traced."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.made: dict[Assumption, None] = {}

    def may_be_made(self, frame: FrameType, sizes: set[str]) -> bool:
        """Whether the line that runs in a frame only skips writes to what it asks about; notes it."""
        code = frame.f_code
        try:
            lines, first = inspect.getsourcelines(code)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, SyntaxError, TypeError):
            return False
        if not _only_skips(tree, frame.f_lineno - first + 1):
            return False
        where = f"{code.co_filename}:{frame.f_lineno}"
        path = users_name(self.model, path_of_frame(frame, self.model))
        self.made[Assumption(where, path, frozenset(sizes))] = None
        return True

    def notes(self) -> list[str]:
        return [f"{where} skips an empty selection: the program runs it on no elements" for where in self.lines()]

    def lines(self) -> list[str]:
        return list(dict.fromkeys(assumption.where for assumption in self.made))

    def of(self, selected: set[str]) -> list[Assumption]:
        """Those made; raises TraceError where what was asked for is none of these sizes of selections."""
        for assumption in self.made:
            if not assumption.sizes <= selected:
                raise _undecided(assumption)
        return list(self.made)


def _only_skips(tree: ast.AST, line: int) -> bool:
    """Whether the `if` at a line skips nothing but writes to the places that its condition asks about."""
    for parent in ast.walk(tree):
        for block in (getattr(parent, name, ()) for name in ("body", "orelse")):
            for i, statement in enumerate(block if isinstance(block, list) else []):
                if isinstance(statement, ast.If) and statement.lineno <= line <= (statement.test.end_lineno or 0):
                    skips = len(statement.body) == 1 and isinstance(statement.body[0], ast.Continue)
                    skipped = block[i + 1 :] if skips else statement.body
                    return not statement.orelse and _write_selected(skipped, _names(statement.test), tree)
    return False


def _write_selected(statements: Sequence[ast.stmt], selected: set[str], tree: ast.AST) -> bool:
    """Whether statements do nothing where the tensors of these names are empty: they write to places that these say,
    and make what nothing else reads."""
    inside = {id(node) for statement in statements for node in ast.walk(statement)}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in inside]
    read_later = {name.id for name in names if isinstance(name.ctx, ast.Load)}
    return all(_writes_selected(statement, selected, read_later) for statement in statements)


def _writes_selected(statement: ast.stmt, selected: set[str], read_later: set[str]) -> bool:
    if isinstance(statement, ast.Expr):  # y.index_add_(0, index, x)
        return _indexes(statement.value, _IN_PLACE, selected)
    if not isinstance(statement, (ast.Assign, ast.AugAssign)):
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    for target in targets:
        if isinstance(target, ast.Subscript):  # y[index] = x
            if not _names(target.slice) & selected:
                return False
        elif _names(target) & read_later or not isinstance(target, (ast.Name, ast.Tuple)):
            same = isinstance(target, ast.Name) and isinstance(statement, ast.Assign)  # y = y.index_add(0, index, x)
            if not same or not _indexes(statement.value, _OUT_OF_PLACE, selected, of=_names(target)):
                return False
    return True


def _indexes(value: ast.expr, methods: set[str], selected: set[str], of: set[str] | None = None) -> bool:
    """Whether an expression is a call of a method that writes at the places of these names; `of`: whose method."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute) or value.func.attr not in methods:
        return False
    written = isinstance(value.func.value, ast.Name) and (of is None or value.func.value.id in of)
    return written and any(_names(argument) & selected for argument in value.args)


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def check_nothing_done(
    assumed: Iterable[Assumption], selected: Mapping[fx.Node, set[fx.Node]], counted: Mapping[fx.Node, fx.Node]
) -> None:
    """Raises TraceError where something is done with a selection that is assumed to have elements.

    Args:
        assumed: the lines.
        selected: {selection: all values that have a dim of its elements}.
        counted: {selection: what reads how many it has}.
    """
    for assumption in assumed:
        selections = [selection for selection in selected if module_path(selection) == assumption.path]
        if not selections:
            raise _undecided(assumption)
        for selection in selections:
            reader = counted.get(selection)
            values = selected[selection]
            ends = (user for member in values for user in member.users if user not in values and user is not selection)
            reader = reader or next((user for user in ends if operator_name(user) not in _NOTHING_IF_EMPTY), None)
            if reader is None:
                continue
            raise TraceError(
                "this line skips an empty selection, and what it skips is not nothing", refusal=Refusal.DECISION,
                why=f"{short_name(reader)} of no elements would change the result ({source_text(reader)})",
                where=assumption.where, hint="torch.where(count > 0, x, 0), or a sum in place of a mean",
            )  # fmt: skip


def _undecided(assumption: Assumption) -> TraceError:
    return TraceError(
        "this line decides what to run by how many elements there are", refusal=Refusal.DECISION,
        why="that depends on values, which a graph does not hold", where=assumption.where,
        hint="a mask in place of a selection: torch.where(mask, x, 0)",
    )  # fmt: skip
