"""Code that a model skips depending on values: `if mask.any(): y[mask] += expert(x[mask])`.

A graph has no branches. If the skippable code only writes to elements of tensors (`branch_source.py`), the code is
traced as if it ran. A marker node is inserted before the code and another marker node after it. The first marker has
the condition as an argument.

When the model would skip the code, the program must select no elements in it. Either the condition implies that the
mask is false everywhere, or the mask is combined with the condition. A final check makes sure that the skippable code
has no other effect: later code must read only the written tensors.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor, fx

from autopart.compat.export_internals import keep_calls
from autopart.compat.symbolic_shape_internals import as_tensor
from autopart.errors import Refusal, TraceError
from autopart.ir.graph import argument, draws_random_numbers, operator_name, short_name, source_text, value
from autopart.ir.selection import is_selection, positions_of
from autopart.ir.subgraphs import ancestors_of
from autopart.tracing.dynamic.branch_source import OUT_OF_PLACE, Skipped, skipped_by_length, skipped_code_of

_DEFINED = torch.library.Library("autopart_skipped", "FRAGMENT")
_DEFINED.define("begins(Tensor runs, int turn, int lines) -> Tensor")
_DEFINED.define("ends(int turn) -> ()")
_DEFINED.impl("begins", lambda runs, turn, lines: runs.clone(), "CompositeExplicitAutograd")
_DEFINED.impl("ends", lambda turn: None, "CompositeExplicitAutograd")
_BEGINS, _ENDS = torch.ops.autopart_skipped.begins.default, torch.ops.autopart_skipped.ends.default
keep_calls(_BEGINS)
keep_calls(_ENDS)

_SAME_TRUTHS = {"view", "reshape", "expand", "detach", "_to_copy", "clone", "alias", "squeeze", "unsqueeze", "t",
                "transpose", "permute", "flatten"}  # fmt: skip
_OF_SOME = {("gt", 0), ("ge", 1)}
_OF_NONE = {("eq", 0), ("le", 0), ("lt", 1)}
_TRUE_OR_NOT = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isin"}
_NO_FINITE_SLOPE = {"div", "reciprocal", "rsqrt", "sqrt", "pow", "log", "log2", "log10", "log1p", "logit", "norm",
                    "linalg_vector_norm", "std", "var", "acos", "asin", "atanh", "acosh", "atan2"}  # fmt: skip


class DataDependentBranches:
    """Recorder of code that a model can skip depending on values. It marks this code in the trace."""

    def __init__(self) -> None:
        self.lines: dict[Skipped, int] = {}
        self.running: dict[tuple[FrameType, Skipped], int] = {}
        """{(frame, lines of skippable code): number of the current execution}."""
        self.turns = 0

    def go_on(self) -> None:
        """Insert the end marker of skippable code if Python has left the lines of the code.

        Call this before every torch function.
        """
        if not self.running:
            return
        alive = set(_frames())
        for frame, code in list(self.running):
            if frame not in alive or not code.first <= frame.f_lineno <= code.last:
                self._end(frame, code)

    def _end(self, frame: FrameType, code: Skipped) -> None:
        turn = self.running.pop((frame, code), None)
        if turn is not None:
            _ENDS(turn)

    def answer(self, frame: FrameType | None, truth: Callable[[], Tensor]) -> bool | None:
        """Return the outcome of a condition, True or False, with which Python runs the skippable code.

        Returns None if the skippable code does more than write to elements of tensors.

        Args:
            frame: frame that evaluates the condition.
            truth: function that returns the condition as a tensor.
        """
        return self._marked(frame, skipped_code_of(frame), truth) if frame is not None else None

    def has_length(self, frame: FrameType, size: int | torch.SymInt) -> bool:
        """Return True if a frame evaluates `if len(x) > 0:`, whose body only writes to tensors.

        `size`: the length, which depends on data.
        """
        if isinstance(size, int):
            return False
        # Leave torch's Python code, such as Tensor.__len__.
        while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        skipped = skipped_by_length(frame)
        if skipped is not None:
            skipped = skipped._replace(runs_if=True)
        return bool(self._marked(frame, skipped, lambda: as_tensor(size) > 0))

    def _marked(self, frame: FrameType, skipped: Skipped | None, truth: Callable[[], Tensor]) -> bool | None:
        if skipped is None:
            return None
        self._end(frame, skipped)  # in a loop, the code of the previous iteration ends here
        self.turns += 1
        runs = truth().detach().reshape(()).to(torch.bool)
        number = self.lines.setdefault(skipped, len(self.lines))
        _BEGINS(runs if skipped.runs_if else runs.logical_not(), self.turns, number)
        self.running[frame, skipped] = self.turns
        return skipped.runs_if

    def notes(self) -> list[str]:
        lines = dict.fromkeys(f"{code.file}:{code.line}" for code in self.lines)
        then = "the program runs them on no elements, and gives a gradient of zero where the model gives none"
        return [f"{where} skips writes: {then}" for where in lines]


def _frames() -> Iterator[FrameType]:
    """Yield the Python frames that are running, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class Marks:
    """The marker nodes around code in a graph that the model can skip.

    A begin marker is inserted before the code, an end marker after it. The first argument of a begin marker is the
    condition. The class also records masks that are false everywhere when the model skips the code.

    `same`: function that returns True for two nodes that compute equal values.
    """

    def __init__(self, lines: Sequence[Skipped], same: Callable[[fx.Node, fx.Node], bool]) -> None:
        self.lines, self.same = lines, same
        self.around: list[fx.Node] = []
        """The markers whose code contains the current node, outermost first."""
        self.empty: dict[fx.Node, set[fx.Node]] = {}
        """{marker: masks that are false everywhere if the model skips its code}."""

    def pass_by(self, node: fx.Node) -> bool:
        """Update the state for the next node of the graph. Return True if the node is a marker."""
        if node.target is _BEGINS:
            self.around.append(node)
            self.empty.setdefault(node, set())
        elif node.target is _ENDS:
            self.around = [mark for mark in self.around if mark.args[1] != node.args[0]]
        return node.target in (_BEGINS, _ENDS)

    def guarded(self, mask: fx.Node, combine: Callable[[fx.Node, fx.Node], fx.Node]) -> fx.Node:
        """Return `mask` AND the condition under which the model runs the current node.

        If the model skips the node, the result is false everywhere, so the node selects no elements.

        Args:
            combine: function that adds the logical AND of two masks to the graph.
        """
        for mark in self.around:
            if not self.is_empty(mark, mask):
                mask = combine(mask, mark.args[0])
        for mark in self.around:
            self.empty[mark].add(mask)
        return mask

    def is_empty(self, mark: fx.Node, mask: fx.Node) -> bool:
        """Return True if `mask` is false everywhere whenever the model skips the code after marker `mark`."""
        counted = _asked_of(mark.args[0])
        parts = _conjuncts(mask)
        if isinstance(counted, fx.Node):
            return any(self.same(part, counted) for part in parts)
        return counted is not None and any(
            operator_name(part) == "aten::eq" and part.args[1] == counted.number
            and self.same(_root(part.args[0]), _root(counted.of)) for part in parts
        )  # fmt: skip


