"""The attention masks of a stage: which calls read them, and the stage in which kernels are told what they are.

A model that is traced makes its masks as tensors, also a causal one. What a mask is depends on the values of a call
(a batch with padding), so a stage keeps it, and for a call is written anew for the bands that its masks turn out to be
(`attention.band_of`): one kernel that leaves out what no query sees, and no mask in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import networkx as nx
from torch import fx

from autopart.ir.attention import Band, blocks_fit
from autopart.ir.facts import cost_notes, facts
from autopart.ir.graph import argument, dropout_probability, draws_random_numbers, operator_name, reads, shape
from autopart.ir.operators import autopart_ops, axis_of
from autopart.ir.program import Program, Stage, StageGraph

_KERNEL_BLOCK = 128
"""Queries that a kernel works on at a time: of a causal mask it leaves out whole blocks of keys (Dao 2023,
arXiv:2307.08691, section 3.1)."""


def masks_of(stage: Stage) -> dict[fx.Node, list[fx.Node]]:
    """{mask: the calls of attention that read it}, of the masks that a rank makes of the stage's inputs alone."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in stage.graph.graph.nodes:
        if is_attention(node) and isinstance(mask := argument(node, "attn_mask"), fx.Node):
            found.setdefault(mask, []).append(node)
    if not found:
        return {}
    graph = reads(stage.graph.graph)
    return {mask: calls for mask, calls in found.items() if _is_of_inputs(mask, graph, stage)}


def _is_of_inputs(mask: fx.Node, graph: nx.DiGraph, stage: Stage) -> bool:
    """Whether a value is made of keyword inputs and buffers, by every rank for itself."""
    inputs = {stage_input.name for stage_input in stage.inputs}
    for node in (mask, *nx.descendants(graph, mask)):
        known = {"placeholder": node.target in inputs, "get_attr": node.target in stage.buffers}
        if not known.get(node.op, axis_of(node) is None and not draws_random_numbers(node)):
            return False
    return True


def is_attention(node: fx.Node) -> bool:
    return node.op == "call_function" and operator_name(node) == "aten::scaled_dot_product_attention"


def scores_of(call: fx.Node) -> tuple[int, int]:
    """How many queries and keys a call of attention has."""
    query, key = call.args[:2]
    return shape(query)[-2], shape(key)[-2]


def mask_graph(stage: Stage, masks: Sequence[fx.Node]) -> fx.GraphModule:
    """The part of a stage's graph that makes these masks, of the keyword inputs that it needs."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = _made_for(masks, stage.graph.graph)
    for node in stage.graph.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[mask] for mask in masks))
    return fx.GraphModule(stage.graph, graph)


def _made_for(values: Sequence[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """What these values are made of, they themselves included."""
    edges = reads(graph)
    return set(values).union(*(nx.descendants(edges, node) for node in values if node in edges))


def with_bands(stage: Stage, bands: Mapping[str, Band | None]) -> Stage:
    """A stage whose attention is told these bands, {name of a mask: its band}, without the masks that nothing reads
    then, and without the inputs that they alone were made of."""
    known = {mask: band for mask in masks_of(stage) if (band := bands.get(mask.name)) is not None}
    if not any(map(is_attention, stage.graph.graph.nodes)):
        return stage
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(stage.graph.graph, copies))
    for mask, band in known.items():
        for call in [user for user in copies[mask].users if is_attention(user)]:
            _tell(call, band)
    for call in filter(is_attention, graph.nodes):
        if argument(call, "is_causal"):
            facts(call)["cost"] = cost_notes(call)._replace(share=_share_of_causal(call))
    needless = {copies[node] for node in _made_for(list(known), stage.graph.graph)}
    for node in reversed(graph.nodes):
        if node in needless and not node.users:
            graph.erase_node(node)
    left = {node.target for node in graph.find_nodes(op="placeholder")}
    is_read = [stage_input.name in left for stage_input in stage.inputs]
    return replace(
        stage, graph=StageGraph(stage.graph, graph), prologue=_with_outputs(stage.prologue, is_read),
        inputs=tuple(i for i, read in zip(stage.inputs, is_read, strict=True) if read),
    )  # fmt: skip


def as_traced(program: Program) -> Program:
    """A program whose masks are what they were in the call that was traced (`passes/facts/masks.py`)."""
    stages = []
    for stage in program.stages:
        bands = {mask.name: facts(mask).get("band") for mask in masks_of(stage)}
        stages.append(with_bands(stage, bands))
    return replace(program, stages=tuple(stages))


def _tell(call: fx.Node, band: Band) -> None:
    """Let a call of attention know what its mask is, and read it no more. A window on which blocks gain nothing, or a
    band that no kernel takes, stays a mask."""
    queries, keys = scores_of(call)
    given = {name: argument(call, name) for name in ("dropout_p", "scale", "enable_gqa")}
    if band == (queries - 1, keys - 1):
        given["is_causal"] = False
    elif band == (queries - 1, 0) and queries == keys:
        given["is_causal"] = True
    elif queries == keys and len(shape(call)) == 4 and not dropout_probability(call) and blocks_fit(band, queries):
        call.target = autopart_ops.window_attention.default
        call.args, call.kwargs = (*call.args[:3], *band), {name: given[name] for name in ("scale", "enable_gqa")}
        return
    else:
        return
    call.args, call.kwargs = call.args[:3], given


def _share_of_causal(call: fx.Node) -> float:
    """How much of its matrix work a causal kernel does."""
    queries, keys = scores_of(call)
    return min(1.0, (queries + _KERNEL_BLOCK) / (2 * queries)) if queries == keys else 1.0


def _with_outputs(prologue: fx.GraphModule, is_read: Sequence[bool]) -> fx.GraphModule:
    """A prologue without those of its outputs, the first ones, that the stage does not read."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs: Any = graph.graph_copy(prologue.graph, copies)
    graph.output((*(o for o, read in zip(outputs, is_read, strict=False) if read), *outputs[len(is_read) :]))
    return fx.GraphModule(prologue, graph)
