"""Reduction of a wrong partitioned graph to the smallest subgraph that is wrong when it runs alone.

The search begins at the operator that computes the first wrong value, or, for a wrong gradient, at the operators that
use the value. It extracts these operators into a subgraph with the plan's decisions, and runs it with inputs that were
recorded from the model. If the results are right, it adds neighbouring operators until they are wrong. Then it removes
operators as long as the results stay wrong (delta debugging: Zeller and Hildebrandt 2002, "Simplifying and isolating
failure-inducing input").
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx

from autopart.errors import AutopartError
from autopart.ir.facts import ACTIVE, DATA, INPUT, PARAMETER, facts
from autopart.ir.graph import describe, operators, source_of
from autopart.proof.comparison import Arrangement, GraphUnderTest
from autopart.proof.localize.localize import BROKEN, Mismatch
from autopart.proof.localize.subgraph import ROWS, Builder, Subgraph

MAX_RUNS = 300


def smallest_failing(
    subject: GraphUnderTest, arrangement: Arrangement, tolerance: float, first: Mismatch | None, breaks: bool = False
) -> Subgraph | None:
    """Return a minimal subgraph whose error exceeds `tolerance`; None if the search finds no subgraph.

    Args:
        first: the first wrong value of the full graph; None if it is unknown.
        breaks: True if the run of the full graph raises an exception. Then a subgraph that raises an exception counts
            as wrong too.
    """
    for recorded in (True, False):  # True: values that depend only on inputs are recorded, not recomputed
        search = _FaultSearch(subject, arrangement, tolerance, recorded, breaks)
        chosen = search.grown(search.suspects(first))
        if chosen:
            return search.cut(search.reduced(chosen))
    return None


class _FaultSearch:
    """Search for a minimal set of operators that gives wrong results when it runs as a separate graph."""

    def __init__(
        self, subject: GraphUnderTest, arrangement: Arrangement, tolerance: float, recorded: bool, breaks: bool
    ):
        self.subject, self.arrangement, self.tolerance = subject, arrangement, tolerance
        self.recorded, self.breaks, self.runs = recorded, breaks, 0
        self.active = [n for n in operators(subject.traced.graph) if n in arrangement.decisions.stage_of]
        self.order = {node: i for i, node in enumerate(self.active)}
        with torch.no_grad():
            self.values = subject.values()
        self.joined = nx.Graph((node, user) for node in self.active for user in _users(node) if user in self.order)

    def suspects(self, first: Mismatch | None) -> set[fx.Node]:
        """Return the operators from which the search starts.

        If the first mismatch is a value, this is the operator that computes the value. If it is a gradient, these are
        the operators that use the value. Without a mismatch, these are all operators.
        """
        if first is None:
            return set(self.active)
        source, _ = source_of(first.node)
        makes = source in self.order and first.kind == "value"
        return {source} if makes else {user for user in _users(source) if user in self.order}

    def grown(self, chosen: set[fx.Node]) -> set[fx.Node]:
        """Add neighbouring operators to `chosen` until the subgraph gives wrong results. Return its operators.

        Each round adds all neighbours of the chosen operators. If even the graph of all operators gives right results,
        the returned set is empty.
        """
        rings = 1
        while not self.fails(chosen):
            if len(chosen) == len(self.active):
                return set()
            for _ in range(rings):
                around = nx.node_boundary(self.joined, chosen)
                chosen = chosen | around if around else set(self.active)
            rings *= 2
        return chosen

    def reduced(self, chosen: set[fx.Node]) -> set[fx.Node]:
        """Remove operators from `chosen` as long as the subgraph stays wrong. Return the remaining operators.

        It first tries to remove half of the operators at once, then smaller and smaller groups.
        """
        size = max(1, len(chosen) // 2)
        while len(chosen) > 1 and self.runs < MAX_RUNS:
            ordered = sorted(chosen, key=self.order.__getitem__)
            pieces = [set(ordered[i : i + size]) for i in range(0, len(ordered), size)]
            smaller = next((chosen - piece for piece in pieces if chosen - piece and self.fails(chosen - piece)), None)
            if smaller is not None:
                chosen, size = smaller, min(size, max(1, len(smaller) // 2))
            elif size == 1:
                break
            else:
                size = max(1, size // 2)
        return chosen

    def fails(self, chosen: set[fx.Node]) -> bool:
        """Return True if the subgraph of these operators gives wrong results.

        A subgraph that raises an exception counts as wrong only if the full graph raises one too.
        """
        self.runs += 1
        planted = _Planted(self.arrangement)
        try:
            subgraph = self.cut(chosen, planted.arrangement)
            errors = subgraph.errors()
        except AutopartError:
            return False  # this set of operators cannot be extracted
        except BROKEN:
            return self.breaks and planted.is_planted
        return max(errors.values(), default=0.0) > self.tolerance

    def cut(self, chosen: set[fx.Node], arrangement: Arrangement | None = None) -> Subgraph:
        """Extract these operators into a subgraph, with the decisions of the full graph.

        Args:
            arrangement: decisions to use in place of the full graph's.
        """
        return _Extraction(self.subject, arrangement or self.arrangement, self.values, chosen, self.recorded).subgraph()


class _Planted:
    """Arrangement with a planted fault, which records whether the fault could be applied to a subgraph.

    A fault that changes a value outside of the subgraph cannot be applied. The subgraph's result then proves nothing.
    """

    def __init__(self, arrangement: Arrangement):
        self.is_planted = True
        self._tamper = arrangement.tamper
        tamper = self.tamper if arrangement.tamper is not None else None
        self.arrangement = Arrangement(arrangement.decisions, arrangement.stage_style, tamper)

    def tamper(self, program: Any, shards: Any) -> None:
        self.is_planted = False
        assert self._tamper is not None
        self._tamper(program, shards)
        self.is_planted = True


class _Extraction:
    """Extraction of chosen operators into a separate graph."""

    def __init__(
        self, subject: GraphUnderTest, arrangement: Arrangement, values: dict[fx.Node, Any], chosen: set[fx.Node],
        recorded: bool,
    ):  # fmt: skip
        self.subject, self.arrangement, self.values = subject, arrangement, values
        self.chosen, self.is_recorded = chosen, recorded
        decisions = arrangement.decisions
        chosen_once = decisions.microbatches, decisions.num_stages, decisions.scatter_sends
        self.builder = Builder(decisions.mesh, *chosen_once)
        self.new: dict[fx.Node, fx.Node] = {}

    def subgraph(self) -> Subgraph:
        graph = self.subject.traced.graph
        for node in graph.nodes:
            if node in self.chosen or source_of(node)[0] in self.chosen:
                self._copy(node)
        copied = [n for n in graph.nodes if n in self.new and source_of(n)[0] in self.chosen]
        ends = [n for n in copied if isinstance(self.values[n], Tensor) and not self._is_used_up(n)]
        subject = self.builder.subject([self.new[n] for n in ends])
        built = self.builder.arrangement(stage_style=self.arrangement.stage_style, tamper=self.arrangement.tamper)
        return Subgraph(subject, built)

    def _is_used_up(self, node: fx.Node) -> bool:
        return bool(node.users) and all(user in self.chosen for user in node.users)

    def _copy(self, node: fx.Node) -> fx.Node:
        new = self.new[node] = self.builder.graph.node_copy(node, self._read)
        decisions = self.arrangement.decisions
        for over, target in self.builder.chosen.items():
            chosen = decisions.rows if over == ROWS else decisions.strategies[over]
            if node in chosen:
                target[new] = chosen[node]
        if node in decisions.stage_of:
            self.builder.stage_of[new] = decisions.stage_of[node]
        return new

    def _read(self, node: fx.Node) -> fx.Node:
        if node not in self.new:
            self.new[node] = self._input(node)
        return self.new[node]

    def _input(self, node: fx.Node) -> fx.Node:
        """Create the subgraph input for a value that a chosen operator uses and no chosen operator computes."""
        source, index = source_of(node)
        role, decisions, value = facts(source)["role"], self.arrangement.decisions, self.values[node]
        if role == PARAMETER:
            layout = decisions.stored.get(node.target, {})
            new = self.builder.weight(node.target, self.subject.weights[node.target], layout, node.name)
            new.meta = dict(node.meta)
        elif role in (INPUT, DATA) and (node.op != "call_function" or self.is_recorded):
            new = self.builder.input(node.name, value)
            new.meta |= _origin(source, node)
        elif role == ACTIVE:
            value = value.detach().requires_grad_(facts(node)["needs_grad"])
            chosen = {ROWS: decisions.rows, **decisions.strategies}
            layout = {over: on[source].outputs[index] for over, on in chosen.items() if source in on}
            new = self.builder.recorded(node.name, value, layout, decisions.stage_of[source])
            new.meta |= _origin(source, node)
        else:
            return self._copy(node)
        return new


def _origin(source: fx.Node, node: fx.Node) -> dict[str, Any]:
    kept = {k: v for k, v in {**source.meta, **node.meta}.items() if k in ("key", "stack_trace", "nn_module_stack")}
    return kept | ({"comment": describe(source)} if node.op == "call_function" else {})


def _users(node: fx.Node) -> Iterable[fx.Node]:
    """Yield the operators that use a value, also through `getitem` and views of weights."""
    for user in node.users:
        if user.op != "output" and facts(user)["role"] == ACTIVE and "key" in facts(user):
            yield user
        elif user.op != "output":
            yield from _users(user)
