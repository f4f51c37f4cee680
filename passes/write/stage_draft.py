"""Builder of one pipeline stage, which is finally converted to a `Stage`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopart.ir.graph import parameters_of, shape, value
from autopart.ir.layout import Placement, local_shape
from autopart.ir.program import Boundary, BufferUpdate, Stage, StageGraph, StageInput
from autopart.ir.sharding import DimSharding
from autopart.ir.trace import Trace
from autopart.passes.normalize.attention_forms import fuse_attention_dropout
from autopart.passes.normalize.common_subexpressions import merge_equal_calls
from autopart.passes.normalize.matmul_forms import fuse_bias
from autopart.passes.pass_pipeline import Pass, eliminate_dead_code, run_passes

Key = tuple[tuple[str, Placement], ...]
"""A layout as a tuple of (axis, placement), which can be a dictionary key."""


@dataclass
class StageDraft:
    """A pipeline stage that is being written: its graphs, inputs, parameters and updates of buffers."""

    index: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    prologue: fx.Graph = field(default_factory=fx.Graph)
    made: dict[tuple[fx.Node, Key], fx.Node] = field(default_factory=dict)
    stored: dict[tuple[fx.Node, Key], fx.Node] = field(default_factory=dict)
    whole: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: list[StageInput] = field(default_factory=list)
    prologue_outputs: list[fx.Node] = field(default_factory=list)
    receives: list[tuple[fx.Node, Key]] = field(default_factory=list)
    sends: list[tuple[fx.Node, Key]] = field(default_factory=list)
    parameters: dict[str, None] = field(default_factory=dict)
    buffers: dict[str, None] = field(default_factory=dict)
    updates: list[tuple[BufferUpdate, fx.Node]] = field(default_factory=list)
    seeds: fx.Node | None = None
    seed: fx.Node | None = None
    is_tail: bool = False

    def placeholder(self, name: str) -> fx.Node:
        """Add an input to the stage graph. If another input has its name, the name gets a suffix."""
        placeholder = self.graph.placeholder(name)
        placeholder.target = placeholder.name
        return placeholder

    def parameter(self, node: fx.Node) -> fx.Node:
        """Add a node that reads a parameter in its stored layout to the stage graph. Return the node."""
        self.parameters[node.target] = None
        return self.graph.create_node("get_attr", node.target, (), {}, node.name)

    def output(self, values: Sequence[fx.Node]) -> None:
        """Write the output nodes of the stage graph and of its prologue.

        The stage graph returns `values`, and new values of the buffers that it updates. The prologue
        (the graph that runs before the first microbatch) returns the inputs that it computes for the stage graph, and
        new values of buffers that depend only on the model's inputs.
        """
        new = {from_inputs: [n for update, n in self.updates if update.from_inputs is from_inputs] for from_inputs in
                (True, False)}  # fmt: skip
        self.graph.output((*values, *new[False]))
        self.prologue.output((*self.prologue_outputs, *new[True]))

    def finish(self, trace: Trace, sizes: Mapping[str, int], mark: Callable[[fx.Graph], None]) -> Stage:
        """Return the finished stage. `output` must be called first.

        Args:
            sizes: sizes of the mesh axes.
            mark: function that marks recomputed regions. It can rewrite and reorder the stage graph.
        """
        received = [self.made[value] for value in self.receives]
        keywords = [n for n in self.graph.find_nodes(op="placeholder") if n not in received]
        for placeholder in reversed([*received, *keywords]):  # inputs: first the values received from other stages
            next(iter(self.graph.nodes)).prepend(placeholder)
        run_passes(self.graph, (Pass(fuse_bias), Pass(fuse_attention_dropout)), of=f"stage {self.index}")
        run_passes(self.prologue, (Pass(eliminate_dead_code),), of=f"prologue {self.index}")
        mark(self.graph)
        run_passes(self.graph, (Pass(merge_equal_calls),), of=f"stage {self.index}")
        return Stage(
            self.index, _module(self.prologue, trace), tuple(self.inputs), _module(self.graph, trace),
            tuple(_boundary(n, k, sizes) for n, k in self.receives),
            tuple(_boundary(n, k, sizes) for n, k in self.sends),
            tuple(self.parameters), tuple(self.buffers), tuple(update for update, _ in self.updates),
            self.is_tail,
        )  # fmt: skip


def _module(graph: fx.Graph, trace: Trace) -> fx.GraphModule:
    """Return a module that runs a graph of a stage.

    Its constants have values; parameters and buffers are on `meta`.
    """
    attributes: dict[str, Any] = {}
    for node in graph.find_nodes(op="get_attr"):
        constant = trace.constants.get(node.target)
        meta = node.meta["val"]
        attributes[node.target] = (
            constant if constant is not None else torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        )
        if node.target in trace.parameters:
            grad = trace.parameters[node.target].requires_grad
            attributes[node.target] = torch.nn.Parameter(attributes[node.target], requires_grad=grad)
    return StageGraph(attributes, graph)


def _boundary(node: fx.Node, layout: Key, sizes: Mapping[str, int]) -> Boundary:
    full, places = shape(node), dict(layout)
    cuts = ((axis, DimSharding(place.dim, full[place.dim], place.sections, sizes[axis]))
            for axis, place in places.items() if place.is_shard)  # fmt: skip
    uneven = tuple((axis, cut) for axis, cut in cuts if len({*map(cut.length, range(cut.num_shards))}) > 1)
    return Boundary(node.name, tuple(local_shape(full, places, sizes)), value(node).dtype, places, uneven)


def parameter_stages(stage_of: Mapping[fx.Node, int], outputs: fx.Node, last: int) -> dict[str, set[int]]:
    """Return {parameter: stages that read it, directly or through a view}.

    A parameter that is an output of the model counts as read on the stage `last`.
    """
    readers: dict[str, set[int]] = {}
    for node, stage in (*stage_of.items(), (outputs, last)):
        for used in node.all_input_nodes:
            for name in parameters_of(used):
                readers.setdefault(name, set()).add(stage)
    return readers
