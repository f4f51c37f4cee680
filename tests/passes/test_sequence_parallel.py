"""What lies between matrix products, cut along the sequence: exact, as many bytes, and chosen where it is faster."""

import copy
from collections import Counter

import dist
import pytest
import random_models
import zoo
from cost_models import large_llama
from traced import run_of, verified

import autopart
from autopart.ir.mesh import Mesh
from autopart.options import Options
from autopart.recipe.make_plan import make_plan, prepare
from autopart.tracing.trace_model import bind_call

MESHES = ("tp2", "tp4", "pp2,tp2", "dp2,pp2,tp2")
TOKENS = ("gpt2", "llama", "bert", "t5", "phi3", "transformer_encoder")


def moved(plan):
    """{collective: how many, forward and backward}, those of single numbers left out."""
    counts = Counter()
    for entry in plan.collectives:
        if entry.axis == "tp" and entry.per == "microbatch" and entry.bytes / entry.count > 1024:
            counts.update({entry.forward: entry.count, entry.backward: entry.count})
    return {kind: count for kind, count in counts.items() if kind}


@pytest.mark.few
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", TOKENS)
def test_exact_along_the_sequence(name, mesh):
    found = verified(run_of(zoo.ZOO[name]), mesh, sequence_parallel=True)
    assert found.ok and found.max_error < 1e-12, str(found)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_nothing_between_matrix_products_is_whole(name):
    """Norms run on their positions, so the gradients of their weights are summed once a step."""
    model, batch = zoo.ZOO[name]()
    plan = autopart.plan(model, "tp2", example_kwargs=batch, sequence_parallel=True)
    norms = [layout["tp"] for weight, layout in plan.parameters.items() if "norm" in weight or ".ln_" in weight]
    assert "R(grad P)" in norms and "R" not in norms, plan.parameters
    kinds = moved(plan)
    assert kinds["reduce_scatter"] == kinds["all_gather"] >= 8
    assert [entry.count for entry in plan.collectives if entry.per == "step"]


@pytest.mark.large
@pytest.mark.parametrize("seq", [7, 13])
def test_a_sequence_that_tp_does_not_divide(seq):
    model, batch = zoo.llama(seq=seq)
    found = autopart.verify(model, "tp2", example_kwargs=batch, sequence_parallel=True)
    assert found.ok and found.max_error < 1e-12, str(found)


def test_masks_of_dropout_along_the_sequence():
    model, batch = random_models.gpt2()
    found = autopart.verify(
        model.double().train(), "dp2,tp2", example_kwargs=batch, sequence_parallel=True, rng="exact"
    )
    assert found.ok and found.max_error < 1e-12, str(found)


def train(name):
    model, batch = zoo.ZOO[name]()
    _, loss, grads = zoo.reference(model, batch)
    pm = autopart.parallelize(copy.deepcopy(model), "tp2", example_kwargs=batch, sequence_parallel=True)
    assert "R(grad P)" in {layout["tp"] for layout in pm.plan.parameters.values()}
    zoo.assert_close_outputs(pm.step(**batch), loss, where="loss")
    zoo.assert_same_grads(pm.full_grads(), grads)
    pm.zero_grad()
    pm(**batch).loss.backward()  # the user's own loop
    zoo.assert_same_grads(pm.full_grads(), grads)
    shorter = {key: value[:, :8] for key, value in batch.items()}  # another length under the same plan
    _, loss, grads = zoo.reference(model, shorter)
    pm.zero_grad()
    zoo.assert_close_outputs(pm.step(**shorter), loss, where="loss")
    zoo.assert_same_grads(pm.full_grads(), grads)


@pytest.mark.large
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_processes(name):
    dist.run_ranks(train, 2, name, timeout_s=120.0)


def test_a_plan_from_a_file_is_followed(tmp_path):
    model, batch = zoo.llama()
    plan = autopart.plan(model, "tp2", example_kwargs=batch, sequence_parallel=True)
    plan.save(tmp_path / "plan.json")
    found = autopart.verify(model, "tp2", example_kwargs=batch, plan=tmp_path / "plan.json")
    assert found.ok, str(found)


@pytest.mark.large
def test_as_many_bytes_at_real_sizes():
    model, batch = large_llama(4)
    traced = prepare(model, bind_call(model, (), batch))
    plans = {s: make_plan(model, traced, Mesh.parse("tp8"), Options(sequence_parallel=s)) for s in (False, True)}
    assert set(moved(plans[False])) == {"all_reduce"}
    # Korthikanti et al. 2022, figure 5: two all-gathers and two reduce-scatters a layer, forward and backward each.
    kinds = moved(plans[True])
    assert kinds["all_gather"] == kinds["reduce_scatter"] == 4 * 4 + 2, kinds
    sent = {s: sum(entry.bytes for entry in plan.collectives) for s, plan in plans.items()}
    assert sent[True] <= 1.001 * sent[False]


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp8", "dp2,tp4"])
def test_it_comes_by_itself_where_it_is_faster(mesh):
    model, batch = large_llama(2)
    traced = prepare(model, bind_call(model, (), batch))
    plans = {s: make_plan(model, traced, Mesh.parse(mesh), Options(sequence_parallel=s)) for s in (False, "auto")}
    kinds = moved(plans["auto"])
    assert kinds["all_gather"] == kinds["reduce_scatter"] == 2 * 4 + 2, kinds
    norms = [layout["tp"] for name, layout in plans["auto"].parameters.items() if "norm" in name]
    assert set(norms) == {"R(grad P)"}
    seconds = {
        s: sum(plan.cost[key] for key in ("communication_s", "memory_traffic_s", "gradient_sync_s"))
        for s, plan in plans.items()
    }
    assert seconds["auto"] < seconds[False]


def test_values_stay_whole_where_that_is_faster():
    """A toy's gradient sums cost more than the memory traffic that is saved."""
    model, batch = zoo.llama()
    plans = [autopart.plan(model, "tp2", example_kwargs=batch, sequence_parallel=s) for s in (False, "auto")]
    assert plans[0].parameters == plans[1].parameters and moved(plans[1]).keys() == {"all_reduce"}
