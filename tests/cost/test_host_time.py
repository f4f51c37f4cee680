"""The CPU issues operators ahead of the device: a step takes the longer of the two, and other systems differ."""

import json
from itertools import pairwise

import pytest
import torch
import zoo
from click.testing import CliRunner
from cost_models import gpt, llama, profile

import autopart
from autopart.cli.main import main
from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.run_setting import RunSetting
from autopart.cost.predict.stage_balance import filled_stages, stage_boundaries
from autopart.cost.predict.timeline import Durations, timeline
from autopart.cost.systems.system import System, system_names
from autopart.errors import OptionError
from autopart.ir.mesh import Mesh
from autopart.ir.run.schedules import Schedule
from autopart.plans.plan import Plan


def test_a_device_waits_for_the_last_operator_that_the_cpu_issues():
    """The CPU is ahead by the seconds that the device took longer so far."""

    def ends(forward, backward):
        host = {"F": [forward], "B": [backward]}
        return timeline(None, 1, 1, 2, Durations([2.0], [4.0], host_s=host)).step_time_s

    assert ends(0.0, 0.0) == ends(2.0, 4.0) == ends(1.0, 4.9) == 12
    assert ends(3.0, 5.0) == 16  # the CPU takes longer than the device
    assert ends(3.0, 1.0) == 13  # only the first forward waits


def test_a_slow_cpu_delays_the_stages_after_it():
    fast, slow = (timeline("1f1b", 2, 2, 4, Durations([1.0] * 2, [2.0] * 2, host_s={"F": [0, s], "B": [0, s]}))
                  for s in (0.5, 5.0))  # fmt: skip
    assert fast.step_time_s == 15 and slow.step_time_s > 8 * 5
    assert slow.in_flight == fast.in_flight


def test_a_step_takes_the_longer_of_cpu_and_device(tmp_path):
    """As many kernels in every microbatch: more microbatches of the same batch need more of the CPU."""
    model, batch = gpt(rows=8)

    def step(microbatches, **numbers):
        path = profile(tmp_path, **numbers)
        plan = autopart.plan(model, "dp1", example_kwargs=batch, hardware=path, microbatches=microbatches)
        assert Plan.from_json(plan.to_json()).cost["step_time_s"] == plan.cost["step_time_s"]
        assert plan.cost.at().step_time_s == pytest.approx(plan.cost["step_time_s"])
        assert sum(plan.cost["parts_s"].values()) == pytest.approx(plan.cost["step_time_s"])
        return plan

    device = step(4)
    quick, slow, two = step(4, host_operator_s=1e-9), step(4, host_operator_s=1e-3), step(2, host_operator_s=1e-3)
    assert quick.cost["step_time_s"] == pytest.approx(device.cost["step_time_s"], rel=1e-3)
    assert slow.cost["step_time_s"] == pytest.approx(2 * two.cost["step_time_s"], rel=0.05)  # additions of gradients
    assert slow.cost["parts_s"]["host"] > 0.9 * slow.cost["step_time_s"] and "host" not in device.cost["parts_s"]
    (note,) = (note for note in slow.notes if "CPU" in note)
    assert note.startswith("the CPU limits the step: for ") and note.endswith("larger microbatches would help")
    assert not any("CPU" in note for note in (*device.notes, *quick.notes))


def test_collectives_and_compiled_kernels_need_the_cpu_too(tmp_path):
    model, batch = gpt(rows=8)

    def step(mesh, compile=False, **numbers):
        plan = autopart.plan(model, mesh, example_kwargs=batch, hardware=profile(tmp_path, **numbers), compile=compile)
        return plan.cost["step_time_s"], plan

    alone, plan = step("tp2", host_collective_s=1e-3)
    calls = sum(row["count"] for row in plan.timing["stages"][0]["collectives"])
    assert alone == pytest.approx(calls * 1e-3, rel=0.02)
    (note,) = (note for note in plan.notes if "CPU" in note)
    assert "a smaller tp would help" in note
    eager, compiled = (step("dp1", c, host_operator_s=1e-3, host_compiled_s=1e-3)[0] for c in (False, True))
    assert compiled < 0.8 * eager  # fewer kernels
    assert step("dp1", True, host_operator_s=1e-3)[0] < 1e-3


def test_another_system_runs_a_plan(tmp_path):
    model, batch = llama(torch.float32)
    plan = autopart.plan(model, "pp2,tp2", example_kwargs=batch, precision="bf16", hardware="h100-80gb-sxm-measured",
                         microbatches=4)  # fmt: skip
    own, other = autopart.simulate(plan), autopart.simulate(plan, system="nanotron")
    assert other.step_time_s > own.step_time_s and other.parts["host"] > own.parts.get("host", 0)
    assert autopart.simulate(plan).step_time_s == plan.cost["step_time_s"]  # the plan is unchanged
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine", "source": "a guess", "host_operator_s": 0, "host_collective_s": 0}))
    mine = autopart.simulate(plan, system=str(path))
    path.write_text(json.dumps({"name": "mine", "source": "a guess", "host_operator_s": 0, "host_collective_s": 0,
                                "casts_weights": False}))  # fmt: skip
    assert autopart.simulate(plan, system=str(path)).parts["other"] < mine.parts["other"]
    assert "host" not in mine.parts
    plan.save(tmp_path / "plan.json")
    printed = CliRunner().invoke(main, ["simulate", str(tmp_path / "plan.json"), "--system", "nanotron", "--json"])
    assert json.loads(printed.output)["step_time_s"] == other.step_time_s


