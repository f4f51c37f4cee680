"""Advice for a plan that needs more memory than its hardware has: other settings that fit."""

from __future__ import annotations

from dataclasses import replace

from autopart.common.text import quantity
from autopart.cost.memory_advice import helpful_remedies, quick_remedies
from autopart.ir.mesh import Mesh
from autopart.options import Options
from autopart.passes.choose.explain.reasons import DeferredReasons, Reasons
from autopart.passes.choose.plan_codec import decode
from autopart.plans.headlines import ADVICE, fits
from autopart.plans.plan import Plan
from autopart.recipe.make_plan import estimator, left_open
from autopart.recipe.plan_figures import Draft


def advised(plan: Plan, options: Options) -> Plan:
    """Return the plan. If it does not fit into memory, add a note that names settings that would fit.

    The function tries at most `cost.memory_advice.TRIES` settings in a fixed order, so all processes write the same
    note.
    """
    reasons = plan.reasons
    if fits(plan) is not False:
        return plan
    if isinstance(reasons, DeferredReasons):
        reasons = reasons.of_full_model
    if not isinstance(reasons, Reasons):
        return plan
    trace, mesh = reasons.trace, plan.mesh_object()
    draft = Draft(reasons.problem, decode(trace, plan, mesh), reasons.program, reasons.solved, ())
    asked = replace(options, recompute=plan.recompute)
    needed, capacity = max(row["total"] for row in plan.memory), int(plan.cost["device_memory_bytes"])
    ways = helpful_remedies(
        quick_remedies(mesh, left_open(asked)), needed, capacity, estimator(trace, mesh, asked, draft)
    )
    text = "; ".join([*ways, _otherwise(mesh, capacity)])
    return replace(plan, notes=(*plan.notes, f"{ADVICE}{text}"))


def _otherwise(mesh: Mesh, capacity: int) -> str:
    size = quantity(capacity, "B").replace(" ", "")
    return (
        f"memory='{size}' plans what fits on {mesh}, or says why nothing does; autopart search looks for other meshes"
    )
