"""Write the program of every stage: a pure function of the annotated graph and the decisions.

Every value is made in the layout its operator's strategies give it and converted, once per target layout, to what its
consumers want. What depends on the inputs alone is made on every stage that needs it, in the layout asked for: whole
values in the stage's prologue (once per call, on the global batch), rows of the batch in the stage graph. Weights are
read where they are used. Everything else that a later stage needs travels through the stages between.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopart.errors import LayoutError
from autopart.graph import describe, draws_random_numbers, operators, shape, source_of, tensor_inputs, value
from autopart.layout import R_GRAD_P, Placement, R, Sections, conversion
from autopart.mesh import Mesh
from autopart.program import (
    MICROBATCH_AXIS,
    SEEDS,
    Boundary,
    Output,
    Program,
    Stage,
    StageGraph,
    StageInput,
    StoredTensor,
)
from autopart.trace import Trace

from .analyze import BATCH, DATA, DATA_DIM, FEATURE, INPUT, PARAMETER, WEIGHT
from .local_ops import LocalCall, autopart_ops, local_shape, local_value, write_local
from .strategies import Strategy, strategies

Key = tuple[tuple[str, Placement], ...]
ANY_KIND = frozenset({BATCH, DATA_DIM, FEATURE})
BATCH_AXES = ("dp", MICROBATCH_AXIS)


@dataclass(frozen=True)
class Decisions:
    """All that was chosen: strategies on the batch and the tensor axis, stored placements, the stage of operators."""

    mesh: Mesh
    microbatches: int
    batch: Mapping[fx.Node, Strategy]
    tensor: Mapping[fx.Node, Strategy]
    stored: Mapping[str, Placement]
    stage_of: Mapping[fx.Node, int]
    num_stages: int


@dataclass
class _StageGraph:
    """One stage being written."""

    index: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    prologue: fx.Graph = field(default_factory=fx.Graph)
    made: dict[tuple[fx.Node, Key], fx.Node] = field(default_factory=dict)
    whole: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: list[StageInput] = field(default_factory=list)
    prologue_outputs: list[fx.Node] = field(default_factory=list)
    receives: list[tuple[fx.Node, Key]] = field(default_factory=list)
    sends: list[tuple[fx.Node, Key]] = field(default_factory=list)
    parameters: dict[str, None] = field(default_factory=dict)
    buffers: dict[str, None] = field(default_factory=dict)
    received: list[fx.Node] = field(default_factory=list)
    seeds: fx.Node | None = None
    seed: fx.Node | None = None


def lower(trace: Trace, decisions: Decisions, outputs: Sequence[Any], whole_outputs: bool) -> Program:
    """The program that computes `outputs` (nodes of the graph, or constants) under these decisions.

    `whole_outputs`: bring outputs to their global value on `dp` (for a call); else leave them as they are made there,
    such as a partial sum of the loss (for a training step, which sums once).
    """
    writer = _Writer(trace, decisions)
    needed = _needed(outputs)
    for node in operators(trace.graph):
        if node in decisions.stage_of and node in needed:
            writer.write(node)
    return writer.finish(outputs, whole_outputs)


def _needed(outputs: Sequence[Any]) -> set[fx.Node]:
    """The nodes that the outputs depend on."""
    seen: set[fx.Node] = set()
    todo = [o for o in outputs if isinstance(o, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return seen


class _Writer:
    """Writes all stage graphs side by side."""

    def __init__(self, trace: Trace, decisions: Decisions):
        self.trace, self.decisions = trace, decisions
        sizes = {
            "dp": decisions.mesh.size("dp"),
            MICROBATCH_AXIS: decisions.microbatches,
            "tp": decisions.mesh.size("tp"),
        }
        self.sizes = {axis: size for axis, size in sizes.items() if size > 1}
        self.batch_axes = tuple(axis for axis in BATCH_AXES if axis in self.sizes)
        self.is_random = any(draws_random_numbers(node) for node in decisions.stage_of)
        self.stages = [_StageGraph(i) for i in range(decisions.num_stages)]
        for stage in self.stages:
            for node in trace.graph.find_nodes(op="placeholder"):
                stage.whole[node] = stage.prologue.node_copy(node)
            if self.is_random:
                stage.seeds = stage.prologue.placeholder(SEEDS)

    # Layouts

    def key(self, node: fx.Node, batch: Placement, tensor: Placement) -> Key:
        """A layout over the axes there are; gradients of values that have none do not count."""
        places = {**dict.fromkeys(self.batch_axes, batch), "tp": tensor}
        grad = node.meta["needs_grad"]
        return tuple((a, R if places[a] == R_GRAD_P and not grad else places[a]) for a in self.sizes)

    def produced(self, node: fx.Node) -> Key:
        """The layout in which a value is made."""
        source, index = source_of(node)
        if source.meta["role"] == PARAMETER:
            return self.key(source, R_GRAD_P, self.decisions.stored.get(source.target, R))
        tensor = self.decisions.tensor[source].outputs[index] if "tp" in self.sizes else R
        batch = self.decisions.batch[source].outputs[index] if self.batch_axes else R
        return self.key(node, batch, tensor)

    def wanted(self, node: fx.Node, position: int, used: fx.Node) -> Key:
        """The layout in which an operator takes an input."""
        tensor = self.decisions.tensor[node].inputs[position] if "tp" in self.sizes else R
        batch = self.decisions.batch[node].inputs[position] if self.batch_axes else R
        return self.key(used, batch, tensor)

    # Emitting

    def emitter(self, stage: _StageGraph, origin: fx.Node) -> Any:
        def emit(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            node = stage.graph.call_function(target, args, kwargs)
            node.meta = {k: v for k, v in origin.meta.items() if k in ("nn_module_stack", "stack_trace", "key")}
            if target is not origin.target and (val := local_value(target, args)) is not None:
                node.meta["val"] = val
            return node

        return emit

    def seed(self, stage: _StageGraph) -> fx.Node:
        """The random seed of the microbatch, a keyword input of the stage."""
        if stage.seed is None:
            assert stage.seeds is not None, "a program without dropout has no seeds"
            stage.seed = stage.graph.placeholder(f"{SEEDS}_{stage.index}")
            stage.inputs.append(StageInput(stage.seed.target, 0))
            stage.prologue_outputs.append(stage.seeds)
        return stage.seed

    def mark(self, made: fx.Node, origin: fx.Node, layout: Key) -> None:
        """Note on a written node which traced value it holds, in which layout."""
        made.meta.update(origin=origin.name, layout=dict(layout), needs_grad=origin.meta["needs_grad"])
        for name in ("nn_module_stack", "stack_trace", "key"):
            if name in origin.meta:
                made.meta[name] = origin.meta[name]
        full = value(origin)
        if isinstance(full, torch.Tensor):
            local = local_shape(full.shape, dict(layout), self.sizes)
            made.meta["val"] = torch.empty(local, dtype=full.dtype, device="meta")

    def write(self, node: fx.Node, stage: _StageGraph | None = None) -> None:
        """Write one operator on its stage, with its inputs converted to what it takes."""
        stage = stage or self.stages[self.decisions.stage_of[node]]
        positions = iter(range(len(tensor_inputs(node))))

        def local(used: fx.Node) -> fx.Node:
            return self.get(used, self.wanted(node, next(positions), used), stage)

        args, kwargs = fx.map_arg((node.args, node.kwargs), local)
        chosen = {axis: self.decisions.batch[node] for axis in self.batch_axes}
        if "tp" in self.sizes:
            chosen["tp"] = self.decisions.tensor[node]
        call = LocalCall(node, chosen, self.sizes, self.emitter(stage, node), lambda: self.seed(stage))
        self._store(node, write_local(call, args, kwargs), stage)

    def _store(self, node: fx.Node, made: fx.Node, stage: _StageGraph) -> None:
        if isinstance(value(node), torch.Tensor):
            layout = self.produced(node)
            self.mark(made, node, layout)
            stage.made[node, layout] = made
            return
        for user in node.users:  # a tuple: write its projections
            if user.target is operator.getitem:
                part = stage.graph.call_function(operator.getitem, (made, user.args[1]))
                layout = self.produced(user)
                self.mark(part, user, layout)
                stage.made[user, layout] = part

    # Reading

    def get(self, node: fx.Node, layout: Key, stage: _StageGraph) -> fx.Node:
        """A value in a layout on a stage: made before, converted, received, or made now."""
        if (node, layout) in stage.made:
            return stage.made[node, layout]
        role = source_of(node)[0].meta["role"]
        if role in (INPUT, DATA):
            made = self._from_inputs(node, layout, stage)
        else:
            produced = self.produced(node)
            source = self._at_home(node, produced, stage, role)
            if produced == layout:
                return source
            made = self.convert(source, node, produced, layout, stage)
        self.mark(made, node, layout)
        stage.made[node, layout] = made
        return made

    def _at_home(self, node: fx.Node, produced: Key, stage: _StageGraph, role: str) -> fx.Node:
        """The value as it is made: a parameter or a weight's view made here, or a value from an earlier stage."""
        if (node, produced) in stage.made:
            return stage.made[node, produced]
        if role == PARAMETER:
            made = stage.graph.create_node("get_attr", node.target, (), {}, node.name)
            stage.parameters[node.target] = None
            self.mark(made, node, produced)
            stage.made[node, produced] = made
        elif role == WEIGHT:
            self.write(node, stage)
        else:
            self._receive(node, produced, stage)
        return stage.made[node, produced]

    def _receive(self, node: fx.Node, layout: Key, stage: _StageGraph) -> None:
        """Let a value travel here from the stage before, and there from the one before it."""
        assert stage.index > 0, f"{node.name} is used before it is made"
        before = self.stages[stage.index - 1]
        if (node, layout) not in before.made:
            self._receive(node, layout, before)
        before.sends.append((node, layout))
        made = stage.graph.placeholder(node.name)
        stage.received.append(made)
        self.mark(made, node, layout)
        stage.made[node, layout] = made
        stage.receives.append((node, layout))

    # Values of the inputs alone

    def _from_inputs(self, node: fx.Node, layout: Key, stage: _StageGraph) -> fx.Node:
        places = dict(layout)
        tensor = places.get("tp", R)
        batch = places[self.batch_axes[0]] if self.batch_axes else R
        if tensor != R:
            whole = self.get(node, self.key(node, batch, R), stage)
            return self.convert(whole, node, self.key(node, batch, R), layout, stage)
        if not batch.is_shard:
            return self._stage_input(node, None, stage)
        made = self._rows(node, batch, stage)
        return made if made is not None else self._stage_input(node, batch, stage)

    def _rows(self, node: fx.Node, batch: Placement, stage: _StageGraph) -> fx.Node | None:
        """Compute only the rows asked for, where the operator's rule allows it."""
        if node.op != "call_function" or node.target is operator.getitem:
            return None
        shards = math.prod(self.sizes[axis] for axis in self.batch_axes)
        options = [s for s in strategies(node, shards, ANY_KIND) if s.outputs == (batch,)]
        if not options or not tensor_inputs(node):
            return None
        strategy = options[0]
        positions = iter(strategy.inputs)

        def local(used: fx.Node) -> fx.Node:
            return self.get(used, self.key(used, next(positions), R), stage)

        args, kwargs = fx.map_arg((node.args, node.kwargs), local)
        chosen = dict.fromkeys(self.batch_axes, strategy)
        return write_local(
            LocalCall(node, chosen, self.sizes, self.emitter(stage, node), lambda: self.seed(stage)), args, kwargs
        )

    def _stage_input(self, node: fx.Node, batch: Placement | None, stage: _StageGraph) -> fx.Node:
        """A keyword input of the stage graph, computed whole by its prologue and cut by the runtime."""
        if batch is not None and batch.sections:
            raise LayoutError(
                f"rows of {node.name} cannot be cut in sections",
                why=f"it is asked for as {batch}",
                where=describe(node),
            )
        rows = "" if batch is None or not self.batch_axes else "_rows"
        made = stage.graph.placeholder(f"{node.name}_{stage.index}{rows}")
        stage.inputs.append(StageInput(made.target, batch.dim if batch is not None else None))
        stage.prologue_outputs.append(self._whole(node, stage))
        return made

    def _whole(self, node: fx.Node, stage: _StageGraph) -> fx.Node:
        """The global value in the stage's prologue."""
        if node not in stage.whole:
            if node.op == "get_attr":
                made = stage.prologue.create_node("get_attr", node.target, (), {}, node.name)
                made.meta = {"val": value(node)}
                stage.buffers[node.target] = None
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._whole(n, stage))
                made = stage.prologue.call_function(node.target, args, kwargs)
                made.meta = {
                    k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace", "val", "key")
                }
            stage.whole[node] = made
        return stage.whole[node]

    # Conversions

    def convert(self, made: fx.Node, node: fx.Node, source: Key, target: Key, stage: _StageGraph) -> fx.Node:
        """Go from one layout to another, one axis after the other."""
        current = dict(source)
        for axis, place in target:
            if current[axis] != place:
                made = self._convert_axis(made, node, current, axis, place, stage)
                current[axis] = place
                self.mark(made, node, tuple(current.items()))
        return made

    def _convert_axis(
        self,
        made: fx.Node,
        node: fx.Node,
        current: Mapping[str, Placement],
        axis: str,
        target: Placement,
        stage: _StageGraph,
    ) -> fx.Node:
        source = current[axis]
        step = conversion(source, target)
        if step is None or (step.operator == "all_to_all" and (source.sections or target.sections)):
            whole = self._convert_axis(made, node, current, axis, R_GRAD_P if node.meta["needs_grad"] else R, stage)
            between = {**current, axis: R_GRAD_P if node.meta["needs_grad"] else R}
            return self._convert_axis(whole, node, between, axis, target, stage)
        operation = getattr(autopart_ops, step.operator).default
        emit = self.emitter(stage, node)
        if step.operator == "all_to_all":
            return emit(operation, made, axis, source.dim, target.dim)
        cut = source if source.is_shard else target
        if not cut.is_shard:
            return emit(operation, made, axis)
        size, sections = self._over_other_axes(node, current, axis, cut)
        return emit(operation, made, axis, cut.dim, size, list(sections))

    def _over_other_axes(
        self, node: fx.Node, current: Mapping[str, Placement], axis: str, cut: Placement
    ) -> tuple[int, Sections]:
        """The dim's size over this axis alone, and its sections, given what the other axes cut of the same dim."""
        others = math.prod(self.sizes[a] for a, p in current.items() if a != axis and p.is_shard and p.dim == cut.dim)
        size = shape(node)[cut.dim] // others
        plain = math.prod(
            self.sizes[a] for a, p in current.items()
            if a != axis and p.is_shard and p.dim == cut.dim and not p.sections
        )  # fmt: skip
        if len(cut.sections) == 1 and plain > 1:
            return size, (cut.sections[0] // plain,)
        return size, cut.sections

    # Finishing

    def finish(self, outputs: Sequence[Any], whole_outputs: bool) -> Program:
        last = self.stages[-1]
        results: list[Output] = []
        nodes: list[tuple[fx.Node, Key, fx.Node]] = []
        for output in outputs:
            if not isinstance(output, fx.Node):
                results.append(Output(None, {}, output))
                continue
            layout = self._output_layout(output, whole_outputs)
            results.append(Output(len(nodes), dict(layout)))
            nodes.append((output, layout, self.get(output, layout, last)))
        for stage in self.stages[:-1]:
            stage.graph.output(tuple(stage.made[send] for send in stage.sends))
        last.graph.output(tuple(made for _, _, made in nodes))
        last.sends = [(node, layout) for node, layout, _ in nodes]
        stages = tuple(self._finish_stage(stage) for stage in self.stages)
        names = (*self.trace.call.names, SEEDS) if self.is_random else self.trace.call.names
        return Program(
            self.decisions.mesh, self.decisions.microbatches, names, stages, self._stored(), tuple(results),
            self.trace.output_spec,
        )  # fmt: skip

    def _output_layout(self, node: fx.Node, whole: bool) -> Key:
        if source_of(node)[0].meta["role"] in (INPUT, DATA):
            return self.key(node, R, R)
        places = dict(self.produced(node))
        for axis in places:
            if axis == "tp" or (axis == "dp" and whole):
                places[axis] = R
        return tuple(places.items())

    def _finish_stage(self, stage: _StageGraph) -> Stage:
        stage.prologue.output(tuple(stage.prologue_outputs))
        keywords = [n for n in stage.graph.find_nodes(op="placeholder") if n not in stage.received]
        for placeholder in reversed([*stage.received, *keywords]):  # received values come first
            next(iter(stage.graph.nodes)).prepend(placeholder)
        fuse_bias(stage.graph)
        for graph in (stage.graph, stage.prologue):
            graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
            graph.lint()
        return Stage(
            stage.index, self._module(stage.prologue), tuple(stage.inputs), self._module(stage.graph),
            tuple(self._boundary(n, k) for n, k in stage.receives), tuple(self._boundary(n, k) for n, k in stage.sends),
            tuple(stage.parameters), tuple(stage.buffers),
        )  # fmt: skip

    def _module(self, graph: fx.Graph) -> fx.GraphModule:
        """A module around a graph: parameters and buffers without data, constants of the trace with theirs."""
        attributes: dict[str, Any] = {}
        for node in graph.find_nodes(op="get_attr"):
            constant = self.trace.constants.get(node.target)
            meta = node.meta["val"]
            attributes[node.target] = (
                constant if constant is not None else torch.empty(meta.shape, dtype=meta.dtype, device="meta")
            )
            if node.target in self.trace.parameters:
                grad = self.trace.parameters[node.target].requires_grad
                attributes[node.target] = torch.nn.Parameter(attributes[node.target], requires_grad=grad)
        return StageGraph(attributes, graph)

    def _boundary(self, node: fx.Node, layout: Key) -> Boundary:
        local = local_shape(shape(node), dict(layout), self.sizes)
        return Boundary(node.name, tuple(local), value(node).dtype, dict(layout))

    def _stored(self) -> dict[str, StoredTensor]:
        """How every parameter of the model is stored: the same for all programs of one plan."""
        readers = parameter_stages(self.decisions.stage_of)
        stored = {}
        for name, parameter in self.trace.parameters.items():
            place = self.decisions.stored.get(name, R)
            axes = ["dp"] if "dp" in self.sizes else []
            axes += ["tp"] if place == R_GRAD_P else []
            layout = {"tp": R if place == R_GRAD_P else place} if "tp" in self.sizes else {}
            stored[name] = StoredTensor(
                name, tuple(parameter.shape), layout, tuple(sorted(readers.get(name, {0}))),
                tuple(axes) if parameter.requires_grad else (), self.trace.aliases.get(name, ()),
            )  # fmt: skip
        return stored


def parameter_stages(stage_of: Mapping[fx.Node, int]) -> dict[str, set[int]]:
    """The stages that read each parameter, directly or through a view of it."""
    readers: dict[str, set[int]] = {}
    for node, stage in stage_of.items():
        todo = list(node.all_input_nodes)
        while todo:
            used = todo.pop()
            if used.meta["role"] == PARAMETER:
                readers.setdefault(used.target, set()).add(stage)
            elif used.meta["role"] == WEIGHT:
                todo.extend(used.all_input_nodes)
    return readers


def fuse_bias(graph: fx.Graph) -> None:
    """Put the bias back into `linear` where no collective came between them."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.aten.add.Tensor or node.kwargs:
            continue
        product, bias = node.args
        fits = (
            isinstance(product, fx.Node) and isinstance(bias, fx.Node)
            and product.target is torch.ops.aten.linear.default
            and len(product.users) == 1 and len(product.args) == 2 and bias.op == "get_attr"
            and value(bias).dim() == 1 and value(bias).shape[0] == value(product).shape[-1]
        )  # fmt: skip
        if fits:
            with graph.inserting_before(node):
                fused = graph.call_function(torch.ops.aten.linear.default, (*product.args, bias))
            fused.meta = {**product.meta, **node.meta}
            node.replace_all_uses_with(fused)
            graph.erase_node(node)
            graph.erase_node(product)