def run_by(tmp_path, plan, **entries):
    path = tmp_path / "system.json"
    path.write_text(json.dumps({"name": "mine", "source": "a guess", **entries}))
    return autopart.simulate(plan, system=str(path))


def test_a_system_that_gathers_inputs_again_saves_their_shards(tmp_path):
    model, batch = llama(torch.float32)
    plan = autopart.plan(model, "tp2", example_kwargs=batch, hardware="h100-80gb-sxm", sequence_parallel=True)
    saves, again = (run_by(tmp_path, plan, recompute_gathers=again) for again in (False, True))
    gathers, more = ({c.kind: c for c in one.collectives}["all_gather"] for one in (saves, again))
    assert more.count > gathers.count and more.seconds > gathers.seconds
    assert again.memory[0]["activations"] < saves.memory[0]["activations"]


def test_a_system_that_gathers_parameters_one_by_one_waits_for_each(tmp_path):
    model, batch = llama(torch.float32)
    plan = autopart.plan(model, "dp2", example_kwargs=batch, hardware="h100-80gb-sxm", zero=1)
    buckets, single = (run_by(tmp_path, plan, zero_by_parameter=single) for single in (False, True))
    assert single.parts["parameter gathers"] > 2 * buckets.parts["parameter gathers"]


def test_a_system_that_receives_into_one_buffer_needs_less_memory(tmp_path):
    model, batch = llama(torch.float32)
    plan = autopart.plan(model, "pp2", example_kwargs=batch, hardware="h100-80gb-sxm", microbatches=4)
    every, one = (run_by(tmp_path, plan, allocates_receives=every) for every in (True, False))
    assert one.memory[1]["communication"] < every.memory[1]["communication"]
    assert one.step_time_s == every.step_time_s


def test_a_system_that_fills_stages_gives_early_stages_a_block_more():
    assert filled_stages([2.0] * 5, range(1, 5), 4) == (2, 3, 4)
    assert filled_stages([1.0, 9.0], [1], 3) is None
    model, batch = zoo.llama(num_layers=6)
    plan = autopart.plan(model, "dp1", example_kwargs=batch)
    setting = RunSetting(Mesh.parse("pp4"), Schedule("1f1b", 4, 1), 8)
    system = System("mine", "a guess", fills_stages=True)
    cuts = stage_boundaries(plan.cost.table, setting.run_by(system), Hardware.load())
    names = [{number for _, path, number in plan.cost.table.order[a:b] if path} for a, b in pairwise((0, *cuts))]
    assert names == [{0, 1}, {2, 3}, {4}]  # each starts with a block of its own


@pytest.mark.parametrize("name", system_names())
def test_a_system_has_a_source(name):
    system = System.load(name)
    assert system.name == name and len(system.source) > 40


def test_an_unknown_system(tmp_path):
    model, batch = zoo.gpt2()
    plan = autopart.plan(model, "dp1", example_kwargs=batch)
    with pytest.raises(OptionError) as raised:
        autopart.simulate(plan, system="mine")
    assert str(raised.value) == (
        f"there is no system 'mine'\n  why    the systems are {', '.join(system_names())}\n"
        "  try    one of these names, or the path of a JSON file in the same format"
    )
    path = tmp_path / "mine.json"
    for wrong in ({"name": "mine"}, {"name": "mine", "source": "-", "sends": 1},
                  {"name": "mine", "source": "-", "overlap_tensor": 2}, {"name": "mine", "source": "-",
                  "casts_weights": 1}):  # fmt: skip
        path.write_text(json.dumps(wrong))
        with pytest.raises(OptionError, match="the system"):
            autopart.simulate(plan, system=str(path))


def test_a_profile_extends_another(tmp_path):
    path = tmp_path / "mine.json"
    entry = {"value": 1e9, "unit": "B/s", "source": "a guess"}
    path.write_text(json.dumps({"name": "mine", "extends": "a100-80gb-sxm", "node_link_bytes_per_s": entry}))
    mine, base = Hardware.load(path), Hardware.load("a100-80gb-sxm")
    assert mine.node_link_bytes_per_s == 1e9 and mine.matmul_efficiency == base.matmul_efficiency
    path.write_text(json.dumps({"name": "mine", "extends": "a200"}))
    with pytest.raises(OptionError, match="extends 'a200'"):
        Hardware.load(path)
