"""Why a plan is as it is: reasons, runners-up and their prices, and what was asked for instead."""

import copy
import pickle

import pytest
import zoo
from cost_models import large_llama

import autopart
from autopart.common.text import quantity

DOWN = "model.layers.*.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def plan():
    model, batch = large_llama(2)
    return autopart.plan(model, "dp2,tp8", example_kwargs=batch)


@pytest.mark.large
def test_every_plan_has_a_certificate(plan):
    model, batch = zoo.gpt2()
    for made in (plan, *(autopart.plan(model, mesh, example_kwargs=batch) for mesh in ("dp2", "pp2,tp2", "tp4"))):
        cost = made.cost
        assert cost["lower_bound"] <= cost["objective"] and cost["gap"] == 0.0
        assert cost.get("sharing_costs", 0.0) <= 1e-9
        assert autopart.Plan.from_json(made.to_json()).cost == cost
    assert plan.cost["work_share"] == plan.cost["weight_share"] == 1 / 8


@pytest.mark.few
@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj", DOWN, "model.layers.1.mlp.down_proj.weight"])
def test_a_weight_and_its_runner_up(plan, name):
    found = plan.why(name)
    assert found.subject == DOWN and found.chosen == "S(1)" and found.runner_up == "S(0)"
    assert found.reason.startswith("S(0) would have +") and "communication" in found.reason
    assert found.price_s > 0 and "modeling_llama.py" in found.where
    assert {"S(0)", "R"} <= found.others.keys() and "of the weights on every rank" in found.others["R"]
    if name != DOWN:
        return
    assert "reduce_scatter" not in found.collectives  # a weight moves nothing; its module does
    assert any(c.startswith("reduce_scatter") for c in plan.why("model.layers.*.mlp.down_proj").collectives)


def test_the_price_of_the_runner_up_is_that_of_asking_for_it(plan):
    for name, place in ((DOWN, "S(0)"), ("lm_head.weight", "S(1)"), ("model.norm.weight", "S(0)")):
        why, why_not = plan.why(name), plan.why_not(name, {"tp": place})
        assert why.others[place] == why_not.others[f"{place} on tp"].partition("; with ")[0]


@pytest.mark.large
def test_pinning_costs_what_why_not_says():
    model, batch = zoo.llama()
    before = autopart.plan(model, "tp2", example_kwargs=batch)
    pinned = autopart.plan(model, "tp2", example_kwargs=batch, pins={DOWN: {"tp": "R"}}, sequence_parallel=False)
    found = before.why_not(DOWN, {"tp": "R"})
    assert pinned.cost["objective"] > before.cost["objective"]
    more = pinned.cost["work_share"] - before.cost["work_share"]
    assert f"{more:+.2%} of the matrix work on every rank" in found.others["R on tp"]


def test_a_collective_knows_its_edge(plan):
    found = plan.why("reduce_scatter_2")
    assert "down_proj" in found.subject and "from P to S(1) on tp" in found.subject
    assert found.reason == "it is produced as a partial sum on every rank and used sharded along dim 1"
    assert "read by" in found.where and "modeling_llama.py" in found.where
    assert found.price_s >= 0 and found.runner_up


def test_what_is_so_and_what_cannot_be(plan):
    assert plan.why_not(DOWN, {"tp": "S(1)"}).reason == "the plan has this layout already"
    model, batch = zoo.llama()
    toy = autopart.plan(model, "tp2", example_kwargs=batch, pins={DOWN: {"tp": "S(1)"}})
    refused = toy.why_not(DOWN, {"tp": "S(0)"})
    assert "these pins conflict" in refused.reason and DOWN in refused.reason


def test_names_that_are_not_there(plan):
    with pytest.raises(
        autopart.AutopartError, match=r"the plan has nothing with the name 'model.layers.0.mlp.down'\n.*down_proj"
    ):
        plan.why("model.layers.0.mlp.down")
    with pytest.raises(autopart.AutopartError, match=r"'model\.nowhere' as R on tp matches nothing"):
        plan.why_not("model.nowhere", {"tp": "R"})


def test_other_axes_have_no_price(plan):
    with pytest.raises(
        autopart.AutopartError, match=r"cannot compute the cost of .* as R on pp\n.*layouts on tp and on dp"
    ):
        plan.why_not(DOWN, {"pp": "R"})
    with pytest.raises(autopart.AutopartError, match=r"on two axes at once\n.*one axis at a time"):
        plan.why_not(DOWN, {"tp": "S(0)", "dp": "S(1)"})


def test_storing_a_weight_in_parts_has_a_price(plan):
    model, _ = large_llama(2)
    found = plan.why_not(DOWN, {"dp": "S(0)"})
    assert "of communication, -" in found.reason and "gradient reduction" in found.reason and found.price_s > 0
    size = 4 * model.model.layers[0].mlp.down_proj.weight.numel()
    saved = 2 * size / 8 / 2 * 4  # two layers, in eighths on tp, half of it, with gradient and two moments
    assert f"-{quantity(saved, 'B')} of weights, gradients and optimizer state on every rank" in found.reason
    assert "tp shards dim 1 already" in plan.why_not(DOWN, {"dp": "S(1)"}).reason
    assert plan.why_not(DOWN, {"dp": "R"}).reason == "the plan has this layout already"
    model, batch = zoo.gpt2()
    without = autopart.plan(model, "dp2", example_kwargs=batch)
    assert "of communication" in without.why_not("transformer.h.*.mlp.c_fc.weight", {"dp": "S(1)"}).reason


def test_without_a_tensor_axis():
    model, batch = zoo.gpt2()
    plan = autopart.plan(model, "dp2", example_kwargs=batch)
    found = plan.why("transformer.h.0.attn.c_attn")
    assert found.chosen == "replicated" and found.reason == "the mesh dp2 has no axis tp to shard it over"


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "chosen"), [("dp2", "S(0) on dp"), ("dp2,tp2", "S(1; sections=3), S(0) on dp")])
def test_a_weight_in_parts(mesh, chosen):
    model, batch = zoo.gpt2()
    found = autopart.plan(model, mesh, example_kwargs=batch, zero=3).why("transformer.h.0.attn.c_attn.weight")
    assert found.chosen == chosen
    assert found.reason.endswith("each rank of dp=2 stores one shard and gathers the rest before use")


def test_a_copy_of_a_plan_says_that_it_cannot_tell(plan):
    for other in (autopart.Plan.from_json(plan.to_json()), pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert other == plan
        with pytest.raises(autopart.AutopartError, match="a plan that was read from a file has no alternatives"):
            other.why(DOWN)
