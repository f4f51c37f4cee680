"""Changes that would make a plan's step faster, or its memory fit, predicted from the plan alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING

from autopart.cost.formula.plan_cost import Cost, Figures
from autopart.errors import AutopartError
from autopart.ir.mesh import Mesh
from autopart.ir.run.schedules import MULTI_STAGE, SINGLE_STAGE, SPLIT_BACKWARD, Schedule

if TYPE_CHECKING:
    from autopart.cost.predict.table import Table
    from autopart.plans.plan import Plan

SHOWN = 3
"""Maximum number of suggestions."""

MIN_GAIN = 0.01
"""Minimum share of the step time that a suggestion saves."""


@dataclass(frozen=True)
class Suggestion:
    """A change of a plan with its predicted step.

    Args:
        change: options of `autopart.plan`, as a user writes them.
        step_time_s: seconds of a step with the change.
        memory_bytes: peak bytes of the fullest rank with the change.
        gain: share of the step time that the change saves; negative if the step takes longer.
        fits: True if the change fits into device memory; None if the memory of the device is unknown.
        notes: reasons why a plan made with the change may differ from the prediction.
    """

    change: str
    step_time_s: float
    memory_bytes: float
    gain: float
    fits: bool | None
    notes: tuple[str, ...]


def suggestions(plan: Plan) -> list[Suggestion]:
    """Return up to three changes of mesh, schedule, microbatches or ZeRO, the fastest step first.

    For a plan that does not fit into memory, these are changes that fit. For other plans, these are changes that fit
    and save step time. Each change is predicted by `plan.cost.variant` for the same global batch and number of ranks.
    """
    cost = Cost.of(plan)
    try:
        now = cost.at()
    except AutopartError:  # plans of older versions have no cost table
        return []
    capacity = cost.get("device_memory_bytes")
    must_shrink = capacity is not None and now.memory_bytes > capacity
    found = []
    for change, figures in _predictions(plan, cost):
        gain = 1 - figures.step_time_s / now.step_time_s
        fits = figures.memory_bytes <= capacity if capacity is not None else None
        if fits is not False and (must_shrink or gain >= MIN_GAIN):
            found.append(Suggestion(change, figures.step_time_s, figures.memory_bytes, gain, fits, figures.notes))
    return sorted(found, key=lambda suggestion: suggestion.step_time_s)[:SHOWN]


def _predictions(plan: Plan, cost: Cost) -> Iterator[tuple[str, Figures]]:
    for change, mesh, schedule, zero in _changes(plan, cost.table):
        try:
            yield change, cost.variant(mesh, schedule, zero)
        except AutopartError:  # no schedule or no layout for this change
            continue


def _changes(plan: Plan, table: Table) -> Iterator[tuple[str, Mesh, Schedule, int]]:
    """Yield (text, mesh, schedule, ZeRO stage) of changes with which the batch is still divisible."""
    mesh, schedule, zero = plan.mesh_object(), plan.schedule, plan.zero
    rows = table.b * mesh.data_parallel_size * schedule.microbatches
    zero = 3 if table.gathers else zero
    for microbatches in (4 * schedule.microbatches, 2 * schedule.microbatches, schedule.microbatches // 2):
        if microbatches and rows % (mesh.data_parallel_size * microbatches) == 0:
            yield f"microbatches={microbatches}", mesh, replace(schedule, microbatches=microbatches), zero
    has_tail = any("tail" in stage for stage in plan.stages)
    if mesh.size("pp") > 1 and not has_tail:
        excluded = {schedule.name, "1f1b_2bw", *(SPLIT_BACKWARD if plan.compile else ())}  # 2BW delays gradients
        for name in (*SINGLE_STAGE, *MULTI_STAGE):
            if name not in excluded:
                virtual = 1 if name in SINGLE_STAGE else max(2, schedule.virtual_stages)
                yield f"schedule='{name}'", mesh, Schedule(name, schedule.microbatches, virtual), zero
    if mesh.size("dp") > 1 and zero < 3:
        yield from ((f"zero={stage}", mesh, schedule, stage) for stage in (1, 2) if stage != zero)
    for smaller, larger in permutations(("tp", "pp", "dp"), 2):
        if mesh.size(smaller) % 2 == 0:
            changed = {smaller: mesh.size(smaller) // 2, larger: 2 * mesh.size(larger)}
            every = {axis.name: changed.get(axis.name, mesh.size(axis.name)) for axis in mesh.axes}
            other = Mesh({axis: size for axis, size in every.items() if size > 1}, mesh.axes)
            if rows % (other.data_parallel_size * schedule.microbatches) == 0:
                yield f"mesh='{other}'", other, _schedule_on(other, schedule), zero


def _schedule_on(mesh: Mesh, schedule: Schedule) -> Schedule:
    """Return the schedule for a mesh that may have gained or lost its pipeline."""
    if mesh.size("pp") == 1:
        return Schedule(None, schedule.microbatches, 1)
    return schedule if schedule.name is not None else replace(schedule, name="1f1b")
