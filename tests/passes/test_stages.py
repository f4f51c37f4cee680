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
from torch import nn
from traced import plan_of, run_of, verified

import autopart
from autopart.cost.flops import work
from autopart.cost.hardware import profile
from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.stage_balance import BOUND, MAX_IMBALANCE, TIME_TOLERANCE, balance, stage_boundaries
from autopart.cost.predict.table_data import plan_setting
from autopart.errors import StageError
from autopart.ir.facts import facts
from autopart.ir.graph import active_operators
from autopart.ir.run.sync_option import ALL_REDUCE
from autopart.passes.choose.stages.stage_partition import boundary_bytes, equal_layer_loads, partition
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call

WITHIN = 0.02  # of the lower bound
NUM_RANDOM_CUTS = 10


# --- The programme against brute force -----------------------------------------------------------------------------


def stage_times(weights, crossing, cuts, send_cost):
    """The time of every stage, in units of load: its load, and what it receives and sends."""
    edges = (0, *cuts, len(weights))
    sent = [0.0, *(crossing[cut] for cut in cuts), 0.0]
    loads = [sum(weights[a:b]) for a, b in itertools.pairwise(edges)]
    return [load + send_cost * (sent[i] + sent[i + 1]) for i, load in enumerate(loads)]


@pytest.mark.parametrize("cost_of_sends", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("seed", range(300))
def test_balance_is_the_best_of_all_partitions(seed, cost_of_sends):
    weights, crossing, num_stages = random_problem(seed)
    send_cost = cost_of_sends * sum(weights) / num_stages
    found = balance(weights, crossing, num_stages, send_cost=send_cost)
    possible = dict(every_partition(weights, crossing, num_stages))
    if not possible:
        assert found is None
        return
    slowest = {cuts: max(stage_times(weights, crossing, cuts, send_cost)) for cuts in possible}
    least_load = min(heaviest for heaviest, _ in possible.values())
    bound = max(sum(weights) / num_stages, max(weights))
    allowed = {cuts for cuts, (heaviest, _) in possible.items() if heaviest <= least_load * (1 + MAX_IMBALANCE + 1e-9)}
    best = min(slowest[cuts] for cuts in allowed)
    limit = best * (1 + TIME_TOLERANCE)  # so much may be spent on sending little and on being even
    if best <= bound * BOUND:
        limit = min(limit, bound * BOUND)
    limit *= 1 + 1e-9
    edges = (0, *found.cuts, len(weights))
    assert list(edges) == sorted(set(edges)) or len(weights) == 0
    loads = [sum(weights[a:b]) for a, b in itertools.pairwise(edges)]
    assert found.loads == pytest.approx(loads) and found.cuts in allowed
    assert slowest[found.cuts] <= limit
    least = min(possible[cuts][1] for cuts in allowed if slowest[cuts] <= limit)
    assert possible[found.cuts][1] == pytest.approx(least)
    assert found.lower_bound == pytest.approx(bound) and bound <= least_load * (1 + 1e-9)
    assert found.least_load == pytest.approx(least_load)


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
def test_stages_send_less_over_a_slow_link(num_layers, tmp_path):
    """Also of a model whose blocks are deduplicated."""
    model, batch = zoo.llama(num_layers=num_layers)
    even = autopart.plan(model, "pp2", example_kwargs=batch)
    slow = autopart.plan(model, "pp2", example_kwargs=batch, hardware=on_link(1e7, tmp_path))
    assert sent_bytes(slow) < sent_bytes(even)
    assert even.cost["imbalance"] < slow.cost["imbalance"] < (1 + MAX_IMBALANCE) * (1 + even.cost["imbalance"]) - 1
    assert slow.cost["step_time_s"] < 0.98 * even.cost.on(Hardware.load(slow.hardware)).step_time_s
    assert re.fullmatch(
        r"stages could be more even, but would send more, which takes longer on link of 1e\+07: the largest is "
        r"\d+\.\d % over the lower bound, not \d+\.\d %", next(n for n in slow.notes if n.startswith("stages could"))
    )  # fmt: skip
    assert not any(note.startswith("stages could") for note in even.notes)
    fast = autopart.plan(model, "pp2", example_kwargs=batch, hardware=on_link(1e15, tmp_path))
    assert fast.cuts == even.cuts


@pytest.mark.large
@pytest.mark.parametrize("options", [{}, {"virtual_stages": 2, "schedule": "interleaved_1f1b"}])
@pytest.mark.parametrize("mesh", ["pp2", "pp2,tp2", "dp2,pp2"])
@pytest.mark.parametrize("bytes_per_s", [1e6, 1e7, 1e8, None])
def test_a_table_has_the_stages_of_the_plan(bytes_per_s, mesh, options, tmp_path):
    """One rule chooses stages for a plan, and for the predictions of other sizes and of the search."""
    run, hardware = run_of(zoo.llama), {} if bytes_per_s is None else {"hardware": on_link(bytes_per_s, tmp_path)}
    plan = plan_of(run, mesh, **hardware, **options)
    table, sizes = plan.cost.table, plan.mesh_object()
    setting = plan_setting(table, sizes, plan.schedule, 0, 1, plan.scatter_sends, ALL_REDUCE)
    cuts = stage_boundaries(table, replace(setting, cuts=None), Hardware.load(plan.hardware))
    assert cuts == table.cuts[len(plan.cuts) + 1]


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
    with pytest.raises(StageError, match=r"cannot be split into 64 stages(.|\n)*pp=\d+ or less"):
        autopart.plan(model, "pp64", example_kwargs=batch, schedule="gpipe", microbatches=8)


class OfAList(nn.Module):
    """A mean over images of several sizes, which are passed as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([self.a(image).square().mean() for image in images]).mean()


def test_a_batch_size_that_comes_from_a_list_is_explained():
    with pytest.raises(StageError) as error:
        autopart.plan(OfAList(), "dp2", example_args=([torch.randn(3, 4, 8), torch.randn(3, 5, 8)],))
    assert (
        "why    3 is not a multiple of 2: the first dim of 'images.0' counts as the samples, because the tensors of a "
        "list are separate inputs\n"
    ) in str(error.value)


class OfLabels(nn.Module):
    """Images, and the boxes of each image, as detectors take them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor, labels: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        out = self.a(images)
        return sum((out[i] - label["boxes"]).abs().mean() for i, label in enumerate(labels)) / len(labels)


@pytest.mark.few
@pytest.mark.parametrize("sizes", [(1, 2, 3, 1), (3, 3, 3, 3), (2, 2, 2, 2)], ids=str)
def test_a_list_with_an_entry_per_sample_has_no_batch_dim(sizes):
    labels = [{"boxes": torch.randn(size, 4), "kinds": torch.zeros(size, dtype=torch.long)} for size in sizes]
    for mesh in ("dp4", "dp2,tp2"):
        result = autopart.verify(OfLabels(), mesh, example_args=(torch.randn(4, 8), labels))
        assert result.ok and result.max_error < 1e-10, str(result)
