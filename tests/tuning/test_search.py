"""The search: what its tables predict is what plans say, and what it finds fits, runs and beats the others."""

import json
import re
from pathlib import Path

import cost_models
import expert_models
import pytest
import torch
import zoo
from click.testing import CliRunner
from cost_models import gpt

import autopart
from autopart.cli.main import main
from autopart.cost.hardware import profile
from autopart.cost.predict.table import RunSetting, predict
from autopart.errors import InputError, MemoryLimitError, OptionError
from autopart.tuning.alternatives import reasons, why_others_lose
from autopart.tuning.search import LayoutKind, space_of
from autopart.tuning.search_inputs import fixed_axes


@pytest.fixture(scope="module")
def space():
    model, batch = gpt(hidden=256, layers=8, vocabulary=2000, tokens=64, rows=8)
    return space_of(model, "a100-80gb-sxm", 32, batch)


@pytest.mark.large
@pytest.mark.parametrize(
    ("mesh", "options"),
    [("dp1", {}), ("dp4", {"microbatches": 2}), ("tp2", {}), ("tp4", {"sequence_parallel": True}), ("dp2,tp2", {}),
     ("dp4", {"zero": 3}), ("dp2,tp2", {"recompute": "full"}), ("tp2", {"recompute": "selective"}),
     ("pp2", {"microbatches": 8}), ("dp2,pp2,tp2", {"microbatches": 4, "recompute": "full"})],
    ids=str,
)  # fmt: skip
def test_a_table_of_few_blocks_predicts_the_plan_of_all(space, mesh, options):
    model, _ = gpt(hidden=256, layers=8, vocabulary=2000, tokens=64, rows=8)
    ids = torch.zeros(32, 64, dtype=torch.long, device="meta")
    asked = {"sequence_parallel": False, **options}
    plan = autopart.plan(model, mesh, example_kwargs={"input_ids": ids, "labels": ids.clone()}, **asked)
    real, tensor = autopart.simulate(plan), plan.mesh_object().size("tp") > 1
    table = space.table(LayoutKind(tensor, asked["sequence_parallel"] and tensor), options.get("recompute", "none"))
    found = predict(table, RunSetting(plan.mesh_object(), plan.schedule, 32, options.get("zero", 0)), space.hardware)
    assert found.step_time_s == pytest.approx(real.step_time_s, rel=0.1)
    assert max(found.peak_memory_bytes) == pytest.approx(max(real.peak_memory_bytes), rel=0.1)
    assert found.hfu == pytest.approx(real.hfu, rel=0.1)


@pytest.mark.large
def test_the_formulas_rank_as_the_simulation_does(space):
    swept = space.sweep(8)
    assert len(swept) > 100 and swept == sorted(swept, key=lambda c: c.step_time_s)
    best, worst = space.simulated(swept[0]), space.simulated(swept[-1])
    assert best.step_time_s < worst.step_time_s
    assert 0.7 < best.step_time_s / swept[0].step_time_s < 1.7
    assert {c.mesh.num_ranks for c in swept} == {8}


@pytest.mark.large
def test_found_plans_are_a_pareto_list_that_computes_what_the_model_does():
    torch.manual_seed(0)
    model, _ = gpt(hidden=32, layers=4, tokens=16, rows=8)
    real = type(model)(model.config).double()
    real.loss_type = "ForCausalLM"
    ids = torch.randint(120, (8, 16))
    batch = {"input_ids": ids, "labels": ids}
    plans = autopart.search(real, 4, example_kwargs=batch)
    steps = [autopart.simulate(plan) for plan in plans]
    assert [s.step_time_s for s in steps] == sorted(s.step_time_s for s in steps)
    assert all("found by search: " in plan.notes[-1] and plan.mesh_object().num_ranks == 4 for plan in plans)
    found = autopart.verify(real, plans[0].mesh_object(), example_kwargs=batch, plan=plans[0])
    assert found.ok and found.max_error < 1e-10
    assert autopart.plan(real, 4, example_kwargs=batch) == plans[0]


@pytest.mark.large
@pytest.mark.parametrize("name", ["skip_mlp", pytest.param("t5", marks=pytest.mark.large)])
def test_any_model_can_be_searched(name, tmp_path):
    """Few places to cut, or blocks of two kinds; with a profile of one's own."""
    model, batch = zoo.ZOO[name]()
    data = json.loads((Path(profile.__file__).parent / "profiles" / "h100-80gb-sxm.json").read_text())
    (tmp_path / "own.json").write_text(json.dumps(data | {"name": "own"}))
    (plan,) = autopart.search(model, 4, hardware=str(tmp_path / "own.json"), example_kwargs=batch, count=1)
    assert plan.hardware == "own" and plan.cost.at().step_time_s > 0


@pytest.mark.large
def test_less_memory_finds_smaller_plans(space):
    least = min(c.memory_bytes for c in map(space.simulated, space.sweep(4)[::40]))
    roomy, tight = space.best(4, 80e9)[0], space.best(4, 1.2 * least)[0]
    assert tight.memory_bytes <= 1.2 * least and roomy.step_time_s <= tight.step_time_s
    with pytest.raises(MemoryLimitError, match="no configuration for 4 devices fits into 1 kB"):
        space.best(4, 1e3)


