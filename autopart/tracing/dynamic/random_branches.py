"""Branches whose condition is a random number or depends on values: both sides are computed.

Examples: `if torch.rand([]) < self.layerdrop: continue`, `if not torch.isfinite(h).all(): h = torch.clamp(h, -m, m)`.

A single trace fixes the outcome of each condition. So the forward is traced several times: with all outcomes True, with
all outcomes False, with each outcome changed alone, and once with random outcomes. The "full trace" is the larger of
the first two. The difference between it and a trace with one outcome changed is the code that one branch affects. The
final graph computes both sides of each branch, and a random number, equal on all ranks, selects a side. Every trace
must equal the final graph with the outcomes of that trace. Otherwise the forward depends on more than these random
numbers, and is rejected.

A condition on values selects a side in the same way. The gradient of the side that is not selected can be infinite or
NaN, and would stay so if multiplied by zero. So the inputs of each side receive a gradient only if the side is
selected.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopart.compat.export_internals import keep_calls
from autopart.compat.torch_internals import Tracing
from autopart.errors import Refusal, TraceError
from autopart.ir.facts import facts
from autopart.ir.graph import draws_random_numbers, value, writes
from autopart.ir.subgraphs import ancestors_of
from autopart.tracing.python.value_checks import Operand
from autopart.tracing.trace_errors import LostInTrace

_DEFINED = torch.library.Library("autopart_chance", "FRAGMENT")
_DEFINED.define("decided(Tensor condition) -> Tensor")
_DEFINED.impl("decided", torch.clone, "CompositeExplicitAutograd")
_DECIDED = torch.ops.autopart_chance.decided.default
keep_calls(_DECIDED)
_MOST = 64
"""Maximum number of branches in a forward. Each branch needs one more trace."""
_INEXACT = "a branch on a random number can skip this random operator"


class RandomBranches:
    """The branches of one forward, and the outcomes that the current trace assumes for them.

    Attributes:
        answers: truth values for the conditions, in the order of evaluation. Conditions beyond the end of the list are
            False.
        lines: source lines of the branches.
        skips_draws: True if a branch skips code that draws random numbers.
    """

    def __init__(self) -> None:
        self.answers: Sequence[bool] = ()
        self.count = 0
        self.lines: dict[str, None] = {}
        self.skips_draws = False
        self.by_values: dict[int, str] = {}
        """{number of a branch on values: its source line}"""
        self.limit = ""
        """Why both sides of the branches on values cannot be computed; "" if nothing was found yet."""
        self.refuses_values = False
        """True if the branches on values of this forward cannot be merged."""
        self.operands: list[Tensor] = []
        """Conditions that were evaluated before the current one in an `and` or `or`."""

    def refuse_values(self, error: Exception) -> None:
        """Stop computing both sides of branches on values, from the next trace on. `error`: the reason."""
        self.refuses_values = True
        if self.is_full:
            self.limit = f"there are more than {_MOST} branches, as in a loop"
        elif isinstance(error, LostInTrace):
            self.limit = error.why.replace(" random branch", " branch")
        elif isinstance(error, TraceError):
            self.limit = error.what
        else:
            text = str(error).strip().partition("\n")[0]
            self.limit = f"the trace of one side fails ({type(error).__name__}: {text:.100})"

    @property
    def is_full(self) -> bool:
        """True if the forward has reached the maximum number of branches.

        Without a maximum, the trace of a loop that ends on a random condition would never end.
        """
        return self.count >= _MOST

    def start(self, answers: Sequence[bool] = ()) -> None:
        """Begin a trace in which the conditions have these outcomes."""
        self.answers, self.count = tuple(answers), 0
        self.operands.clear()

    def answer_values(self, condition: Tensor, operand: Operand | None, line: str) -> bool:
        """Return the outcome that the current trace assumes for a condition on values.

        Args:
            operand: position of the condition in an `and` or `or`; None if it is a condition by itself.
        """
        condition = condition.detach().reshape(()).to(torch.bool)
        if operand is None:
            return self._decide(condition, line)
        value = condition.logical_not() if operand.is_negated else condition
        if not operand.is_last:  # so that Python evaluates the other operands too
            self.operands.append(value)
            return operand.is_and != operand.is_negated
        combine = torch.logical_and if operand.is_and else torch.logical_or
        for other in self.operands:
            value = combine(value, other)
        self.operands.clear()
        return self._decide(value, line) != operand.is_negated

    def _decide(self, condition: Tensor, line: str) -> bool:
        self.by_values[self.count] = line
        _DECIDED(condition)
        self.count += 1
        return self.answers[self.count - 1] if self.count <= len(self.answers) else False

    def answer(self, condition: Tensor) -> bool | None:
        """Return the outcome that the current trace assumes for a condition on random numbers.

        Returns None if the condition depends on more than random numbers.
        """
        tracing = Tracing.current()
        node = tracing.node_of(condition) if tracing is not None else None
        if node is None or not depends_only_on_random(node):
            return None
        _DECIDED(condition)
        self.count += 1
        return self.answers[self.count - 1] if self.count <= len(self.answers) else False


def depends_only_on_random(node: fx.Node) -> bool:
    """Return True if a value depends on random numbers and constants, but not on inputs or parameters."""
    nodes = ancestors_of([node])
    drawn = any(draws_random_numbers(made) for made in nodes if not made.all_input_nodes)
    return drawn and all(made.op == "call_function" for made in nodes)


def with_random_branches(program: Any, chances: RandomBranches, again: Callable[[], Any]) -> Any:
    """Return an exported program that computes both sides of every branch.

    Raises LostInTrace if two branches affect the same operators.

    Args:
        again: function that traces the call again, with the outcomes that `chances.answers` contains.
    """
    lines = next(iter([*chances.lines, *chances.by_values.values()]), "")
    try:
        return _with_chances(program, chances, again)
    except LostInTrace as error:
        why = error.why if chances.by_values else f"{error.why}: {lines}"
        raise LostInTrace(error.what, why, error.hint, error.refusal) from error


def _with_chances(program: Any, chances: RandomBranches, again: Callable[[], Any]) -> Any:
    count, draws = chances.count, random.Random(0)

    def traced(answers: Sequence[bool]) -> Any:
        chances.start(answers)
        result = again()
        if chances.count != count:
            raise _lost("the number of random branches depends on the outcome of another one, as in a loop")
        return result

    none, every = traced([False] * count), traced([True] * count)
    most = len(every.graph.nodes) > len(none.graph.nodes)
    program, least = (every, none) if most else (none, every)
    by_values = frozenset(chances.by_values)
    sides = [_Side.of(number, program.graph, traced([most ^ (i == number) for i in range(count)]).graph)
             for number in range(count)]  # fmt: skip
    _check_apart(sides)
    _check_pure([side for side in sides if side.number in by_values])
    mixed = [bool(draws.getrandbits(1)) for _ in range(count)]
    for answers, trace in (([not most] * count, least), (mixed, traced(mixed))):
        if not _same(_built(program.graph, sides, most, answers), trace.graph):
            raise _lost("the effect of one random branch depends on the outcome of another")
    merged = _built(program.graph, sides, most, None, by_values)
    chances.skips_draws = any(draws_random_numbers(node) for side in sides for node in (*side.here, *side.there))
    for spec, node in zip(program.graph_signature.output_specs, merged.output_node().args[0], strict=True):
        if isinstance(node, fx.Node):
            spec.arg.name = node.name
    program.graph_module.graph = merged
    return program


def _lost(why: str) -> LostInTrace:
    return LostInTrace(
        "the branches of the forward on random numbers cannot be traced", why,
        "torch.where(torch.rand(()) < p, a, b), or the decision outside of forward()", Refusal.RANDOM,
    )  # fmt: skip


@dataclass(frozen=True)
class _Side:
    """The code that branch `number` affects: the difference between the full trace and another trace.

    In the other trace, only branch `number` has the other outcome.

    Args:
        here: nodes that only the full trace has.
        there: nodes that only the other trace has.
        known: {node of the other trace: equal node of the full trace}, for nodes before the branch.
        instead: {value of the full trace: value of the other trace}, for values that differ and that code after the
            branch reads.
        after: first node of the full trace after the branch.
    """

    number: int
    here: Sequence[fx.Node]
    there: Sequence[fx.Node]
    known: Mapping[fx.Node, fx.Node]
    instead: Mapping[fx.Node, fx.Node]
    after: fx.Node

    @classmethod
    def of(cls, number: int, graph: fx.Graph, other: fx.Graph) -> _Side:
        """Compare two graphs: `graph` is the full trace, `other` has branch `number` changed."""
        ours, theirs = list(graph.nodes), list(other.nodes)
        start = 1 + ours.index(_decided(graph)[number])
        known = dict(zip(theirs[:start], ours[:start], strict=False))
        if any(_form(theirs) != _form(ours) or _slots(ours) != [known[n] for n in _slots(theirs)]
               for theirs, ours in known.items()):  # fmt: skip
            raise _lost("code before a random branch differs with the branch's outcome")
        behind, most = 0, min(len(ours), len(theirs)) - start
        while behind < most and _form(ours[-1 - behind]) == _form(theirs[-1 - behind]):
            behind += 1
        first, second = len(ours) - behind, len(theirs) - behind
        common = dict(zip(theirs[second:], ours[first:], strict=True))
        instead: dict[fx.Node, fx.Node] = {}
        for their, our in common.items():
            for b, a in zip(_slots(their), _slots(our), strict=True):
                replacement = common.get(b) or known.get(b) or b
                if instead.setdefault(a, replacement) is not replacement:
                    raise _lost("a random branch changes some uses of a value and not all")
        instead = {a: b for a, b in instead.items() if a is not b}
        if any(a in common.values() or b in common.values() for a, b in instead.items()):
            raise _lost("code after a random branch runs in another order with the other outcome")
        return cls(number, ours[start:first], theirs[start:second], known, instead, ours[first])


def _check_apart(sides: Sequence[_Side]) -> None:
    """Raise LostInTrace for nested branches, in-place writes, or sides of different shapes or dtypes."""
    seen: set[fx.Node] = set()
    for side in sides:
        if seen & {*side.here}:
            raise _lost("a random branch is nested in another one")
        seen |= {*side.here}
        for node in (*side.here, *side.there):
            schema = getattr(node.target, "_schema", None)
            if node.target is _DECIDED:
                raise _lost("a random branch is nested in another one")
            if schema is not None and schema.is_mutable and node.all_input_nodes[0] not in (*side.here, *side.there):
                raise _lost(f"{schema.name.removeprefix('aten::')} writes to a tensor that is read elsewhere")
        for a, b in side.instead.items():
            one, other = value(a), value(b)
            if not isinstance(one, Tensor) or (one.shape, one.dtype) != (other.shape, other.dtype):
                raise _lost("the two sides of a random branch give tensors of different shapes or dtypes")
            if any(getattr(getattr(user.target, "_schema", None), "is_mutable", False) for user in a.users):
                raise _lost("the result of a random branch is written in place")


def _check_pure(sides: Sequence[_Side]) -> None:
    """Raise LostInTrace if a side of a branch on values draws random numbers or writes running statistics."""
    for node in (node for side in sides for node in (*side.here, *side.there)):
        if draws_random_numbers(node):
            raise _lost("a side of a branch draws random numbers")
        if writes(node) and not node.target._schema.is_mutable:
            raise _lost("a side of a branch writes running statistics")


def _built(
    graph: fx.Graph, sides: Sequence[_Side], most: bool, answers: Sequence[bool] | None,
    guarded: Collection[int] = (),
) -> fx.Graph:  # fmt: skip
    """Build the graph for given outcomes of all branches, or with both sides of every branch.

    Args:
        most: the outcome (True or False) of all conditions in the full trace.
        answers: the outcomes. None: compute both sides of every branch, and select one by a `where` per branch.
        guarded: numbers of the branches on values. Their inputs receive a gradient only from the selected side.
    """
    built, now = fx.Graph(), dict[fx.Node, fx.Node]()
    decided = _decided(graph)
    taken = {s.number: answers is None or answers[s.number] == most for s in sides}
    left_out = {node for side in sides if not taken[side.number] for node in side.here}
    sides_of = {node: side for side in sides if side.number in guarded for node in side.here}
    guards = _Guards(built, guarded, most)
    ends: dict[fx.Node, list[_Side]] = {}
    for side in sides:
        ends.setdefault(side.after, []).append(side)
    for node in graph.nodes:
        for side in ends.get(node, ()):
            if answers is not None and taken[side.number]:
                continue
            condition = now[decided[side.number].args[0]]
            of_side: dict[fx.Node, fx.Node] = {}
            for other in side.there:
                reads = {
                    n: of_side.get(n) or guards.of(side, False, now[side.known[n]], condition)
                    for n in other.all_input_nodes
                }
                of_side[other] = built.node_copy(other, reads.__getitem__)
            new = {a: of_side.get(b) or now[b] for a, b in side.instead.items()}
            for a, other in new.items() if answers is None else ():
                own, other = guards.replaced(side, a in side.here, now[a], other, condition)
                pair = (own, other) if most else (other, own)
                new[a] = built.call_function(torch.ops.aten.where.self, (condition, *pair))
                new[a].meta = {**condition.meta, "val": value(a)}
            now |= new
        if node in left_out or (answers is None and node.target is _DECIDED):
            continue
        reads = {n: now[n] for n in node.all_input_nodes}
        if (own_side := sides_of.get(node)) is not None:
            condition = now[decided[own_side.number].args[0]]
            reads = {n: v if n in own_side.here else guards.of(own_side, True, v, condition) for n, v in reads.items()}
        now[node] = built.node_copy(node, reads.__getitem__)
    return built


class _Guards:
    """Builder of `where` calls by which the inputs of a branch get a gradient only from the selected side.

    Without the `where`, a gradient that is infinite or NaN on the side that is not selected would reach the input.

    Args:
        graph: the graph with both sides of every branch, which is being built.
        guarded: numbers of the branches whose condition depends on values.
        most: the outcome (True or False) of all conditions in the full trace.
    """

    def __init__(self, graph: fx.Graph, guarded: Collection[int], most: bool) -> None:
        self.graph, self.guarded, self.most = graph, guarded, most
        self.made: dict[tuple[int, bool, fx.Node], fx.Node] = {}
        self.has_second = False

    def of(self, side: _Side, is_here: bool, source: fx.Node, condition: fx.Node) -> fx.Node:
        """Return one side's copy of `source`, which passes on a gradient only if the side is selected.

        `is_here`: True for the side that the full trace has.
        """
        if side.number not in self.guarded or not _has_gradient(source):
            return source
        key = side.number, is_here, source
        if key not in self.made:
            self.made[key] = self._selected(source, condition, is_here == self.most)
        return self.made[key]

    def _selected(self, source: fx.Node, condition: fx.Node, side: bool) -> fx.Node:
        alone = self.graph.call_function(torch.ops.aten.detach.default, (source,))
        pair = (source, alone) if side else (alone, source)
        selected = self.graph.call_function(torch.ops.aten.where.self, (condition, *pair))
        for new in (alone, selected):
            new.meta = {**condition.meta, "val": value(source)}
        return selected

    def replaced(
        self, side: _Side, is_inside: bool, own: fx.Node, other: fx.Node, condition: fx.Node
    ) -> tuple[fx.Node, fx.Node]:
        """Return the two values, one of each side, between which the branch selects.

        A value that was computed before the branch may be computed a second time, by `_second`.

        Args:
            is_inside: True if the full trace computes `own` inside of the branch.
            own: value of the full trace.
            other: value of the other trace.
        """
        if side.number in self.guarded and not is_inside and not _carries(own, other):
            own = self._second(own, condition, self.most)
        elif side.number in self.guarded and is_inside and not _carries(other, own):
            other = self._second(other, condition, not self.most)
        return own, other

    def _second(self, node: fx.Node, condition: fx.Node, side: bool) -> fx.Node:
        """Compute a value a second time, from graph inputs that get a gradient only if the value is selected.

        Needed if the branch replaces this value by one that is not computed from it. The derivative of this value may
        then be infinite or NaN. The inputs of the original value cannot be selected in this way, because the condition
        is computed after the original value.
        """
        again: dict[fx.Node, fx.Node] = {}
        before = ancestors_of([node])
        for one in [one for one in self.graph.nodes if one in before]:
            if one.op == "placeholder" and _has_gradient(one):
                again[one] = self._selected(one, condition, side)
            elif any(source in again for source in one.all_input_nodes):
                if draws_random_numbers(one) or writes(one):
                    raise _lost("a value that a branch replaces is computed with random numbers or in-place writes")
                again[one] = self.graph.node_copy(one, lambda source: again.get(source, source))
        if again and self.has_second:
            raise _lost("two branches replace a value by one that does not depend on it")
        self.has_second |= bool(again)
        return again.get(node, node)


def _carries(source: fx.Node, node: fx.Node) -> bool:
    """Return True if the gradient of `node` flows on to `source`, or if `source` has no gradient."""
    if not _has_gradient(source):
        return True
    todo, seen = [node], {node}
    while todo:
        reached = todo.pop()
        if reached is source:
            return True
        stops = not _has_gradient(reached) or _WITHOUT_GRADIENT.search(str(reached.target)) is not None
        before = [one for one in reached.all_input_nodes if not stops and one not in seen]
        todo += before
        seen.update(before)
    return False


_WITHOUT_GRADIENT = re.compile(r"^aten\.(detach|new_\w+|\w+_like)\.")
"""Operators whose results carry no gradient to their inputs."""


def _has_gradient(node: fx.Node) -> bool:
    return isinstance(value(node), Tensor) and (value(node).is_floating_point() or value(node).is_complex())


def _same(one: fx.Graph, other: fx.Graph) -> bool:
    """Return True if two graphs are equal after their unused calls are removed."""
    for graph in (one, other):
        graph.eliminate_dead_code()
    pairs = list(zip(one.nodes, other.nodes, strict=False))
    known = {theirs: ours for ours, theirs in pairs}
    return len(one.nodes) == len(other.nodes) and all(
        _form(a) == _form(b) and _slots(a) == [known[n] for n in _slots(b)] for a, b in pairs
    )


def _decided(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is _DECIDED]


def _slots(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among the arguments of a call, in order, with repetitions."""
    nodes: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), nodes.append)
    return nodes


def _form(node: fx.Node) -> Any:
    """Return a comparison key of a node: its operator and arguments, except nodes among the arguments."""
    args = fx.map_arg((node.args, node.kwargs), lambda n: _SLOT)
    return node.op, node.target if node.op == "call_function" else "", repr(args)


_SLOT: Any = "a value of the graph"


def random_branch_notes(chances: RandomBranches, graph: fx.Graph) -> list[str]:
    """Return notes for the user on the random branches of a trace.

    Also marks the random operators that the model can skip.
    """
    for node in filter(draws_random_numbers, graph.nodes if chances.skips_draws else ()):
        facts(node)["inexact"] = _INEXACT
    by_values = dict.fromkeys(chances.by_values.values())
    both = [f"both sides of a branch on values are computed, and the condition selects: {line}" for line in by_values]
    few = ", ".join(list(chances.lines)[:2]) + ", ..." * (len(chances.lines) > 2)
    text = "code that a random branch skips is computed too: its parameters get a gradient of zero instead of None"
    return [f"{text}: {few}"] * bool(chances.lines) + both
