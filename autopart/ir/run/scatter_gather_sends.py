"""Scatter-gather sends between pipeline stages (Narayanan et al. 2021, arXiv:2104.04473, section 4.1).

Without them, ranks that differ only on the feature axes each send the same replicated value over the slow link between
stages. With them, each of these ranks sends one shard, and the receivers gather the shards over the fast link between
them. `R` becomes `S(d)` before the send (a slice, whose backward is an all-gather) and `R` again after it (an
all-gather, whose backward is a slice).
"""

from __future__ import annotations

from torch import fx

from autopart.ir.atoms import selections_in
from autopart.ir.facts import facts
from autopart.ir.graph import shape
from autopart.ir.layout import Layout, Placement, R, shard
from autopart.ir.mesh import Mesh


def scatter_layout(node: fx.Node, layout: Layout, mesh: Mesh) -> dict[str, Placement] | None:
    """Return the layout in which a traced value is sent as shards; None if it is not sent as shards.

    The value must be replicated on all feature axes (`R(grad P)` would need a reduce-scatter). The last dim that can be
    sharded is used: no axis shards it yet, its size is static, and the number of ranks divides it.
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
