"""`autopart diff`: what differs in meaning is reported, and only that."""

from __future__ import annotations

import dataclasses

import pytest
import zoo
from click.testing import CliRunner

import autopart
from autopart.cli.main import main
from autopart.plans.plan import Plan

UP = "model.layers.*.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def llama():
    return zoo.llama(rows=4, seq=6)


@pytest.fixture(scope="module")
def plan(llama) -> Plan:
    model, batch = llama
    return autopart.plan(model, "pp2,tp2", example_kwargs=batch)


def changed(plan: Plan, **fields) -> Plan:
    return dataclasses.replace(plan, **fields)


def rows(plan: Plan, other: Plan) -> list[tuple[str, str, str, str]]:
    return [dataclasses.astuple(row) for row in plan.diff(other).rows]


def test_a_plan_is_the_same_as_itself(plan):
    found = plan.diff(Plan.from_json(plan.to_json()))
    assert not found and str(found) == "first and second are the same plan\n"


def test_patterns_and_full_names_mean_the_same(plan):
    full = {UP.replace("*", str(number)): {"tp": "S(0)"} for number in (0, 1)}
    by_name = {name: place for name, place in plan.parameters.items() if name != UP} | full
    assert plan.parameters[UP] == {"tp": "S(0)"}
    assert rows(plan, changed(plan, parameters=by_name)) == []
    assert rows(changed(plan, parameters=by_name), plan) == []
    overridden = plan.parameters | {UP: {"tp": "R"}} | full  # a pattern that holds for no layer
    assert rows(plan, changed(plan, parameters=overridden)) == []
    assert rows(plan, changed(plan, mesh={"dp": 1, **plan.mesh}, notes=("another",), pins={"*": {"dp": "R"}})) == []


def test_what_runs_whole_need_not_be_said(plan):
    said = plan.operators | {"model.norm/mul": {"tp": "R, R -> R"}}
    if "model.norm/mul" not in plan.operators:
        assert rows(plan, changed(plan, operators=said)) == []
    silent = {name: entry for name, entry in plan.operators.items() if name != "lm_head/linear"}
    text = plan.operators["lm_head/linear"]["tp"]
    assert rows(plan, changed(plan, operators=silent)) == [("operators", "lm_head/linear", text, "replicated")]


def test_a_layer_that_differs_is_named(plan):
    one = plan.parameters | {UP.replace("*", "1"): {"tp": "R"}}
    assert rows(plan, changed(plan, parameters=one)) == [("parameters", f"{UP}  of 1", "tp:S(0)", "R")]
    all_ = plan.parameters | {UP: {"tp": "R"}}
    assert rows(plan, changed(plan, parameters=all_)) == [("parameters", UP, "tp:S(0)", "R")]


def test_every_part_is_compared(plan):
    first, *rest = plan.collectives
    cases = {
        "mesh": {"mesh": {"pp": 2, "tp": 4}},
        "model": {"model": {**plan.model, "mode": "eval"}},
        "inputs": {"inputs": {"input_ids": {"shape": [8, 6], "dtype": "int64"}, "labels": plan.inputs["labels"]}},
        "schedule": {"schedule": dataclasses.replace(plan.schedule, microbatches=2)},
        "parameters": {"parameters": {**plan.parameters, "model.norm.weight": {"tp": "S(0)"}}},
        "operators": {"operators": {**plan.operators, "lm_head/linear": {"tp": "R, R -> R"}}},
        "recompute": {"recompute": "full"},
        "zero": {"zero": 1},
        "prefetch": {"prefetch": 2},
        "scatter_sends": {"scatter_sends": True},
        "dp_sync": {"dp_sync": {"strategy": "local", "every": 4}},
        "balance": {"balance": 1.5},
        "sequence_dims": {"sequence_dims": {"input_ids": 1}},
        "compile": {"compile": True},
        "precision": {"precision": "bf16"},
        "reduce_dtype": {"reduce_dtype": "bf16"},
        "cuts": {"cuts": ("model.layers.1.mlp/mul",)},
        "collectives": {"collectives": (dataclasses.replace(first, count=first.count + 1), *rest)},
        "rules": {"rules": {"mylib::op": {"lines": ["a -> a"]}}},
        "cost": {"cost": {**plan.cost, "step_time_s": 1.0}},
        "hardware": {"hardware": "h100-80gb-sxm"},
    }
    fields = {field.name for field in dataclasses.fields(Plan)}
    not_compared = {
        "stages",
        "unsharded",
        "memory",
        "timing",
        "notes",
        "pins",
        "text",
        "reasons",
        "axes",
        "alternatives",
    }  # what follows, and how the plan came to be
    assert set(cases) == fields - not_compared
    for part, fields_ in cases.items():
        found = rows(plan, changed(plan, **fields_))
        assert {row[0] for row in found} == {part}, (part, found)


def test_the_table_reads_well(llama, plan):
    model, batch = llama
    pins = {"model.layers.1.mlp": {"tp": "R"}, "stages": {"cut_before": ["model.layers.1"]}}
    other = autopart.plan(model, "pp2,tp2", example_kwargs=batch, microbatches=2, pins=pins)
    text = plan.diff(other).table("a.json", "b.json")
    lines = {line.split("  ")[1] if line.startswith("  ") else line.split("  ")[0]: line for line in text.splitlines()}
    assert lines["microbatches"].split() == ["microbatches", "4", "2"]
    assert lines[UP].split() == [UP, "of", "1", "tp:S(0)", "R"]
    assert "model.layers.1.input_layernorm/pow" in lines["stage 1 begins with"]
    assert "tp all_reduce forward, a microbatch" in text and "step_time_s" in text
    assert [line for line in text.splitlines() if line and not line.startswith(" ")] == [
        "schedule", "parameters", "operators", "cuts", "collectives", "cost",
    ]  # fmt: skip
    assert max(map(len, text.splitlines())) <= 140


def test_the_command_line(plan, tmp_path):
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    plan.save(a)
    changed(plan, parameters=plan.parameters | {"lm_head.weight": {"tp": "R"}}).save(b)
    same = CliRunner().invoke(main, ["diff", a, a])
    assert (same.exit_code, same.output) == (0, f"{a} and {a} are the same plan\n")
    other = CliRunner().invoke(main, ["diff", a, b])
    assert other.exit_code == 1
    heading, part, row = other.output.splitlines()
    assert heading.split() == [a, b] and part == "parameters" and row.split() == ["lm_head.weight", "tp:S(0)", "R"]
    missing = CliRunner().invoke(main, ["diff", a, "nowhere.json"])
    assert missing.exit_code == 2 and "there is no plan at nowhere.json" in missing.stderr


def test_plans_on_other_meshes_are_summarised(llama, plan):
    model, batch = llama
    other = autopart.plan(model, "dp2", example_kwargs=batch)
    found = plan.diff(other)
    labels = [label.strip() for label, _, _ in found.summary]
    assert labels == ["summary", "ranks", "step", "memory", "sent"]
    change = 100 * (other.cost["step_time_s"] / plan.cost["step_time_s"] - 1)
    assert f"({change:+.1f} %)" in found.summary[2][2] and found.summary[1][1:] == ("4", "2")
    assert "summary" in str(found).splitlines()[1] and plan.diff(changed(plan, zero=1)).summary == ()
