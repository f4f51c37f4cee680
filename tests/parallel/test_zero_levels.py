"""ZeRO 0 to 3: what ranks store, checkpoints from level to level, and what plans say. `test_exact_features.py` has
their exactness."""

from __future__ import annotations

import copy
import math
from typing import Any

import dist
import pytest
import torch
import zoo

import autopart
from autopart.ir.mesh import Mesh


def trains_by_its_own_loop() -> None:
    model, batch = zoo.llama()
    pm = autopart.parallelize(copy.deepcopy(model), "dp2", example_kwargs=batch, zero=3)
    ours, theirs = torch.optim.SGD(pm.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for module, optimizer in ((pm, ours), (model, theirs)):
            optimizer.zero_grad()
            module(**batch).loss.backward()
            optimizer.step()
    state = pm.full_state_dict()
    for name, weight in model.state_dict().items():
        zoo.assert_close_outputs(state[name], weight, where=name)


def test_every_backward_gathers_the_weights_of_its_own_step():
    dist.run_ranks(trains_by_its_own_loop, 2, timeout_s=120)


# --- what ranks hold -------------------------------------------------------------------------------------------------


def holds(zero: int) -> tuple[int, int, int]:
    """Elements of the parameters, of AdamW's state, and of what is whole between steps."""
    model, batch = zoo.gpt2()
    pm = autopart.parallelize(model, "dp2", example_kwargs=batch, zero=zero)
    optimizer = torch.optim.AdamW(pm.parameters())
    pm.step(**batch)
    optimizer.step()
    moments = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    (executable,) = pm._executables.values()
    wholes = sum(p.untyped_storage().nbytes() for p in executable.unsharded.parameters.values())
    return sum(getattr(p, "to_local", p.detach)().numel() for p in pm.parameters()), moments, wholes


@pytest.mark.large
def test_an_optimizer_sees_the_parts_alone():
    """Vectors too with 1 and 2; any optimizer that updates each element by itself cuts its state without knowing."""
    model, _ = zoo.gpt2()
    every = sum(p.numel() for p in model.parameters())
    for zero in (1, 2):
        assert dist.run_ranks(holds, 2, zero) == [(every // 2, every // 2, 0)] * 2
    parameters, moments, _ = dist.run_ranks(holds, 2, 3)[0]
    assert parameters == moments > every // 2


def with_optimizers(zero: int) -> None:
    """Fused and foreach ones too."""
    for options in ({"fused": True}, {"foreach": True}):
        model, batch = zoo.llama(num_layers=1)
        pm = autopart.parallelize(copy.deepcopy(model), "dp2", example_kwargs=batch, zero=zero)
        ours, theirs = torch.optim.AdamW(pm.parameters(), **options), torch.optim.AdamW(model.parameters(), **options)
        for _ in range(2):
            pm.step(**batch)
            model(**batch, **zoo.no_cache(model)).loss.backward()
            ours.step()
            theirs.step()
        found = pm.full_state_dict()
        for name, value in model.state_dict().items():
            zoo.assert_close_outputs(found[name], value, where=name)


@pytest.mark.large
@pytest.mark.parametrize("zero", [1, 2])
def test_fused_and_foreach_optimizers(zero):
    dist.run_ranks(with_optimizers, 2, zero)


def saves(folder: str, mesh: str, zero: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    pm, optimizer, _ = _trained(mesh, zero)
    weights, moments = get_state_dict(pm, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


def loads(folder: str, mesh: str, zero: int) -> None:
    """Weights and moments are those of one process, and the next step is."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, batch = zoo.gpt2()
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, zero=zero)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    weights, moments = get_state_dict(pm, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(pm, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    pm.step(**batch)
    optimizer.step()
    model, batch = zoo.gpt2()
    alone = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        alone.zero_grad()
        model(**batch, **zoo.no_cache(model)).loss.backward()
        alone.step()
    found = pm.full_state_dict()
    for name, value in model.state_dict().items():
        zoo.assert_close_outputs(found[name], value, where=name)


def _trained(mesh: str, zero: int) -> tuple[Any, torch.optim.Optimizer, dict[str, Any]]:
    model, batch = zoo.gpt2()
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, zero=zero)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        pm.step(**batch)
        optimizer.step()
    return pm, optimizer, batch


@pytest.mark.large
@pytest.mark.parametrize(("made", "read"), [
    (("dp2", 1), ("dp2", 3)), (("dp2", 2), ("dp2", 0)), (("dp2", 3), ("dp2,tp2", 1)), (("dpr2,dp2", 1), ("pp2,dp2", 2)),
])  # fmt: skip
def test_checkpoints_go_from_level_to_level(tmp_path, made, read):
    for work, (mesh, zero) in ((saves, made), (loads, read)):
        dist.run_ranks(work, Mesh.parse(mesh).num_ranks, str(tmp_path / "saved"), mesh, zero, timeout_s=120)


# --- what plans say --------------------------------------------------------------------------------------------------


@pytest.mark.large
def test_memory_falls_with_the_level():
    """Of a model that is large beside its batch: optimizer, then gradients, then parameters (the paper's figure 1)."""
    model, batch = zoo.llama(num_layers=4, hidden=128)
    plans = [autopart.plan(model, "dp4", example_kwargs=batch, zero=zero, microbatches=2) for zero in (0, 1, 2, 3)]
    totals = [max(row["total"] for row in plan.memory) for plan in plans]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 4, totals
    assert totals[3] < 0.5 * totals[0]


def test_levels_send_what_the_paper_says():
    """Sections 7.1 and 7.2: 1 and 2 move what an all-reduce does, 3 half as much again, of one microbatch."""
    model, batch = zoo.llama()
    sent = []
    for zero in (0, 1, 2, 3):
        plan = autopart.plan(model, "dp2", example_kwargs=batch, zero=zero)
        sent.append(sum(c.bytes for c in plan.collectives if c.axis == "dp"))
    every = sum(p.nbytes for p in model.parameters())
    assert sent[0] == sent[1] == sent[2] == every
    assert every < sent[3] < 1.5 * every + 1, "a weight that the backward does not read is gathered once"


def test_replicas_are_summed_over_too():
    model, batch = zoo.llama()
    plan = autopart.plan(model, "dpr2,dp2", example_kwargs=batch, zero=3)
    matrices = sum(p.nbytes for p in model.parameters() if p.dim() > 1)
    vectors = sum(p.nbytes for p in model.parameters() if p.dim() == 1)
    (over,) = [c for c in plan.collectives if c.axis == "dpr"]
    assert over.bytes == matrices // 2 + vectors, "of what dp cuts, the parts"
    assert math.isclose(autopart.simulate(plan).step_time_s, plan.cost.at().step_time_s, rel_tol=1e-9)
