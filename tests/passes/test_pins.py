"""Pins: what is fixed is in the plan, the rest is the best there is around it, and all of it stays exact."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import zoo
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_problems import every_partition, flat_cost, least_cost, pairs_of, problems, random_problem
from traced import plan_of, run_of, verified

import autopart
from autopart.cli.main import main
from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.stage_balance import balance
from autopart.errors import AutopartError
from autopart.ir.facts import facts
from autopart.ir.graph import active_operators
from autopart.ir.mesh import Mesh
from autopart.passes.choose.solve.layout_pins import pinned_layouts, smallest_conflict
from autopart.passes.choose.solve.pairwise_solver import NoSolution
from autopart.passes.choose.solve.shard_axis import ShardingProblem
from autopart.plans.pins import Pins
from autopart.plans.plan import Plan

LAYER, H = "model.layers.*", "transformer.h.*"
LAYOUTS = {
    "llama: row by column": ("llama", {f"{LAYER}.mlp.down_proj.weight": {"tp": "S(0)"}}),
    "llama: attention whole": ("llama", {f"{LAYER}.self_attn": {"tp": "R"}}),
    "llama: one block": ("llama", {"model.layers.1.mlp": {"tp": "R"}}),
    "llama: a weight stored in shards, used whole": (
        "llama", {f"{LAYER}.mlp.down_proj.weight": {"tp": "S(0)"}, f"{LAYER}.mlp.down_proj/linear": {"tp": "P"}}
    ),
    "llama: norms": ("llama", {"*layernorm.weight": {"tp": "S(0)"}}),
    "llama: all whole": ("llama", {"*": {"tp": "R"}}),
    "gpt2: one block": ("gpt2", {"transformer.h.0.mlp.c_fc.weight": {"tp": "S(0)"}}),
    "gpt2: output of an operator": ("gpt2", {f"{H}.attn.c_attn/linear": {"tp": "R"}}),
    "gpt2: sections": ("gpt2", {f"{H}.mlp.c_fc.weight": {"tp": "S(1; sections=2)"}}),
    "gpt2: tied embedding by its other name": ("gpt2", {"lm_head.weight": {"tp": "S(1)"}}),
}  # fmt: skip


def pinned_plan(name, pins, mesh, **options):
    return plan_of(run_of(zoo.ZOO[name]), mesh, pins=Pins.parse(pins), **options)


def traced(name, **sizes):
    return run_of(zoo.ZOO[name], **sizes).traced


def stored_in(plan, model):
    """`{full name: placement}` of all parameters."""
    return {name: plan.placement_text(name, "tp") for name, _ in model.named_parameters()}


# --- layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.large
@pytest.mark.parametrize(
    ("case", "mesh"), [*((case, "tp2") for case in LAYOUTS), *((case, "pp2,tp2") for case in list(LAYOUTS)[::3])]
)
def test_a_pinned_plan_is_exact(case, mesh):
    name, pins = LAYOUTS[case]
    run = run_of(zoo.ZOO[name], rows=2, seq=6)
    free = plan_of(run, mesh)
    plan = Plan.from_json(plan_of(run, mesh, pins=Pins.parse(pins)).to_json())
    assert plan.pins == pins
    stored = stored_in(plan, run.base)
    for pin in Pins.parse(pins).layouts:
        names = [n for n in stored if pin.matches(n)] or (["transformer.wte.weight"] if "lm_head" in pin.name else [])
        assert all(stored[n] == pin.text or (pin.text == "R" and stored[n] == "R(grad P)") for n in names), stored
    assert (plan.parameters, plan.operators) != (free.parameters, free.operators)
    verification = verified(run, mesh, plan)
    assert verification.ok, str(verification)


def test_a_module_pinned_whole_runs_whole():
    plan = pinned_plan("llama", {f"{LAYER}.self_attn": {"tp": "R"}}, "tp2")
    assert not any("S(" in e["tp"] or "P" in e["tp"].replace("(grad P)", "")
                   for key, e in plan.operators.items() if ".self_attn" in key)  # fmt: skip
    assert {e["tp"] for key, e in plan.parameters.items() if ".self_attn" in key} <= {"R", "R(grad P)"}
    assert plan.parameters[f"{LAYER}.mlp.up_proj.weight"] == {"tp": "S(0)"}
    reasons = {row["why"] for row in plan.unsharded if ".self_attn" in row["where"]}
    assert reasons == {"a pin fixes it"}


def test_positions_are_cut_where_they_are_pinned_so():
    run = run_of(zoo.ZOO["gpt2"], rows=2, seq=6)
    plan = plan_of(run, "tp2", pins=Pins.parse({f"{H}.ln_2/layer_norm": {"tp": "S(1)"}}))
    assert plan.operators[f"{H}.ln_2/layer_norm"]["tp"].endswith("-> S(1)")
    assert verified(run, "tp2", plan).ok


@pytest.mark.large
def test_tp_leaves_a_dim_to_dp_that_is_pinned_so():
    run, pins = run_of(zoo.ZOO["llama"], rows=2, seq=6), {"model.layers.1.mlp.down_proj.weight": {"dp": "S(1)"}}
    free, plan = plan_of(run, "dp2,tp2"), plan_of(run, "dp2,tp2", pins=Pins.parse(pins))
    assert stored_in(free, run.base)["model.layers.1.mlp.down_proj.weight"] == "S(1)"
    assert plan.parameters["model.layers.1.mlp.down_proj.weight"] == {"dp": "S(1)", "tp": "S(0)"}
    assert plan.parameters[f"{LAYER}.mlp.down_proj.weight"] == free.parameters[f"{LAYER}.mlp.down_proj.weight"]
    assert verified(run, "dp2,tp2", plan).ok


def test_a_number_splits_a_block_from_the_others():
    plan = pinned_plan("llama", {"model.layers.1.mlp": {"tp": "R"}}, "tp2")
    assert plan.parameters["model.layers.1.mlp.up_proj.weight"] == {"tp": "R"}
    assert plan.parameters["model.layers.*.mlp.up_proj.weight"] == {"tp": "S(0)"}
    assert plan.parameters["model.layers.*.self_attn.q_proj.weight"] == {"tp": "S(0)"}
    assert "model.layers.1.self_attn.q_proj.weight" not in plan.parameters


def test_blocks_with_the_same_pins_share_their_choices():
    trace, pins = traced("llama", num_layers=5), {f"model.layers.{i}.mlp": {"tp": "R"} for i in (1, 3)}
    pinned = pinned_layouts(trace, Mesh.parse("tp2"), Pins.parse(pins), "tp")
    sizes = {
        len(choice.members)
        for choice in ShardingProblem(trace.graph, 2, Hardware.load(), {}, {}, pinned).choices.values()
    }
    assert sizes == {1, 2, 3}


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_rest_is_the_best_there_is(case):
    """The pinned programme has the optimum of one flat programme, and none under that of the free one."""
    name, pins = LAYOUTS[case]
    trace = traced(name)
    pinned = pinned_layouts(trace, Mesh.parse("tp2"), Pins.parse(pins), "tp")
    programme = ShardingProblem(trace.graph, 2, Hardware.load(), {}, {}, pinned)
    found = programme.solve()
    assert found.bound == found.cost and found.cost == pytest.approx(flat_cost(programme), rel=1e-9)
    assert found.cost >= ShardingProblem(trace.graph, 2, Hardware.load(), {}, {}).solve().cost * (1 - 1e-12)


def test_what_is_chosen_anyway_changes_nothing():
    model, batch = zoo.llama()
    free = autopart.plan(model, "tp2", example_kwargs=batch)
    same = autopart.plan(model, "tp2", example_kwargs=batch, pins=dict(free.parameters))
    assert (same.parameters, same.operators, same.cost) == (free.parameters, free.operators, free.cost)


@pytest.mark.large
@settings(max_examples=100, deadline=None)
@given(problems())
def test_a_problem_without_solution_is_told(problem):
    costs, tables = problem
    tables = [(a, b, np.where(np.arange(table.size).reshape(table.shape) % 2, table, np.inf)) for a, b, table in tables]
    least = least_cost(costs, tables)
    for collapse in (True, False):
        pairs = pairs_of(costs, tables)
        if math.isfinite(least):
            assert abs(pairs.solve(collapse).cost - least) < 1e-6
        else:
            with pytest.raises(NoSolution):
                pairs.solve(collapse)


# --- stages --------------------------------------------------------------------------------------------------------


def stage_of(plan, trace):
    """`{module: its stages}`, by the plan's cuts."""
    stage, found = 0, {}
    for node in active_operators(trace.graph):
        stage += facts(node)["key"] in plan.cuts
        found.setdefault(facts(node)["key"].rsplit("/", 1)[0], set()).add(stage)
    return found


