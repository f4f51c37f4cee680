"""Nodes of a plan's mesh: which ranks share a node, and which axes cross nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopart.common.text import quantity
from autopart.cost.hardware.profile import Hardware
from autopart.errors import OptionError
from autopart.ir.mesh import Mesh

if TYPE_CHECKING:
    from autopart.plans.plan import Plan

SHOWN = 4


def node_lines(plan: Plan) -> list[str]:
    """Return lines that list the ranks of each node, with a warning if `tp` crosses nodes.

    Returns no lines if all ranks fit into one node, or the hardware of the plan is unknown.
    """
    try:
        hardware = Hardware.load(plan.hardware)
    except OptionError:
        return []
    mesh, per_node = plan.mesh_object(), hardware.devices_per_node
    if mesh.num_ranks <= per_node:
        return []
    nodes = [range(first, min(first + per_node, mesh.num_ranks)) for first in range(0, mesh.num_ranks, per_node)]
    listed = [f"{node[0]}-{node[-1]}" for node in nodes[:SHOWN]]
    more = ", ..." if len(nodes) > SHOWN else ""
    crossing = crossing_axes(mesh, per_node)
    inside = [axis for axis in mesh.sizes if mesh.size(axis) > 1 and axis not in crossing]
    lines = [f"nodes: {len(nodes)} of {per_node} devices, with ranks {', '.join(listed)}{more}; "
             f"{' and '.join(inside) or 'no axis'} inside a node, {' and '.join(crossing)} between nodes"]  # fmt: skip
    if "tp" in crossing:
        best = max(size for size in range(1, per_node + 1) if mesh.size("tp") % size == 0 and per_node % size == 0)
        slow, fast = quantity(hardware.node_link_bytes_per_s, "B/s"), quantity(hardware.link_bytes_per_s, "B/s")
        lines.append(f"warning: tp{mesh.size('tp')} crosses nodes, where a device sends {slow} and not {fast}; "
                     f"try tp{best} with more pp or dp")  # fmt: skip
    return lines


def crossing_axes(mesh: Mesh, per_node: int) -> list[str]:
    """Return the axes along which some neighbours are on different nodes, outermost first."""
    crossing = []
    for axis in mesh.sizes:
        stride = mesh.stride(axis)
        pairs = [rank for rank in range(mesh.num_ranks) if mesh.coordinates(rank)[axis] + 1 < mesh.size(axis)]
        if any(rank // per_node != (rank + stride) // per_node for rank in pairs):
            crossing.append(axis)
    return crossing