# --- Conditions on masks --------------------------------------------------------------------------------------


class _CountOf(NamedTuple):
    """Count of the elements of the tensor `of` that equal `number`: one entry of `bincount`."""

    of: fx.Node
    number: int


def _root(node: fx.Node) -> fx.Node:
    """Follow casts and views back to the value that they were computed from.

    The returned value has a nonzero element if and only if `node` has a nonzero element.
    """
    while True:
        name = operator_name(node).removeprefix("aten::")
        is_asked = (name == "any" and len(node.args) > 1) or (name == "ne" and node.args[1] == 0)
        is_rounded = name == "_to_copy" and value(node.args[0]).is_floating_point() and value(node).dtype != torch.bool
        if not is_asked and (is_rounded or name not in _SAME_TRUTHS):
            return node
        node = node.args[0]


def _conjuncts(mask: fx.Node) -> list[fx.Node]:
    """Return the mask and, if it is `a & b`, also its operands: each is true wherever the mask is true."""
    root = _root(mask)
    if operator_name(root) in ("aten::logical_and", "aten::bitwise_and"):
        return [root, *(part for of in root.args if isinstance(of, fx.Node) for part in _conjuncts(of))]
    return [root]


def _asked_of(runs: fx.Node) -> fx.Node | _CountOf | None:
    """Return the mask whose elements a condition tests; None for other conditions.

    For `mask.any()`, this is the mask. For `count > 0`, it is the mask whose true elements are counted, or a
    `_CountOf`.
    """
    node, positive = _root(runs), True
    while operator_name(node) in ("aten::logical_not", "aten::bitwise_not"):
        node, positive = _root(node.args[0]), not positive
    name = operator_name(node).removeprefix("aten::")
    if positive and name == "any":
        return _root(node.args[0])
    if (name, *node.args[1:]) in (_OF_SOME if positive else _OF_NONE):
        return _counted(node.args[0])
    return _counted(node) if positive else None