@pytest.mark.large
@pytest.mark.parametrize(
    ("name", "mesh", "stages"),
    [
        ("llama", "pp2", {"cut_before": ["model.layers.1"]}),
        ("llama", "pp2", {"together": [["model.layers.*"]]}),
        ("llama", "pp2,tp2", {"together": [["model.layers.1", "model.norm", "lm_head"]]}),
        ("gpt2", "pp2", {"cut_before": ["transformer.h.1.mlp"], "together": [["transformer.h.0", "transformer.wte"]]}),
        ("gpt2", "pp3", {"cut_before": ["transformer.h.1.attn.c_proj/linear"], "together": [["transformer.h.*.mlp"]]}),
    ],
)  # fmt: skip
def test_pinned_stages_are_kept_and_exact(name, mesh, stages):
    run = run_of(zoo.ZOO[name], rows=4, seq=6)
    plan = plan_of(run, mesh, pins=Pins.parse({"stages": stages}))
    at = stage_of(plan, run.traced)
    for cut in stages.get("cut_before", ()):
        assert any(key == cut or key.startswith((f"{cut}.", f"{cut}/")) for key in plan.cuts), plan.cuts
    for names in stages.get("together", ()):
        for number in ("0", "1"):
            wanted = [n.replace("*", number) for n in names]
            inside = [s for module, s in at.items() if any(module == w or module.startswith(w + ".") for w in wanted)]
            assert inside and len(set.union(*inside)) == 1
    assert verified(run, mesh, plan).ok
    free = plan_of(run, mesh)
    assert max(s["flops"] for s in plan.stages) >= 0.98 * max(s["flops"] for s in free.stages)


