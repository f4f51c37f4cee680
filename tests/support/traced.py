"""Models traced once a process, for tests that arrange one trace in many ways: tracing takes longer than checking."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from autopart.ir.mesh import Mesh
from autopart.options import Options
from autopart.plans.plan import Plan
from autopart.proof.verify import Verification, VerificationRun
from autopart.recipe.make_plan import make_plan
from autopart.tracing.trace_model import bind_call


@cache
def run_of(build: Callable[..., tuple], training: bool = True, **sizes: Any) -> VerificationRun:
    """The model and batch of a builder, traced in float64: to be read and checked, never written to."""
    model, batch = build(**sizes)
    return VerificationRun(model.train(training), bind_call(model, (), batch))


def plan_of(run: VerificationRun, mesh: str, **options: Any) -> Plan:
    """What `autopart.plan` chooses."""
    return make_plan(run.model, run.traced, Mesh.parse(mesh), Options(**options))


def verified(run: VerificationRun, mesh: str, plan: Plan | None = None, **options: Any) -> Verification:
    """What `autopart.verify` finds."""
    return run.check(run.arrange(mesh, plan, Options(rng="exact", **options)))
