"""Compare `schedule="1f1b_2bw"` (PipeDream-2BW) with "1f1b", measured and predicted.

Stages run on gloo processes and sleep instead of computing, twice as long in backward as in forward. The processor
is idle, so any number of ranks runs in parallel. `clipped` clips gradients by their global norm, and `tied` shares a
weight between the first and the last stage. Both synchronise ranks in every step.

    python benchmarks/bubble.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _ranks import of_first_rank
from torch import Tensor, nn

import autopart
from autopart.cost.predict.timeline import Durations, timeline

FORWARD_S, BACKWARD_S = 0.02, 0.04
SCHEDULES = ("1f1b", "1f1b_2bw")


class Case(NamedTuple):
    pp: int
    microbatches: int
    kind: str = "plain"


CASES = [
    Case(2, 2), Case(2, 4), Case(2, 8), Case(4, 4), Case(4, 8), Case(4, 16), Case(2, 4, "clipped"), Case(2, 4, "tied"),
    Case(4, 8, "clipped"), Case(4, 8, "tied"),
]  # fmt: skip


@torch.library.custom_op("bubble::sleep", mutates_args=())
def sleep(x: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return x.clone()


@sleep.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.seconds = inputs[1]


sleep.register_autograd(
    lambda ctx, grad: (sleep(grad, ctx.seconds * BACKWARD_S / FORWARD_S), None), setup_context=_remember
)
autopart.rule("bubble::sleep", "b h -> b h")


class Chain(nn.Module):
    """A linear layer and a sleep a stage."""

    def __init__(self, stages: int, is_tied: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(stages))
        if is_tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = sleep(layer(x), FORWARD_S)
        return x.square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one case, one round")
    parser.add_argument("--rounds", type=int, default=3, help="how often both are measured, in turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    cases, rounds = (CASES[:1], 1) if arguments.quick else (CASES, arguments.rounds)
    rows = []
    print(f"{'stages':>6} {'microbatches':>13}  {'':8} {'1f1b ms':>8} {'2bw ms':>8} {'ratio':>7} {'predicted':>10}")
    for case in cases:
        found = of_first_rank(measured, case.pp, case, rounds)
        medians = [1e3 * statistics.median(found[name]) for name in SCHEDULES]
        ratio = statistics.median(late / flush for flush, late in zip(*found.values(), strict=True))
        rows.append({**case._asdict(), "ms": medians, "ratio": ratio, "predicted": predicted(case)})
        times = f"{medians[0]:>8.0f} {medians[1]:>8.0f} {ratio:>7.3f} {rows[-1]['predicted']:>10.3f}"
        print(f"{case.pp:>6} {case.microbatches:>13}  {case.kind:8} {times}", flush=True)
    if arguments.json:
        print(json.dumps({"benchmark": "bubble", "rows": rows}))


def predicted(case: Case) -> float:
    """What a step takes beside one with a flush; after a norm of all gradients no rank is ahead of another."""
    everyone = range(case.pp) if case.kind == "clipped" else (0, case.pp - 1) if case.kind == "tied" else ()
    tied = [tuple(everyone)] if everyone else []
    durations = Durations([FORWARD_S] * case.pp, [BACKWARD_S] * case.pp, tied=tied)
    flush, late = (timeline(name, case.pp, case.pp, case.microbatches, durations).step_time_s for name in SCHEDULES)
    return late / flush


def measured(rank: int, store: str, case: Case, rounds: int) -> dict[str, list[float]]:
    """{schedule: seconds of a step, round by round}."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=case.pp)
    steps = {schedule: step_of(case, schedule) for schedule in SCHEDULES}
    found: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
    for _ in range(rounds):
        for schedule, (step, flush) in steps.items():
            found[schedule].append(seconds_of(step))
            flush()
    return found


def seconds_of(step: Callable[[], None], number: int = 8) -> float:
    """Seconds of a step among many, the slowest rank's: from the end of one to the end of a later one."""
    ends = []
    for _ in range(number):
        step()
        ends.append(time.perf_counter())
    took_s = torch.tensor((ends[-1] - ends[2]) / (number - 3), dtype=torch.float64)
    dist.all_reduce(took_s, dist.ReduceOp.MAX)
    return float(took_s)


def step_of(case: Case, schedule: str) -> tuple[Callable[[], None], Callable[[], Any]]:
    """A training step, and what ends a row of them."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(2 * case.microbatches, 64)}
    model = Chain(case.pp, case.kind == "tied")
    pm = autopart.parallelize(
        model, f"pp{case.pp}", example_kwargs=batch, schedule=schedule, microbatches=case.microbatches,
        check_replicas=False,
    )  # fmt: skip
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        pm.step(**batch)
        if case.kind == "clipped":
            pm.clip_grad_norm_(1.0)
        optimizer.step()

    return step, pm.flush if schedule == "1f1b_2bw" else dist.barrier


if __name__ == "__main__":
    main()
