"""The memory of a plan: what is estimated is what is held."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from dist import run_ranks
from held import most_in_flight, peak_on_a_rank, saved_on_a_rank, small, states_on_a_rank
from torch import fx
from traced import plan_of, run_of
from zoo import ZOO

import autopart
from autopart.common.memory_size import parse_size
from autopart.common.text import quantity
from autopart.cost.count.saved_tensors import EFFECT_CACHE, SavedTensors, TensorSpec
from autopart.cost.predict.comm_buffers import GradientBucket, MemoryEvent, StageCommBuffers, backward_peaks
from autopart.errors import MemoryLimitError, OptionError
from autopart.ir.facts import facts
from autopart.ir.graph import operator_name, operators, value
from autopart.ir.mesh import Mesh
from autopart.ir.run.report_terms import MEMORY_KINDS
from autopart.ir.run.schedule_actions import StageBytes, actions, peak_activations, peak_stage_bytes
from autopart.ir.run.schedules import FLUSHING, SCHEDULES, SINGLE_STAGE
from autopart.plans.plan import Plan
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call

ALL = ("gpt2", "llama", "bert", "t5", "vit", "conv_net")
RUNS = {
    # name: (models, mesh, dropout, options)
    "tp2": (ALL, "tp2", 0.1, {}),
    "pp2": (("gpt2", "llama", "vit", "conv_net"), "pp2", 0.0, {}),
    "dp2": (("gpt2", "conv_net"), "dp2", 0.1, {}),
    "one rank": (("gpt2", "bert", "vit"), "dp1", 0.1, {}),
    "zero": (("llama",), "dp2", 0.0, {"zero": 3}),
    "sequence": (("gpt2", "llama", "bert"), "tp2", 0.1, {"sequence_parallel": True}),
    "context": (("gpt2", "llama", "bert", "t5"), "cp2", 0.0, {}),
    "heads": (("gpt2", "bert"), "cp2", 0.0, {"context": "ulysses"}),
}


# --- activations ---------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize(("run", "name"), [(run, name) for run, (models, *_) in RUNS.items() for name in models])
def test_activations_are_those_that_autograd_saves(name, run):
    """To the byte, of one microbatch, counted at the end of a forward on real processes."""
    for rank in run_ranks(saved_on_a_rank, Mesh.parse(RUNS[run][1]).num_ranks, name, *RUNS[run][1:]):
        for stage, held, estimated in rank:
            assert held == estimated > 0, f"stage {stage}"


def _kept(node: fx.Node) -> SavedTensors:
    """What one call of a traced graph keeps for its backward."""
    form = {n: TensorSpec.of(value(n), facts(n).get("needs_grad", False)) for n in node.all_input_nodes}
    return EFFECT_CACHE.effect(node.target, *fx.map_arg((node.args, node.kwargs), form.__getitem__)).kept


def test_what_an_operator_keeps():
    """On a traced graph: softmax its result, a product both factors, an addition nothing."""
    model, batch = small("bert")
    trace = prepare(model, bind_call(model, (), batch))
    found = {operator_name(n): _kept(n) for n in operators(trace.graph) if facts(n)["needs_grad"]}
    assert found["aten::add"] == ((), (), 0)
    assert found["aten::gelu"] == ((0,), (), 0)
    assert found["aten::linear"].inputs == (0, 1)
    rows = batch["input_ids"].numel()
    assert found["aten::layer_norm"].other_bytes == 2 * rows * torch.float64.itemsize  # mean and deviation of each row


# --- schedules -----------------------------------------------------------------------------------------------------

PP, MICROBATCHES = 4, 8
IN_FLIGHT = {
    # Microbatches that the rank at each coordinate holds, those of its two stages together.
    "gpipe": [MICROBATCHES] * PP,
    "1f1b": [PP - rank for rank in range(PP)],  # Narayanan et al. 2021, section 2.2
    "1f1b_2bw": [PP - rank for rank in range(PP)],  # of two batches together
    "interleaved_1f1b": [2 * PP + PP - 1 - 2 * rank for rank in range(PP)],  # p(1 + (p-1)/(pv)) v at the first
    "interleaved_zero_bubble": [2 * PP] * PP,  # Qi et al. 2024: as much as the first rank of 1F1B
    "zbv": [2 * PP] * PP,  # p of whole depth, in two halves
    "dualpipev": [2 * PP + 1] * PP,  # PP + 1/2 of whole depth
    "looped_bfs": [2 * MICROBATCHES] * PP,  # all of them
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_in_flight_have_their_closed_form(schedule):
    stages = PP if schedule in SINGLE_STAGE else 2 * PP
    orders = actions(schedule, stages, PP, MICROBATCHES)
    found = [peak_activations(order, {a.stage: 1 for a in order}, {}).size_bytes for order in orders]
    assert found == IN_FLIGHT[schedule]


def test_delayed_gradients_wait_between_the_parts_of_a_backward():
    order = actions("interleaved_zero_bubble", 8, 4, 8)[3]
    plain = peak_activations(order, {3: 1, 7: 1}, {}).size_bytes
    assert peak_activations(order, {3: 1, 7: 1}, {3: 1, 7: 1}).size_bytes > plain


@pytest.mark.parametrize("schedule", FLUSHING)
def test_a_real_step_holds_as_many(schedule):
    """Of every stage, what `torch.distributed.pipelining` itself holds."""
    for order, found in zip(
        actions(schedule, 2 if schedule in SINGLE_STAGE else 4, 2, 4),
        run_ranks(most_in_flight, 2, schedule, "pp2", 4),
        strict=True,
    ):
        expected = {s: peak_activations(tuple(a for a in order if a.stage == s), {s: 1}, {}).size_bytes for s in found}
        assert found == expected


# --- a step at its fullest -----------------------------------------------------------------------------------------

PEAKS = [
    # model, mesh, options, how much more may be counted than there is; what a pipeline receives into is there before
    ("gpt2", "tp2", {}, 0.01), ("gpt2", "dp2", {}, 0.01), ("gpt2", "dp2", {"microbatches": 2}, 0.02),
    ("gpt2", "pp2", {"schedule": "gpipe", "microbatches": 4}, 0.25), ("gpt2", "pp2", {"schedule": "1f1b"}, 0.25),
    ("gpt2", "pp2", {"schedule": "interleaved_zero_bubble"}, 0.7),
    ("llama", "tp2", {"sequence_parallel": False}, 0.05),
    ("llama", "tp2", {"recompute": "full"}, 0.15),
    ("llama", "pp2", {"schedule": "zbv", "recompute": "full"}, 0.9),
    ("bert", "tp2", {"sequence_parallel": True}, 0.05), ("t5", "tp2", {}, 0.01), ("vit", "dp2", {}, 0.05),
    ("gpt2", "cp2", {}, 0.05), ("llama", "cp2", {}, 0.05),
    *(("llama", "cp2", {"zero": zero}, 0.05) for zero in (1, 2, 3)),
]  # fmt: skip
ZERO_PEAKS = [
    *(("llama", {"zero": zero}) for zero in (1, 2, 3)),
    *(("gpt2", {"zero": zero, "microbatches": 2}) for zero in (1, 2, 3)), ("llama", {"zero": 3, "recompute": "full"}),
    ("gpt2", {"zero": 1, "microbatches": 2, "dp_sync": "parameter_server"}),
]  # fmt: skip
HELD_BACK = 0.05  # of a step, by threads that communicate: what they have sent, for a moment that is not the same twice


@pytest.mark.few
@pytest.mark.parametrize(("name", "mesh", "options", "margin"), PEAKS, ids=str)
def test_a_real_step_takes_what_is_counted(name, mesh, options, margin):
    """What is counted is the most that torch's allocator hands out at a time, and not less."""
    ranks = run_ranks(peak_on_a_rank, 2, name, mesh, options)
    if mesh != "pp2":  # both do the same, and one may hold longer what it has sent
        ranks = [min(ranks)]
    for rank, (found, counted) in enumerate(ranks):
        assert found * (1 - HELD_BACK) <= counted <= found * (1 + margin), f"rank {rank}"