def _counted(node: fx.Node) -> fx.Node | _CountOf | None:
    """Return the mask if a value is the number of the mask's true elements, or a multiple of this number.

    Returns a `_CountOf` if the value is an entry of `bincount`, and None for any other value.
    """
    node = _root(node)
    name = operator_name(node).removeprefix("aten::")
    if name == "mul" and _is_positive(node.args[0]):
        return _counted(node.args[1])
    if name == "count_nonzero" or (name == "sum" and _is_truth(node.args[0])):
        return _root(node.args[0])
    if node.target is operator.getitem and operator_name(node.args[0]) == "aten::unbind":  # tolist()
        return _of_bincount(node.args[0].args[0], node.args[1])
    return _of_bincount(node.args[0], node.args[2]) if name == "select" else None


def _of_bincount(counts: fx.Node, number: object) -> _CountOf | None:
    if operator_name(counts) != "aten::index_add" or not isinstance(number, int):
        return None
    zeros, _, of, ones = counts.args
    is_count = [operator_name(n).removeprefix("aten::") for n in (zeros, ones)] == ["new_zeros", "ones_like"]
    return _CountOf(of, number) if is_count and value(counts).ndim == 1 else None


def _is_truth(node: fx.Node) -> bool:
    """Return True for a value that can only be 0 or 1: a boolean, a comparison, a one-hot entry."""
    while operator_name(node) in ("aten::select", "aten::slice") or _root(node) is not node:
        node = node.args[0] if _root(node) is node else _root(node)
    name = operator_name(node).removeprefix("aten::")
    return value(node).dtype == torch.bool or name in _TRUE_OR_NOT or name == "one_hot"


def _is_positive(factor: object) -> bool:
    return isinstance(factor, fx.Node) and operator_name(factor) == "aten::full" and factor.args[1] > 0


# --- Skipped code has no other effects ------------------------------------------------------------------------------


def check_only_writes(graph: fx.Graph, marks: Marks, selected: Mapping[fx.Node, set[fx.Node]]) -> None:
    """Raise TraceError if code that the model can skip affects more than the elements that it writes.

    Removes the markers.

    Args:
        selected: {node that selects elements by a mask: all nodes with a dim of these elements}.
    """
    inside: dict[fx.Node, list[fx.Node]] = {}
    marks.around.clear()
    for node in graph.nodes:
        if not marks.pass_by(node) and node.op == "call_function":
            for mark in marks.around:
                inside.setdefault(mark, []).append(node)
    for mark, nodes in inside.items():
        _SkippedCode(mark, nodes, marks, selected).check()
    asked = ancestors_of(marks.empty)
    for node in reversed(graph.nodes):
        is_unread = node in asked and node.op == "call_function" and not node.users and not draws_random_numbers(node)
        if node.target in (_BEGINS, _ENDS) or is_unread:
            graph.erase_node(node)


