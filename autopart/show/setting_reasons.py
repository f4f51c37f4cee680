"""Answers of `Plan.why` about settings: mesh, schedule, microbatches and ZeRO stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopart.common.text import quantity
from autopart.cost.formula.plan_cost import Cost, Figures
from autopart.errors import PlanError
from autopart.ir.run.recompute_spec import text_of
from autopart.plans.why import Why
from autopart.show.setting_changes import predictions

if TYPE_CHECKING:
    from autopart.plans.plan import Plan


def why_setting(plan: Plan, setting: str) -> Why:
    """Explain a setting of a plan: compare its predicted step time with that of each alternative.

    It needs only the plan, which can be read from a file. Raises PlanError for a plan without a cost table.

    Args:
        setting: one of `autopart.plans.why.SETTINGS`.
    """
    if setting == "loss":
        return _why_loss(plan)
    cost = Cost.of(plan)
    if setting == "recompute":
        return _why_recompute(plan, cost)
    now, capacity = cost.at(), cost.get("device_memory_bytes")
    found = [(change.text, figures) for change, figures in predictions(plan, cost) if change.setting == setting]
    found.sort(key=lambda pair: pair[1].step_time_s)
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


def _why_recompute(plan: Plan, cost: Cost) -> Why:
    """Explain activation checkpointing by the memory of activations and the time of a forward.

    A plan counts the saved tensors of its own setting only, so the alternatives are bounds.
    """
    from autopart.cost.predict.simulate import simulate

    fullest = max(plan.memory, key=lambda row: row["total"])
    capacity, now, chosen = cost.get("device_memory_bytes"), cost.at(), text_of(plan.recompute)
    spans = simulate(plan).timeline.spans
    forward_s = max(sum(s.end_s - s.start_s for s in rank if s.kind == "F") for rank in spans)
    forward, activations = quantity(forward_s, "s"), quantity(fullest["activations"], "B")
    share = f"{100 * forward_s / now.step_time_s:.3g} %"
    reason = f"activations take {activations} of {quantity(fullest['total'], 'B')} on the fullest rank"
    if capacity is not None:
        fits = "fits into" if fullest["total"] <= capacity else "does not fit into"
        reason += f", which {fits} {quantity(capacity, 'B')}"
    exactly = "autopart plan --recompute"
    others = {
        "recompute='selective'": f"frees the activations inside of attention for little time; {exactly} selective",
        "recompute='full'": f"frees at most {activations}, at most {forward} more ({share}): every forward runs twice; "
        f"{exactly} full",
        "recompute='none'": f"saves at most {forward} ({share}), and needs more memory; {exactly} none",
    }
    return Why("recompute", chosen, reason, others={k: v for k, v in others.items() if f"'{chosen}'" not in k})


def _why_loss(plan: Plan) -> Why:
    """Explain the layouts of the loss: inputs of its operator, and collectives of its block."""
    words = ("cross_entropy", "nll_loss", "loss", "log_softmax")
    named = [key for key in plan.operators if any(word in key.rpartition("/")[2] for word in words)]
    if not named:
        raise PlanError(
            "the plan shards no operator of a loss",
            why="every rank computes the loss of its own samples from full values, or the model returns no loss",
            hint="autopart explain shows all operators that are sharded",
        )
    key = named[-1]
    layout = "; ".join(f"{text} on {axis}" for axis, text in plan.operators[key].items() if axis in plan.mesh)
    places = {row.where for row in plan.collectives if row.where.split("/")[0] in (key.split("/")[0], "")}
    moved = [row for row in plan.collectives if row.where in places and row.axis in plan.operators[key]]
    sent = ", ".join(f"{row.forward or row.backward} of {quantity(row.bytes, 'B')}" for row in moved)
    sharded = "shards" if "S(" in layout else "does not shard"
    reason = f"{key} {sharded} the values that it reads" + (f"; its block sends {sent}" if sent else "")
    stored = plan.alternatives.get(key, {})
    return Why("loss", layout, reason, others=stored.get("others", {}), where=stored.get("where", ""))
