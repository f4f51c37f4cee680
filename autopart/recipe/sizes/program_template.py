"""A program as a function of the sizes of its inputs, such as the batch size.

The function is found by comparing programs that were traced at several sizes. Each integer that differs between them
becomes a formula of the sizes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopart.compat.torch_internals import LazyGraphModule
from autopart.ir.facts import facts
from autopart.ir.layout import mesh_axes_of
from autopart.ir.program import Program, Stage, StageGraph, StageInput
from autopart.ops.stage_masks import LARGEST_MASK, is_ring, mask_of, scores_of
from autopart.recipe.sizes.fitted_values import Fitted, evaluated, fit
from autopart.recipe.sizes.size_formula import NotDerivable, SizeFormula, Sizes

_FACTS = ("val", "layout", "needs_grad", "region", "on_host", "received")
"""Keys of `node.meta` whose values are fitted as functions of the sizes.

All other keys are copied from the first trace.
"""
_GRAPHS = {"prologue": LazyGraphModule, "graph": StageGraph}


class SizeInputs:
    """Integer inputs that graphs of a program get, so that one graph serves all sizes.

    There is one input for each formula of the sizes, such as batch size times sequence length.

    Args:
        used: names of the graphs' other inputs.
    """

    def __init__(self, used: Collection[str]):
        self.used = used
        self.names: dict[SizeFormula, str] = {}

    def name(self, formula: SizeFormula) -> str:
        """Return the name of the input with the value of a formula."""
        if formula not in self.names:
            numbered = map("size_{}".format, itertools.count(len(self.names)))
            self.names[formula] = next(name for name in numbered if name not in {*self.used, *self.names.values()})
        return self.names[formula]


class GraphTemplate:
    """A graph as a function of sizes.

    Args:
        modules: the graph of each trace.
        sizes: for each trace, the values of the sizes that vary between traces, such as (batch size, sequence length).
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
        self.scores: dict[fx.Node, Fitted] = {}
        """Numbers of queries and keys of attention calls."""
        self.takes_sizes = True
        """True if the graph can have the integers that differ as inputs."""
        self.sharded_over = set[str]()
        """Mesh axes over which the graph shards a dim whose size differs."""
        for row in zip(*graphs, strict=True):
            node = row[0]
            if any((other.op, other.target) != (node.op, node.target) for other in row):
                targets = ", ".join(sorted({str(other.target) for other in row}))
                raise NotDerivable(f"the node {node.name} differs between sizes: {targets}")
            if node.op == "get_attr":
                _check_equal(str(node.target), modules)
            if fitted := fit([(other.args, dict(other.kwargs)) for other in row], sizes, numbers):
                self.arguments[node] = fitted
            fitted_facts = {
                name: fitted for name in _FACTS
                if (fitted := fit([other.meta.get(name) for other in row], sizes, numbers))
            }  # fmt: skip
            if fitted_facts:
                self.facts[node] = fitted_facts
                self.sharded_over |= _axes_of_varying_dims(row)
            if node.op == "call_function" and mask_of(node) is not None:
                scores = [scores_of(other) for other in row]
                self.takes_sizes &= not is_ring(node) and max(map(math.prod, scores)) <= LARGEST_MASK
                if fitted := fit(scores, sizes, numbers):
                    self.scores[node] = fitted

    def at(self, sizes: Sizes) -> fx.GraphModule:
        """Return the graph for these sizes. Raises NotDerivable if a formula gives no integer."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        node_of = copies.__getitem__
        for node in self.module.graph.nodes:
            copy = copies[node] = graph.node_copy(node, node_of)
            if node in self.arguments:
                copy.args, copy.kwargs = evaluated(self.arguments[node], sizes, node_of)
            for name, fitted in self.facts.get(node, {}).items():
                copy.meta[name] = evaluated(fitted, sizes, node_of)
        return self.kind(self.module, graph)

    def names_read(self, inputs: SizeInputs) -> list[str]:
        """Return the names of the size inputs that this graph needs.

        They include the numbers of queries and keys, from which attention calls detect a mask structure such as causal.
        """
        names = dict[str, None]()

        def read(formula: SizeFormula) -> str:
            names[inputs.name(formula)] = None
            return inputs.name(formula)

        for fitted in (*self.arguments.values(), *self.scores.values()):
            fitted(read, lambda node: node)
        return list(names)

    def with_inputs(self, inputs: SizeInputs, names: Sequence[str]) -> tuple[fx.Graph, dict[str, fx.Node]]:
        """Add size inputs to a copy of the graph, after its other inputs. Return (graph, {name: size input}).

        Raises NotDerivable if a size is inside of an object that cannot contain graph nodes.
        """
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        size_nodes: dict[str, fx.Node] = {}
        for node in self.module.graph.nodes:
            if node.op != "placeholder" and not size_nodes:
                size_nodes = {name: graph.placeholder(name) for name in names}
            copy = copies[node] = graph.node_copy(node, copies.__getitem__)
            if node in self.arguments:
                read = set[fx.Node]()
                copy.args, copy.kwargs = self.arguments[node](_reader(inputs, size_nodes, read), copies.__getitem__)
                if not read.issubset(copy.all_input_nodes):
                    raise NotDerivable(f"{node.name} has a size inside of another object")
            if node in self.scores:
                facts(copy)["scores"] = self.scores[node](inputs.name, lambda node: node)
        return graph, size_nodes


def _reader(
    inputs: SizeInputs, size_nodes: Mapping[str, fx.Node], read: set[fx.Node]
) -> Callable[[SizeFormula], fx.Node]:  # fmt: skip
    def evaluate(formula: SizeFormula) -> fx.Node:
        node = size_nodes[inputs.name(formula)]
        read.add(node)
        return node

    return evaluate


def _axes_of_varying_dims(row: Sequence[fx.Node]) -> set[str]:
    values, layout = [facts(node).get("val") for node in row], facts(row[0]).get("layout") or {}
    tensors = [value for value in values if isinstance(value, Tensor)]
    return {
        axis for over, placement in layout.items() if placement.is_shard and len(tensors) == len(row)
        for axis in mesh_axes_of(over) if len({tensor.size(placement.dim) for tensor in tensors}) > 1
    }  # fmt: skip


def _check_equal(name: str, modules: Sequence[fx.GraphModule]) -> None:
    """Raise NotDerivable if the tensor with this name in the graph modules differs between the traces."""
    first, *others = (attrgetter(name)(module) for module in modules)
    for other in others:
        alike = isinstance(other, Tensor) and (other.shape, other.dtype) == (first.shape, first.dtype)
        if other is not first and not (alike and (other.is_meta or torch.equal(other, first))):
            raise NotDerivable(f"the tensor {name} differs")


class _SizedStages(NamedTuple):
    """Stages whose graphs take sizes, such as the sequence length, as integer inputs.

    Attributes:
        stages: the stages of the first trace, with these inputs.
        inputs: for each stage, the integer inputs of its graph.
        formulas: {name of an integer input: formula that computes it}. Every prologue (the graph of a stage that runs
            before the microbatches) takes its integer inputs in this order.
    """

    stages: tuple[Stage, ...]
    inputs: tuple[tuple[StageInput, ...], ...]
    formulas: Mapping[str, SizeFormula]


class ProgramTemplate:
    """A program as a function of sizes.

    Args:
        programs: the program of each trace. All are forward programs, or all are programs of training steps.
        sizes: for each trace, the values of the sizes that vary between traces, such as (batch size, sequence length).
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
        self.sharded_over = {axis for graphs in self.graphs for graph in graphs.values() for axis in graph.sharded_over}
        """Mesh axes over which a dim is sharded whose size differs between traces."""
        self._sized = self._with_size_inputs()

    def at(self, sizes: Sizes) -> Program:
        """Return the program for these sizes. Raises NotDerivable if a formula gives no integer.

        The programs of all sizes share their graphs, which take the sizes as inputs. If a graph has ring attention or a
        very large mask, whose kernels need constant sizes, the graphs are not shared.
        """
        if self._sized is None:
            return self.with_constant_sizes(sizes)
        stages = []
        for stage, fields, inputs in zip(self._sized.stages, self.stage_fields, self._sized.inputs, strict=True):
            new = _evaluated(fields, sizes)
            if "inputs" in new:
                new["inputs"] = (*new["inputs"], *inputs)
            stages.append(replace(stage, **new))
        values = {name: formula.at(sizes) for name, formula in self._sized.formulas.items()}
        new = _evaluated(self.fields, sizes)
        return replace(self.program, stages=tuple(stages), sizes=values, shared_graphs=self, **new)

    def with_constant_sizes(self, sizes: Sizes) -> Program:
        """Return the program for these sizes, with sizes as constants in its graphs, as in a traced program."""
        stages = tuple(
            replace(stage, **_evaluated(fields, sizes), **{name: graph.at(sizes) for name, graph in graphs.items()})
            for stage, fields, graphs in zip(self.program.stages, self.stage_fields, self.graphs, strict=True)
        )
        return replace(self.program, stages=stages, **_evaluated(self.fields, sizes))

    def _with_size_inputs(self) -> _SizedStages | None:
        templates = [template for graphs in self.graphs for template in graphs.values()]
        if not all(template.takes_sizes for template in templates):
            return None
        used = {str(node.target) for template in templates for node in template.module.graph.nodes
                if node.op == "placeholder"}  # fmt: skip
        inputs = SizeInputs(used)
        names = [template.names_read(inputs) for template in templates]
        all_names = list(inputs.names.values())
        try:
            stages = [
                _sized_stage(stage, graphs, inputs, all_names, of_graph)
                for stage, graphs, of_graph in zip(self.program.stages, self.graphs, names[1::2], strict=True)
            ]
        except NotDerivable:
            return None
        formulas = {name: formula for formula, name in inputs.names.items()}
        added = tuple(tuple(StageInput(name, None) for name in of_graph) for of_graph in names[1::2])
        return _SizedStages(tuple(stages), added, formulas)


