"""Expert parallelism: rows on the ranks of their experts, exact wherever they go, each rank with its own experts."""

from __future__ import annotations

import copy
import re

import dist
import pytest
import torch
import zoo
from expert_models import EXPERTS, TIMES, WIDTH, Mixture, mixture, small
from traced import plan_of, verified

import autopart
from autopart.errors import LayoutError, OptionError, StageError
from autopart.ir.mesh import Mesh
from autopart.proof.verify import VerificationRun
from autopart.tracing.trace_model import bind_call


class ByToken(Mixture):
    """Which experts a row goes to follows from the number of its token: from the inputs alone."""

    def choose(self, probabilities, ids):
        chosen = torch.stack([(ids + i) % EXPERTS for i in range(TIMES)], 1)
        return probabilities.gather(1, chosen), chosen


MESHES = ["ep2", "ep4", "dp2,ep2", "ep2,tp2", "cp2,ep2", "pp2,ep2"]


@pytest.mark.large
@pytest.mark.parametrize("mesh", [*MESHES, "dp2,pp2,cp2,ep2"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss", "qwen2_moe"])
def test_mixtures_of_transformers_are_exact(name, mesh):
    model, batch = small(name)
    report = autopart.verify(model, mesh, example_kwargs=batch)
    assert report.ok, report


@pytest.mark.large
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_however_their_products_are_written(name, implementation):
    model, batch = small(name)
    model = copy.deepcopy(model)
    model.set_experts_implementation(implementation)
    run = VerificationRun(model, bind_call(model, (), batch))
    stacks = {name: on["ep"] for name, on in plan_of(run, "ep2").parameters.items() if ".experts." in name}
    assert stacks and set(stacks.values()) == {"S(0)"}, stacks
    report = verified(run, "ep2")
    assert report.ok, report


@pytest.mark.large
def test_a_mixture_in_bfloat16_is_verified_with_its_plan(capfd):
    """The kernel of `grouped_mm` takes no float64; casts around the router come and go with the precision."""
    model, batch = small("deepseek_v3")
    model = copy.deepcopy(model).bfloat16()
    plan = autopart.plan(model, "tp2", example_kwargs=batch)
    report = autopart.verify(model, "tp2", example_kwargs=batch, plan=plan)
    assert report.ok, report
    assert "failed while attempting" not in capfd.readouterr().err


@pytest.mark.few
@pytest.mark.parametrize("options", [{}, {"zero": 1}, {"zero": 3, "recompute": "full"}, {"microbatches": 2}], ids=str)
@pytest.mark.parametrize("form", ["looked up", "matrix first"])
def test_one_written_by_hand(form, options):
    model, batch = mixture(form=form)
    mesh = "dp2,ep2"
    if "microbatches" in options:
        batch = {name: torch.cat([x, x]) for name, x in batch.items()}
        model.forward = type(model).forward.__get__(model)
        with pytest.raises(StageError, match="cannot be split into 2 microbatches"):  # of the means of its own loss
            autopart.verify(model, mesh, example_kwargs=batch, **options)
        return
    plan = autopart.plan(model, mesh, example_kwargs=batch, **options)
    assert [plan.parameters[name]["ep"] for name in ("up", "up_bias", "down")] == ["S(0)"] * 3
    assert plan.parameters["router.weight"]["ep"] == "R(grad P)"
    report = autopart.verify(model, mesh, example_kwargs=batch, **options)
    assert report.ok, report


@pytest.mark.parametrize("mesh", ["ep2", "dp2,ep2", "ep2,tp2"])
def test_experts_that_the_inputs_choose(mesh):
    _, batch = mixture()
    torch.manual_seed(0)
    report = autopart.verify(ByToken().double(), mesh, example_kwargs=batch)
    assert report.ok, report


@pytest.mark.parametrize("towards", [(99.0, 99.0, 0.0, 0.0), (0.0, 99.0, 0.0, 98.0)], ids=["one rank", "one of each"])
@pytest.mark.parametrize("mesh", ["ep2", "ep4"])
def test_wherever_all_rows_go(mesh, towards):
    """All to the experts of one rank, so that others have no row at all."""
    model, batch = mixture(towards=towards)
    report = autopart.verify(model, mesh, example_kwargs=batch)
    assert report.ok, report


def same_step(towards, mesh):
    model, batch = mixture(towards=towards)
    loss, expected = zoo.reference(model, batch)[1:]
    pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch)
    zoo.assert_close_outputs(pm.step(**batch), loss, where="loss")
    zoo.assert_same_grads(pm.full_grads(), {n: g for n, g in expected.items() if g is not None})
    assert tuple(pm.get_parameter("up").to_local().shape) == (2, WIDTH, 3 * WIDTH)


@pytest.mark.few
@pytest.mark.parametrize("towards", [(0.0,) * EXPERTS, (99.0, 99.0, 0.0, 0.0)], ids=["spread", "one rank"])
@pytest.mark.parametrize("mesh", ["ep2", "dp2,ep2"])
def test_on_processes(mesh, towards):
    dist.run_ranks(same_step, Mesh.parse(mesh).num_ranks, towards, mesh, timeout_s=120.0)


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["ep2", "ep3", "dp2,ep3", "ep3,tp2", "cp2,ep3", "pp2,ep3"])
@pytest.mark.parametrize("towards", [(0.0,) * 7, (*(0.0,) * 6, 50.0), (50.0, *(0.0,) * 6)], ids=str)
def test_experts_need_not_divide(mesh, towards):
    """Of seven experts three ranks have three, three and one; all rows may go to any."""
    model, batch = mixture(experts=7, towards=towards)
    batch = {name: rows.repeat(3, 1)[:12] for name, rows in batch.items()}
    report = autopart.verify(model, mesh, example_kwargs=batch)
    assert report.ok, report


