"""Predicted and measured steps side by side: `Simulation.save_memory`, `pm.profile` and `autopart.compare`."""

import copy
import json

import pytest
import torch
import zoo
from click.testing import CliRunner
from dist import run_ranks

import autopart
from autopart.cli.main import main
from autopart.errors import OptionError, UsageError


@pytest.fixture(scope="module")
def plan():
    model, batch = zoo.gpt2()
    return autopart.plan(model, "pp2,tp2", example_kwargs=batch, microbatches=4, schedule="1f1b")


def event(name, start_us, duration_us, category="cpu_op", thread=1):
    return {"ph": "X", "name": name, "cat": category, "ts": start_us, "dur": duration_us, "pid": 1, "tid": thread}


def written(path, *events, rank=0):
    path.write_text(json.dumps({"traceEvents": list(events), "distributedInfo": {"rank": rank}}))
    return path


def test_memory_over_the_step(plan, tmp_path):
    simulation = autopart.simulate(plan)
    simulation.save_memory(tmp_path / "memory.json")
    events = json.loads((tmp_path / "memory.json").read_text())["traceEvents"]
    for rank, row in enumerate(plan.memory):
        counters = [one for one in events if one["ph"] == "C" and one["pid"] == rank]
        assert all(one["args"]["parameters"] == row["parameters"] for one in counters)
        activations = [one["args"]["activations"] for one in counters]
        assert max(activations) == pytest.approx(row["activations"], abs=8) and activations[-1] == 0
        times = [one["ts"] for one in counters]
        assert times == sorted(times) and times[-1] == pytest.approx(simulation.step_time_s * 1e6)
    with pytest.raises(OptionError, match="cannot write the trace to"):
        simulation.save_memory(tmp_path / "nowhere" / "memory.json")


def test_a_predicted_trace_equals_the_prediction(plan, tmp_path):
    simulation = autopart.simulate(plan)
    simulation.save_trace(tmp_path / "step.json")
    comparison = autopart.compare(plan, tmp_path / "step.json")
    rows = {row.name: row for row in comparison.rows}
    assert {"forward", "backward"} <= set(rows)
    for name in ("forward", "backward"):
        assert rows[name].measured_s == pytest.approx(rows[name].predicted_s)