@pytest.mark.parametrize("seed", range(300))
def test_balance_around_beginnings_is_the_best_of_all_partitions(seed):
    weights, crossing, num_stages = random_problem(seed)
    begins = frozenset(i for i in range(1, len(weights)) if (seed * 7 + i * 5) % 6 == 0)
    found = balance(weights, crossing, num_stages, begins)
    possible = [
        max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, len(weights))))
        for cuts in itertools.combinations(
            [i for i in range(1, len(weights)) if math.isfinite(crossing[i])], num_stages - 1
        )
        if begins <= set(cuts)
    ]
    assert (found is None) == (not possible)
    if found is not None:
        assert begins <= set(found.cuts) and len(found.cuts) == num_stages - 1
        allowed = max(min(possible), 0.0) * 1.015 * (1 + 1e-9)
        assert max(found.loads) <= allowed
        assert min(heaviest for _, (heaviest, _) in every_partition(weights, crossing, num_stages)) <= allowed


# --- conflicts -----------------------------------------------------------------------------------------------------


def test_a_conflict_is_a_smallest_one():
    assert smallest_conflict(list("abcdef"), lambda left: not {"b", "e"} <= set(left)) == ["b", "e"]
    assert smallest_conflict(list("abc"), lambda left: not left) in (["a"], ["c"])
    assert smallest_conflict(list("abcde"), lambda left: len(left) < 4 and not {"a", "e"} <= set(left)) == ["a", "e"]
    assert smallest_conflict(list("abcde"), lambda left: len(left) < 4) == list("bcde")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.frozensets(st.sampled_from("abcdefg"), min_size=1, max_size=5), min_size=1, max_size=4))
