"""A program as a function of the sizes of its inputs, such as the batch size.

The function is found by comparing programs that were traced at several sizes. Each integer that differs between them
becomes a formula of the sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from autopart.compat.torch_internals import LazyGraphModule
from autopart.ir.program import Program, Stage, StageGraph
from autopart.recipe.sizes.fitted_values import Fitted, fit, no_nodes
from autopart.recipe.sizes.size_formula import NotDerivable, Sizes

_FACTS = ("val", "layout", "needs_grad", "region", "on_host", "received")
"""Keys of `node.meta` whose values are fitted as functions of the sizes.

All other keys are copied from the first trace.
"""
_GRAPHS = {"prologue": LazyGraphModule, "graph": StageGraph}


class GraphTemplate:
    """A graph as a function of sizes.

    Args:
        modules: the graph of each trace.
        sizes: the sizes of each trace that vary between traces, such as (batch size, sequence length).
        kind: class of the graph modules.
    Raises:
        NotDerivable: the graphs differ in something that is not a formula of the sizes, such as an operator.
    """

    def __init__(self, modules: Sequence[fx.GraphModule], sizes: Sequence[Sizes], kind: type[fx.GraphModule]):
        self.module, self.kind = modules[0], kind
        graphs = [list(module.graph.nodes) for module in modules]
        if len({len(nodes) for nodes in graphs}) > 1:
            raise NotDerivable(f"the graphs have {', '.join(str(len(nodes)) for nodes in graphs)} nodes")
        indices = [{node: index for index, node in enumerate(nodes)} for nodes in graphs]
        numbers = [index.__getitem__ for index in indices]
        self.arguments: dict[fx.Node, Fitted] = {}
        self.facts: dict[fx.Node, dict[str, Fitted]] = {}
        for row in zip(*graphs, strict=True):
            node = row[0]
            if any((other.op, other.target) != (node.op, node.target) for other in row):
                targets = ", ".join(sorted({str(other.target) for other in row}))
                raise NotDerivable(f"the node {node.name} differs between sizes: {targets}")
            if node.op == "get_attr":
                _check_equal(str(node.target), modules)
            if fitted := fit([(other.args, dict(other.kwargs)) for other in row], sizes, numbers):
                self.arguments[node] = fitted
            facts = {}
            for name in _FACTS:
                given = [other.meta.get(name) for other in row]
                if fitted := fit(given, sizes, numbers):
                    facts[name] = fitted
            if facts:
                self.facts[node] = facts

    def at(self, sizes: Sizes) -> fx.GraphModule:
        """Return the graph for these sizes. Raises NotDerivable if a formula gives no integer."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        node_of = copies.__getitem__
        for node in self.module.graph.nodes:
            copy = copies[node] = graph.node_copy(node, node_of)
            if node in self.arguments:
                copy.args, copy.kwargs = self.arguments[node](sizes, node_of)
            for name, fitted in self.facts.get(node, {}).items():
                copy.meta[name] = fitted(sizes, node_of)
        return self.kind(self.module, graph)


def _check_equal(name: str, modules: Sequence[fx.GraphModule]) -> None:
    """Raise NotDerivable if the tensor with this name in the graph modules differs between the traces."""
    first, *others = (attrgetter(name)(module) for module in modules)
    for other in others:
        alike = isinstance(other, Tensor) and (other.shape, other.dtype) == (first.shape, first.dtype)
        if other is not first and not (alike and (other.is_meta or torch.equal(other, first))):
            raise NotDerivable(f"the tensor {name} differs")


class ProgramTemplate:
    """A program as a function of sizes.

    Args:
        programs: the program of each trace. All are forward programs, or all are programs of training steps.
        sizes: the sizes of each trace that vary between traces, such as (batch size, sequence length).
    Raises:
        NotDerivable: the programs differ in something that is not a formula of the sizes, such as an operator.
    """

    def __init__(self, programs: Sequence[Program], sizes: Sequence[Sizes]):
        self.program = programs[0]
        self.graphs: list[dict[str, GraphTemplate]] = []
        self.fields = _fit_fields(programs, {"stages"}, sizes)
        self.stage_fields: list[dict[str, Fitted]] = []
        if len({len(program.stages) for program in programs}) > 1:
            raise NotDerivable("the numbers of stages differ")
        for stages in zip(*(program.stages for program in programs), strict=True):
            self.graphs.append(
                {name: GraphTemplate([getattr(s, name) for s in stages], sizes, kind) for name, kind in _GRAPHS.items()}
            )
            self.stage_fields.append(_fit_fields(stages, {*_GRAPHS}, sizes))

    def at(self, sizes: Sizes) -> Program:
        """Return the program for these sizes. Raises NotDerivable if a formula gives no integer."""
        stages = tuple(
            replace(stage, **_evaluated(fields, sizes), **{name: graph.at(sizes) for name, graph in graphs.items()})
            for stage, fields, graphs in zip(self.program.stages, self.stage_fields, self.graphs, strict=True)
        )
        return replace(self.program, stages=stages, **_evaluated(self.fields, sizes))


def _fit_fields(
    objects: Sequence[Program] | Sequence[Stage], without: set[str], sizes: Sequence[Sizes]
) -> dict[str, Fitted]:
    names = [field.name for field in dataclasses.fields(objects[0]) if field.name not in without]
    fitted = {name: fit([getattr(one, name) for one in objects], sizes, []) for name in names}
    return {name: one for name, one in fitted.items() if one is not None}


def _evaluated(fields: Mapping[str, Fitted], sizes: Sizes) -> dict[str, Any]:
    return {name: fitted(sizes, no_nodes) for name, fitted in fields.items()}


def check_derived(derived: Program, traced: Program) -> None:
    """Raise AssertionError if a program derived for a call differs from the program traced for that call."""
    try:
        template = ProgramTemplate([derived, traced], [(0,), (0,)])
    except NotDerivable as reason:
        raise AssertionError(f"the derived program differs from the traced one: {reason}") from None
    assert not template.fields and not any(template.stage_fields)
