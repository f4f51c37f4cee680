"""One step time and one memory of a plan, whoever is asked; at other sizes, what a plan made there says."""

from functools import cache

import at_cases
import cost_models
import expert_models
import pytest
import torch
import zoo
from cost_models import gpt
from report_page import texts_of

import autopart
from autopart.common.text import quantity
from autopart.cost.predict.table import RunSetting, predict
from autopart.errors import LayoutError
from autopart.ir.mesh import Mesh
from autopart.options import Options
from autopart.plans.plan import Plan
from autopart.recipe.compiler import make_plan, prepare
from autopart.show.report.page import page
from autopart.tracing.trace_model import bind_call

EXACT, NEAR = 1e-9, 0.05


def llama(rows=16, tokens=256, layers=4, hidden=512):
    return cost_models.llama(torch.bfloat16, layers, hidden, rows, tokens, vocab=4000, widening=3)


MODELS = {
    "llama": llama, "gpt2": lambda rows=16, tokens=32: gpt(layers=4, heads=8, rows=rows, tokens=tokens),
    "t5": zoo.t5, "conv_net": zoo.conv_net, "mixture": expert_models.mixture,
}  # fmt: skip
INTERLEAVED = {"schedule": "interleaved_1f1b", "microbatches": 4}
CASES = [
    ("dp1", {"microbatches": 4}), ("dp2", {}), ("dp2", {"zero": 3, "microbatches": 2}), ("tp2", {"recompute": "full"}),
    ("tp2", {"sequence_parallel": True}), ("tp2", {"compile": True}), ("tp8", {"recompute": "selective"}), ("pp2", {}),
    ("pp2", INTERLEAVED | {"virtual_stages": 2}), ("pp4", INTERLEAVED | {"virtual_stages": 1}),
    ("cp2", {}), ("dp2,cp4", {"zero": 3}), ("pp2,cp2,tp2", {"recompute": "full"}), ("dp2,ep2", {}),
    ("dp2,pp2,tp2", {}), ("dp2,pp2,tp2", {"zero": 3, "recompute": "full"}),
]  # fmt: skip


@cache
def traced(name, **sizes):
    model, batch = MODELS[name](**sizes)
    return model, prepare(model, bind_call(model, (), batch))


def planned(name, mesh, options, **sizes):
    model, trace = traced(name, **sizes)
    return make_plan(model, trace, Mesh.parse(mesh), Options(**options))


@pytest.mark.large
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [(name, *case) for case in CASES for name in MODELS if (name == "mixture") == ("ep" in case[0])], ids=str,
)  # fmt: skip
def test_all_sources_say_the_same(name, mesh, options):
    plan = planned(name, mesh, options)
    step, fullest = autopart.simulate(plan), max(row["total"] for row in plan.memory)
    setting = RunSetting(
        plan.mesh_object(), plan.schedule, next(iter(plan.inputs.values()))["shape"][0], plan_zero(plan)
    )
    by_table = predict(plan.cost.table, setting, plan.cost.formula.hardware)
    read = Plan.from_json(plan.to_json()).cost
    own = {axis: size for axis, size in plan.mesh.items() if axis in ("dp", "tp", "pp")}
    for figures in (plan.cost.at(), plan.cost.at(m=plan.schedule.microbatches, **own), read.at()):
        assert figures.step_time_s == pytest.approx(step.step_time_s, rel=EXACT)
        assert figures.memory_bytes == pytest.approx(fullest, rel=EXACT)
        assert figures.parts_s == pytest.approx(plan.cost["parts_s"], rel=EXACT)
        assert sum(figures.parts_s.values()) == pytest.approx(step.step_time_s, rel=EXACT)
    assert by_table.step_time_s == pytest.approx(step.step_time_s, rel=EXACT)
    assert plan.cost["step_time_s"] == read["step_time_s"] == step.step_time_s
    assert max(step.peak_memory_bytes) == fullest and step.memory == plan.memory
    for text in (str(plan.explain()), texts_of(page({"plan": plan})), str(step)):
        assert f"{quantity(fullest, 'B')} on the fullest rank" in " ".join(text.split())
    for text in (str(plan.explain()), texts_of(page({"plan": plan}))):
        assert f"{quantity(step.step_time_s, 's')} a step" in " ".join(text.split())


def plan_zero(plan):
    return 3 if plan.axes_in_parts else 0


ALWAYS = [
    ("gpt2", "dp2", {"zero": 3}, {"dp": 8}), ("gpt2", "pp2", at_cases.PIPED, {"pp": 4}),
    ("gpt2", "tp2", at_cases.SEQUENCE, {"tp": 8}),
]  # fmt: skip
"""Cases that `make test` runs whatever it leaves out of the matrix."""


def matrix():
    """(hardware, model, mesh, options, sizes) of every case."""
    for hardware in at_cases.HARDWARE:
        for case in at_cases.cases():
            always = hardware == at_cases.HARDWARE[0] and case in ALWAYS
            marks = [pytest.mark.whole] if always else []
            yield pytest.param(hardware, *case, marks=marks)


@pytest.mark.few
@pytest.mark.parametrize(("hardware", "name", "mesh", "options", "sizes"), list(matrix()), ids=str)
def test_at_other_sizes_is_near_a_new_plan(hardware, name, mesh, options, sizes):
    """With the layouts that it has; where a plan made there has others, `at` says that it may."""
    found = at_cases.beside(name, mesh, options | {"hardware": hardware}, sizes)
    assert found.off < NEAR if found.same_layouts else found.noted


def test_at_says_what_a_new_plan_may_have_otherwise():
    cost = at_cases.planned("gpt2", "tp2", {}).cost
    assert cost.at().notes == cost.at(dp=4, m=1).notes == ()
    (note,) = cost.at(tp=4, b=8).notes
    assert note == "layouts are those of the plan on tp2; a plan made for tp=4, b=8 may have other layouts"
    (note,) = cost.at(cp=2).notes
    assert "cp=2" in note


def test_at_refuses_more_ranks_than_there_are_parts():
    cost = at_cases.planned("llama", "tp2", {}).cost
    assert cost.at(tp=8).step_time_s > 0
    with pytest.raises(LayoutError) as raised:
        cost.at(tp=16)
    assert str(raised.value) == (
        "cost.at(tp=16): the plan's layouts have only 8 shards over tp\n"
        "  why    some of 16 ranks would have no shard; a plan for tp=16 has other layouts\n"
        "  where  model.layers.*.self_attn/scaled_dot_product_attention\n"
        "  try    tp=8 or less, or a plan for tp=16"
    )