def test_no_conflict_has_a_pin_too_many(clashes):
    def hold(left):
        return not any(clash <= set(left) for clash in clashes)

    found = smallest_conflict("abcdefg", hold)
    assert not hold(found) and all(hold([pin for pin in found if pin != other]) for other in found)
    fewest = min(map(len, clashes))
    assert len(found) == fewest or fewest > 2


@pytest.mark.large
def test_each_pin_of_a_conflict_is_needed():
    pins = {
        "model.norm": {"tp": "R"},
        f"{LAYER}.mlp.up_proj.weight": {"tp": "S(1)"},
        f"{LAYER}.mlp.up_proj/linear": {"tp": "S(2)"},
        f"{LAYER}.self_attn.o_proj.weight": {"tp": "R"},
    }
    with pytest.raises(AutopartError, match="these pins conflict") as error:
        pinned_plan("llama", pins, "tp2")
    named = [name for name in pins if f"'{name}'" in str(error.value).splitlines()[0]]
    assert named == [f"{LAYER}.mlp.up_proj.weight", f"{LAYER}.mlp.up_proj/linear"]
    for left_out in named:
        pinned_plan("llama", {name: place for name, place in pins.items() if name != left_out}, "tp2")


def test_a_conflict_names_the_line_of_its_file(tmp_path):
    path = tmp_path / "pins.json"
    path.write_text(
        '{"stages": {\n  "cut_before": ["layers.2", "layers.3"],\n  "together": [["layers.2", "layers.5"]]}}'
    )
    with pytest.raises(AutopartError, match=r"where  line 2, line 3\n"):
        pinned_plan("skip_mlp", path, "pp4")


# --- where they are written ----------------------------------------------------------------------------------------


PINS = {"layers.*.weight": {"tp": "S(1)"}, "head": {"tp": "R"}, "stages": {"cut_before": ["layers.4"]}}


def test_pins_survive_their_data():
    assert Pins.parse(PINS).as_data() == PINS
    assert Pins.parse(Pins.parse(PINS)) == Pins.parse(PINS) and not Pins.parse({}) and not Pins.parse(None)


def test_parallelize_takes_pins_and_the_plan_shows_them():
    model, batch = zoo.skip_mlp()
    pm = autopart.parallelize(model, "pp1,tp1", example_kwargs=batch, pins={"head": {"tp": "R"}})
    assert pm.plan.pins == {"head": {"tp": "R"}}
    assert "pins         head tp:R\n" in pm.plan.explain()
    again = autopart.parallelize(model, "pp1,tp1", example_kwargs=batch, plan=pm.plan, pins=pm.plan.pins)
    assert again.plan == pm.plan


def test_explain_shows_stages_too():
    text = pinned_plan("skip_mlp", PINS | {"stages": {"together": [["layers.6", "head"]]}}, "pp2,tp2").explain()
    assert "pins         layers.*.weight tp:S(1); head tp:R; layers.6, head together\n" in text


def model_for_the_command_line():
    return zoo.skip_mlp()


def test_the_command_line_reads_pins_from_a_file(tmp_path):
    path = tmp_path / "pins.json"
    path.write_text(json.dumps(PINS))
    model = ["--model", "test_pins:model_for_the_command_line", "--mesh", "pp2,tp2"]
    result = CliRunner().invoke(main, ["plan", *model, "--pins", str(path)])
    assert result.exit_code == 0, result.output
    plan = Plan.from_json(result.stdout)
    assert plan.pins == PINS and plan.parameters["head.weight"] == {"tp": "R"} and plan.cuts == ("layers.4/linear",)
    path.write_text('{\n"head": {"tp": "S"}}')
    result = CliRunner().invoke(main, ["plan", *model, "--pins", str(path)])
    assert (
        result.exit_code == 2
        and "the pin 'head' has the invalid placement 'S'" in result.stderr
        and "line 2" in result.stderr
    )
