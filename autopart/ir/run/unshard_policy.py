"""Unshard policy: which sharded parameters stay gathered for a step, and which are gathered together."""

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

    In a graph that is bound to a rank, process groups take the place of axes.
    """
    gathers = autopart_operator(node) in GATHERS and axis_of(node) in axes
    source = node.args[0] if gathers else None
    return isinstance(source, fx.Node) and source.op == "get_attr"


def storing_axes(program: Program) -> list[str]:
    """Return the sorted (flattened) axes over which a program stores parameters sharded."""
    mesh = program.mesh
    axes = {mesh.stored_over(stored.layout) for stored in program.parameters.values()}
    return sorted(axis for axis in axes if axis is not None and mesh.size(axis) > 1)


class ParameterGather(NamedTuple):
    """All-gather of a parameter: its operator, axis and dim.

    `size`, `sections`: of the gathered dim (other axes can still shard it). `dtype`, `grad_dtype`: in mixed precision,
    dtypes of the unsharded parameter and of the gradient reduction.
    """

    operator: str
    axis: str
    dim: int
    size: int
    sections: Sections
    dtype: torch.dtype | None
    grad_dtype: torch.dtype | None


def gather_of(node: fx.Node) -> ParameterGather:
    """Return the all-gather of a parameter that a node runs."""
    dim, size, sections = node.args[2:]
    dtypes = node.kwargs.get("dtype"), node.kwargs.get("grad_dtype")
    return ParameterGather(str(autopart_operator(node)), str(axis_of(node)), dim, size, tuple(sections), *dtypes)


def unsharded_for_step(program: Program, stages: Sequence[Stage]) -> dict[str, ParameterGather]:
    """Return {parameter: its all-gather} for parameters that stay unsharded for a step (ZeRO 1 and 2).

    A parameter stays unsharded if every use in these stages reads it through one and the same all-gather over the axis
    that stores it sharded.
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
    """Group the parameter gathers that run as one collective, in order.

    A group contains consecutive gathers with the same block, operator, axis, kind and recompute region.

    Args:
        nodes: the gathers.
        kind: returns what else must be equal in a group, such as dtype and gradient axes of the parameter.
        alone: put each gather in a group of its own.
    """
    if alone:
        return [[node] for node in nodes]
    rows: list[list[fx.Node]] = []
    kinds: dict[Any, dict[str, fx.Node]] = {}
    for node, number in zip(nodes, block_runs(map(source_name, nodes)), strict=True):
        name = source_name(node)
        location = number, facts(node).get("region"), autopart_operator(node), axis_of(node)
        by_name = kinds.setdefault((location, kind(node)), {})
        if name in by_name:  # also read in another layout
            rows.append([node])
        else:
            by_name[name] = node
    rows += [list(by_name.values()) for by_name in kinds.values()]
    order = {node: index for index, node in enumerate(nodes)}
    return sorted(rows, key=lambda row: order[row[0]])


def source_name(node: fx.Node) -> str:
    """Return the name of the parameter that a node gathers."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return str(source.target)
