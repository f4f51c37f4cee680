"""One step time and one utilisation of a plan, of the dtype that is multiplied, and whether it fits, in every text."""

import json
import re
import warnings
from dataclasses import replace
from functools import cache

import pytest
import sympy
import torch
import zoo
from click.testing import CliRunner
from cost_models import gpt, llama
from report_page import texts_of

import autopart
from autopart.cli.main import main
from autopart.common.text import quantity
from autopart.cost.hardware.profile import _PROFILES, Hardware
from autopart.errors import MemoryLimitError
from autopart.plans.headlines import ADVICE, fit_text, fits, step_size
from autopart.plans.plan import Plan
from autopart.recipe.plan_checks import warn_of_memory
from autopart.tuning import advice

EXACT = 1e-9


def gpt2(dtype):
    model, batch = gpt(layers=4, rows=16, heads=8)
    return model.to(dtype), batch


def convolutions(dtype):
    model, batch = zoo.ZOO["skip_mlp"]()
    return model.to(dtype), {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}


MODELS = {"llama": llama, "gpt2": gpt2, "skip_mlp": convolutions}
CASES = [
    ("llama", "dp2,tp8", {}, torch.float32, "a100-80gb-sxm"),
    ("llama", "dp2,tp8", {}, torch.bfloat16, "h100-80gb-sxm"),
    ("llama", "pp4,tp2", {}, torch.float32, "h100-80gb-sxm"),
    ("llama", "pp4,tp2", {"schedule": "interleaved_1f1b", "recompute": "full"}, torch.bfloat16, "a100-80gb-sxm"),
    ("gpt2", "dp2,pp2", {"zero": 3}, torch.bfloat16, "a100-80gb-sxm"),
    ("gpt2", "pp2,tp2", {"schedule": "zbv"}, torch.float32, "a100-80gb-sxm"),
    ("skip_mlp", "dp2", {}, torch.float32, "cpu-gloo"),
]


@cache
def made(case):
    name, mesh, options, dtype, hardware = CASES[case]
    model, batch = MODELS[name](dtype)
    return autopart.plan(model, mesh, example_kwargs=batch, hardware=hardware, **options)


@pytest.mark.few
@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_every_place_says_the_same_number(case, tmp_path):
    plan, (_, _, _, dtype, hardware) = made(case), CASES[case]
    step = autopart.simulate(plan)
    assert plan.cost["step_time_s"] == pytest.approx(step.step_time_s, rel=EXACT)
    assert plan.cost.at().step_time_s == pytest.approx(step.step_time_s, rel=EXACT)
    assert float(plan.cost.at(tp=plan.mesh.get("tp", 1))) == pytest.approx(step.step_time_s, rel=EXACT)
    own = plan.cost._values({})
    assert float(plan.cost.subs(own)) == pytest.approx(step.step_time_s, rel=EXACT)
    parts = sympy.lambdify([*own], [*plan.cost.parts.values()], modules="numpy")(*own.values())
    assert sum(parts) == pytest.approx(step.step_time_s, rel=EXACT)
    for name in ("mfu", "hfu", "tflops_per_device", "bubble_fraction"):
        assert plan.cost[name] == pytest.approx(getattr(step, name), rel=EXACT)
    peak = Hardware.load(hardware).flops_per_s[str(dtype).removeprefix("torch.")]
    assert step.peak_flops_per_s == plan.cost["peak_flops_per_s"] == peak
    assert step.mfu == pytest.approx(step.tflops_per_device * 1e12 / peak, rel=EXACT) and 0 < step.mfu < 1
    again = Plan.from_json(plan.to_json())
    assert again.cost == plan.cost and again.cost.at() == plan.cost.at()

    said, mfu = quantity(step.step_time_s, "s"), f"MFU {100 * step.mfu:.3g} % of {quantity(peak, 'FLOP/s')}"
    plan.report(tmp_path / "plan.html")
    plan.save(tmp_path / "plan.json")
    told = CliRunner().invoke(main, ["simulate", str(tmp_path / "plan.json"), "--json"]).output
    assert json.loads(told)["step_time_s"] == plan.cost["step_time_s"]
    texts = (plan.explain(), texts_of((tmp_path / "plan.html").read_text()))
    for text in (*texts, str(step)):
        assert mfu in words(text) and step_size(plan) in words(text) and fit_text(plan) in words(text)
    for text in texts:
        times = set(re.findall(r"[\d.]+ [nµm]?s(?= a step)", text))
        assert times == {said}
    assert max(map(len, str(step).splitlines())) <= 80


def words(text):
    return " ".join(re.sub(r"<[^>]*>", " ", text).split())


