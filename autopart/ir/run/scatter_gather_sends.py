"""Which values pipeline stages send in parts (scatter-gather: Narayanan et al. 2021, arXiv:2104.04473, section 4.1).

Ranks that differ on the feature axes alone and hold the same value would each send all of it over the slow link between
stages. Instead each sends a part, and the receivers gather the parts over the fast link between them: `R` becomes
`S(d)` before the send (a slice, whose backward is an all-gather) and `R` again after it (an all-gather, whose backward
is a slice).
"""

from __future__ import annotations

from torch import fx

from autopart.ir.atoms import selections_in
from autopart.ir.facts import facts
from autopart.ir.graph import shape
from autopart.ir.layout import Layout, Placement, R, shard
from autopart.ir.mesh import Mesh


def in_parts(node: fx.Node, layout: Layout, mesh: Mesh) -> dict[str, Placement] | None:
    """The layout in which a traced value is sent; None where it is sent in the layout that it has.

    That is where ranks of a feature axis do not hold it alike (`R(grad P)` would need a reduce-scatter), or where no
    dim can be cut: one that no axis cuts yet, of a size that is known and divides by the ranks. The last such dim is
    taken.
    """
    axes = mesh.along("features")
    if not axes or any(layout.get(axis, R) != R for axis in axes):
        return None
    taken = {place.dim for place in layout.values() if place.is_shard} | {*facts(node).get("shares", ())}
    for dim, size in reversed(list(enumerate(shape(node)))):
        divides = size > 0 and size % mesh.feature_ranks == 0 and not selections_in(facts(node)["atoms"][dim])
        if dim not in taken and divides:
            return {**layout, **dict.fromkeys(axes, shard(dim))}
    return None