def same_uneven_step():
    model, batch = mixture(experts=7, towards=(0.0,) * 7)
    batch = {name: rows[:6] for name, rows in batch.items()}
    _, loss, grads = zoo.reference(model, batch)
    pm = autopart.parallelize(copy.deepcopy(model), "ep3", example_kwargs=batch)
    zoo.assert_close_outputs(pm.step(**batch), loss, where="loss")
    zoo.assert_same_grads(pm.full_grads(), {name: grad for name, grad in grads.items() if grad is not None})


@pytest.mark.large
def test_experts_need_not_divide_on_processes():
    dist.run_ranks(same_uneven_step, 3, timeout_s=120.0)


@pytest.mark.parametrize(("made", "mesh", "text"), [
    (zoo.llama, "ep2", "ep=2 has nothing to shard\n"
     "  why    the model has no experts: all tokens go through all of its matrix products\n"
     "  try    leave ep out of the mesh; dp shards any batch"),
    (mixture, "ep8", "ep=8 does not divide the experts of the model\n"
     "  why    there are 4 experts; unequal shards need at least two experts per rank on average, and one on the "
     "last rank\n"
     "  where  expert_linear at expert_models.py:LINE\n"
     "  try    ep=2, 4"),
])  # fmt: skip
def test_what_has_no_experts_to_cut_is_told(made, mesh, text):
    model, batch = made()
    with pytest.raises(LayoutError) as error:
        autopart.plan(model, mesh, example_kwargs=batch)
    assert re.sub(r"\.py:\d+", ".py:LINE", str(error.value)) == text


def test_stages_with_experts_are_not_compiled():
    model, batch = mixture()
    with pytest.raises(OptionError) as error:
        autopart.plan(model, "ep2", example_kwargs=batch, compile=True)
    assert str(error.value) == (
        "compile=True is not supported on ep2\n  why    a compiled stage has fixed sizes, and the number of tokens of "
        "a rank's experts is known only at run time\n  try    leave compile out, or use dp in place of ep"
    )


def test_rows_have_to_divide_over_the_ranks_with_experts():
    model, batch = mixture()
    with pytest.raises(StageError, match="a batch of 6 samples cannot be split into ep=4 x microbatches=1 equal parts"):
        autopart.plan(model, "ep4", example_kwargs={name: x[:6] for name, x in batch.items()})
