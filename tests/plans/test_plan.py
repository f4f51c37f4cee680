"""A plan is data: it is written, read, edited and run again, and every wrong edit is reported with its line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import jsonschema
import pytest
import torch
from torch import nn
from traced import plan_of, run_of, verified
from zoo import ZOO, gpt2, skip_mlp

import autopart
from autopart.errors import AutopartError
from autopart.ir.facts import facts
from autopart.ir.graph import pattern_of
from autopart.ir.mesh import Mesh
from autopart.passes.choose.plan_codec import decode
from autopart.passes.pass_pipeline import PassError
from autopart.passes.write.lower import lower
from autopart.plans.plan import Plan, schema
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call

EDITED = ("gpt2", "llama", "bert", "phi3", "t5")


SMALL = {"num_layers": 1, "rows": 2, "seq": 6}


def small(name: str) -> tuple[nn.Module, dict]:
    return ZOO[name](**SMALL)


# --- written and read ----------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2", "dp2,pp2,tp2"])
@pytest.mark.parametrize("name", ["gpt2", "phi3", "conv_net"])
def test_a_plan_survives_its_file(name, mesh, tmp_path):
    plan = plan_of(run_of(ZOO[name]), mesh)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.to_json() == plan.to_json() == (tmp_path / "plan.json").read_text()
    jsonschema.validate(json.loads(plan.to_json()), schema(), cls=jsonschema.Draft202012Validator)
    assert list(json.loads(plan.to_json())["mesh"]) == [axis for axis in ("pp", "dp", "tp") if axis in mesh]


def test_a_plan_of_an_input_that_needs_a_gradient_survives_its_file(tmp_path):
    x = torch.randn(4, 8, requires_grad=True)
    plan = autopart.plan(nn.Linear(8, 8), "tp2", example_args=(x,))
    plan.save(tmp_path / "plan.json")
    assert plan.model["mode"] == "train+input gradients" and Plan.load(tmp_path / "plan.json") == plan


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.large
def test_a_plan_does_not_grow_with_depth():
    """Llama on the meta device: repeated blocks are written once, so 32 layers take as much text as 8."""
    from transformers import LlamaConfig, LlamaForCausalLM

    lengths = {}
    for layers in (8, 32):
        config = LlamaConfig(
            hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers, num_attention_heads=32
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
            ids = torch.zeros(8, 128, dtype=torch.int64)
        plan = autopart.plan(model, "dp2,pp4,tp8", example_kwargs={"input_ids": ids, "labels": ids})
        lengths[layers] = len(plan.to_json())
    assert lengths[32] < 1.05 * lengths[8] < 100_000
    assert plan.parameters["model.layers.*.mlp.down_proj.weight"] == {"tp": "S(1)"}
    assert len(plan.parameters) == 12
    assert not any(part.isdigit() for name in plan.operators for part in name.split("/")[0].split("."))
    assert len(plan.cuts) == 3


def deterministic_text() -> str:
    """The plans that two processes must agree on."""
    built = [(small(name), mesh) for name, mesh in (("gpt2", "tp2"), ("phi3", "pp2,tp2"))]
    return "".join(autopart.plan(model, mesh, example_kwargs=batch).to_json() for (model, batch), mesh in built)


@pytest.mark.large
def test_plans_are_the_same_in_every_process():
    program = "import test_plan; print(test_plan.deterministic_text())"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # another order of sets than here
    text = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout.strip()  # fmt: skip
    assert text == deterministic_text().strip()


# --- run again without choosing ------------------------------------------------------------------------------------


def printed(pm: autopart.ParallelModule, num_stages: int) -> str:
    return "\n".join(str(pm.graph(stage).graph) for stage in range(num_stages))


@pytest.fixture
def forbid_choosing(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("a given plan leaves nothing to choose")

    def forbid():
        monkeypatch.setattr("autopart.passes.choose.decide.cheapest", forbidden)
        monkeypatch.setattr("autopart.passes.choose.plan_codec.fit_around", forbidden)
        monkeypatch.setattr("autopart.passes.choose.decide.pinned_partition", forbidden)

    return forbid


def test_the_solver_is_what_the_fixture_forbids(forbid_choosing):
    model, batch = small("gpt2")
    forbid_choosing()
    for mesh in ("tp2", "pp2"):
        with pytest.raises(PassError, match=r"AssertionError: .*nothing to choose"):
            autopart.plan(model, mesh, example_kwargs=batch)


@pytest.mark.few
@pytest.mark.parametrize("name", ZOO)
def test_a_plan_from_a_file_gives_the_identical_program(name, tmp_path, forbid_choosing):
    run, mesh = run_of(ZOO[name]), Mesh.parse("pp2,tp2")
    path = tmp_path / "plan.json"
    chosen = plan_of(run, "pp2,tp2")
    chosen.save(path)
    trace = run.traced
    outputs = list(trace.graph.output_node().args[0])
    first = lower(trace, decode(trace, chosen, mesh), outputs, whole_outputs=True)
    forbid_choosing()
    assert verified(run, "pp2,tp2", Plan.load(path)).ok
    second = lower(trace, decode(trace, Plan.load(path), mesh), outputs, whole_outputs=True)
    for one, two in zip(first.stages, second.stages, strict=True):
        assert str(one.graph.graph) == str(two.graph.graph)
        assert str(one.prologue.graph) == str(two.prologue.graph)
    assert first.parameters == second.parameters


@pytest.mark.large
def test_verify_runs_a_plan_from_a_file(tmp_path, forbid_choosing):
    model, batch = skip_mlp()
    autopart.plan(model, "pp2,tp2", example_kwargs=batch).save(tmp_path / "plan.json")
    forbid_choosing()
    assert autopart.verify(model, "pp2,tp2", example_kwargs=batch, plan=tmp_path / "plan.json").ok


def test_parallelize_runs_a_plan_from_a_file(tmp_path, monkeypatch, forbid_choosing):
    """On one rank; `test_errors` and the runtime's tests run more."""
    model, batch = small("gpt2")
    path = tmp_path / "plan.json"
    first = autopart.parallelize(model, "tp1", example_kwargs=batch)
    first.plan.save(path)
    forbid_choosing()
    second = autopart.parallelize(model, "tp1", example_kwargs=batch, plan=path)
    assert second.plan == first.plan
    assert printed(second, 1) == printed(first, 1)