@pytest.mark.large
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_attention_that_drops_weights_takes_what_is_counted(name):
    """That is what its fused kernel takes: no more than the rest of the step leaves free. (A CPU writes scores out.)"""
    (found, counted), (_, without) = (run_ranks(peak_on_a_rank, 1, name, "dp1", {}, p)[0] for p in (0.1, 0.0))
    assert counted == pytest.approx(found, rel=1e-4)
    assert counted > without  # the masks of the other dropouts


@pytest.mark.few
@pytest.mark.parametrize(("name", "options"), ZERO_PEAKS, ids=str)
def test_what_zero_sends_and_gathers_is_counted(name, options):
    """Within a thousandth: wholes, flat copies under way, blocks that are gathered ahead, parts of gradients."""
    held, counted = min(run_ranks(peak_on_a_rank, 2, name, "dp2", options))
    assert counted == pytest.approx(held, rel=1e-3)


def test_gradients_come_while_activations_go():
    one = StageBytes(held=100, delayed=0, forward=5, backward=10, first_backward=40, gradients=80)
    once, twice = (actions(None, 1, 1, number)[0] for number in (1, 2))
    assert peak_stage_bytes(once, {0: one}, 80) == 140
    assert peak_stage_bytes(twice, {0: one}, 80) == 80 + 100 + 10
    gpipe = actions("gpipe", 2, 2, 2)[0]
    assert peak_stage_bytes(gpipe, {0: one}, 80) == max(200 + 40, 80 + 100 + 10)


