"""The benchmarks run in their quick mode, and their last line holds the figures."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TIME_LIMIT_S = 240


def ran(name, *options):
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, str(BENCHMARKS / name), *options]
    answer = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def figures(name, *options):
    return json.loads(ran(name, *(options or ("--quick",)), "--json").splitlines()[-1])


def figures_here(name, monkeypatch, capsys, *options):
    """In this process, which has imported much already."""
    path = BENCHMARKS / name
    monkeypatch.setattr(sys, "argv", [str(path), *options, "--json"])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    runpy.run_path(str(path), run_name="__main__")
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_benchmark_is_run():
    """Here, or in a test of its own beside."""
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    files = [path for folder in (BENCHMARKS, BENCHMARKS / "gpu") for path in folder.glob("[!_]*.py")]
    assert len(files) > 20
    assert [path.name for path in files if f'{path.name}"' not in tests and f"import {path.stem}" not in tests] == []


@pytest.mark.large
def test_against():
    (row,) = figures("against.py", "--quick", "--base", "HEAD")["cases"].values()
    assert row["ratio"] == row["new_s"] / row["old_s"] > 0


@pytest.mark.large
def test_depth():
    times_s = figures("depth.py")["time_s"]
    assert list(times_s) == ["2", "4"]
    assert all(0 < row["choose"] < row["planned"] < row["whole"] for row in times_s.values())


@pytest.mark.large
def test_lengths():
    (row,) = figures("lengths.py")["rows"]
    assert row["positions"] == 8192 and 0 < row["mfu"] < 1 and row["memory_bytes"] < 80e9


@pytest.mark.large
def test_precision():
    (row,) = figures("precision.py")["rows"]
    one_rank, *several = row["differences"].values()
    assert one_rank == 0 and len(several) == 2
    assert all(0 < part < row["rounding"] for part in several)


@pytest.mark.large
def test_trained():
    (row,) = figures("trained.py")["rows"]
    assert row["exact"] and 0 <= row["error"] < 1e-10


@pytest.mark.large
def test_stages():
    (row,) = figures("stages.py")["models"].values()
    assert 1 <= row["ratio"] <= row["equal_layers_ratio"]
    assert sum(row["shares"]) == pytest.approx(1) and len(row["shares"]) == 4


@pytest.mark.large
def test_bubble():
    (row,) = figures("bubble.py")["rows"]
    assert row["pp"] == 2 and row["predicted"] == pytest.approx(2 / 3) and row["ratio"] > 0


@pytest.mark.large
def test_curves():
    curves = figures("curves.py")["losses"]
    assert len(curves) == 6 and {len(curve) for curve in curves.values()} == {5}
    assert curves["dp2,tp2, fp32"] == pytest.approx(curves["one process, fp32"], rel=1e-5)


@pytest.mark.large
def test_planning():
    (row,) = figures("planning.py")["cases"].values()
    times_s = row["time_s"]
    parts_s = sum(time_s for name, time_s in times_s.items() if name != "whole")
    # No part is counted twice. How much of the whole the parts are depends on the machine's other work.
    assert 0 < parts_s <= times_s["whole"]
    assert row["peak_memory_bytes"] >= row["before_memory_bytes"]


@pytest.mark.large
def test_checks():
    found = figures("checks.py")
    for row in found["meshes"].values():
        assert row["off_us"] > 0 and row["checks_us"] == pytest.approx(row["calls_us"] + row["copies_us"])


@pytest.mark.large
def test_two_ranks():
    found = figures("two_ranks.py")
    assert all(median["wall_s"] > 0 for median in found["median"].values())
    assert {"autopart-tp/dtensor-tp", "autopart-pp/hand-pp"} <= set(found["ratio"])


@pytest.mark.large
def test_overhead():
    rows = figures("overhead.py")["rows"]
    assert [row["model"] for row in rows] == ["gpt2", "llama", "bert", "t5", "vit"]
    assert all(row["wall_ratio"] > 0 and 0.5 < row["bytes_ratio"] < 2 for row in rows)
    row, compiled = figures("overhead.py", "--quick", "--only", "llama", "--compile")["rows"]
    assert compiled["variant"] == "compiled graph" and compiled["figures"]["first_s"] > row["figures"]["wall_s"]
    masked, graph = figures("overhead.py", "--quick", "--attention")["rows"]
    assert masked["base_figures"] == graph["base_figures"]


@pytest.mark.large
def test_predicted():
    (row,) = figures("predicted.py")["meshes"].values()
    assert row["predicted_s"] > 0 and 0 < row["min_s"] <= row["median_s"]
    for rank, predicted in zip(row["ranks"], row["predicted_peak_bytes"], strict=True):
        assert predicted == pytest.approx(rank["peak_bytes"], rel=0.15)
        assert {"matmul", "attention", "optimizer", "other"} <= rank["kinds_s"].keys() and rank["thread_s"] > 0


@pytest.mark.large
@pytest.mark.parametrize("link", ["gloo", "sleep"])
def test_beside_torch(link):
    names = ["zero0", "zero1", "zero3-bf16", "tp2", "pp2"]
    rows = figures("beside_torch.py", "--quick", "--links", link, "--only", *names)["rows"]
    assert [row["case"] for row in rows] == names
    for row in rows:
        assert row["autopart"]["wall_s"] > 0 and row["cpu_ratio"] > 0
        low, high = row["wall_quartiles"]
        assert low <= row["wall_ratio"] <= high
        assert (row["work_s"] is None) == (link == "gloo")


@pytest.mark.large
def test_dp_sync():
    rows = figures("dp_sync.py")["methods"]
    exact, largest = rows["all_reduce"], rows["top_k:0.01"]
    assert exact["sent"] == 1 and largest["sent"] == pytest.approx(0.04, rel=0.01)
    assert largest["links_ms"]["1"] < exact["links_ms"]["1"] and exact["loss"][0] != largest["loss"][0]


@pytest.mark.large
def test_context():
    found = figures("context.py", "--quick")
    ways = {"autopart-gather", "autopart-ulysses", "autopart-ring"}
    assert found["median"].keys() == {*ways, "unbalanced", "gather", "ring"}
    assert all(ratio["wall"] > 0 and ratio["cpu"] > 0 for ratio in found["ratio"].values())


@pytest.mark.large
def test_picture_of_a_step(tmp_path):
    """It shows both sides, and what each gathers and scatters."""
    file = tmp_path / "step.svg"
    figures("beside_torch.py", "--quick", "--trace", str(file))
    drawn = ElementTree.fromstring(file.read_text())
    texts = [element.text or "" for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text.startswith(("autopart, zero=3:", "torch, fully_shard:"))] == texts[5::4]
    colors = [element.get("fill") for element in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    assert colors.count("#72b7b2") > 6 and colors.count("#e45756") > 4  # gathers and scatters, beside the legend


@pytest.mark.large
def test_memory():
    found = figures("memory.py", "--quick", "--zero", "0", "3", "--recompute", "none", "full")
    assert len(found["rows"]) == 8
    assert all(row["held_bytes"] > 0 for row in found["rows"])
    assert found["worst_percent"] == max(abs(row["off_percent"]) for row in found["rows"]) < 15


@pytest.mark.large
def test_imports():
    rows = figures("imports.py")["variants"]
    assert rows["torch"]["ratio"] == rows["torch"]["processor_ratio"] == 1.0
    assert {"autopart", "torch, autopart", "parallelize", "help", "explain"} < set(rows)
    assert all(row["processor_s"] > 0 for row in rows.values())


@pytest.mark.large
def test_guards():
    rows = figures("guards.py", "--quick")["rows"]
    assert [row["model"] for row in rows] == ["llama, 2 layers", "gpt2, 2 layers"]
    assert all(row["values"] > 20 and row["guards_us"] > 0 and row["changing_ms"] > 0 for row in rows)


@pytest.mark.large
def test_methods():
    (case,) = figures("methods.py")["cases"]
    gaps = {row["method"]: row["gap"] for row in case["rows"]}
    assert len(gaps) == 4 and gaps["integer_programming"] < 1e-6 and 0 <= gaps["dynamic_programming"] < 0.02
    assert case["lower_bound_s"] == pytest.approx(case["best_known_s"], rel=1e-4)
    assert all(row["memory_bytes"] <= case["case"]["memory_gb"] * 1e9 for row in case["rows"])
    assert min(row["step_time_s"] for row in case["rows"]) < case["uniform"]["step_time_s"]


@pytest.mark.large
def test_published():
    found = figures("published.py")
    assert found["worst_error"] < 0.1 and len(found["rows"]) == 2
    assert all(row["memory_bytes"] < 80e9 for row in found["rows"])


@pytest.mark.large
def test_probe_of_gpus():
    """On the CPU, which shows that every point runs."""
    points = figures("gpu/probe.py", "--device", "cpu")["points"]
    assert len(points) >= 12
    assert {name: point for name, point in points.items() if "error" in point or point["ok"] is False} == {}


@pytest.mark.large
def test_gpu_benchmarks_run(tmp_path):
    """On the CPU, tiny: steps are measured and predicted, kernels compared, and ranks that share a device agree."""
    steps = tmp_path / "steps.json"
    ran("gpu/steps.py", "measure", str(steps), "--quick", "--device", "cpu")
    (row,) = figures("gpu/steps.py", "predict", str(steps), "--quick")["rows"]
    assert row["measured_s"] > 0 and row["predicted_s"] > 0
    assert figures("gpu/kernels.py", "--quick", "--device", "cpu")["rows"]["tiny"]["ratio"] > 0
    rows = figures("gpu/sharing.py", "--quick", "--device", "cpu", "--ranks", "2")["rows"]
    assert len(rows) == 12 and all(row["ok"] for row in rows)


@pytest.mark.parametrize(("gpu", "profile", "only", "count"), [
    ("h200", "h200-141gb-sxm", ("gpt2-medium",), 1),
    pytest.param("h200", "h200-141gb-sxm", (), 15, marks=pytest.mark.large),
    pytest.param("h100", "h100-80gb-sxm-measured", (), 8, marks=pytest.mark.large),
], ids=str)  # fmt: skip
def test_steps_measured_on_a_gpu_are_predicted(gpu, profile, only, count, monkeypatch, capsys):
    """By a profile of which no number is fitted to a step."""
    chosen = ("--only", *only) if only else ()
    asked = ("predict", str(BENCHMARKS / "gpu" / gpu / "steps.json"), "--hardware", profile, *chosen)
    rows = figures_here("gpu/steps.py", monkeypatch, capsys, *asked)["rows"]
    assert len(rows) == count
    errors = [abs(row["error"]) for row in rows]
    assert sum(errors) / len(errors) < 0.06 and max(errors) < 0.15
    for row in rows:
        assert -0.012 < row["memory_error"] < 0, row["step"]  # what is missing is what cuBLAS keeps for itself


@pytest.mark.large
def test_host_memory():
    rows = figures("host_memory.py", "--quick", "--only", "2-tp2-folder", "2-pp2-folder", "2-tp2-init")["rows"]
    assert len(rows) == 6
    assert all(row["peak_bytes"] < row["shard_bytes"] + row["largest_bytes"] + 2**26 for row in rows)