# --- edited --------------------------------------------------------------------------------------------------------


def edits(name: str) -> list[tuple[str, str]]:
    """For every parameter pattern of a model, its other layouts: whole, or cut along any dim that divides."""
    run = run_of(ZOO[name], **SMALL)
    plan = plan_of(run, "tp2")
    shapes = {pattern_of(n): p.shape for n, p in run.parameters.items()} | {
        n: p.shape for n, p in run.parameters.items()
    }
    return [
        (pattern, text)
        for pattern, entry in plan.parameters.items()
        for text in ("R", "S(0)", "S(1)")
        if text != entry["tp"] and (text == "R" or divides(shapes[pattern], int(text[2])))
    ]


def divides(shape: torch.Size, dim: int) -> bool:
    return dim < len(shape) and shape[dim] % 2 == 0


@pytest.mark.large
@pytest.mark.parametrize("name", EDITED)
def test_any_layout_of_any_parameter_stays_exact(name):
    run = run_of(ZOO[name], **SMALL)
    plan = plan_of(run, "tp2")
    tried = edits(name) if name in ("gpt2", "phi3") else dict(edits(name)).items()  # all, or one per parameter
    assert {pattern for pattern, _ in tried} == set(plan.parameters)
    for pattern, text in tried:
        edited = dataclasses.replace(plan, parameters={**plan.parameters, pattern: {"tp": text}})
        verification = verified(run, "tp2", edited)
        assert verification.ok, f"{name}: {pattern} as {text}: {verification}"


@pytest.mark.few
@pytest.mark.parametrize("name", EDITED)
def test_an_edited_weight_is_stored_and_read_as_edited(name):
    """Where the rule of the operator that reads it has such a strategy, nothing converts the weight on its way."""
    run = run_of(ZOO[name], **SMALL)
    plan, trace = plan_of(run, "tp2"), run.traced
    outputs = list(trace.graph.output_node().args[0])
    mesh, followed = Mesh.parse("tp2"), 0
    for pattern, text in edits(name):
        edited = dataclasses.replace(plan, parameters={**plan.parameters, pattern: {"tp": text}})
        program = lower(trace, decode(trace, edited, mesh), outputs, whole_outputs=True)
        names = [n for n in program.parameters if pattern in (n, pattern_of(n))]
        assert {str(program.parameters[n].layout["tp"]) for n in names} == {text}
        (graph,) = [stage.graph.graph for stage in program.stages]
        for parameter in [n for n in trace.graph.find_nodes(op="get_attr") if n.target in names]:
            weights = [parameter, *(user for user in parameter.users if facts(user)["role"] == "weight")]
            readers = [user for weight in weights for user in weight.users if user not in weights]
            if len(readers) == 1 and facts(readers[0])["pattern"].flops and text != "R":
                moved = [n for n in graph.nodes if facts(n).get("origin") in {w.name for w in weights}]
                moved = [n for n in moved if "autopart" in str(n.target)]
                assert not moved, f"{parameter.target} as {text}: {moved}"
                followed += 1
    assert followed


