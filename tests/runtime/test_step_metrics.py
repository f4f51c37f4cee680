"""`pm.metrics()`: throughput, utilization and predictions of the training steps since the previous call."""

from __future__ import annotations

import dist
import pytest
import torch
from torch import nn

import autopart
from autopart.runtime.batch import step_metrics

ROWS, LENGTH, WIDTH = 4, 6, 8
FORWARD_FLOPS = 2 * ROWS * LENGTH * WIDTH * WIDTH
STEP_S = 2.0


class Tagger(nn.Module):
    """A model with one matrix product."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, ids):
        return {"loss": self.head(self.embedding(ids)).square().mean()}


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.arange(ROWS * length).reshape(ROWS, length) % 16


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose only entry is the time that the meter reads."""
    now = [0.0]
    monkeypatch.setattr(step_metrics.time, "perf_counter", lambda: now[0])
    return now


def train(pm, clock, lengths):
    for length in lengths:
        pm.step(tokens(length))
        clock[0] += STEP_S


def test_figures_of_equal_batches(clock):
    pm = autopart.parallelize(Tagger(), "dp1", example_args=(tokens(),), hardware="a100-80gb-sxm")
    pm.step(tokens())  # creates the executable: not measured
    clock[0] += 100.0
    train(pm, clock, [LENGTH] * 3)
    figures = pm.metrics()
    peak = pm.plan.timing["peak_flops_per_s"]
    assert figures == {
        "steps": 3,
        "step_time_s": STEP_S,
        "samples_per_s": ROWS / STEP_S,
        "tokens_per_s": ROWS * LENGTH / STEP_S,
        "tflops_per_device": pytest.approx(3 * FORWARD_FLOPS / STEP_S / 1e12),
        "mfu": pytest.approx(3 * FORWARD_FLOPS / STEP_S / peak),
        "predicted_step_time_s": pm.plan.cost["step_time_s"],
        "planned_memory_bytes": pm.plan.memory[0]["total"],
    }
    assert pm.metrics()["steps"] == 0


def test_other_sizes_have_no_prediction(clock):
    pm = autopart.parallelize(Tagger(), "dp1", example_args=(tokens(),), hardware="a100-80gb-sxm")
    train(pm, clock, [LENGTH, 2 * LENGTH])
    pm.metrics()
    train(pm, clock, [LENGTH, 2 * LENGTH])
    figures = pm.metrics()
    assert "predicted_step_time_s" not in figures
    assert figures["tokens_per_s"] == 3 * ROWS * LENGTH / (2 * STEP_S)
    assert figures["tflops_per_device"] == pytest.approx(3 * 3 * FORWARD_FLOPS / (2 * STEP_S) / 1e12)


def test_evaluation_is_not_measured(clock):
    pm = autopart.parallelize(Tagger(), "dp1", example_args=(tokens(),))
    train(pm, clock, [LENGTH])
    pm.metrics()
    train(pm, clock, [LENGTH])
    with torch.no_grad():
        pm(tokens())
    clock[0] += 50.0
    train(pm, clock, [LENGTH])
    figures = pm.metrics()
    assert (figures["steps"], figures["step_time_s"]) == (2, STEP_S)


def own_rows():
    rank = torch.distributed.get_rank()
    pm = autopart.parallelize(Tagger(), "dp2", example_args=(tokens()[:2],), local_batch=True)
    for _ in range(3):
        pm.step(tokens().chunk(2)[rank])
    return pm.metrics()


def test_samples_of_all_ranks_count():
    for figures in dist.run_ranks(own_rows, 2):
        assert figures["samples_per_s"] == pytest.approx(ROWS / figures["step_time_s"])
        assert figures["tokens_per_s"] == pytest.approx(ROWS * LENGTH / figures["step_time_s"])