class TiedHead(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(1000, 64)

    def forward(self, ids):
        return torch.nn.functional.linear(self.embed(ids), self.embed.weight).square().mean()


def test_a_second_gradient_of_a_weight_is_added_out_of_place():
    """At the fullest there are the weight, its optimizer's state of two, two gradients of it and their sum."""
    (row,) = autopart.plan(TiedHead(), "dp1", example_kwargs={"ids": torch.tensor([[1, 2]])}).memory
    assert row["total"] / (1000 * 64 * 4) == pytest.approx(6, abs=0.2)


def test_a_stage_that_runs_again_holds_nothing_for_a_second_part_of_its_backward():
    """Where torch's schedules split a backward, a stage with regions runs it as one."""
    run = run_of(ZOO["llama"])
    split, whole = (plan_of(run, "pp2", schedule=s, recompute="full").memory for s in ("zbv", "interleaved_1f1b"))
    assert split[0]["activations"] <= 2 * max(row["activations"] for row in whole)


# --- what is stored ------------------------------------------------------------------------------------------------


@pytest.mark.large
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [("gpt2", "tp2", {}), ("llama", "pp2", {}), ("vit", "dp2", {}), ("bert", "tp2", {"sequence_parallel": True}),
     ("gpt2", "pp2", {"schedule": "zbv"}),
     *(("llama", mesh, {"zero": zero}) for zero in (1, 2, 3) for mesh in ("dp2", "cp2", "dp2,cp2"))],
)  # fmt: skip
def test_states_are_those_of_an_optimizer(name, mesh, options):
    """Parameters, gradients and AdamW's moments of a rank after a step, to the byte."""
    model, batch = small(name)
    memory = autopart.plan(model, mesh, example_kwargs=batch, **options).memory
    for rank, found in enumerate(run_ranks(states_on_a_rank, Mesh.parse(mesh).num_ranks, name, mesh, options)):
        row = memory[rank if mesh == "pp2" else 0]
        assert found == {
            **{kind: row[kind] for kind in ("parameters", "gradients", "optimizer", "buffers")},
            "rank": rank,
        }


@pytest.mark.large
def test_frozen_parameters_take_no_gradient_and_no_state():
    model, batch = small("gpt2")
    whole = autopart.plan(model, "tp2", example_kwargs=batch).memory[0]
    for parameter in model.transformer.h.parameters():
        parameter.requires_grad_(False)
    part = autopart.plan(model, "tp2", example_kwargs=batch).memory[0]
    assert part["parameters"] == whole["parameters"]
    assert 0 < part["gradients"] < whole["gradients"] and part["optimizer"] == 2 * part["gradients"]
    assert part["activations"] < whole["activations"]


# --- more of anything never takes more -----------------------------------------------------------------------------


def total(name: str, mesh: str, **options) -> int:
    return max(row["total"] for row in plan_of(run_of(ZOO[name]), mesh, **options).memory)


def test_more_tensor_parallelism_never_takes_more():
    totals = [total("llama", mesh) for mesh in ("tp1", "tp2", "tp4")]
    assert totals == sorted(totals, reverse=True) and totals[0] > totals[-1]


def test_sequence_parallelism_takes_less():
    rows = [plan_of(run_of(ZOO["llama"]), "tp2", sequence_parallel=s).memory[0] for s in (False, True)]
    assert rows[1]["activations"] < rows[0]["activations"]


def test_gpipe_takes_at_least_what_1f1b_does():
    assert total("gpt2", "pp2", schedule="gpipe") > total("gpt2", "pp2", schedule="1f1b")


def test_more_microbatches_keep_less():
    run = run_of(ZOO["gpt2"])
    rows = [plan_of(run, "dp1", microbatches=number).memory[0]["activations"] for number in (1, 2, 4, 8)]
    assert rows == sorted(rows, reverse=True)


