"""Cutting into stages: the cuts are the best there are, and any cuts at all compute the same."""

import itertools
import json
import math
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import zoo
from solver_problems import every_partition, random_problem
from traced import plan_of, run_of, verified

import autopart
from autopart.cost.flops import work
from autopart.cost.hardware import profile
from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.stage_balance import BOUND, IMBALANCE_TOLERANCE, balance
from autopart.cost.predict.table import MAX_STEP_SHARE, WIDE_IMBALANCE_TOLERANCE
from autopart.errors import StageError
from autopart.ir.facts import facts
from autopart.ir.graph import active_operators
from autopart.passes.choose.stages.stage_partition import boundary_bytes, equal_layer_loads, partition
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call

WITHIN = 0.02  # of the lower bound
NUM_RANDOM_CUTS = 10


# --- The programme against brute force -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(300))
def test_balance_is_the_best_of_all_partitions(seed):
    weights, crossing, num_stages = random_problem(seed)
    found = balance(weights, crossing, num_stages)
    possible = dict(every_partition(weights, crossing, num_stages))
    if not possible:
        assert found is None
        return
    best = min(heaviest for heaviest, _ in possible.values())
    bound = max(sum(weights) / num_stages, max(weights))
    limit = best * (1 + IMBALANCE_TOLERANCE)  # so much may be spent on sending little and on being even
    if best <= bound * BOUND:
        limit = min(limit, bound * BOUND)
    limit *= 1 + 1e-9
    edges = (0, *found.cuts, len(weights))
    assert list(edges) == sorted(set(edges)) or len(weights) == 0
    loads = [sum(weights[a:b]) for a, b in itertools.pairwise(edges)]
    assert found.loads == pytest.approx(loads) and max(loads) <= limit
    least = min(cost for heaviest, cost in possible.values() if heaviest <= limit)
    assert possible[found.cuts][1] == pytest.approx(least)
    assert found.lower_bound == pytest.approx(bound) and bound <= best * (1 + 1e-9)


# --- GPT-2 at its real sizes ---------------------------------------------------------------------------------------

