"""rng="exact": on any mesh, the random numbers that one device draws after the same seed."""

import copy

import dist
import pytest
import torch
import zoo
from random_models import DRAWS, MODELS, RECURRENT, P, around, gpt2, trained
from torch import nn
from traced import plan_of, run_of, verified

import autopart
from autopart.ir.mesh import Mesh
from autopart.options import Options
from autopart.proof.verify import VerificationRun
from autopart.runtime.comm import call_random
from autopart.tracing.trace_model import bind_call

MESHES = ("tp2", "dp2,pp2,tp2")
TIMEOUT_S = 240.0


# --- in lockstep, against the model --------------------------------------------------------------------------------


def check(model, batch, meshes=MESHES, microbatches=2):
    run = VerificationRun(model.train(), bind_call(model, (), batch))
    assert not run.notes, run.notes
    for mesh in meshes:
        found = run.check(run.arrange(mesh, None, Options(microbatches=microbatches)))
        assert found.ok, found


@pytest.mark.large
@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_that_of_one_device(name):
    check(*around(name))


@pytest.mark.large
@pytest.mark.parametrize("name", RECURRENT)
def test_dropout_between_recurrent_layers(name):
    torch.manual_seed(0)
    check(RECURRENT[name](), {"x": torch.randn(4, 4, 8)}, meshes=("dp2", "pp2", "tp2"), microbatches=1)


@pytest.mark.few
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", ["tp4", "dp2,tp2", "pp4", "dp2,pp2,tp2"])
def test_a_model_is_that_of_one_device(name, mesh):
    found = verified(run_of(MODELS[name]), mesh)
    assert found.ok, found


def test_an_input_that_is_dropped():
    model = nn.Sequential(nn.Dropout(P), nn.Linear(8, 8))
    found = autopart.verify(model, "dp2,tp2", example_args=(torch.randn(4, 8),), microbatches=2)
    assert found.ok, found


@pytest.mark.large
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv", "dualpipev"])
def test_stages_that_share_a_rank(schedule):
    model, batch = gpt2(num_layers=4)
    assert autopart.verify(model, "pp2", example_kwargs=batch, schedule=schedule, microbatches=4).ok


@pytest.mark.large
def test_fast_switches_dropout_off():
    model, batch = gpt2()
    found = autopart.verify(model, "tp2", example_kwargs=batch, rng="fast")
    assert found.ok
    assert "dropout is off: compared in eval mode" in found.notes


def test_verify_leaves_the_generator_alone():
    model, batch = around("dropout")
    before = torch.get_rng_state()
    autopart.verify(model, "dp2", example_kwargs=batch)
    assert torch.equal(torch.get_rng_state(), before)


# --- it can fail ---------------------------------------------------------------------------------------------------


def not_ok(name="dropout", mesh="pp2"):
    model, batch = around(name)
    found = autopart.verify(model, mesh, example_kwargs=batch, microbatches=2)
    assert not found.ok
    return found


def test_stages_that_go_on_drawing_are_noticed(monkeypatch):
    monkeypatch.setattr(call_random, "set_state", lambda state, device: None)
    assert not_ok().first_mismatch.kind == "value"


def test_another_order_in_memory_is_noticed(monkeypatch):
    monkeypatch.setattr("autopart.passes.normalize.random_ops._stride", lambda empty: [1, 32, 8])
    assert not_ok("dropout", "tp2").max_error > 1e-3


def test_a_dropped_draw_is_noticed(monkeypatch):
    monkeypatch.setattr("autopart.passes.pass_pipeline.draws_random_numbers", lambda node: False)
    assert not_ok("draws that nothing reads", "tp2").max_error > 1e-3


# --- on processes --------------------------------------------------------------------------------------------------


def trains_alike(name, mesh, **options):
    """Two AdamW steps and a call, from one seed: the same weights, outputs and generator as one device."""
    model, batch = MODELS[name]()
    whole = copy.deepcopy(model)
    torch.manual_seed(7)
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, rng="exact", **options)
    found = trained(pm, pm.step, batch), pm.full_state_dict(), called(pm, batch), torch.get_rng_state()
    torch.manual_seed(7)
    expected = trained(whole, whole, batch), whole.state_dict(), called(whole, batch), torch.get_rng_state()
    for actual, wanted, what in zip(found, expected, ("losses", "weights", "outputs", "generator"), strict=True):
        zoo.assert_close_outputs(dict(actual) if what == "weights" else actual, dict(wanted) if what == "weights"
                                 else wanted, where=what)  # fmt: skip
    assert len({float(loss) for loss in found[0]}) == len(found[0]), "every step has the same masks"


@torch.no_grad()
def called(model, batch):
    """The loss in training mode, in eval mode, which draws nothing, and in training mode again."""
    losses = []
    for mode in (True, False, True):
        out = model.train(mode)(**batch)
        losses.append(out if isinstance(out, torch.Tensor) else out.loss)
    return losses


@pytest.mark.large
@pytest.mark.parametrize(("name", "mesh"), [
    ("conv_net", "dp2,pp2,tp2"), ("vit", "dp2,pp2"), ("gpt2", "dp2,tp2"),
    pytest.param("t5", "pp2,tp2", marks=pytest.mark.large),
])  # fmt: skip
def test_training_on_several_axes(name, mesh):
    plan = plan_of(run_of(MODELS[name]), mesh, microbatches=2)  # once, not on every rank
    dist.run_ranks(trains_alike, Mesh.parse(mesh).num_ranks, name, mesh, plan=plan, timeout_s=TIMEOUT_S)


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "options"), [
    ("tp1", {}),
    ("pp2", {"microbatches": 4, "schedule": "zbv"}),
])  # fmt: skip
def test_training_on_some(mesh, options):
    dist.run_ranks(trains_alike, Mesh.parse(mesh).num_ranks, "gpt2", mesh, timeout_s=TIMEOUT_S, **options)


def differ_by_one(mesh):
    model, batch = gpt2()
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, rng="exact")
    torch.rand(torch.distributed.get_rank())
    with pytest.raises(autopart.AutopartError) as raised:
        pm.step(**batch)
    pm.eval().step(**batch)  # draws nothing
    return str(raised.value)


@pytest.mark.large
def test_ranks_whose_generators_differ_are_told():
    text = (
        "the ranks' random generators are not in the same state\n  why    with rng='exact' every rank draws the "
        "random numbers of the global batch\n  try    torch.manual_seed(0) on every rank, and no random "
        "draws on single ranks afterwards; or rng='fast'"
    )
    assert dist.run_ranks(differ_by_one, 2, "tp2") == [text, text]


# --- plans ---------------------------------------------------------------------------------------------------------


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "pp2,tp2"])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_serves_both_modes_and_both_kinds(name, mesh):
    """Of training and eval mode: the same plan in one, and one that the other can run."""
    runs = [run_of(MODELS[name], training) for training in (True, False)]
    for run in runs:
        plan = plan_of(run, mesh, microbatches=2)
        assert all(verified(other, mesh, plan).ok for other in runs)


def test_an_edited_dropout_runs_as_the_plan_says():
    model, batch = around("dropout")
    plan = autopart.plan(model, "tp2", example_kwargs=batch)
    dropouts = [name for name in plan.operators if name.endswith("/dropout")]
    assert dropouts and all("S(2)" in plan.operators[name]["tp"] for name in dropouts)
    assert autopart.verify(model, "tp2", example_kwargs=batch, plan=plan).ok