# --- in the plan ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> Plan:
    model, batch = ZOO["gpt2"]()
    return autopart.plan(model, "pp2,tp2", example_kwargs=batch, schedule="interleaved_1f1b")


def test_a_plan_has_a_row_a_pipeline_coordinate(plan):
    assert [row["stages"] for row in plan.memory] == [[0, 2], [1, 3]]
    for row in plan.memory:
        lasting = sum(row[kind] for kind in ("parameters", "optimizer", "buffers", "inputs"))
        moments = row["gradients"], row["activations"]  # after the step, and before its first backward
        assert lasting + max(moments) <= row["total"] <= sum(row[kind] for kind in MEMORY_KINDS)
        assert len(row["in_flight"]) == 2
    order = actions("interleaved_1f1b", 4, 2, plan.schedule.microbatches)[0]
    assert sum(plan.memory[0]["in_flight"]) == peak_activations(order, {0: 1, 2: 1}, {}).size_bytes


def test_it_is_explained(plan):
    text = plan.explain()
    assert "memory of the fullest rank" in text and "0,2" in text and "in flight" in text
    part = next(part for part in text.split("\n\n") if part.startswith("memory of the fullest rank"))
    assert max(map(len, part.splitlines())) <= 80


def test_a_plan_without_it_still_loads(plan):
    data = json.loads(plan.to_json())
    del data["memory"]
    older = Plan.from_json(json.dumps(data))
    assert older.memory == () and "memory of the fullest rank" not in older.explain()


# --- within a limit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "expected"),
    [("24GB", 24 * 10**9), ("24GiB", 24 * 2**30), ("800 MB", 800 * 10**6), ("1.5kb", 1500), (4096, 4096), ("7", 7)],
)
def test_sizes_are_read(size, expected):
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", ["", "GB", "24XB", "-1GB", "0", -5, True, 2.5, "3iB"])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(OptionError, match="is not a size"):
        parse_size(size)


@pytest.fixture(scope="module")
def refused() -> tuple[Plan, MemoryLimitError]:
    """A plan, and what is said where a rank has four fifths of what it needs."""
    model, batch = ZOO["llama"](num_layers=6)
    plan = autopart.plan(model, "pp2,dp2", example_kwargs=batch, schedule="gpipe", microbatches=2)
    limit = max(row["total"] for row in plan.memory) * 4 // 5
    with pytest.raises(MemoryLimitError) as caught:
        autopart.plan(model, "pp2,dp2", example_kwargs=batch, schedule="gpipe", microbatches=2, zero=0, memory=limit)
    return plan, caught.value


@pytest.mark.large
def test_an_error_says_what_takes_the_memory(refused):
    plan, error = refused
    row = max(plan.memory, key=lambda row: row["total"])
    text = str(error)
    assert f"the plan needs {quantity(row['total'], 'B')} on a rank" in text
    assert f"activations of 2 microbatches in flight {quantity(row['activations'], 'B')}" in text
    assert f"optimizer state {quantity(row['optimizer'], 'B')}" in text
    assert f"stage {row['stages'][0]} of pp2,dp2" in text and "the largest: " in text and "model.layers.*" in text


WAYS = {
    "zero=3": ("pp2,dp2", {"schedule": "gpipe", "microbatches": 2, "zero": 3}),
    "recompute='full'": ("pp2,dp2", {"schedule": "gpipe", "microbatches": 2, "recompute": "full"}),
    "mesh='pp2,dp4' (8 ranks)": ("pp2,dp4", {"schedule": "gpipe", "microbatches": 2}),
    "mesh='pp2,dp2,tp2' (8 ranks)": ("pp2,dp2,tp2", {"schedule": "gpipe", "microbatches": 2}),
}


@pytest.mark.large
@pytest.mark.parametrize("way", WAYS)
def test_a_way_out_takes_what_its_plan_takes(refused, way):
    """The estimate, which keeps what is known, is that of a plan made anew."""
    plan, error = refused
    mesh, options = WAYS[way]
    model, batch = ZOO["llama"](num_layers=6)
    made = autopart.plan(model, mesh, example_kwargs=batch, **options)
    need, less = (max(row["total"] for row in p.memory) for p in (plan, made))
    assert less < need
    assert f"{way}: {quantity(less, 'B')}, {quantity(need - less, 'B')} less" in str(error)


def test_what_fits_comes_first_and_works(refused):
    _, error = refused
    lines = str(error).partition("  try ")[2].splitlines()
    assert ["still too much" in line for line in lines] == sorted("still too much" in line for line in lines)
    assert any("still too much" not in line for line in lines)


