"""ZeRO stores parameters over all axes joined whose ranks hold them alike: rows, positions, and for dense weights
experts."""

from __future__ import annotations

import copy
from typing import Any

import dist
import pytest
import torch
import zoo
from expert_models import mixture, small
from process_checks import same_grads

import autopart
from autopart.errors import LayoutError
from autopart.ir.mesh import Mesh
from autopart.plans.plan import Plan


def exact(model: torch.nn.Module, batch: dict[str, Any], mesh: str, **options: Any) -> None:
    report = autopart.verify(model, mesh, example_kwargs=batch, **options)
    assert report.ok and report.max_error < 1e-10, report


@pytest.mark.large
@pytest.mark.parametrize("options", [{"microbatches": 2, "recompute": "selective"}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_with_microbatches_and_in_mixed_precision(zero, options):
    exact(*zoo.llama(), "dp2,cp2", zero=zero, **options)


@pytest.mark.few
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_weights_that_are_read_alike_on_every_rank_of_positions(precision):
    """What mixes positions is computed on every rank of `cp`: the gradient of its weights is summed over `dp` alone."""
    exact(*zoo.conv_net(), "dp2,cp2", zero=3, precision=precision)


@pytest.mark.few
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("mesh", ["ep2", "dp2,ep2", "cp2,ep2", "dp2,cp2,ep2"])
def test_a_mixture_is_exact(mesh, zero):
    exact(*mixture(), mesh, zero=zero)


@pytest.mark.large
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_mixtures_of_transformers_are_exact(name):
    exact(*small(name), "dp2,ep2", zero=3)


def stored(model: torch.nn.Module, batch: dict[str, Any], mesh: str, **options: Any) -> Plan:
    return autopart.plan(model, mesh, example_kwargs=batch, **{"zero": 3, **options})


def test_experts_are_stored_over_the_axes_that_do_not_cut_them():
    plan = stored(*mixture(), "dp2,cp2,ep2")
    assert plan.parameters["up"] == {"dp_cp": "S(1)", "cp": "R(grad P)", "ep": "S(0)"}
    assert plan.parameters["head.weight"] == {"dp_cp_ep": "S(0)", "cp": "R(grad P)", "ep": "R(grad P)"}


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "ranks"), [("dp2", 2), ("cp2", 2), ("dp2,cp2", 4), ("dpr2,cp2", 2)])
def test_a_rank_holds_one_part_of_all(mesh, ranks):
    """With ZeRO 1 and 2 vectors too: of all parameters, their gradients and AdamW's state, a share of the ranks."""
    model, batch = zoo.gpt2()
    (whole,) = stored(model, batch, "dp1", zero=0).memory
    (row,) = stored(model, batch, mesh, zero=2).memory
    assert all(row[kind] == whole[kind] // ranks for kind in ("parameters", "gradients", "optimizer"))


def test_what_does_not_divide_over_all_is_stored_over_fewer():
    """64 rows of the vocabulary and 32 features do not divide over 6 ranks, and do over 2."""
    plan = stored(*zoo.llama(), "dp2,cp3")
    assert {axis for entry in plan.parameters.values() for axis in entry} == {"dp", "cp"}
    assert any("is sharded over dp=2 and not dp_cp=6: no dim" in note for note in plan.notes), plan.notes


def test_one_collective_gathers_over_all_axes():
    plan = stored(*zoo.llama(), "dp2,cp2")
    assert {row.axis for row in plan.collectives if row.forward == "all_gather"} == {"dp_cp", "cp"}
    assert "parameters, gradients and optimizer state sharded over dp x cp" in plan.explain()


@pytest.mark.large
def test_a_plan_is_read_back():
    model, batch = zoo.llama()
    plan = stored(model, batch, "dp2,cp2")
    again = Plan.from_json(plan.to_json())
    assert again.parameters == plan.parameters
    exact(model, batch, "dp2,cp2", plan=again)


NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.large
def test_a_pin_of_the_data_axis_is_for_all_that_is_joined_to_it():
    model, batch = zoo.llama()
    whole = stored(model, batch, "dp2,cp2", pins={NAME: {"dp": "R"}})
    other = stored(model, batch, "dp2,cp2", pins={NAME: {"dp": "S(1)"}})
    alone = stored(model, batch, "dp2,cp2", zero=0, pins={NAME: {"dp": "S(1)"}})
    assert whole.placement_text(NAME, "dp_cp") == "R" and other.placement_text(NAME, "dp_cp") == "S(1)"
    assert alone.placement_text(NAME, "dp") == "S(1)", "without zero a pin is for its own axis"
    exact(model, batch, "dp2,cp2", zero=0, pins={NAME: {"dp": "S(1)"}})
    on_cp = stored(model, batch, "cp2", pins={NAME: {"dp": "R"}})
    assert on_cp.placement_text(NAME, "dp_cp") == "R" and on_cp.axes_in_parts == ("dp_cp",)
    assert not stored(model, batch, "cp2", zero=0, pins={NAME: {"dp": "S(1)"}}).axes_in_parts, "dp has one rank"
    with pytest.raises(LayoutError, match="its shape is"):
        stored(model, batch, "dp2,cp2", pins={NAME: {"dp": "S(2)"}})


# --- on processes --------------------------------------------------------------------------------------------------


def train_mixture(mesh: str, zero: int) -> None:
    model, batch = mixture()
    model(**batch).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch, zero=zero)
    model.zero_grad()
    pm.step(**batch)
    same_grads(pm, grads)
    pm.zero_grad()
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (pm, model))
    for _ in range(3):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        zoo.assert_close_outputs(pm.step(**batch), (loss := model(**batch)).detach(), where="loss")
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        zoo.assert_close_outputs(pm.clip_grad_norm_(0.1), norm, where="norm")
        for optimizer in (ours, theirs):
            optimizer.step()
    found = pm.full_state_dict()
    for name, value in model.state_dict().items():
        zoo.assert_close_outputs(found[name], value, where=name)


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "zero"), [("ep2", 3), ("dp2,ep2", 1), ("dp2,ep2", 3)])
def test_training_a_mixture_over_processes(mesh, zero):
    dist.run_ranks(train_mixture, Mesh.parse(mesh).num_ranks, mesh, zero, timeout_s=120)
