"""A simulated step: its work is the plan's, its actions the runtime's, and nothing faster makes it slower."""

import json
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
import zoo
from cost_models import SECOND, profile
from torch import nn

import autopart
from autopart.common.text import quantity
from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.simulate import training_time_s
from autopart.errors import OptionError, PlanError
from autopart.ir.run.schedule_actions import actions
from autopart.plans.plan import Plan


def simulated(path, mesh, name="gpt2", **options):
    model, batch = zoo.ZOO[name]()
    return autopart.simulate(autopart.plan(model, mesh, example_kwargs=batch, hardware=path, **options))


def products(plan, part):
    """Seconds of matrix products and attention in one microbatch, of all stages together."""
    return sum(row[part].get("matmul", 0) + row[part].get("attention", 0) for row in plan.timing["stages"])


@pytest.mark.parametrize("mesh", ["dp1", "tp2", "tp4", "dp2,tp2", "pp2", "dp2,pp2,tp2"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_all_ranks_together_do_the_work_of_the_model(name, mesh, tmp_path):
    model, batch = zoo.ZOO[name]()
    plan = autopart.plan(model, mesh, example_kwargs=batch, hardware=profile(tmp_path))
    ranks = math.prod(size for axis, size in plan.mesh.items() if axis != "pp")
    forward = products(plan, "forward") * plan.schedule.microbatches * ranks * SECOND["value"]
    assert forward == pytest.approx(plan.timing["forward_flops"], rel=1e-7)


def test_a_backward_takes_two_products_for_one_and_attention_five_for_two(tmp_path):
    model, batch = zoo.gpt2()
    (stage,) = autopart.plan(model, "dp1", example_kwargs=batch, hardware=profile(tmp_path)).timing["stages"]
    assert not stage["input_backward"]  # the only stage receives nothing: all of its backward is towards weights
    assert stage["weight_backward"]["matmul"] == pytest.approx(2 * stage["forward"]["matmul"])
    assert stage["weight_backward"]["attention"] == pytest.approx(2.5 * stage["forward"]["attention"])


class Then(nn.Module):
    """A function of what a linear layer makes, summed."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8, bias=False), function

    def forward(self, x):
        return self.function(self.linear(x)).sum()


@pytest.mark.parametrize(("function", "summed", "more"), [
    (lambda h: h + 1.0, 1, 0),  # its gradient is handed on
    (lambda h: h * 2.0, 1, 2),
    (lambda h: h * h, 1, 5 + 3),  # a kernel each, which both read what was kept, and their sum
    (lambda h: h + h, 1, 3),
    (lambda h: h * 2.0 + h * 3.0, 1, 2 + 2 + 3),
    (lambda h: h[:, :4], 0.5, 1 + 2 * 0.5),  # zeros, and the part
    (lambda h: h.expand(3, -1, -1).tanh(), 3, 3 + 3 + 1 + 3 + 1),  # the gradient of a view counts as its memory
    (lambda h: h.tanh(), 1, 3),  # one kernel, which reads what was kept
], ids=["added", "scaled", "square", "twice", "two products", "part", "repeated", "tanh"])  # fmt: skip
def test_what_the_backward_of_arithmetic_reads_and_writes(tmp_path, function, summed, more):
    """In units of what the layer makes, beside the gradient of the sum at the end, which is a `summed` of them."""
    x = torch.randn(4, 8)

    def bytes_of(then):
        plan = autopart.plan(Then(then), "dp1", example_args=(x,), hardware=profile(tmp_path, memory_bytes_per_s=1e12))
        return plan.timing["stages"][0]["weight_backward"]["other"] * 1e12 / x.nbytes

    assert bytes_of(function) - bytes_of(lambda h: h) == pytest.approx(more + summed - 1)


def test_cross_entropy_runs_several_kernels(tmp_path):
    """Beside the sum of the losses: log_softmax reads and writes the logits; its backward writes zeros, reads two, and
    writes one."""
    x, labels = torch.randn(4, 8), torch.tensor([1, 2, 3, 4])
    used = profile(tmp_path, memory_bytes_per_s=1e12)

    def seconds(part, reduces):
        plan = autopart.plan(Then(reduces), "dp1", example_args=(x,), hardware=used)
        return plan.timing["stages"][0][part]["other"] * 1e12 / x.nbytes

    def loss(h):
        return nn.functional.cross_entropy(h, labels, reduction="none")

    few = pytest.approx(0.25, abs=0.1)  # a loss per token is written and read
    assert seconds("forward", loss) - 2 == few
    assert seconds("weight_backward", loss) - 4 == few


def test_frozen_weights_have_no_backward(tmp_path):
    model, batch = zoo.llama()
    for weight in model.model.parameters():
        weight.requires_grad_(False)
    (stage,) = autopart.plan(model, "dp1", example_kwargs=batch, hardware=profile(tmp_path)).timing["stages"]
    head = 2 * batch["input_ids"].numel() * model.lm_head.weight.numel() / SECOND["value"]
    assert stage["weight_backward"]["matmul"] == pytest.approx(head)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_idle_as_published(schedule, tmp_path):
    """(p - 1) / m of PTD-P, for a stack of equal blocks."""
    model, batch = zoo.transformer_encoder()
    plan = autopart.plan(
        model, "pp2", example_kwargs=batch, schedule=schedule, microbatches=4, hardware=profile(tmp_path)
    )
    loads = [math.fsum(row["forward"].values()) for row in plan.timing["stages"]]
    found = autopart.simulate(plan)
    even = min(loads) / max(loads)
    assert 1 / 4 - 1e-9 <= found.bubble_fraction <= (1 + 1 / 4) / ((1 + even) / 2) - 1 + 1e-9


@pytest.mark.few
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_the_actions_are_those_of_the_runtime(schedule):
    found = zoo_plan("pp2", schedule=schedule, microbatches=4)
    stages = len(found.timing["stages"])
    ran = [[(s.stage, s.kind, s.microbatch) for s in spans] for spans in autopart.simulate(found).timeline.spans]
    assert ran == [[(a.stage, a.kind, a.microbatch) for a in order] for order in actions(schedule, stages, 2, 4)]


@cache
def zoo_plan(mesh, **options):
    model, batch = zoo.gpt2(num_layers=4)
    return autopart.plan(model, mesh, example_kwargs=batch, **options)


@pytest.mark.few
@pytest.mark.parametrize(
    ("mesh", "axis", "zero"), [("tp2", "tp", 0), ("dp2,pp2,tp2", "tp", 0), ("dp2", "dp", 3), ("dp2,tp2", "dp", 3)]
)
def test_collectives_are_those_of_the_plan(mesh, axis, zero):
    plan = zoo_plan(mesh, zero=zero)
    found = autopart.simulate(plan)
    microbatches, stages = plan.schedule.microbatches, plan.timing["stages"]
    planned = sum(c.bytes for c in plan.collectives if c.per == "microbatch" and c.axis == axis) * microbatches
    moved = sum(c["bytes"] for row in stages for c in row["collectives"] if c["axis"] == axis) * microbatches
    assert moved == pytest.approx(planned, rel=1e-3) and planned > 0
    most = max(sum(c["bytes"] for c in row["collectives"]) for row in stages) * microbatches
    assert sum(c.bytes for c in found.collectives) == pytest.approx(most, rel=1e-9)


@pytest.mark.few
@pytest.mark.parametrize("name", ["memory_bytes_per_s", "link_bytes_per_s", "launch_s", "link_latency_s"])
def test_slower_hardware_is_never_faster(name, tmp_path):
    worse = {"memory_bytes_per_s": (1e9, 1e8), "link_bytes_per_s": (1e9, 1e8), "launch_s": (1e-6, 1e-5),
             "link_latency_s": (1e-6, 1e-5)}[name]  # fmt: skip
    times = [simulated(profile(tmp_path, **{name: n}), "dp2,pp2,tp2").step_time_s for n in (None, *worse) if n]
    assert times[0] < times[1]


def test_a_step_is_at_least_its_busiest_rank():
    found = autopart.simulate(zoo_plan("dp2,pp2,tp2"))
    assert found.step_time_s >= max(found.timeline.busy_s)
    assert sum(found.parts.values()) == pytest.approx(found.step_time_s)
    assert len(found.peak_memory_bytes) == 2
    assert found.mfu == found.hfu == found.tflops_per_device * 1e12 / Hardware.load().flops_per_s["float64"]


def test_zero_3_gathers_weights_in_both_directions():
    plain, cut = (autopart.simulate(zoo_plan("dp2", zero=zero)) for zero in (0, 3))
    kinds = {(row.axis, row.kind) for row in cut.collectives}
    assert {("dp", "all_gather"), ("dp", "reduce_scatter")} <= kinds
    assert not plain.collectives and cut.step_time_s > plain.step_time_s


def test_a_dtype_without_a_peak_takes_the_slowest():
    """A V100 has none for bfloat16."""
    model, batch = zoo.gpt2()
    found = {
        dtype: autopart.simulate(autopart.plan(model.to(dtype), "dp1", example_kwargs=batch, hardware="v100-32gb-sxm"))
        for dtype in (torch.bfloat16, torch.float64)
    }
    assert 0 < found[torch.bfloat16].parts["matmul"] <= found[torch.float64].parts["matmul"]


def test_a_plan_from_a_file_says_the_same():
    plan = zoo_plan("pp2,tp2")
    read = Plan.from_json(plan.to_json())
    assert str(autopart.simulate(read)) == str(autopart.simulate(plan))


def test_a_plan_without_timing_is_refused():
    with pytest.raises(
        PlanError, match=r"the plan has no 'timing'\n.*a plan that autopart has made stores the durations"
    ):
        autopart.simulate(replace(zoo_plan("tp2"), timing={}))


@pytest.mark.parametrize(
    ("tokens", "parameters", "devices", "days", "recompute", "utilisation"),
    [(300e9, 175e9, 1024, 35, True, 0.4347), (1.4e12, 65e9, 2048, 21, True, 0.628),
     (1.4e12, 65e9, 2048, 21, False, 0.471)],
    ids=["GPT-3", "LLaMA-65B", "LLaMA-65B, nothing recomputed"],
)  # fmt: skip
def test_the_utilisation_law(tokens, parameters, devices, days, recompute, utilisation):
    """LLaMA's 380 tokens/s a GPU (Touvron et al. 2023) are the last one: 380 * 6 P / F = 0.476. A slide that gives it
    0.3 does not follow from its own inputs."""
    taken = training_time_s(tokens, parameters, devices, 312e12, utilisation, recompute)
    assert taken / 86400 == pytest.approx(days, rel=2e-3)


@pytest.mark.large
def test_a_pipeline_that_waits_for_its_sends_says_what_would_not(tmp_path):
    model, batch = zoo.gpt2()
    slow, fast = (profile(tmp_path, link_bytes_per_s=rate) for rate in (1e9, 1e15))
    options = {"example_kwargs": batch, "schedule": "1f1b", "microbatches": 4}

    def said(**changed):
        plan = autopart.plan(model, "pp2", **options | changed)
        return plan, [note for note in plan.notes if note.startswith("ranks wait for sends between stages")]

    plan, (note,) = said(hardware=slow)
    ahead, none = said(hardware=slow, schedule="interleaved_1f1b", virtual_stages=1)
    before, after = (quantity(one.cost["step_time_s"], "s") for one in (plan, ahead))
    assert "schedule='interleaved_1f1b' with virtual_stages=1" in note
    assert f"{after} per step instead of {before}, with up to 3 instead of 2 microbatches in flight" in note
    assert ahead.cost["step_time_s"] < 0.95 * plan.cost["step_time_s"] and not none
    assert not said(hardware=fast)[1]
    assert not said(hardware=profile(tmp_path, link_bytes_per_s=1e15, link_latency_s=1e-3))[1], "a toy's latency"
    assert autopart.verify(model, "pp2", plan=ahead, example_kwargs=batch).ok


def test_a_trace_has_every_action(tmp_path):
    step = simulated(profile(tmp_path), "pp2,dp2")
    step.save_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    spans = [(rank, span) for rank, spans in enumerate(step.timeline.spans) for span in spans]
    drawn = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert [(e["pid"], e["ts"] / 1e6, e["args"]["stage"], e["args"]["microbatch"]) for e in drawn] == [
        (rank, pytest.approx(span.start_s), span.stage, span.microbatch) for rank, span in spans
    ]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) / 1e6 == pytest.approx(step.step_time_s)
    with pytest.raises(OptionError, match=r"cannot write the trace to .*\n.*No such file"):
        step.save_trace(tmp_path / "nowhere" / "step.json")