def test_the_peak_is_said_in_words():
    hardware = Hardware.load("h100-80gb-sxm")
    half, single = hardware.flops_per_s["bfloat16"], hardware.flops_per_s["float32"]
    assert hardware.peak_of({"bfloat16": 1.0}) == (half, "bfloat16")
    assert hardware.peak_of({"float32": 1.0}) == (single, "float32 without TF32")
    peak, said = hardware.peak_of({"bfloat16": 3.0, "float32": 1.0})
    assert peak == pytest.approx(4 / (3 / half + 1 / single)) and said == "75 % bfloat16, 25 % float32 without TF32"
    assert hardware.peak_of({}) == (half, "")
    old = Hardware.load("v100-32gb-sxm")
    assert "as there is none for bfloat16" in old.peak_of({"bfloat16": 1.0})[1]
    assert Hardware.load("cpu-gloo").peak_of({"float32": 1.0})[1] == "float32"


@pytest.mark.large
def test_the_formulas_move_with_the_step():
    """At other sizes they are about as many times more as the prediction of these stages."""
    cost = made(2).cost
    assert cost.left_out != 0 and "left out" in cost.parts
    assert float(cost.subs(cost._values({}) | {"r": 0})) == pytest.approx(cost.formula_s, rel=EXACT)
    assert f"the closed formula alone gives {quantity(cost.formula_s, 's')} per step" in str(cost)
    moved = cost.subs(cost._values({"s": 128.0}))
    assert cost.at(s=128).step_time_s == pytest.approx(float(moved), rel=0.05)
    with pytest.warns(UserWarning, match="both plans take equal time"):
        assert autopart.crossover(made(2), made(2)) is None


def old_plan(**changed):
    """As versions before wrote it: another time, of a formula of peaks."""
    data = json.loads(made(0).to_json())
    for name in ("parts_s", "mfu", "hfu", "peak_flops_per_s", "peak_dtype", "tflops_per_device",
                 "device_memory_bytes", "device_memory_of"):  # fmt: skip
        del data["cost"][name]
    data["cost"] |= {"step_time_s": 1e-3, "formula": "3*F/(n*X) + G/B", "values": {"F": 1.0}}
    del data["timing"]["peak_dtype"]
    data = {name: value for name, value in (data | changed).items() if value != {}}
    return Plan.from_json(json.dumps(data))


def test_an_old_plan_says_the_simulated_step():
    plan = old_plan()
    step = autopart.simulate(plan).step_time_s
    assert plan.cost["step_time_s"] == step != 1e-3 and "formula" not in plan.cost
    assert plan.cost.at().step_time_s == pytest.approx(step, rel=EXACT)
    assert f"{quantity(step, 's')} a step" in plan.explain() and fits(plan) is None


def test_an_old_plan_without_timing_says_whose_number_it_has():
    text = old_plan(timing={}).explain()
    assert "1 ms by the formula of an older autopart, from peak FLOP/s only" in text and "MFU" not in text
    bare = old_plan(timing={}, cost={}).explain()
    assert "a step of" not in bare and "a step is" in bare


# --- the search ----------------------------------------------------------------------------------------------------


@pytest.mark.large
def test_found_plans_are_told_and_ordered_by_their_own_steps():
    model, batch = llama(torch.bfloat16, layers=4)
    plans = autopart.search(model, 8, example_kwargs=batch)
    steps = [autopart.simulate(plan).step_time_s for plan in plans]
    assert steps == sorted(steps) == [plan.cost["step_time_s"] for plan in plans]
    for plan, step in zip(plans, steps, strict=True):
        needed = max(row["total"] for row in plan.memory)
        told = f"{quantity(step, 's')} a step of 16 samples x 64 tokens, {quantity(needed, 'B')} a rank; "
        assert told in plan.notes[-1] and "about" not in plan.notes[-1].partition(";")[0]
    others = [note for note in plans[0].notes if " x the time" in note]
    assert all(re.search(r": about [\d.]+ \S+ a step, about ", note) for note in others)


# --- what a step is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "said"), [
    ({"input_ids": ("int64", [8, 128]), "labels": ("int64", [8, 128])}, "8 samples x 128 tokens"),
    ({"input_ids": ("int64", [8, 128]), "decoder_input_ids": ("int64", [8, 32])}, "8 samples x 128 and 32 tokens"),
    ({"pixels": ("float32", [4, 3, 32, 32]), "labels": ("int64", [4])}, "4 samples x 3 x 32 x 32"),
    ({"x": ("float32", [1, 16]), "target": ("int64", [1, 5])}, "1 sample x 16"),
    ({"positions": ("int64", [1, 128]), "ids": ("int64", [4, 128]), "mask": ("bool", [4, 128])},
     "4 samples x 128 tokens"),
    ({"x": ("float64", [7])}, "7 samples"),
    ({"scale": ("float64", [])}, ""),
])  # fmt: skip
def test_what_a_step_takes(inputs, said):
    shapes = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in inputs.items()}
    assert step_size(replace(made(0), inputs=shapes)) == said


# --- whether it fits -----------------------------------------------------------------------------------------------


@cache
def small_device():
    """The profile of a device with half of what the Llama takes."""
    data = json.loads((_PROFILES / "h100-80gb-sxm.json").read_text())
    need = max(row["total"] for row in made(0).memory)
    data["memory_bytes"]["value"] = need // 2
    return data | {"name": "small"}


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(small_device()))
    return str(path)


