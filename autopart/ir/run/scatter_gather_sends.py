"""Scatter-gather sends between pipeline stages (Narayanan et al. 2021, arXiv:2104.04473, section 4.1).

A value that leaves a stage is often replicated over tensor-parallel ranks. Without this method, each of these ranks
sends the full value over the slow link between stages. With it, each rank sends one shard, and the receivers gather the
shards over their fast link. The replicated value (`R`) becomes a shard (`S(d)`) before the send, by a slice whose
backward is an all-gather. After the send it is replicated again, by an all-gather whose backward is a slice.
"""

from __future__ import annotations

from torch import fx

from autopart.ir.atoms import selections_in
from autopart.ir.facts import facts
from autopart.ir.graph import shape
from autopart.ir.layout import Layout, Placement, R, shard
from autopart.ir.mesh import Mesh


def scatter_layout(node: fx.Node, layout: Layout, mesh: Mesh) -> dict[str, Placement] | None:
    """Return the layout with which a replicated value is sent as shards; None if it must be sent in full.

    The value must be replicated on all tensor-parallel axes; for `R(grad P)` the backward would need a reduce-scatter.
    The value is sharded along its last suitable dim. A dim is suitable if no axis shards it, its size is static, and
    the number of ranks divides the size.
    """
    axes = mesh.along("features")
    if not axes or any(layout.get(axis, R) != R for axis in axes):
        return None
    unusable_dims = {place.dim for place in layout.values() if place.is_shard} | {*facts(node).get("shares", ())}
    for dim, size in reversed(list(enumerate(shape(node)))):
        divides = size > 0 and size % mesh.tensor_parallel_size == 0 and not selections_in(facts(node)["atoms"][dim])
        if dim not in unusable_dims and divides:
            return {**layout, **dict.fromkeys(axes, shard(dim))}
    return None
