"""Measure the cost of the training loop's checks: microseconds per step, all on against all off.

Two gloo ranks train a small model. Blocks of steps with the checks of every call (which compare how the ranks are
called and on what, and watch for hangs) alternate with blocks that have none; the median of the differences
counts, since other work on the machine changes single blocks. Replica checks (`check_replicas`) are timed
separately and divided by the number of steps. The aim: at most 1 % of a step of 200 ms.

    python benchmarks/checks.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

NUM_RANKS = 2
STEP_US, SHARE = 200_000, 0.01
BLOCK = 10  # steps that are timed together
MESHES = ("dp2", "tp2")


class Model(nn.Module):
    """Tokens and floats in; a loss out."""

    def __init__(self, width: int, vocab: int):
        super().__init__()
        self.table, self.norm = nn.Embedding(vocab, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(ids))
        return (x + self.down(torch.tanh(self.up(x))) - target).pow(2).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="40 steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (f"file://{folder}/store", arguments), nprocs=NUM_RANKS)


def rank_main(rank: int, store: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    num_steps = 4 * BLOCK if arguments.quick else 1000
    rows = {mesh: measured(mesh, num_steps) for mesh in MESHES}
    if rank == 0:
        report(rows, num_steps, arguments.json)
    dist.destroy_process_group()


def measured(mesh: str, num_steps: int) -> dict[str, float]:
    """Microseconds per step, with and without the checks."""
    import autopart

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    batch = {
        "ids": torch.randint(512, (8, 128), generator=generator),
        "target": torch.randn(8, 128, 64, generator=generator),
    }
    pm = autopart.parallelize(Model(64, 512), mesh, example_kwargs=batch, check_replicas=False)
    block(pm, batch)
    on, off = [], []
    for _ in range(num_steps // BLOCK):
        on.append(block(pm, batch))
        with without_checks():
            off.append(block(pm, batch))
    copies_us = statistics.median(comparison(pm) for _ in range(10 if num_steps < 1000 else 50))
    copies_us *= sum(is_due(step) for step in range(1, 1001)) / 1000
    calls_us = statistics.median(a.wall_us - b.wall_us for a, b in zip(on, off, strict=True))
    cpu_us = statistics.median(a.cpu_us - b.cpu_us for a, b in zip(on, off, strict=True))
    return {
        "on_us": statistics.mean(taken.wall_us for taken in on),
        "off_us": statistics.mean(taken.wall_us for taken in off),
        "calls_us": calls_us,
        "copies_us": copies_us,
        "checks_us": calls_us + copies_us,
        "cpu_us": cpu_us,
    }


class Time(NamedTuple):
    """Of one step: microseconds of the slowest rank, and processor microseconds of the mean rank."""

    wall_us: float
    cpu_us: float


def block(module: nn.Module, batch: dict[str, torch.Tensor]) -> Time:
    """A step's time, over a block of them."""
    dist.barrier()
    start_s, cpu_start_s = time.perf_counter(), time.process_time()
    for _ in range(BLOCK):
        module.step(**batch)
    wall_us = torch.tensor((time.perf_counter() - start_s) / BLOCK * 1e6, dtype=torch.float64)
    cpu_us = torch.tensor((time.process_time() - cpu_start_s) / BLOCK / NUM_RANKS * 1e6, dtype=torch.float64)
    dist.all_reduce(wall_us, dist.ReduceOp.MAX)
    dist.all_reduce(cpu_us)
    return Time(float(wall_us), float(cpu_us))


def comparison(module: Any) -> float:
    """Microseconds of one comparison of all copies."""
    from autopart.compat.torch_function_internals import on_local_values

    check = on_local_values(module._replicas.check)
    dist.barrier()
    start_s = time.perf_counter()
    check(module._program, module._local_parameters, 1)
    return (time.perf_counter() - start_s) * 1e6


def is_due(step: int) -> bool:
    from autopart.runtime.consistency import replicas

    return replicas.is_due(None, step)


class NoComparison:
    """In the place of the comparison of a call."""

    def __init__(self, *_: Any):
        pass

    def finish_comparison(self) -> None:
        pass


@contextlib.contextmanager
def without_checks() -> Iterator[None]:
    """Inside, no call is compared and none is watched; what there is to a step beside that stays."""
    from autopart.runtime import module
    from autopart.runtime.comm import collectives, watchdog

    nothing = mock.patch.object(module, "Comparison", NoComparison)
    unwatched = mock.patch.object(watchdog.Watch, "inside", lambda *_: contextlib.nullcontext())
    unmarked = mock.patch.object(collectives, "line_of_graph", lambda: None)
    with nothing, unwatched, unmarked:
        yield


def report(rows: dict[str, dict[str, float]], num_steps: int, as_json: bool) -> None:
    limit_us = STEP_US * SHARE
    print(f"microseconds per step over {num_steps} steps, {NUM_RANKS} gloo ranks; checks: at most {limit_us:g}\n")
    print(
        f"{'mesh':<6} {'with':>8} {'without':>8} {'calls':>8} {'copies':>8} {'checks':>8} {'of 200 ms':>10} {'cpu':>8}"
    )
    for mesh, row in rows.items():
        times = [row[name] for name in ("on_us", "off_us", "calls_us", "copies_us", "checks_us")]
        share = row["checks_us"] / STEP_US
        print(f"{mesh:<6} {' '.join(f'{us:>8.0f}' for us in times)} {share:>10.2%} {row['cpu_us']:>8.0f}")
    worst_us = max(row["checks_us"] for row in rows.values())
    print(f"\nthe dearest: {worst_us:.0f} us, {'within' if worst_us <= limit_us else 'BEYOND'} the aim")
    print("with, without: means. calls: median of the differences of neighbouring blocks. cpu: of a rank's processor")
    if as_json:
        figures = {"num_steps": num_steps, "limit_us": limit_us, "meshes": rows, "within": worst_us <= limit_us}
        print(json.dumps({"benchmark": "checks", **figures}))


if __name__ == "__main__":
    main()