REAL = {"small": {"n_layer": 12, "n_embd": 768, "n_head": 12}, "medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16}}


@cache
def real_gpt2(size):
    """The annotated graph of GPT-2 with its vocabulary of 50257, no weights in memory."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**REAL[size], **dropout))
    assert model.config.vocab_size == 50257
    ids = torch.zeros(8, 1024, dtype=torch.long)
    return prepare(model, bind_call(model, (), {"input_ids": ids, "labels": ids.clone()})).graph


@pytest.mark.few
@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("size", REAL)
def test_real_gpt2_is_balanced(size, num_stages):
    graph = real_gpt2(size)
    found = partition(graph, num_stages)
    heaviest_operator = max(map(work, active_operators(graph)))
    mean = sum(found.loads) / num_stages
    equal = max(equal_layer_loads(graph, num_stages))
    assert sum(equal_layer_loads(graph, num_stages)) == pytest.approx(sum(found.loads))
    print(
        f"GPT-2 {size}, {num_stages} stages: heaviest over lower bound {max(found.loads) / found.lower_bound:.4f}, "
        f"over mean {max(found.loads) / mean:.4f}; equal layers over mean {equal / mean:.4f}"
    )
    assert found.lower_bound == pytest.approx(max(mean, heaviest_operator))
    assert max(found.loads) <= (1 + WITHIN) * found.lower_bound
    assert max(found.loads) < equal
    if (size, num_stages) == ("medium", 4):
        assert 1.2 < equal / mean < 1.6, "what equal numbers of layers cost"


def test_plan_shows_the_balance():
    model, batch = zoo.gpt2(num_layers=4)
    plan = autopart.plan(model, "pp4", example_kwargs=batch)
    loads = [row["flops"] for row in plan.stages]
    assert plan.cost["heaviest_stage_flops"] == max(loads)
    assert plan.cost["imbalance"] == pytest.approx(max(loads) / plan.cost["stage_lower_bound_flops"] - 1, abs=1e-6)


def on_link(bytes_per_s, folder):
    """The path of a profile in which devices send so fast."""
    data = json.loads((Path(profile.__file__).with_name("profiles") / "a100-80gb-sxm.json").read_text())
    data |= {"name": f"link of {bytes_per_s:g}", "link_latency_s": data["link_latency_s"] | {"value": 1e-12}}
    data["link_bytes_per_s"] |= {"value": bytes_per_s}
    data.pop("collectives", None)
    file = folder / f"{bytes_per_s:g}.json"
    file.write_text(json.dumps(data))
    return str(file)


def sent_bytes(plan):
    return sum(moved.bytes for moved in plan.collectives if moved.forward == "send")


@pytest.mark.large
@pytest.mark.parametrize("num_layers", [4, 8])
def test_stages_are_less_even_where_a_named_link_is_slow(num_layers, tmp_path):
    """Also of a model whose blocks are planned as one that stands for all."""
    model, batch = zoo.llama(num_layers=num_layers)
    even = autopart.plan(model, "pp2", example_kwargs=batch)
    slow = autopart.plan(model, "pp2", example_kwargs=batch, hardware=on_link(1e7, tmp_path))
    assert sent_bytes(slow) < sent_bytes(even)
    assert (
        even.cost["imbalance"]
        < slow.cost["imbalance"]
        < (1 + WIDE_IMBALANCE_TOLERANCE) * (1 + even.cost["imbalance"]) - 1
    )
    assert slow.cost["step_time_s"] < MAX_STEP_SHARE * even.cost.on(Hardware.load(slow.hardware)).step_time_s
    assert re.fullmatch(
        r"stages are less even than they could be, as a step takes .* then on link of 1e\+07, not .*: the heaviest is "
        r"\d+\.\d % over the lower bound, not \d+\.\d %", slow.notes[-1],
    )  # fmt: skip
    fast = autopart.plan(model, "pp2", example_kwargs=batch, hardware=on_link(1e15, tmp_path))
    assert fast.cuts == even.cuts


@pytest.mark.large
def test_pinned_stages_stay_where_they_are(tmp_path):
    model, batch = zoo.llama(num_layers=4)
    pins = {"stages": {"cut_before": ["model.layers.1"]}}
    profiles = (None, on_link(1e7, tmp_path))
    pinned, slow = (autopart.plan(model, "pp2", example_kwargs=batch, pins=pins, hardware=one) for one in profiles)
    assert slow.cuts == pinned.cuts


# --- Any cut is legal ----------------------------------------------------------------------------------------------


def possible_cuts(graph):
    """The names of all operators before which a stage may begin."""
    nodes = active_operators(graph)
    return [facts(n)["key"] for n, sent in zip(nodes, boundary_bytes(nodes), strict=True) if math.isfinite(sent)][1:]


@pytest.mark.large
@pytest.mark.parametrize("name", zoo.ZOO)
def test_random_cuts_are_exact(name):
    """Also in the middle of attention, inside a norm, between a skip and what it is added to."""
    run = run_of(zoo.ZOO[name])
    keys = possible_cuts(run.traced.graph)
    rng = random.Random(name)
    plans = {mesh: plan_of(run, mesh, microbatches=2, schedule="gpipe") for mesh in ("pp2", "pp4", "pp2,tp2")}
    for mesh in itertools.islice(itertools.cycle(plans), NUM_RANDOM_CUTS):
        plan, num_stages = plans[mesh], autopart.Mesh.parse(mesh).size("pp")
        cuts = tuple(keys[k] for k in sorted(rng.sample(range(len(keys)), num_stages - 1)))
        found = verified(run, mesh, replace(plan, cuts=cuts))
        assert found.ok, f"{mesh}, cut before {cuts}\n{found}"
        assert "loss" in found.errors and len(found.errors) > 3


def test_values_travel_through_stages_that_do_not_read_them():
    """The last layer of the skip MLP reads the first's output: with a stage per layer it crosses every cut."""
    run = run_of(zoo.skip_mlp)
    cuts = tuple(f"layers.{i}/linear" for i in range(1, 8))
    assert set(cuts) <= set(possible_cuts(run.traced.graph))
    assert verified(run, "pp8", replace(plan_of(run, "pp8"), cuts=cuts)).ok


@pytest.mark.large
def test_most_operators_can_begin_a_stage():
    for name, builder in zoo.ZOO.items():
        graph = run_of(builder).traced.graph
        assert len(possible_cuts(graph)) > 0.8 * (len(active_operators(graph)) - 1), name


def test_too_many_stages_are_refused():
    model, batch = zoo.conv_net()
    with pytest.raises(StageError, match=r"cannot be cut into 64 stages(.|\n)*pp=\d+ or less"):
        autopart.plan(model, "pp64", example_kwargs=batch, schedule="gpipe", microbatches=8)
