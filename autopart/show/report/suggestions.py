"""Changes that would make a plan's step faster, or its memory fit, predicted from the plan alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopart.cost.formula.plan_cost import Cost
from autopart.errors import AutopartError
from autopart.show.setting_changes import predictions

if TYPE_CHECKING:
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
    for change, figures in predictions(plan, cost):
        gain = 1 - figures.step_time_s / now.step_time_s
        fits = figures.memory_bytes <= capacity if capacity is not None else None
        if fits is not False and (must_shrink or gain >= MIN_GAIN):
            found.append(Suggestion(change.text, figures.step_time_s, figures.memory_bytes, gain, fits, figures.notes))
    return sorted(found, key=lambda suggestion: suggestion.step_time_s)[:SHOWN]
