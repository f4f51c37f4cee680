"""The cost as formulas: what they say at other sizes is what is counted there, and what papers derive by hand."""

import numpy as np
import pytest
import sympy
import zoo
from cost_models import gpt

import autopart
from autopart.cost.count.operator_counts import counted
from autopart.cost.formula.step_formula import SIZES, Formula, compiled
from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.operator_work import Sizes
from autopart.errors import OptionError, PlanError
from autopart.ir.facts import facts
from autopart.ir.mesh import Mesh
from autopart.options import Options
from autopart.plans.plan import Plan
from autopart.recipe.make_plan import drafted, prepare
from autopart.tracing.trace_model import bind_call

b, s, tp, ep, cp, dp, dpr, pp, m, v = SIZES


def plan(mesh="dp1", model=None, **options):
    model, batch = model or gpt()
    return autopart.plan(model, mesh, example_kwargs=batch, **options)


def works(mesh, **sizes):
    """What every operator of a GPT does, by part of a step."""
    model, batch = gpt(hidden=96, heads=8, vocabulary=504, **sizes)
    traced = prepare(model, bind_call(model, (), batch))
    made = drafted(traced, Mesh.parse(mesh), Options(sequence_parallel=False))
    (found,) = counted(traced, made.program, made.walks)
    parts = ("forward", "input_backward", "weight_backward")
    return [(facts(one.node).get("key"), w) for one in found for part in parts for w in getattr(one, part)]


@pytest.mark.few
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("times", "mesh", "sizes"),
    [
        pytest.param(Sizes(1, 2, 1), "tp2", {"tokens": 64}, id="tokens"),
        pytest.param(Sizes(2, 1, 1), "tp2", {"rows": 16}, id="rows"),
        pytest.param(Sizes(1, 1, 2), "tp4", {}, id="tp", marks=pytest.mark.whole),
    ],
)
def test_a_count_at_other_sizes_is_what_is_counted_there(times, mesh, sizes, attention):
    here, there = works("tp2", attention=attention), works(mesh, attention=attention, **sizes)
    assert [(key, work.name) for key, work in here] == [(key, work.name) for key, work in there]
    off = {
        key for (key, one), (_, other) in zip(here, there, strict=True)
        if one.size.at(times) != pytest.approx(other.size.value)
        or one.flops.at(times) != pytest.approx(other.flops.value)
    }  # fmt: skip
    # Labels are padded by one token; a mask is looked up by position.
    assert off <= {"/pad", "transformer/index", "transformer/index#1"}


@pytest.mark.large
def test_matrix_work_is_the_published_formula():
    """72 B s l h^2 (1 + s/6h + V/12lh): Korthikanti et al. 2022, appendix A; a forward is a third of it."""
    hidden, layers, vocabulary = map(sympy.Integer, (64, 3, 120))
    published = 72 * b * s * layers * hidden**2 * (1 + s / (6 * hidden) + vocabulary / (12 * layers * hidden))
    assert sympy.simplify(3 * plan().cost.forward_flops - published) == 0


def test_full_recomputation_runs_the_blocks_again():
    """96 B s l h^2 (1 + s/6h + V/16lh): Narayanan et al. 2021, equation 3; the head is not run again."""
    hidden, layers, vocabulary, rows, tokens = 64, 3, 120, 8, 32
    found = plan(recompute="full").timing
    published = 96 * rows * tokens * layers * hidden**2
    published *= 1 + tokens / (6 * hidden) + vocabulary / (16 * layers * hidden)
    assert 3 * found["forward_flops"] + found["recomputed_flops"] == pytest.approx(published, rel=1e-12)


def test_parameters_are_the_published_formula():
    """12 l h^2 (1 + 13/12h + (V+s)/12lh): Narayanan et al. 2021, equation 2, which leaves out the last norm (2 h)."""
    hidden, layers, vocabulary, positions = 64, 3, 120, 64
    published = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocabulary + positions) / (12 * layers * hidden))
    assert plan().cost.formula.totals.stored.value / 4 == pytest.approx(published + 2 * hidden)


def error_of(found):
    """The closed formula over the simulated step, without the term of what it leaves out."""
    alone = found.cost.subs(found.cost._values({}) | {"r": 0})
    return abs(float(alone) / autopart.simulate(found).step_time_s - 1)