@pytest.mark.large
def test_other_schedules_are_tried_on_the_best(space):
    (best,) = [c for c in space.sweep(4) if str(c.mesh) == "pp4" and c.options["schedule"] == "1f1b"][:1]
    others = list(space.rescheduled(best))
    assert {"zbv", "gpipe", "interleaved_zero_bubble"} <= {c.schedule.name for c in others}
    assert all(c.schedule.microbatches == best.schedule.microbatches and c.simulation is not None for c in others)
    assert best.schedule not in [c.schedule for c in others]
    found = space.best(4, 80e9)
    piped = [c for c in found if c.mesh.size("pp") > 1]
    assert all(c.step_time_s >= found[0].step_time_s for p in piped for c in space.rescheduled(p))


@pytest.mark.large
def test_why_it_is_on_the_list_and_why_others_lose(space):
    found = space.best(8, 80e9)
    said = reasons(found)
    assert said[0] == "the fastest that fits" and len(said) == len(found) > 1
    assert all(re.match(r"\d+ % less memory for \d+\.\d % more time, with \w+=", line) for line in said[1:])
    lost = list(why_others_lose(space, 8, found[0], 80e9))
    assert any(line.startswith("tensor parallelism in a node") and " x the time (+" in line for line in lost)
    assert any(line.startswith("a pipeline alone takes ") for line in lost)
    tight = max(1.05 * found[-1].memory_bytes, 1)
    lost = list(why_others_lose(space, 8, space.best(8, tight)[0], tight))
    assert any(re.match(r"data parallelism alone \(DDP\) needs .* a rank of ", line) for line in lost)


def test_a_mesh_does_not_cut_what_cannot_be_cut(space):
    assert {str(mesh) for mesh in space.meshes(3)} == {"pp3", "tp3"}  # 32 rows do not divide over dp3
    assert all(mesh.size("tp") <= 8 for mesh in space.meshes(64))


@pytest.mark.parametrize(
    ("call", "error"),
    [(lambda m, b: autopart.search(m, 0, example_kwargs=b), OptionError),
     (lambda m, b: autopart.search(m, 2, global_batch=0, example_kwargs=b), OptionError),
     (lambda m, b: autopart.search(torch.nn.Linear(2, 2), 2), InputError),
     (lambda m, b: autopart.plan(m, 2), InputError),
     (lambda m, b: autopart.plan(m, 2, example_kwargs=b, zero=3), OptionError)],
    ids=["devices", "batch", "no example", "no example for a plan", "an option of the search"],
)  # fmt: skip
def test_mistakes(call, error):
    model, batch = gpt()
    with pytest.raises(error):
        call(model, batch)


@pytest.mark.large
def test_command_line(tmp_path):
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 32,
              "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    output = tmp_path / "plan.json"
    options = [
        "search",
        "--hf-config",
        str(tmp_path / "config.json"),
        "--devices",
        "4",
        "--count",
        "1",
        "-o",
        str(output),
    ]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 0, result.output
    assert "a step" in result.output and f"wrote {output}" in result.output
    assert autopart.Plan.load(output).mesh_object().num_ranks == 4


@pytest.mark.few
@pytest.mark.parametrize(("tokens", "sizes"), [(1024, {1}), (4096, {1, 2, 4}), (8192, {1, 2, 4, 8})])
def test_sequences_are_cut_where_ranks_keep_long_ones(tokens, sizes):
    model, batch = cost_models.llama(torch.bfloat16, layers=2, rows=8, tokens=tokens)
    meshes = list(space_of(model, "h100-80gb-sxm", 8, batch, None).meshes(8))
    assert {mesh.size("cp") for mesh in meshes} == sizes
    assert {mesh.num_ranks for mesh in meshes} == {8} and {mesh.size("ep") for mesh in meshes} == {1}


@pytest.mark.large
def test_experts_are_cut_where_there_are_some():
    model, batch = expert_models.mixture()
    space = space_of(model, "h100-80gb-sxm", 8, batch, None)
    assert {mesh.size("ep") for mesh in space.meshes(8)} == {1, 2, 4}
    best = space.best(8, 80e9)
    assert best and all(candidate.simulation is not None for candidate in best)


def test_a_search_keeps_the_fixed_axes():
    model, batch = zoo.gpt2()
    space = space_of(model, "a100-80gb-sxm", None, batch)
    space.fixed = fixed_axes("pp=1,tp2", 4)
    assert {str(mesh) for mesh in space.meshes(4)} == {"dp2,tp2"}
    assert fixed_axes({"tp": 2}, 8) == {"tp": 2} and fixed_axes(None, 8) == {}


@pytest.mark.parametrize(
    ("mesh", "error"),
    [("tp3", "mesh='tp3' is not possible\n.*its 3 ranks do not divide 4 devices"), ("tp", "cannot be read"),
     ("xp2", "unknown mesh axis 'xp'\n.*the axes are pp, dp, cp, ep, tp"), ("pp4,tp2", "its 8 ranks do not divide 4"),
     ("dpr2", "unknown mesh axis 'dpr'"), ("tp2,tp4", "names axis 'tp' twice")],
)  # fmt: skip
def test_fixed_axes_that_are_not_possible(mesh, error):
    with pytest.raises(autopart.AutopartError, match=error):
        fixed_axes(mesh, 4)
