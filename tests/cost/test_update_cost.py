"""Predicted cost of optimizer updates: FLOPs, communication and memory are those that the runtime has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from torch.utils.flop_counter import FlopCounterMode
from traced import plan_of, run_of

import autopart
from autopart.cost.update_cost import newton_schulz_flops
from autopart.errors import OptionError
from autopart.ir.mesh import Mesh
from autopart.options import Options
from autopart.plans.plan import Plan
from autopart.proof.steps import lockstep_steps
from autopart.proof.steps.training_options import Training
from autopart.runtime.optimizers.owner_exchange import AllToAll

SIZES = {"num_layers": 2, "hidden": 64, "rows": 8}


def run() -> Any:
    return run_of(zoo.llama, **SIZES)


def muon(named: Any) -> list[torch.optim.Optimizer]:
    is_hidden = {name: p.ndim == 2 and "embed" not in name and "lm_head" not in name for name, p in named}
    matrices, others = ([p for name, p in named if is_hidden[name] is hidden] for hidden in (True, False))
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


def counted(steps: Iterator[Any], mesh: Mesh, rank: int, sent: Counter[int]) -> Iterator[Any]:
    """Pass on the collectives of a rank. Count the bytes that the rank sends to other ranks."""
    received = None
    while True:
        try:
            request = steps.send(received)
        except StopIteration as finished:
            return finished.value
        if isinstance(request, AllToAll):
            own = mesh.index(mesh.coordinates(rank), request.axis)
            sent[rank] += sum(tensor.nbytes for index, tensor in enumerate(request.sends) if index != own)
        received = yield request


def sent_in_a_step(mesh: str, optimizer: Any, options: dict[str, Any], monkeypatch: Any) -> int:
    """The most bytes that a rank sends to owners and back in a training step."""
    sent, lockstep = Counter[int](), lockstep_steps.run_in_lockstep
    updates: list[Any] = []

    def counting(steps: Any, mesh: Mesh) -> Any:
        if not updates:  # the first call of a training step runs the update, later ones exchange state
            updates.append(True)
            steps = {rank: counted(of_rank, mesh, rank, sent) for rank, of_rank in steps.items()}
        return lockstep(steps, mesh)

    monkeypatch.setattr(lockstep_steps, "run_in_lockstep", counting)
    arranged = run().arrange(mesh, None, Options(rng="exact", **options))
    found = run().check(arranged, training=Training(1, optimizer, run().arguments, (run().arguments,)))
    assert found.ok, found
    return max(sent.values(), default=0)


@pytest.mark.parametrize(("mesh", "options"), [
    ("dp2,tp2", {"zero": 3}), ("tp2", {}), ("dp2", {"zero": 1}), ("dp2", {"zero": 3}), ("dp4", {"zero": 2}),
    ("dpr2,dp2", {"zero": 3}), ("pp2,tp2", {}), ("dp2", {}),
])  # fmt: skip
def test_predicted_bytes_are_those_that_a_step_sends(mesh, options, monkeypatch):
    plan = plan_of(run(), mesh, optimizer="muon", **options)
    predicted = max(row["update_sent_bytes"] for row in plan.timing["ranks"])
    assert predicted == sent_in_a_step(mesh, muon, options, monkeypatch)
    assert (predicted > 0) is (mesh != "dp2" or bool(options))


def test_predicted_flops_are_those_of_torch():
    for shape in ((48, 32), (32, 48), (16, 16)):
        parameter = torch.nn.Parameter(torch.randn(shape))
        parameter.grad = torch.randn(shape)
        with FlopCounterMode(display=False) as counter:
            torch.optim.Muon([parameter], lr=0.1).step()
        assert counter.get_total_flops() == newton_schulz_flops(shape, 5)


def test_muon_updates_hidden_matrices_and_stores_one_value_for_each_element():
    model, _ = zoo.llama(**SIZES)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "head" not in name]
    plans = {name: plan_of(run(), "dp1", optimizer=name) for name in ("adamw", "sgd", "muon", "lamb")}
    elements = sum(p.numel() for p in model.parameters())
    hidden = sum(p.numel() for p in matrices)
    state = {name: plan.memory[0]["optimizer"] / 8 for name, plan in plans.items()}
    assert state == {"adamw": 2 * elements, "sgd": 0, "muon": 2 * elements - hidden, "lamb": 2 * elements}
    row = plans["muon"].timing["ranks"][0]
    assert row["full_tensors"] == len(matrices)
    assert row["update_flops"] == sum(newton_schulz_flops(p.shape, 5) for p in matrices)
    times = {name: plan.cost["step_time_s"] for name, plan in plans.items()}
    assert times["sgd"] < times["adamw"] < times["lamb"] < times["muon"]


def test_a_plan_keeps_its_optimizer_in_its_file():
    plan = plan_of(run(), "dp2,tp2", optimizer="muon", zero=3)
    again = Plan.from_json(plan.to_json())
    assert again.cost.at().step_time_s == pytest.approx(plan.cost["step_time_s"], rel=1e-9)
    assert again.cost.at(dp=4).parts_s["optimizer"] < again.cost.at().parts_s["optimizer"]  # fewer matrices each
    assert "optimizer" not in plan_of(run(), "dp2,tp2", zero=3).timing["table"]


def test_the_optimizer_is_explained():
    text = str(plan_of(run(), "dp2,tp2", optimizer="muon", zero=3).explain())
    text = " ".join(text.split())
    assert "optimizer 14 hidden matrices by muon on owner ranks, adamw for all other parameters; the update" in text
    assert "a rank sends 442 kB" in text


@pytest.mark.large
def test_the_search_predicts_the_update():
    model, batch = zoo.llama(**SIZES)
    found = {name: autopart.search(model, 2, example_kwargs=batch, count=1, optimizer=name)[0]
             for name in ("adamw", "muon")}  # fmt: skip
    times = {name: plan.cost["step_time_s"] for name, plan in found.items()}
    assert times["muon"] > times["adamw"]
    assert "optimizer" in found["muon"].timing["table"]


def test_an_unknown_optimizer_is_refused():
    model, batch = zoo.llama(**SIZES)
    with pytest.raises(OptionError) as caught:
        autopart.plan(model, "tp2", example_kwargs=batch, optimizer="soap")
    assert str(caught.value) == "unknown optimizer='soap'\n  try    adamw, sgd, muon, lamb"