@pytest.mark.few
@pytest.mark.parametrize(
    ("mesh", "options"),
    [("dp1", {}), ("dp1", {"microbatches": 4}), ("tp2", {}), ("tp4", {"sequence_parallel": True}), ("dp2,tp2", {}),
     ("dp2", {"zero": 3}), ("tp2", {"recompute": "full"}), ("tp2", {"recompute": "selective"})],
    ids=str,
)  # fmt: skip
def test_without_a_pipeline_the_formula_is_the_simulated_step(mesh, options):
    found = plan(mesh, **options)
    figures = found.cost.at()
    # Sums of gradients over `tp` (norms under sequence parallelism) and odd buckets are the simulator's alone.
    assert error_of(found) < 0.05
    assert float(figures) == pytest.approx(sum(figures.parts_s.values()))


@pytest.mark.large
@pytest.mark.parametrize("name", ["llama", "bert", "t5", "phi3"])
def test_every_model_has_formulas(name):
    found = plan("tp2", zoo.ZOO[name](), sequence_parallel=False)
    assert error_of(found) < 0.05
    assert found.cost.at(b=64).step_time_s > found.cost.at().step_time_s


@pytest.mark.large
def test_a_plan_from_a_file_has_the_same_formulas():
    found = plan("pp2,tp2")
    again = Plan.from_json(found.to_json())
    assert again.cost.expression == found.cost.expression and again == found
    assert again.cost.at(tp=4) == found.cost.at(tp=4)


@pytest.mark.large
def test_forms():
    cost = plan("tp2").cost
    assert cost["gap"] == 0 and {"matmul", "bubble", "tp all_reduce", "optimizer"} <= set(cost.parts)
    assert cost.parts["bubble"].subs({pp: 1}) == 0 and "Max" in str(cost) and r"\max" in cost.latex()
    assert tp not in cost.subs(tp=8).free_symbols and tp in cost.free_symbols
    assert cost.subs({tp: 8}) == cost.subs({"tp": 8}) == cost.subs("tp", 8) == cost.subs(tp=8)
    assert set(cost.memory_parts) >= {"parameters", "gradients", "optimizer", "activations", "buffers"}
    assert cost.at(tp=1, m=4, pp=3).parts_s["idle"] > 0


@pytest.mark.few
@pytest.mark.parametrize("call", [lambda c: c.at(x=2), lambda c: c.at(tp=0), lambda c: c.subs(zz=1)])
def test_other_symbols_are_refused(call):
    with pytest.raises(OptionError):
        call(plan().cost)


def test_a_plan_without_timing_has_no_formulas():
    data = Plan.from_json(plan().to_json())
    bare = Plan(**{name: getattr(data, name) for name in ("mesh", "model", "inputs", "schedule")},
                parameters={}, operators={})  # fmt: skip
    with pytest.raises(PlanError, match="the plan has no formulas"):
        bare.cost.at()


@pytest.mark.large
def test_where_one_plan_overtakes_another():
    model = gpt(hidden=256, layers=2, tokens=64, rows=8)
    first, second = plan("tp2", model), plan("dp2", model)
    at = autopart.crossover(first, second, over="s", high=1e6)
    assert at is not None and 1 < at < 1e6
    order = [float(first.cost.at(s=n)) < float(second.cost.at(s=n)) for n in (at / 1.05, at * 1.05)]
    assert order[0] != order[1]
    with pytest.warns(UserWarning, match=r"found none: both plans take equal time from s=1 to s=1.049e\+06"):
        assert autopart.crossover(first, first) is None


def test_a_sweep_is_one_vectorised_call():
    formula = Formula(plan("tp2").cost.formula.totals, Hardware.load())
    number = 10_000
    rows = np.resize([1.0, 2.0, 4.0, 8.0], number)
    # b, s, tp, ep, cp, dp, dpr, pp, m, v, and the ranks of each group in one node
    times, sizes = compiled([formula])(rows, 32, 2, 1, 1, 8, 1, 4, np.arange(1, number + 1), 1, 2, 1, 1, 4, 1, 1)
    assert times.shape == (number,)
    assert np.all(np.diff(times[::4]) > 0) and np.all(np.asarray(sizes) > 0)
