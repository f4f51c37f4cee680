"""Answers of `Plan.why` about settings: mesh, schedule, microbatches and ZeRO stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopart.common.text import quantity
from autopart.cost.formula.plan_cost import Cost, Figures
from autopart.plans.why import Why
from autopart.show.setting_changes import predictions

if TYPE_CHECKING:
    from autopart.plans.plan import Plan


def why_setting(plan: Plan, setting: str) -> Why:
    """Explain a setting of a plan: compare its predicted step time with that of each alternative.

    It needs only the plan, which can be read from a file. Raises PlanError for a plan without a cost table.

    Args:
        setting: "mesh", "schedule", "microbatches" or "zero".
    """
    cost = Cost.of(plan)
    now, capacity = cost.at(), cost.get("device_memory_bytes")
    found = [(change.text, figures) for change, figures in predictions(plan, cost) if change.setting == setting]
    found.sort(key=lambda pair: pair[1].step_time_s)
    step, memory = quantity(now.step_time_s, "s"), quantity(now.memory_bytes, "B")
    step, memory = quantity(now.step_time_s, "s"), quantity(now.memory_bytes, "B")
    reason = f"a step is predicted to take {step}, with {memory} on the fullest rank"
    if not found:
        return Why(setting, _chosen(plan, setting), f"{reason}; no other value can be predicted from this plan")
    fitting = [pair for pair in found if capacity is None or pair[1].memory_bytes <= capacity]
    runner_up, best = (fitting or found)[0]
    price_s = best.step_time_s - now.step_time_s
    if price_s >= 0 and fitting:
        reason += f"; every alternative that fits is slower, by {quantity(price_s, 's')} or more"
    elif fitting:
        reason += f"; {runner_up} is predicted to be faster"
    others = {text: _described(figures, now, capacity) for text, figures in found}
    return Why(setting, _chosen(plan, setting), reason, runner_up, price_s, others)


def _chosen(plan: Plan, setting: str) -> str:
    schedule = plan.schedule
    virtual = f" with {schedule.virtual_stages} stages per rank" if schedule.virtual_stages > 1 else ""
    return {
        "mesh": str(plan.mesh_object()), "schedule": f"{schedule.name or 'one stage'}{virtual}",
        "microbatches": str(schedule.microbatches), "zero": str(plan.zero),
    }[setting]  # fmt: skip


def _described(figures: Figures, now: Figures, capacity: float | None) -> str:
    change = 100 * (figures.step_time_s / now.step_time_s - 1)
    text = f"{quantity(figures.step_time_s, 's')} ({change:+.1f} %), {quantity(figures.memory_bytes, 'B')}"
    if capacity is not None and figures.memory_bytes > capacity:
        text += ", does not fit"
    return f"{text}, if the layouts stay" if figures.notes else text