def _sized_stage(
    stage: Stage, graphs: Mapping[str, GraphTemplate], inputs: SizeInputs, all_names: Sequence[str],
    names: Sequence[str],
) -> Stage:  # fmt: skip
    """Return a copy of a stage whose two graphs, prologue and stage graph, have size inputs.

    Args:
        all_names: names of the size inputs of the prologue, which are equal for all stages.
        names: names of the size inputs of the stage graph.
    """
    graph, _ = graphs["graph"].with_inputs(inputs, names)
    prologue, size_nodes = graphs["prologue"].with_inputs(inputs, all_names)
    output, count = prologue.output_node(), len(stage.inputs)
    values: Any = output.args[0]
    output.args = ((*values[:count], *(size_nodes[name] for name in names), *values[count:]),)
    return replace(
        stage, graph=StageGraph(stage.graph, graph), prologue=LazyGraphModule(stage.prologue, prologue),
        inputs=(*stage.inputs, *(StageInput(name, None) for name in names)),
    )  # fmt: skip


def _fit_fields(
    objects: Sequence[Program] | Sequence[Stage], without: set[str], sizes: Sequence[Sizes]
) -> dict[str, Fitted]:
    names = [field.name for field in dataclasses.fields(objects[0]) if field.name not in without]
    fitted = {name: fit([getattr(one, name) for one in objects], sizes, []) for name in names}
    return {name: one for name, one in fitted.items() if one is not None}


def _evaluated(fields: Mapping[str, Fitted], sizes: Sizes) -> dict[str, Any]:
    return {name: evaluated(fitted, sizes) for name, fitted in fields.items()}


def check_derived(derived: Program, traced: Program) -> None:
    """Raise AssertionError if a program derived for a call differs from the program traced for that call."""
    try:
        template = ProgramTemplate([derived, traced], [(0,), (0,)])
    except NotDerivable as reason:
        raise AssertionError(f"the derived program differs from the traced one: {reason}") from None
    assert not template.fields and not any(template.stage_fields)