@pytest.mark.few
@pytest.mark.parametrize("name", EDITED)
def test_other_cuts_stay_exact(name):
    run = run_of(ZOO[name], rows=2, seq=6)
    plan = plan_of(run, "pp2")
    keys = [facts(n)["key"] for n in run.traced.graph.nodes if facts(n).get("role") == "active" and "key" in facts(n)]
    tried = 0
    for key in keys[3 :: max(1, len(keys) // 5)]:
        try:
            verification = verified(run, "pp2", dataclasses.replace(plan, cuts=(key,)))
        except AutopartError as error:
            assert "a value without gradient would have to be sent" in str(error)
            continue
        assert verification.ok, f"{name}: cut before {key}: {verification}"
        tried += 1
    assert tried >= 3


def test_an_entry_for_a_full_name_overrides_its_pattern():
    model, batch = gpt2(rows=2, seq=6)
    plan = autopart.plan(model, "tp2", example_kwargs=batch)
    name = "transformer.h.1.mlp.c_fc.weight"
    edited = dataclasses.replace(plan, parameters={**plan.parameters, name: {"tp": "R"}})
    trace = prepare(model, bind_call(model, (), batch))
    program = lower(trace, decode(trace, edited, Mesh.parse("tp2")), list(trace.graph.output_node().args[0]), True)
    stored = {n: str(p.layout["tp"]) for n, p in program.parameters.items()}
    assert (stored[name], stored[name.replace("1", "0")]) == ("R", "S(1)")
    assert autopart.verify(model, "tp2", example_kwargs=batch, plan=edited).ok


# --- wrong edits ---------------------------------------------------------------------------------------------------

CUT = "layers.5/linear"
HEAD = '"head.weight": {"tp": "S(1; sections=2)"}'
WRONG = {
    # name: (what stands there, what is written instead, the texts the error must have; {line} is where it was written)
    "bad JSON": ('"schedule": {', '"schedule": {,', ["is not JSON", "Expecting property name", "{line}"]),
    "empty file": (None, "", ["is empty"]),
    "missing section": ('"parameters": {', '"parametrs": {', ["not a valid plan", "'parameters' is a required "
    "property"]),
    "extra section": (
        '"hardware"', '"extra": 1,\n  "hardware"', ["not a valid plan", "'extra' was unexpected", "{line}"],
    ),
    "other format": ("autopart-plan/1", "autopart-plan/9", ["not a valid plan", "format", "autopart-plan/1", "{line}"]),
    "no placement": (
        HEAD, '"head.weight": {"tp": "S1"}', ["head.weight.tp", "'S1'", "{line}"],
    ),
    "no axis": (HEAD, '"head.weight": {"xp": "S(1)"}', ["head.weight", "'xp'", "{line}"]),
    "an axis of the batch": (
        HEAD, '"head.weight": {"tp": "S(0)", "dp": "S1"}', ["head.weight", "dp", "{line}"],
    ),
    "unknown parameter": ('"head.bias"', '"head.bia"', ["layout for 'head.bia'", "not a parameter of the "
    "model", "{line}"]),
    "unknown operator": (
        '"head/linear"', '"head/liner"', ["names 'head/liner'", "not an operator of the model", "{line}"],
    ),
    "no such dim": (
        HEAD, '"head.weight": {"tp": "S(2)"}', ["layout S(2) of", "[32, 64]", "{line}"],
    ),
    "sections that do not divide": (
        HEAD, '"head.weight": {"tp": "S(1; sections=3)"}', ["size 64", "tp=2", "{line}"],
    ),
    "a stored sum": ('"head.bias": {"tp": "R"}', '"head.bias": {"tp": "P"}', ["layout P of", "partial sum", "{line}"]),
    "not in the rule": (
        '"S(1; sections=2), S(1; sections=2) -> P"', '"S(1; sections=2), S(1; sections=2) -> R"',
        ["sections=2) -> R'", "rule does not allow", "linear at", "{line}"],
    ),
    "unknown cut": (CUT + '"', 'layers.5/liner"', ["at 'layers.5/liner'", "layers.5/linear", "{line}"]),
    "cut at the start": (CUT + '"', 'layers.0/linear"', ["'layers.0/linear'", "a stage would be empty", "line"]),
    "too many cuts": (f'"{CUT}"', f'"{CUT}", "layers.7/linear"', ["has 2 stage boundaries", "2 stages need 1", "line"]),
    "too few cuts": (f'"{CUT}"', "", ["has 0 stage boundaries", "2 stages need 1", "line"]),
    "unknown schedule": ('"name": "1f1b"', '"name": "2f2b"', ["schedule.name", "'2f2b'", "gpipe", "{line}"]),
    "batch that does not divide": (
        '"microbatches": 8', '"microbatches": 3', ["8 samples", "microbatches=3", "not a multiple of 3", "1, 2, 4, 8"],
    ),
    "another mesh": ('"pp": 2', '"pp": 4', ["is for the mesh pp4,tp2, not pp2,tp2", "{line}"]),
    "another model": ('"fingerprint": "', '"fingerprint": "0', ["is for another model than this SkipMLP", "{line}"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def skip_plan() -> tuple[nn.Module, dict, str]:
    model, batch = skip_mlp()
    plan = autopart.plan(model, "pp2,tp2", example_kwargs=batch)
    return model, batch, dataclasses.replace(plan, cuts=(CUT,)).to_json()


@pytest.mark.parametrize("edit", WRONG)
def test_a_wrong_edit_is_told_with_its_line(edit, skip_plan, tmp_path):
    model, batch, text = skip_plan
    old, new, expected = WRONG[edit]
    assert old is None or old in text, f"the plan to edit has no {old}:\n{text}"
    edited = new if old is None else text.replace(old, new, 1)
    path = tmp_path / "plan.json"
    path.write_text(edited)
    line = f"line {edited[: edited.find(new) + len(new)].count(chr(10)) + 1}"
    if edit == "extra section":
        line = f"line {edited[: edited.find('extra')].count(chr(10)) + 1}"
    with pytest.raises(AutopartError) as error:
        autopart.verify(model, "pp2,tp2", example_kwargs=batch, plan=path)
    missing = [part for part in expected if part.format(line=line) not in str(error.value)]
    assert not missing, f"{missing} ({line}) not in\n{error.value}"


def test_cuts_out_of_order_are_told(skip_plan, tmp_path):
    model, batch, _ = skip_plan
    plan = autopart.plan(model, "pp3", example_kwargs=batch)
    plan = dataclasses.replace(plan, cuts=("layers.5/linear", "layers.2/linear"))
    with pytest.raises(
        AutopartError, match=r"at 'layers.2/linear'\n.*a stage would be empty: 'cuts' must be in the order"
    ):
        autopart.verify(model, "pp3", example_kwargs=batch, plan=plan)


@pytest.mark.parametrize("option", [{"microbatches": 2}, {"schedule": "gpipe"}, {"virtual_stages": 2}], ids=str)
@pytest.mark.parametrize("call", ["parallelize", "verify"])
def test_an_option_may_not_contradict_the_plan(call, option, skip_plan):
    model, batch, text = skip_plan
    ((name, asked),) = option.items()
    with pytest.raises(AutopartError, match=f"{name}={asked!r} contradicts the plan"):
        getattr(autopart, call)(model, "pp2,tp2", example_kwargs=batch, plan=Plan.from_json(text), **option)


def test_no_such_file():
    with pytest.raises(AutopartError, match=r"there is no plan at nowhere\.json"):
        Plan.load("nowhere.json")


def test_a_notebook_shows_a_short_text():
    model, batch = gpt2()
    plan = autopart.plan(model, "tp2", example_kwargs=batch)
    shown = repr(plan)
    assert shown.startswith("Plan of GPT2LMHeadModel on tp2\n") and "predicted:" in shown and len(shown) < 600
    assert plan._repr_html_().startswith("<pre>Plan of GPT2LMHeadModel on tp2\n")
    step, broken = autopart.simulate(plan), dataclasses.replace(plan, cost={**plan.cost, "tflops_per_device": "many"})
    assert repr(step) == str(step) and repr(plan.diff(plan)) == str(plan.diff(plan))
    assert repr(broken).startswith("Plan of GPT2LMHeadModel on tp2\n") and "explain" in repr(broken)
