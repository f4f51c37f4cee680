"""What was chosen for a graph, in the words of the passes: a plan has the same by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autopart.ir.layout import Placement
from autopart.ir.mesh import Mesh
from autopart.ir.recomputation import Recompute
from autopart.passes.facts.strategies import Strategy


@dataclass(frozen=True)
class Decisions:
    """All that was chosen: strategies on the batch and the tensor axis, stored placements, the stage of operators.

    `stored`: on `tp`; `stored_over_dp`: of the parameters that are cut over `dp` too, along another dim.
    `copied`: every rank of `dp` computes all rows, and the batch axes are the microbatches alone.
    """

    mesh: Mesh
    microbatches: int
    batch: Mapping[fx.Node, Strategy]
    tensor: Mapping[fx.Node, Strategy]
    stored: Mapping[str, Placement]
    stage_of: Mapping[fx.Node, int]
    num_stages: int
    copied: bool = False
    stored_over_dp: Mapping[str, Placement] = field(default_factory=dict)
    recompute: Recompute = "none"