def test_one_file_has_the_predicted_and_the_measured_steps(plan, tmp_path):
    measured = written(tmp_path / "cpu.json", event("autopart step", 700, 1000, "user_annotation"),
                       event("forward 0", 800, 400, "user_annotation"))  # fmt: skip
    plan.save(tmp_path / "plan.json")
    paths = [str(tmp_path / name) for name in ("plan.json", "both.json")]
    arguments = ["simulate", paths[0], "--trace", paths[1], "--measured", str(measured)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    events = [one for one in json.loads((tmp_path / "both.json").read_text())["traceEvents"] if one["ph"] == "X"]
    predicted = {one["pid"] for one in events if one["cat"] == "predicted"}
    assert len(predicted) == 2 and predicted.isdisjoint({one["pid"] for one in events if one["cat"] != "predicted"})
    assert [one["ts"] for one in events if one["cat"] != "predicted"] == [0, 100]
    assert autopart.compare(plan, paths[1]).rows == autopart.compare(plan, measured).rows
    assert CliRunner().invoke(main, ["simulate", paths[0], "--measured", str(measured)]).exit_code == 2
    with pytest.raises(OptionError, match="is not a trace"):
        autopart.simulate(plan).save_trace(paths[1], paths[0])


def test_events_of_other_programs_are_skipped(plan, tmp_path):
    others = [None, 7, [1], {"ph": "X"}, {"ph": "X", "ts": "soon", "dur": 1, "name": "x"}, {"ph": "M", "name": "x"}]
    measured = written(tmp_path / "foreign.json", event("aten::mm", 500, 100), *others)
    autopart.simulate(plan).save_trace(tmp_path / "both.json", measured)
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    assert [one["ts"] for one in events if one.get("name") == "aten::mm"] == [0]
    assert autopart.compare(plan, measured).rows[0].measured_s == pytest.approx(1e-4)


def test_operators_of_a_cpu_are_counted_once(plan, tmp_path):
    trace = written(
        tmp_path / "cpu.json",
        event("autopart step", 0, 1000, "user_annotation"),
        event("autopart step", 2000, 3000, "user_annotation"),
        event("forward 0", 0, 400, "user_annotation"),
        event("aten::linear", 0, 100),
        event("aten::addmm", 10, 80),
        event("aten::gelu", 100, 50),
        event("aten::softmax", 200, 60),
        event("aten::_softmax", 210, 40),
        event("gloo:all_reduce", 300, 500, "user_annotation", thread=2),
        event("c10d::allreduce_", 300, 490),
        event("Optimizer.step#AdamW.step", 900, 90, "user_annotation"),
        event("aten::mul", 910, 20),
    )
    comparison = autopart.compare(plan, trace)
    seconds = {(row.group, row.name): row.measured_s for row in comparison.rows if row.measured_s is not None}
    assert comparison.num_steps == 2 and comparison.rows[0].name == "step"
    assert {key: round(2e6 * one) for key, one in seconds.items()} == {
        ("step", "step"): 4000,
        ("schedule", "forward"): 400,
        ("operators", "matmul"): 100,
        ("operators", "other"): 110,
        ("operators", "optimizer"): 90,
        ("collectives", "all_reduce"): 500,
    }
    differences = [abs(row.difference_s) for row in comparison.rows[1:]]
    assert differences == sorted(differences, reverse=True)


def test_kernels_of_a_gpu(plan, tmp_path):
    trace = written(
        tmp_path / "gpu.json",
        event("ProfilerStep#3", 0, 1000, "user_annotation"),
        event("ProfilerStep#3", 0, 1000, "gpu_user_annotation"),
        event("aten::linear", 0, 100),
        event("sm90_xmma_gemm_bf16", 10, 300, "kernel", thread=7),
        event("flash_fwd_kernel", 310, 40, "kernel", thread=7),
        event("ncclDevKernel_AllReduce_Sum_bf16", 20, 200, "kernel", thread=8),
        event("vectorized_elementwise_kernel", 400, 30, "kernel", thread=7),
        rank=2,
    )
    comparison = autopart.compare(plan, trace)
    seconds = {row.name: row.measured_s for row in comparison.rows if row.measured_s is not None}
    assert comparison.rank == 2 and seconds == {
        "step": pytest.approx(1e-3), "matmul": pytest.approx(3e-4), "attention": pytest.approx(4e-5),
        "all_reduce": pytest.approx(2e-4), "other": pytest.approx(3e-5),
    }  # fmt: skip


def test_the_command(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    trace = written(tmp_path / "trace.json", event("aten::mm", 0, 100))
    files = [str(tmp_path / "plan.json"), str(trace)]
    result = CliRunner().invoke(main, ["compare", *files])
    assert result.exit_code == 0 and result.output == f"{autopart.compare(*files)}\n"
    assert "rank 0, mean of 1 measured step; predicted for" in result.output
    rows = json.loads(CliRunner().invoke(main, ["compare", *files, "--json"]).stdout)["rows"]
    assert rows[0]["group"] == "step" and rows[0]["measured_s"] == pytest.approx(1e-4)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(OptionError, match=r"other.json is not a trace\n  why    it has no traceEvents"):
        autopart.compare(plan, tmp_path / "other.json")


def profile_steps(folder):
    model, batch = zoo.gpt2()
    pm = autopart.parallelize(copy.deepcopy(model), "pp2", example_kwargs=batch, microbatches=2)
    pm.step(**batch)
    before = [parameter.grad.to_local().clone() for parameter in pm.parameters()]
    path = pm.profile(f"{folder}/measured.json", steps=2, **batch)
    after = [parameter.grad.to_local() for parameter in pm.parameters()]
    assert all(map(torch.equal, before, after))
    comparison = autopart.compare(pm.plan, path)
    names = [json.dumps(event.get("name")) for event in json.loads(path.read_text())["traceEvents"]]
    return path.name, comparison, [name.strip('"') for name in names]


@pytest.mark.large
def test_a_measured_step_has_the_names_of_a_predicted_one(tmp_path):
    for rank, (name, comparison, names) in enumerate(run_ranks(profile_steps, 2, str(tmp_path))):
        assert name == ("measured.json", "measured.rank1.json")[rank]
        assert comparison.rank == rank and comparison.num_steps == 2
        assert {f"{way} {index}" for way in ("forward", "backward") for index in (0, 1)} <= set(names)
        rows = {row.name: row for row in comparison.rows}
        assert all(rows[kind].measured_s and rows[kind].predicted_s for kind in ("matmul", "forward", "backward"))


class Counted(torch.nn.Module):
    """Batch statistics, dropout and a gradient."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return {"loss": torch.nn.functional.dropout(self.linear(self.norm(x)), 0.5).square().mean()}


def test_a_measured_step_changes_no_training_state(tmp_path):
    x = torch.randn(4, 8)
    pm = autopart.parallelize(Counted(), "dp1", precision="fp16", example_args=(x,))
    pm._loss_scaling.scale = 4.0
    pm.step(x)

    def state():
        tensors = [*pm.buffers(), *(parameter.grad for parameter in pm.parameters()), torch.get_rng_state()]
        return [tensor.clone() for tensor in tensors], pm.loss_scale, vars(pm._loss_scaling), pm._meter.total_steps

    before = copy.deepcopy(state())
    pm.profile(tmp_path / "trace.json", x, steps=2)
    after = state()
    assert all(map(torch.equal, before[0], after[0])) and before[1:] == after[1:]


def test_a_measured_step_within_accumulation_is_refused(tmp_path):
    x = torch.randn(4, 8)
    pm = autopart.parallelize(Counted(), "dp1", example_args=(x,))
    pm._process.unreduced.add("a batch")
    with pytest.raises(UsageError, match=r"profile\(\) needs gradients that are reduced"):
        pm.profile(tmp_path / "trace.json", x)
