"""How stage graphs read parameters that are stored in parts: which are held whole for a step, which are gathered block
by block, and which travel together."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autopart.errors import OptionError
from autopart.ir.collective_nodes import autopart_operator, axis_of
from autopart.ir.facts import facts
from autopart.ir.layout import Sections
from autopart.ir.program import Program, Stage
from autopart.ir.run.buckets import block_runs

GATHERS = {"all_gather": False, "all_gather_sum": True}
"""{operator that gathers: whether its backward sums}."""


def gathers_stored(node: fx.Node, axes: Container[str | None]) -> bool:
    """Whether a node gathers a parameter over one of these axes (in a bound graph: groups of processes)."""
    gathers = autopart_operator(node) in GATHERS and axis_of(node) in axes
    source = node.args[0] if gathers else None
    return isinstance(source, fx.Node) and source.op == "get_attr"


def storing_axes(program: Program) -> list[str]:
    """The axes, joined ones as one, over which a program stores parameters in parts, in the order of their names."""
    mesh = program.mesh
    axes = {mesh.stored_over(stored.layout) for stored in program.parameters.values()}
    return sorted(axis for axis in axes if axis is not None and mesh.size(axis) > 1)


class Way(NamedTuple):
    """How a parameter is gathered: by which operator, over which axis, along which dim, which has this size and these
    sections on a rank's share of other axes; in mixed precision the dtypes of the whole and of its gradient's sum."""

    operator: str
    axis: str
    dim: int
    size: int
    sections: Sections
    dtype: torch.dtype | None
    grad_dtype: torch.dtype | None


def way_of(node: fx.Node) -> Way:
    """How a node gathers a parameter."""
    dim, size, sections = node.args[2:]
    dtypes = node.kwargs.get("dtype"), node.kwargs.get("grad_dtype")
    return Way(str(autopart_operator(node)), str(axis_of(node)), dim, size, tuple(sections), *dtypes)


def held_whole(program: Program, stages: Sequence[Stage]) -> dict[str, Way]:
    """{parameter: how it is gathered} of those whose whole lives for a step (ZeRO 1 and 2): all that these stages read
    in one way, whole over the axes that store parameters."""
    if program.zero not in (1, 2):
        return {}
    read: dict[str, set[Way | None]] = {}
    axes = storing_axes(program)
    for node in (node for stage in stages for node in stage.graph.graph.nodes if node.op == "get_attr"):
        for user in node.users:
            way = way_of(user) if gathers_stored(user, axes) else None
            read.setdefault(str(node.target), set()).add(way)
    return {name: way for name, ways in read.items() if len(ways) == 1 and (way := next(iter(ways))) is not None}


def check_sent_whole(program: Program) -> None:
    """Raises OptionError for a parameter whose whole gradient data-parallel ranks bring together by a method, and whose
    whole is not held for a step."""
    sent = [name for name, one in program.parameters.items() if one.whole_to_send(program.mesh)]
    if not sent:
        return
    graphs, held = [stage.graph.graph for stage in program.stages], held_whole(program, program.stages)
    read = {str(node.target) for graph in graphs for node in graph.nodes if node.op == "get_attr"}
    apart = [name for name in sent if name in read and name not in held]
    if apart:
        sync = program.dp_sync
        others = str(sync) if sync.only else f"*={sync}"
        raise OptionError(
            f"dp_sync='{sync}' with zero=1 for '{apart[0]}'",
            why="it is read in more than one layout, so its parts are gathered, and its gradient summed, at every use",
            hint=f"zero=0, or its exact sum: dp_sync='{apart[0]}=all_reduce,{others}'",
        )


def gathered_together(
    nodes: Sequence[fx.Node], kind: Callable[[fx.Node], Any], alone: bool = False
) -> list[list[fx.Node]]:
    """The gathers of parameters that are one collective, in their order: consecutive ones of a block, of one operator,
    axis and kind, and of one region that is run again.

    Args:
        kind: of the parameter that a node gathers: its dtype, over what its gradient is summed too.
        alone: each by itself.
    """
    if alone:
        return [[node] for node in nodes]
    rows: list[list[fx.Node]] = []
    kinds: dict[Any, dict[str, fx.Node]] = {}
    for node, number in zip(nodes, block_runs(map(source_name, nodes)), strict=True):
        name = source_name(node)
        place = number, facts(node).get("region"), autopart_operator(node), axis_of(node)
        named = kinds.setdefault((place, kind(node)), {})
        if name in named:  # read in another layout too
            rows.append([node])
        else:
            named[name] = node
    rows += [list(named.values()) for named in kinds.values()]
    order = {node: index for index, node in enumerate(nodes)}
    return sorted(rows, key=lambda row: order[row[0]])


def source_name(node: fx.Node) -> str:
    """Of the parameter that a node gathers."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return str(source.target)
