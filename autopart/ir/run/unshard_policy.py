"""Unshard policy (ZeRO): which parameters stay gathered for a step, and which share one all-gather."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autopart.ir.collective_nodes import autopart_operator, axis_of
from autopart.ir.facts import facts
from autopart.ir.layout import Sections
from autopart.ir.program import Program, Stage
from autopart.ir.run.buckets import block_runs

GATHERS = {"all_gather": False, "all_gather_sum": True}
"""{operator that all-gathers: True if its backward is a reduce-scatter}."""


def gathers_stored(node: fx.Node, axes: Container[str | None]) -> bool:
    """Return True if a node all-gathers a stored parameter over one of these axes.

    The runtime replaces the axis names in a graph by names of process groups. For such a graph, pass group names.
    """
    gathers = autopart_operator(node) in GATHERS and axis_of(node) in axes
    source = node.args[0] if gathers else None
    return isinstance(source, fx.Node) and source.op == "get_attr"


def storing_axes(program: Program) -> list[str]:
    """Return the axes over which ZeRO shards parameters of a program.

    An axis can be a mesh axis or a flattened axis such as `dp_cp`.
    """
    mesh = program.mesh
    axes = {mesh.stored_over(stored.layout) for stored in program.parameters.values()}
    return sorted(axis for axis in axes if axis is not None and mesh.size(axis) > 1)


class ParameterGather(NamedTuple):
    """All-gather of a ZeRO-sharded parameter.

    Attributes:
        operator: name of the operator, a key of `GATHERS`.
        axis: axis over which shards are gathered.
        dim: dim along which they are concatenated.
        size: size of that dim after the gather; another axis can still shard the dim.
        sections: sizes of the concatenated sections of that dim.
        dtype: dtype of the gathered parameter in mixed precision, else None.
        grad_dtype: dtype of the gradient reduction in mixed precision, else None.
    """

    operator: str
    axis: str
    dim: int
    size: int
    sections: Sections
    dtype: torch.dtype | None
    grad_dtype: torch.dtype | None


def gather_of(node: fx.Node) -> ParameterGather:
    """Return the arguments of a node that all-gathers a parameter."""
    dim, size, sections = node.args[2:]
    dtypes = node.kwargs.get("dtype"), node.kwargs.get("grad_dtype")
    return ParameterGather(str(autopart_operator(node)), str(axis_of(node)), dim, size, tuple(sections), *dtypes)


def unsharded_for_step(program: Program, stages: Sequence[Stage]) -> dict[str, ParameterGather]:
    """Return {parameter: its all-gather} for parameters that stay unsharded for a step (ZeRO 1 and 2).

    A parameter stays unsharded if all its uses in these stages share one all-gather.
    """
    if program.zero not in (1, 2):
        return {}
    gathers_by_name: dict[str, set[ParameterGather | None]] = {}
    axes = storing_axes(program)
    for node in (node for stage in stages for node in stage.graph.graph.nodes if node.op == "get_attr"):
        for user in node.users:
            gather = gather_of(user) if gathers_stored(user, axes) else None
            gathers_by_name.setdefault(str(node.target), set()).add(gather)
    return {
        name: gather
        for name, gathers in gathers_by_name.items()
        if len(gathers) == 1 and (gather := next(iter(gathers))) is not None
    }


def gather_groups(nodes: Sequence[fx.Node], kind: Callable[[fx.Node], Any], alone: bool = False) -> list[list[fx.Node]]:
    """Group parameter all-gathers, so that each group runs as one collective.

    A group contains gathers of consecutive parameters of one block with equal operator, axis, `kind` and recompute
    region. Groups are sorted by their first node.

    Args:
        nodes: the gathers.
        kind: function that returns a key of a gather, such as the dtype of its parameter. Gathers of a group have equal
            keys.
        alone: True to put each gather in a separate group.
    """
    if alone:
        return [[node] for node in nodes]
    rows: list[list[fx.Node]] = []
    kinds: dict[Any, dict[str, fx.Node]] = {}
    for node, number in zip(nodes, block_runs(map(source_name, nodes)), strict=True):
        name = source_name(node)
        location = number, facts(node).get("region"), autopart_operator(node), axis_of(node)
        by_name = kinds.setdefault((location, kind(node)), {})
        if name in by_name:  # another operator reads the parameter in another layout
            rows.append([node])
        else:
            by_name[name] = node
    rows += [list(by_name.values()) for by_name in kinds.values()]
    order = {node: index for index, node in enumerate(nodes)}
    return sorted(rows, key=lambda row: order[row[0]])


def source_name(node: fx.Node) -> str:
    """Return the name of the parameter that a node all-gathers."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return str(source.target)
