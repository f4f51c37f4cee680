"""What PTD-P's authors found (Narayanan et al. 2021, arXiv:2104.04473, sections 3 and 5) holds of predictions, and runs
of others are predicted with the same constants."""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import published
import published_rows
from published import STATES, Run, setting, space

from autopart.cost.predict.table import RunSetting, predict
from autopart.ir.mesh import Mesh
from autopart.ir.run.schedules import Schedule
from autopart.tuning.search import LayoutKind

model = cache(lambda hidden, layers, heads: space(hidden, layers, heads, 1))


def throughput(name, rows, microbatch, virtual=1, scatter=True, **sizes):
    """Rows per second, every layer recomputed."""
    found, mesh = model(*name), Mesh.parse(sizes)
    microbatches, stages = rows // (mesh.size("dp") * microbatch), mesh.size("pp")
    schedule = (
        None if stages == 1 else "interleaved_1f1b" if virtual > 1 else "1f1b" if microbatches >= stages else "gpipe"
    )
    hidden = 1.0 if stages == 1 else 0.0
    run = Schedule(schedule, microbatches, virtual)
    chosen = RunSetting(mesh, run, rows, 0, STATES, hidden, scatter, False, receives_held=1)
    return (
        rows / predict(found.table(LayoutKind(mesh.size("tp") > 1, False), "full"), chosen, found.hardware).step_time_s
    )


GPT_162B, GPT_5_9B, GPT_91B, GPT_175B = (20480, 32, 128), (3840, 32, 32), (15360, 32, 128), (12288, 96, 96)


@pytest.mark.large
@pytest.mark.parametrize("rows", [32, 128])
def test_tensor_parallelism_fills_a_node_and_pipelines_go_between(rows):
    found = {tp: throughput(GPT_162B, rows, 1, tp=tp, pp=64 // tp) for tp in (2, 4, 8, 16, 32)}
    assert max(found, key=found.__getitem__) == 8


@pytest.mark.large
@pytest.mark.parametrize("axis", ["pp", "tp"])
@pytest.mark.parametrize("rows", [32, 128, 512])
def test_more_model_parallelism_than_needed_is_slower(axis, rows):
    found = [throughput(GPT_5_9B, rows, 1, **{axis: n, "dp": 64 // n}) for n in (2, 4, 8, 16, 32)]
    assert found == sorted(found, reverse=True)


def interleaving_gains(rows, scatter):
    ours, default = (throughput(GPT_175B, rows, 1, virtual, scatter, tp=8, pp=12) for virtual in (4, 1))
    return ours / default


@pytest.mark.large
def test_interleaving_wins_by_less_as_the_batch_grows_and_needs_scattered_sends():
    gains = [interleaving_gains(rows, True) for rows in (12, 36, 60, 240)]
    assert gains == sorted(gains, reverse=True) and gains[-1] > 1
    assert interleaving_gains(12, False) > 1 > interleaving_gains(240, False)


def test_scattered_sends_help():
    whole, scattered = (throughput(GPT_175B, 60, 1, 4, scatter, tp=8, pp=12) for scatter in (False, True))
    assert 1.05 < scattered / whole < 1.15


@pytest.mark.few
@pytest.mark.parametrize("rows", [128, 512])
def test_the_best_microbatch_of_91b_is_two(rows):
    found = {size: throughput(GPT_91B, rows, size, tp=8, pp=8) for size in (1, 2, 4, 8)}
    assert max(found, key=found.__getitem__) == 2


def predicted(step_s, measured_s, share, memory_gb=1.0):
    row = published_rows.Row("ultrascale", "1B", 8, 8, 1, 1, 0, 1, 32, measured_s, 0.0)
    return published_rows.Predicted(row, step_s, memory_gb, {}, share)


def test_a_ranking_of_predictions():
    rows = [predicted(1.0, 2.0, 0.5), predicted(2.0, 1.0, 1.0), predicted(3.0, 3.0, 1 / 3), predicted(0.1, 9.0, 1 / 9)]
    crashed = [predicted(0.5, 0.0, 0.0, 90.0), predicted(0.01, 0.0, 0.0, 60.0)]
    (found,) = published_rows.rank([*rows, *crashed], {"ultrascale": 80.0}).values()
    assert found.rows == 3 and found.tau == pytest.approx(1 / 3)  # two of three pairs are in order
    assert found.gap == pytest.approx(8.0)  # the row with the shortest prediction took nine times as long
    assert found.choice == float("inf")  # it fits by its prediction, and crashed
    assert published_rows.separation([1.0, 2.0], [2.0, 3.0]) == 0.875


@pytest.mark.large
@pytest.mark.parametrize("run", published.RUNS[:5], ids=lambda run: f"{run.billions}B")
def test_the_table(run):
    """The first half of the table; `benchmarks/published.py` has all of it."""
    row = published.measure(run)
    assert abs(row["error"]) < 0.1 and row["memory_bytes"] < 80e9


@pytest.mark.large
@pytest.mark.parametrize(("recompute", "mfu"), [("full", 0.421), ("selective", 0.542)])
def test_a_run_with_fused_sums_of_gradients(recompute, mfu):
    """A 530B GPT on 2,240 A100s, recomputed whole, or in part with sequence parallelism (Korthikanti et al. 2022,
    arXiv:2205.05198, abstract), whose products add up the gradients of microbatches."""
    run = Run(530, 128, 20480, 105, 8, 35, 2240, 2240, 1, 3, 0.0)
    model = space(run.hidden, run.layers, run.heads, run.batch)
    table = model.table(LayoutKind(True, recompute == "selective"), recompute)
    found = predict(table, replace(setting(run), fused_sums=True), model.hardware)
    assert found.mfu == pytest.approx(mfu, rel=0.04)


@pytest.mark.large
@pytest.mark.parametrize(("hardware", "name"), [
    ("a100-80gb-sxm", "350m"), ("a100-80gb-sxm", "1b"), ("a100-80gb-sxm", "7b"), ("h100-80gb-sxm", "1b"),
    ("h100-80gb-sxm", "7b"),
])  # fmt: skip
def test_runs_of_zero_3(hardware, name):
    """Those on A100s are what no constant was fitted to; `benchmarks/published.py` has all."""
    run = next(run for run in published.MPT[hardware] if run.name == name)
    assert abs(published.measure_mpt(run, hardware)["error"]) < 0.07
