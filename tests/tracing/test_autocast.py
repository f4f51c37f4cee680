"""`torch.autocast` around the call: the plan has it, and another one at `step` is another program with its figures."""

from __future__ import annotations

from typing import Any

import dist
import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.plans.plan import Plan

SIZE = 64


class Net(nn.Module):
    """Blocks whose products autocast lowers, and norms that it leaves; notes the dtypes that they see."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
        self.norm, self.head = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = x + self.down(torch.nn.functional.gelu(self.up(x)))
        out = self.head(self.norm(h))
        return {"loss": torch.nn.functional.mse_loss(out.float(), target), "out": out}


def built() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Net(), {"x": torch.randn(8, SIZE), "target": torch.randn(8, SIZE)}


def lowered() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def around_step(mesh: str, at_start: bool) -> dict[str, Any]:
    model, batch = built()
    if at_start:
        with lowered():
            pm = autopart.parallelize(model, mesh, example_kwargs=batch)
    else:
        pm = autopart.parallelize(model, mesh, example_kwargs=batch)
    first = pm.plan
    with lowered():
        loss = pm.step(**batch)
    grads = pm.full_grads()
    shown = pm.plan
    pm.zero_grad()
    with lowered():
        output = pm(**batch)
    output["loss"].backward()
    pm.step(**batch)
    return {
        "loss": loss.item(), "grads": grads, "own": (output["loss"].item(), output["out"].dtype),
        "first": first.to_json(), "lowered": shown.to_json(), "last": pm.plan.to_json(),
        "products": {str(n.meta["val"].dtype) for n in pm.graph().graph.nodes if "linear" in n.name},
    }  # fmt: skip


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "at_start"), [("tp2", False), ("dp2", True)])
def test_autocast_around_step_is_one_process_autocast(mesh: str, at_start: bool) -> None:
    model, batch = built()
    with lowered():
        expected = model(**batch)
    expected["loss"].backward()
    for found in dist.run_ranks(around_step, 2, mesh, at_start):
        assert found["loss"] == pytest.approx(expected["loss"].item(), rel=1e-2)
        assert found["own"][0] == pytest.approx(expected["loss"].item(), rel=1e-2)
        assert found["own"][1] == expected["out"].dtype == torch.bfloat16
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and found["grads"][name].dtype == torch.float32
            torch.testing.assert_close(found["grads"][name], parameter.grad, rtol=5e-2, atol=2e-3)
        first, shown, last = (Plan.from_json(found[name]) for name in ("first", "lowered", "last"))
        assert (first.autocast, shown.autocast, last.autocast) == ("bfloat16" * at_start, "bfloat16", "")
        assert shown.parameters == first.parameters == last.parameters


def figures(plan: Plan) -> tuple[int, float]:
    return sum(row["activations"] for row in plan.memory), plan.cost["step_time_s"]


def test_a_plan_shows_what_runs() -> None:
    model, batch = built()
    single = autopart.plan(model, "tp2", example_kwargs=batch)
    with lowered():
        half = autopart.plan(model, "tp2", example_kwargs=batch)
    assert single.autocast == "" and half.autocast == "bfloat16"
    assert "autocast" not in single.model and half.model["autocast"] == "bfloat16"
    assert Plan.from_json(half.to_json()).autocast == "bfloat16"
    assert "under autocast to bfloat16" in " ".join(half.explain().split()) and "autocast" not in single.explain()
    assert figures(half) != figures(single)
    assert [row for row in half.diff(single).rows if "autocast" in str(row)]


def plan_from_another(mesh: str) -> tuple[float, str, bool]:
    """A plan made under autocast serves a call without, and its figures are then of that."""
    model, batch = built()
    with lowered():
        plan = autopart.plan(model, mesh, example_kwargs=batch)
    pm = autopart.parallelize(model, mesh, plan=plan)
    loss = pm.step(**batch).item()
    figures_of_run = figures(pm.plan)
    return loss, pm.plan.autocast, figures_of_run == figures(autopart.plan(model, mesh, example_kwargs=batch))


@pytest.mark.large
def test_a_plan_made_under_autocast_serves_a_call_without() -> None:
    model, batch = built()
    expected = model(**batch)["loss"].item()
    for loss, autocast, same in dist.run_ranks(plan_from_another, 2, "tp2"):
        assert loss == pytest.approx(expected, rel=1e-6) and autocast == "" and same


def in_a_pipeline() -> float:
    model, batch = built()
    with lowered():
        return autopart.parallelize(model, "pp2", example_kwargs=batch).step(**batch).item()


def test_autocast_in_a_pipeline() -> None:
    model, batch = built()
    with lowered():
        expected = model(**batch)["loss"].item()
    assert dist.run_ranks(in_a_pipeline, 2) == pytest.approx([expected] * 2, rel=1e-2)
