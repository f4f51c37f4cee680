"""What PTD-P's authors found (Narayanan et al. 2021, arXiv:2104.04473, sections 3 and 5) holds of predictions, and so
does a run that nothing was fitted to."""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import published
from published import STATES, Run, setting, space

from autopart.cost.table import Setting, estimate
from autopart.mesh import Mesh
from autopart.plan import Schedule

model = cache(lambda hidden, layers, heads: space(hidden, layers, heads, 1))


def throughput(name, rows, microbatch, virtual=1, scatter=True, **sizes):
    """Rows per second, every layer recomputed."""
    found, mesh = model(*name), Mesh.parse(sizes)
    microbatches, stages = rows // (mesh.size("dp") * microbatch), mesh.size("pp")
    schedule = (
        None if stages == 1 else "interleaved_1f1b" if virtual > 1 else "1f1b" if microbatches >= stages else "gpipe"
    )
    hidden = 1.0 if stages == 1 else 0.0
    chosen = Setting(mesh, Schedule(schedule, microbatches, virtual), rows, 0, STATES, hidden, scatter, receives_held=1)
    return rows / estimate(found.table(mesh.size("tp") > 1, False, "full"), chosen, found.hardware).step_time_s


GPT_162B, GPT_5_9B, GPT_91B, GPT_175B = (20480, 32, 128), (3840, 32, 32), (15360, 32, 128), (12288, 96, 96)


@pytest.mark.parametrize("rows", [32, 128])
def test_tensor_parallelism_fills_a_node_and_pipelines_go_between(rows):
    found = {tp: throughput(GPT_162B, rows, 1, tp=tp, pp=64 // tp) for tp in (2, 4, 8, 16, 32)}
    assert max(found, key=found.__getitem__) == 8


@pytest.mark.parametrize("axis", ["pp", "tp"])
@pytest.mark.parametrize("rows", [32, 128, 512])
def test_more_model_parallelism_than_needed_is_slower(axis, rows):
    found = [throughput(GPT_5_9B, rows, 1, **{axis: n, "dp": 64 // n}) for n in (2, 4, 8, 16, 32)]
    assert found == sorted(found, reverse=True)


def test_interleaving_wins_by_less_as_the_batch_grows_and_scattered_sends_help():
    gains = [throughput(GPT_175B, n, 1, 4, tp=8, pp=12) / throughput(GPT_175B, n, 1, tp=8, pp=12) for n in (12, 36, 60)]
    assert gains == sorted(gains, reverse=True) and gains[-1] > 1
    assert throughput(GPT_175B, 60, 1, 4, tp=8, pp=12) > throughput(GPT_175B, 60, 1, 4, False, tp=8, pp=12)


def test_the_best_microbatch_of_91b_is_two():
    found = {size: throughput(GPT_91B, 128, size, tp=8, pp=8) for size in (1, 2, 4, 8)}
    assert max(found, key=found.__getitem__) == 2


@pytest.mark.parametrize("run", published.RUNS[:5], ids=lambda run: f"{run.billions}B")
def test_the_table(run):
    """The first half of the table; `benchmarks/published.py` has all of it."""
    row = published.measure(run)
    assert abs(row["error"]) < 0.1 and row["memory_bytes"] < 80e9


@pytest.mark.parametrize(("recompute", "mfu"), [("full", 0.421), ("selective", 0.542)])
def test_a_run_that_nothing_was_fitted_to(recompute, mfu):
    """A 530B GPT on 2,240 A100s, recomputed whole, or in part with sequence parallelism (Korthikanti et al. 2022,
    arXiv:2205.05198, abstract), whose products add up the gradients of microbatches."""
    run = Run(530, 128, 20480, 105, 8, 35, 2240, 2240, 1, 3, 0.0)
    model = space(run.hidden, run.layers, run.heads, run.batch)
    table = model.table(True, recompute == "selective", recompute)
    found = estimate(table, replace(setting(run), fused_sums=True), model.hardware)
    assert found.mfu == pytest.approx(mfu, rel=0.1)