@pytest.mark.large
def test_what_fits_is_planned():
    model, batch = ZOO["gpt2"]()
    plan = plan_of(run_of(ZOO["gpt2"]), "tp2", sequence_parallel=False)
    need = max(row["total"] for row in plan.memory)
    fitted = autopart.plan(model, "tp2", example_kwargs=batch, sequence_parallel=False, memory=need)
    assert [row.what for row in fitted.diff(plan).rows] == ["device_memory_bytes"]
    with pytest.raises(MemoryLimitError):
        autopart.plan(model, "tp2", example_kwargs=batch, sequence_parallel=False, memory=need - 1)


@pytest.mark.large
def test_a_limit_changes_what_is_left_open():
    """Values are cut along the sequence, weights over dp, in this order, and only where a rank lacks the room."""
    run = run_of(ZOO["llama"])
    changes = [{}, {"sequence_parallel": True}, {"zero": 3}, {"sequence_parallel": True, "zero": 3}]
    plans = [plan_of(run, "dp2,tp2", **change) for change in changes]
    needs = [max(row["total"] for row in plan.memory) for plan in plans]
    for limit in needs:
        expected = next(plan for plan, need in zip(plans, needs, strict=True) if need <= limit)
        limited = plan_of(run, "dp2,tp2", memory=limit)
        # their cost alone differs: it says what the plan had to fit into
        assert dataclasses.replace(limited, cost={}) == dataclasses.replace(expected, cost={})
    assert len(set(needs)) == 4 and min(needs) == needs[3] and needs[0] == max(needs)
    model, batch = ZOO["llama"]()
    assert autopart.verify(model, "dp2,tp2", example_kwargs=batch, memory=needs[3]).ok
    with pytest.raises(MemoryLimitError):
        plan_of(run, "dp2,tp2", memory=needs[3] - 1)
    with pytest.raises(MemoryLimitError):  # what is asked for is kept
        plan_of(run, "dp2,tp2", memory=needs[3], zero=0)


def test_a_given_plan_is_checked():
    model, batch = ZOO["gpt2"]()
    plan = autopart.plan(model, "tp1", example_kwargs=batch)
    need = plan.memory[0]["total"]
    autopart.parallelize(model, "tp1", example_kwargs=batch, plan=plan, memory=need)
    with pytest.raises(MemoryLimitError, match="on a rank, and memory is"):
        autopart.parallelize(model, "tp1", example_kwargs=batch, plan=plan, memory=need - 1)
    with pytest.raises(OptionError, match="cannot be checked: the plan has no memory figures"):
        autopart.parallelize(
            model, "tp1", example_kwargs=batch, plan=dataclasses.replace(plan, memory=()), memory="1GB"
        )


@pytest.mark.large
def test_exact_random_numbers_count_what_they_draw():
    """Every rank draws the noise of the whole batch, and holds it through the step."""
    model, batch = small("gpt2", dropout=0.1)
    need = autopart.plan(model, "tp1", example_kwargs=batch).memory[0]["total"]
    autopart.parallelize(model, "tp1", example_kwargs=batch, memory=need)
    with pytest.raises(MemoryLimitError, match=r"inputs \d"):
        autopart.parallelize(model, "tp1", example_kwargs=batch, memory=need, rng="exact")


@pytest.mark.large
def test_verify_judges_the_model_in_its_own_dtype():
    model, batch = ZOO["skip_mlp"]()
    model, batch = model.float(), {name: tensor.float() for name, tensor in batch.items()}
    options = {"example_kwargs": batch, "sequence_parallel": False}
    need = max(row["total"] for row in autopart.plan(model, "tp2", **options).memory)
    assert autopart.verify(model, "tp2", **options, memory=need).ok
    with pytest.raises(MemoryLimitError):
        autopart.verify(model, "tp2", **options, memory=need - 1)


def test_a_copy_of_gradients_is_there_while_it_is_sent():
    """100 bytes of gradients, copied together when the second is whole; what follows is beside the copy."""
    traffic = StageCommBuffers((GradientBucket(("a", "b"), flat_bytes=100),))
    events = [
        MemoryEvent("takes", 60), MemoryEvent("gives", 0, name="a"), MemoryEvent("peak", 5),
        MemoryEvent("takes", 40), MemoryEvent("gives", 0, name="b"), MemoryEvent("peak", 7),
    ]  # fmt: skip
    assert backward_peaks(events, traffic, {"a": 60, "b": 40}, 1) == (207, 207)
    assert backward_peaks(events, StageCommBuffers(), {}, 1) == (107, 107)
