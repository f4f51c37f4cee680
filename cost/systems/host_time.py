"""Time of the CPU to issue the kernels and collectives of a step.

A device runs kernels from a queue that the CPU fills. If the CPU issues kernels more slowly than the device runs them,
the device waits: the CPU limits the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.collective_costs import levels
from autopart.cost.predict.operator_work import Work
from autopart.cost.systems.system import System
from autopart.ir.mesh import Mesh

LIMITS = 0.05
"""A plan gets a note that the CPU limits a step if the device waits for the CPU for more than this share of it."""


class HostRates(NamedTuple):
    """Seconds of the CPU to issue a kernel and a collective.

    Args:
        operator_s: seconds per kernel.
        collective_s: seconds per collective.
        collective_rank_s: additional seconds per collective and rank of its group.
    """

    operator_s: float
    collective_s: float
    collective_rank_s: float = 0.0

    @staticmethod
    def of(hardware: Hardware, system: System, compiled: bool, mesh: Mesh) -> HostRates:
        """Return the rates of a system on a device.

        Args:
            compiled: True for a plan with `compile=True`.
        """
        operator_s = hardware.host_compiled_s if compiled else hardware.host_operator_s
        operator_s = operator_s if system.host_operator_s is None else system.host_operator_s
        collective_s = hardware.host_collective_s if system.host_collective_s is None else system.host_collective_s
        _, nodes = levels(mesh.size("pp"), hardware.devices_per_node, mesh.stride("pp"))
        if system.host_collective_pipeline_s is not None and nodes > 1:
            return HostRates(operator_s, system.host_collective_pipeline_s, system.host_collective_rank_s)
        return HostRates(operator_s, collective_s)

    def seconds(self, works: Iterable[Work], mesh: Mesh) -> float:
        """Return the seconds of the CPU to issue kernels and collectives."""
        total = 0.0
        for work in works:
            if work.axis:
                once = self.collective_s + self.collective_rank_s * mesh.size(work.axis)
                total += work.times * once if mesh.size(work.axis) > 1 else 0.0
            else:  # attention has one kernel, whatever its work
                total += self.operator_s * (1 if work.flops.terms else max(1.0, work.times))
        return total


def host_notes(parts_s: Mapping[str, float], step_time_s: float, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note if the CPU limits a step.

    Args:
        parts_s: {kind of work: seconds} of the busiest rank.
        settings: {option: value} of the options that could be changed: `tp`, `microbatches`.
    """
    waits_s = parts_s.get("host", 0.0)
    if waits_s <= LIMITS * step_time_s:
        return ()
    helps = [
        *(["larger microbatches"] if settings["microbatches"] > 1 else ["a larger batch"]),
        *(["a smaller tp"] if settings["tp"] > 1 else []),
    ]
    return (
        f"the CPU limits the step: for {100 * waits_s / step_time_s:.0f} % of it, the device waits for operators to be "
        f"issued; {' or '.join(helps)} would help",
    )
