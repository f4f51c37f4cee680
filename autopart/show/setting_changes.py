"""Changes of a plan's mesh, schedule, microbatches and ZeRO stage, predicted from the plan alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING, NamedTuple

from autopart.cost.formula.plan_cost import Cost, Figures
from autopart.errors import AutopartError
from autopart.ir.mesh import Mesh
from autopart.ir.run.schedules import MULTI_STAGE, SINGLE_STAGE, SPLIT_BACKWARD, Schedule

if TYPE_CHECKING:
    from autopart.cost.predict.table import Table
    from autopart.plans.plan import Plan


class SettingChange(NamedTuple):
    """One changed setting of a plan, for the same global batch and number of ranks.

    Args:
        setting: "mesh", "schedule", "microbatches" or "zero".
        text: the option of `autopart.plan`, as a user writes it.
        mesh, schedule, zero: the settings with the change.
    """

    setting: str
    text: str
    mesh: Mesh
    schedule: Schedule
    zero: int


def predictions(plan: Plan, cost: Cost) -> Iterator[tuple[SettingChange, Figures]]:
    """Yield the changes for which a schedule and layouts exist, with the predicted step time and memory."""
    for change in _changes(plan, cost.table):
        try:
            yield change, cost.variant(change.mesh, change.schedule, change.zero)
        except AutopartError:  # no schedule or no layout for this change
            continue


def _changes(plan: Plan, table: Table) -> Iterator[SettingChange]:
    """Yield changes of one setting at a time.

    A change is left out if its data ranks and microbatches do not divide the batch.
    """
    mesh, schedule, zero = plan.mesh_object(), plan.schedule, plan.zero
    rows = table.b * mesh.data_parallel_size * schedule.microbatches
    zero = 3 if table.gathers else zero
    for microbatches in (4 * schedule.microbatches, 2 * schedule.microbatches, schedule.microbatches // 2):
        if microbatches and rows % (mesh.data_parallel_size * microbatches) == 0:
            text = f"microbatches={microbatches}"
            yield SettingChange("microbatches", text, mesh, replace(schedule, microbatches=microbatches), zero)
    has_tail = any("tail" in stage for stage in plan.stages)
    if mesh.size("pp") > 1 and not has_tail:
        excluded = {schedule.name, "1f1b_2bw", *(SPLIT_BACKWARD if plan.compile else ())}  # 2BW delays gradients
        for name in (*SINGLE_STAGE, *MULTI_STAGE):
            if name not in excluded:
                virtual = 1 if name in SINGLE_STAGE else max(2, schedule.virtual_stages)
                changed = Schedule(name, schedule.microbatches, virtual)
                yield SettingChange("schedule", f"schedule='{name}'", mesh, changed, zero)
    if mesh.size("dp") > 1 and zero < 3:
        for stage in (0, 1, 2):
            if stage != zero:
                yield SettingChange("zero", f"zero={stage}", mesh, schedule, stage)
    for smaller, larger in permutations(("tp", "pp", "dp"), 2):
        if mesh.size(smaller) % 2 == 0:
            sizes = {smaller: mesh.size(smaller) // 2, larger: 2 * mesh.size(larger)}
            every = {axis.name: sizes.get(axis.name, mesh.size(axis.name)) for axis in mesh.axes}
            other = Mesh({axis: size for axis, size in every.items() if size > 1}, mesh.axes)
            if rows % (other.data_parallel_size * schedule.microbatches) == 0:
                yield SettingChange("mesh", f"mesh='{other}'", other, _schedule_on(other, schedule), zero)


def _schedule_on(mesh: Mesh, schedule: Schedule) -> Schedule:
    """Return the schedule for a changed mesh: no schedule without `pp`, 1F1B if the old mesh had no `pp`."""
    if mesh.size("pp") == 1:
        return Schedule(None, schedule.microbatches, 1)
    return schedule if schedule.name is not None else replace(schedule, name="1f1b")