class _SkippedCode:
    def __init__(
        self, mark: fx.Node, nodes: Sequence[fx.Node], marks: Marks, selected: Mapping[fx.Node, set[fx.Node]]
    ) -> None:
        self.lines, self.same = marks.lines[mark.args[2]], marks.same
        self.nodes, self.inside = nodes, set(nodes)
        self.masks = marks.empty[mark]
        read = {used for node in nodes for used in (node, *node.all_input_nodes)}
        empty = [s for s in selected if read & {s, *selected[s]}
                 and (s.args[0] in self.masks or marks.is_empty(mark, s.args[0]))]  # fmt: skip
        self.nothing = {*empty, *(member for selection in empty for member in selected[selection])}
        """Values without elements when the model skips this code."""
        self.sources = [*_numbers(mark.args[0]), *(part for mask in self.masks for part in _conjuncts(mask))]
        """Values that show whether the code is skipped."""

    def check(self) -> None:
        for node in self.nodes:
            if is_selection(node) or positions_of(node) is not None:
                continue  # code outside may share this selection
            more = False
            if node not in self.nothing and self.nothing.intersection(node.all_input_nodes):
                more = not self._writes_nothing(node) and operator_name(node) != "aten::sum"
            elif node not in self.nothing and operator_name(node).removeprefix("aten::") in _NO_FINITE_SLOPE:
                more = self._depends_on_condition(node)
            if more or not (self.inside.issuperset(node.users) or self._is_as_before(node)):
                raise self._refused(node)

    def _depends_on_condition(self, node: fx.Node) -> bool:
        """Return True if a value depends on the condition of this code, or on a mask computed from it.

        The program runs the code even when the model would skip it. A count can be 0 then, and an operator that divides
        by the count gives inf or NaN.
        """
        made = ancestors_of([node])
        return any(source in made or any(self.same(one, source) for one in made) for source in self.sources)

    def _writes_nothing(self, node: fx.Node) -> bool:
        """Return True for a write to selected elements only: it has no effect if no element is selected."""
        if operator_name(node).removeprefix("aten::") not in OUT_OF_PLACE:
            return False
        places = [argument(node, name) for name in ("indices", "index", "mask")]
        written = [one for place in places for one in (place if isinstance(place, (list, tuple)) else [place])]
        return any(one in self.nothing or one in self.masks for one in written)

    def _is_as_before(self, node: fx.Node) -> bool:
        """Return True if a value is equal whether or not the model skips this code."""
        while node in self.inside:
            if operator_name(node).removeprefix("aten::") not in _SAME_TRUTHS and not self._writes_nothing(node):
                return False
            node = node.args[0]
        return True

    def _refused(self, node: fx.Node) -> TraceError:
        return TraceError(
            "this line skips code depending on tensor values, and the skipped code does more than write to "
            "selected elements", refusal=Refusal.DECISION,
            why=f"with no selected elements, {short_name(node)} would still change the result ({source_text(node)})",
            where=f"{self.lines.file}:{self.lines.line}",
            hint="torch.where(count > 0, x, 0), or a sum in place of a mean",
        )  # fmt: skip


def _numbers(runs: fx.Node) -> list[fx.Node]:
    """Return the scalar nodes from which a condition is computed."""
    todo, numbers = [runs], list[fx.Node]()
    while todo:
        node = todo.pop()
        if node not in numbers and isinstance(value(node), Tensor) and value(node).numel() == 1:
            numbers.append(node)
            todo += node.all_input_nodes
    return numbers