@pytest.mark.large
def test_a_plan_that_does_not_fit_says_so_everywhere_and_what_would_help(profile, tmp_path):
    model, batch = llama(torch.float32)
    plan = autopart.plan(model, "dp2,tp8", example_kwargs=batch, hardware=profile)
    needed, capacity = max(row["total"] for row in plan.memory), small_device()["memory_bytes"]["value"]
    assert fits(plan) is False and needed > capacity
    (note,) = [note for note in plan.notes if note.startswith(ADVICE)]
    taken = re.search(r"recompute='full' takes ([\d.]+ .B)", note)[1]
    other = autopart.plan(model, "dp2,tp8", example_kwargs=batch, hardware=profile, recompute="full")
    assert quantity(max(row["total"] for row in other.memory), "B") == taken
    assert f"memory='{quantity(capacity, 'B').replace(' ', '')}'" in note
    again = Plan.from_json(plan.to_json())
    again.report(tmp_path / "plan.html")
    page = texts_of((tmp_path / "plan.html").read_text())
    for text in (plan.explain(), again.explain(), str(autopart.simulate(again)), page):
        assert f"{quantity(needed, 'B')} on the fullest rank: IT DOES NOT FIT, small has" in words(text)
    for text in (again.explain(), page):
        assert "to fit into memory: " in text
    # Every process writes the same.
    assert autopart.plan(model, "dp2,tp8", example_kwargs=batch, hardware=profile).notes == plan.notes


@pytest.mark.large
def test_a_pipeline_of_short_stages_is_advised_too(profile):
    """Its blocks are traced as one that stands for others, and planned one by one."""
    model, batch = llama(torch.float32, layers=16)
    plan = autopart.plan(model, "pp8", example_kwargs=batch, hardware=profile, microbatches=1)
    assert fits(plan) is False and any(note.startswith(ADVICE) for note in plan.notes)


def test_what_fits_says_so_and_tries_nothing(monkeypatch):
    monkeypatch.setattr(advice, "helpful_remedies", lambda *_: pytest.fail("other settings were tried"))
    model, batch = llama(torch.float32)
    plan = autopart.plan(model, "dp2,tp8", example_kwargs=batch)
    assert fits(plan) and "it fits, a100-80gb-sxm has 80 GB" in words(plan.explain())


@pytest.mark.large
def test_memory_that_was_asked_for_counts():
    model, batch = llama(torch.float32)
    plan = autopart.plan(model, "dp2,tp8", example_kwargs=batch, memory="10GB")
    assert "it fits, memory= says 10 GB" in fit_text(plan)
    with pytest.raises(MemoryLimitError, match="the plan needs"):
        autopart.plan(model, "dp2,tp8", example_kwargs=batch, memory="1MB")


@pytest.mark.large
def test_the_command_line_says_what_it_wrote(tmp_path, profile):
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "gpt2", "n_embd": 256, "n_layer": 8, "n_head": 4, "vocab_size": 512, "n_positions": 64,
        "bos_token_id": 0, "eos_token_id": 0,
    }))  # fmt: skip
    asked = ["--hf-config", tmp_path / "config.json", "--mesh", "dp2", "--batch", "16", "--sequence", "64",
             "--hardware", profile, "-o", tmp_path / "plan.json"]  # fmt: skip
    result = CliRunner().invoke(main, ["plan", *map(str, asked)])
    assert result.exit_code == 0, result.output
    said = words(result.output)
    assert "a step is 16 samples x 64 tokens" in said and "IT DOES NOT FIT, small has" in said
    assert ADVICE.strip() in said and "zero=3 takes" in said and "the peak of float32 without TF32" in said
    assert all(len(line) <= 80 for line in result.output.splitlines() if line.startswith("  "))


def test_parallelize_warns_where_it_says_something(monkeypatch, profile):
    model, batch = llama(torch.float32, layers=2)
    plan = autopart.plan(model, "dp2", example_kwargs=batch)
    assert fits(plan)
    tight = replace(plan, cost={**plan.cost, "device_memory_bytes": 1000})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_memory(plan)
        warn_of_memory(tight)  # the default profile says nothing of a machine without a GPU
    other = replace(tight, hardware="small")
    with pytest.warns(UserWarning, match=r"the plan needs .* on the fullest rank, and small has 1 kB"):
        warn_of_memory(other)
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_memory(other)
    monkeypatch.setenv("RANK", "0")
    gpu = type("Properties", (), {"total_memory": 2000})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    with pytest.warns(UserWarning, match="this GPU has 2 kB"):
        warn_of_memory(plan)


def test_parallelize_warns_when_it_plans(profile):
    model, batch = zoo.gpt2(exact=False)
    data = small_device() | {"memory_bytes": {"value": 1000.0, "unit": "B", "source": "tiny"}}
    with open(profile, "w") as file:
        json.dump(data, file)
    with pytest.warns(UserWarning, match="on the fullest rank, and small has 1 kB"):
        autopart.parallelize(model, "dp1", example_kwargs=batch, hardware=profile)
