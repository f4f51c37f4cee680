"""What is to be chosen, in one value: an annotated trace, the mesh and schedule it is for, and what users fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.stage_balance import SLACK
from autopart.ir.mesh import Context, Mesh
from autopart.ir.run.dp_sync import ALL_REDUCE, DpSync
from autopart.ir.run.recompute_spec import Recompute
from autopart.ir.run.schedules import Schedule
from autopart.ir.trace import Trace
from autopart.passes.choose.solve.expert_axes import check_expert_axes, mixtures
from autopart.passes.choose.solve.layout_pins import Pinned, pinned_layouts, pinned_parts
from autopart.passes.choose.solve.shard_axis import SequenceParallel
from autopart.passes.choose.storage.parameter_storage import Storage
from autopart.plans.pins import Pins


@dataclass(frozen=True, eq=False)
class Problem:
    """A trace with what is asked for it, and what follows from these alone, found once."""

    trace: Trace
    mesh: Mesh
    schedule: Schedule
    hardware: Hardware
    pins: Pins
    sequence_parallel: SequenceParallel
    zero: int
    recompute: Recompute
    prefetch: int = 1
    context: Context = "auto"
    dp_sync: DpSync = ALL_REDUCE
    balance: float = 1.0
    sequence_dims: Mapping[str, int] | None = None
    stage_slack: float = SLACK
    """How much heavier than need be the heaviest stage may be, to send less."""

    @property
    def graph(self) -> fx.Graph:
        return self.trace.graph

    @property
    def microbatches(self) -> int:
        return self.schedule.microbatches

    @property
    def num_stages(self) -> int:
        return self.mesh.size("pp") * self.schedule.virtual_stages

    @cached_property
    def pinned(self) -> Mapping[str, Pinned]:
        """The layout pins, by the axis on which layouts are chosen, in the order in which they are. Raises for one that
        no plan can follow, also where nothing is chosen."""
        axes = self.mesh.solving_order
        by_axis = {axis: pinned_layouts(self.trace, self.mesh, self.pins, axis) for axis in axes or ("",)}
        asked = {axis: by_axis[axis].stacks for axis in self.mesh.chosen}
        check_expert_axes(self.mesh, mixtures(self.trace), asked)
        return by_axis if axes else {}

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes on which experts may be cut, outermost first."""
        mesh, pinned = self.mesh, self.pinned
        return tuple(axis for axis in mesh.chosen if mesh.axis(axis).cuts == "experts" or pinned[axis].stacks)

    @cached_property
    def storage(self) -> Storage:
        """How parameters are to be stored over the axes that may store them in parts."""
        return Storage(self.mesh, self.zero, pinned_parts(self.trace, self.mesh, self.pins))

    def options(self) -> dict[str, Any]:
        """What the text of a pass says of it."""
        return {
            "mesh": self.mesh, "microbatches": self.microbatches, "num_stages": self.num_stages,
            "sequence_parallel": self.sequence_parallel, "zero": self.zero,
        }  # fmt: skip
