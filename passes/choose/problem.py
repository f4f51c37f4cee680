"""Input of the planner: an analyzed trace, the mesh, the schedule, and the user's options and pins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from autopart.cost.hardware.profile import Hardware
from autopart.ir.mesh import Context, Mesh
from autopart.ir.run.recompute_spec import Recompute
from autopart.ir.run.schedules import Schedule
from autopart.ir.run.sync_option import ALL_REDUCE, SyncOption
from autopart.ir.trace import Trace
from autopart.passes.choose.solve.expert_axes import check_expert_axes, mixtures
from autopart.passes.choose.solve.layout_pins import AxisConstraints, data_axis_pins, pinned_layouts
from autopart.passes.choose.solve.shard_axis import SequenceParallel
from autopart.passes.choose.storage.parameter_storage import Storage
from autopart.plans.pins import Pins


@dataclass(frozen=True, eq=False)
class Problem:
    """Input of the planner. Properties that are computed from it are cached."""

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
    dp_sync: SyncOption = ALL_REDUCE
    balance: float = 1.0
    sequence_dims: Mapping[str, int] | None = None

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
    def pinned(self) -> Mapping[str, AxisConstraints]:
        """The layouts that the user fixed (pins), by mesh axis, in the order in which the axes are solved.

        Pins are checked even if no axis is solved. Raises LayoutError or OptionError for a pin that no plan can follow.
        """
        axes = self.mesh.solving_order
        by_axis = {axis: pinned_layouts(self.trace, self.mesh, self.pins, axis) for axis in axes or ("",)}
        asked = {axis: by_axis[axis].stacks for axis in self.mesh.chosen}
        check_expert_axes(self.mesh, mixtures(self.trace), asked)
        return by_axis if axes else {}

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes that may shard experts, outermost first."""
        mesh, pinned = self.mesh, self.pinned
        return tuple(axis for axis in mesh.chosen if mesh.axis(axis).cuts == "experts" or pinned[axis].stacks)

    @cached_property
    def storage(self) -> Storage:
        """The policy for storing parameters sharded (ZeRO)."""
        return Storage(self.mesh, self.zero, data_axis_pins(self.trace, self.mesh, self.pins))

    def options(self) -> dict[str, Any]:
        return {
            "mesh": self.mesh, "microbatches": self.microbatches, "num_stages": self.num_stages,
            "sequence_parallel": self.sequence_parallel, "zero": self.zero,
        }  # fmt: skip
