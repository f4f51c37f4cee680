"""Train on another sequence length in every step, beside torch's own parallelism, for a Llama on two ranks.

Both sides of a case run in the same two processes, step by step in turn, on the same batches: AdamW, lengths drawn
uniformly. A length is run twice in a row. Figures:

    total       autopart's time of all first steps, traces included, divided by torch's
    derived     the same without the steps that trace
    first step  autopart: time of the first step of a length divided by that of the second, median of derived lengths
    padded      autopart's time of all first steps divided by that of equally many steps at the longest length
    memory      growth of the process's resident memory from step 20 to the end

    python benchmarks/new_lengths.py [--quick] [--json] [--only tp2 zero3] [--steps 200]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from _ranks import of_first_rank
from torch import Tensor, nn
from two_ranks import NUM_RANKS, Batch, Sizes, build, dtensor_tp

SIZES = Sizes(hidden=512, mlp=1408, layers=4, vocab=4096, rows=4, seq=256)
QUICK = Sizes(hidden=64, mlp=128, layers=2, vocab=256, rows=4, seq=32)
SHORTEST = 16
CASES: dict[str, tuple[str, dict[str, Any]]] = {"tp2": ("tp2", {}), "zero3": ("dp2", {"zero": 3})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, ten steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="these cases")
    parser.add_argument("--steps", type=int, default=200, help="number of lengths")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sizes, steps = (QUICK, 10) if asked.quick else (SIZES, asked.steps)
    print(f"{'case':<7} {'total':>6} {'derived':>8} {'first step':>11} {'padded':>7} {'traced':>7} {'memory':>9}")
    rows = []
    for name in asked.only:
        row = of_first_rank(measured, NUM_RANKS, name, sizes, steps)
        rows.append(row)
        print(f"{name:<7} {row['total']:>6.2f} {row['derived']:>8.2f} {row['first_step']:>11.2f} {row['padded']:>7.2f}"
              f" {row['traced']:>7} {row['memory_mb']:>6.0f} MB", flush=True)  # fmt: skip
    if asked.json:
        print(json.dumps({"benchmark": "new_lengths", "load": os.getloadavg(), "rows": rows}))


def measured(rank: int, store: str, name: str, sizes: Sizes, num_steps: int) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    model, longest = build(sizes)
    ours = with_optimizer(*autopart_step(name, copy.deepcopy(model), longest))
    theirs = with_optimizer(*torch_step(name, copy.deepcopy(model), longest))
    lengths = random.Random(0).choices(range(SHORTEST, sizes.seq + 1), k=num_steps)
    times: dict[str, list[float]] = {"ours": [], "again": [], "theirs": [], "padded": []}
    traced, start_mb = [], 0.0
    for number, length in enumerate(lengths):
        batch = {key: value[:, :length].contiguous() for key, value in longest.items()}
        with counted_traces() as count:
            times["ours"].append(timed(ours, batch))
        traced.append(count.call_count > 0)
        times["theirs"].append(timed(theirs, batch))
        times["again"].append(timed(ours, batch))
        if number % 10 == 0:
            times["padded"].append(timed(ours, longest))
        if number == min(20, num_steps // 2):
            start_mb = resident_mb()
    derived = [index for index, was_traced in enumerate(traced) if not was_traced]
    return {
        "name": name,
        "total": sum(times["ours"]) / sum(times["theirs"]),
        "derived": sum(times["ours"][i] for i in derived) / max(sum(times["theirs"][i] for i in derived), 1e-9),
        "first_step": statistics.median([times["ours"][i] / times["again"][i] for i in derived] or [0.0]),
        "padded": sum(times["ours"]) / (statistics.mean(times["padded"]) * num_steps),
        "traced": sum(traced),
        "memory_mb": resident_mb() - start_mb,
    }


def autopart_step(name: str, model: nn.Module, batch: Batch) -> tuple[Callable[[Batch], Any], nn.Module]:
    import autopart

    mesh, options = CASES[name]
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, **options)
    return lambda batch: pm.step(**batch), pm


def torch_step(name: str, model: nn.Module, longest: Batch) -> tuple[Callable[[Batch], Any], nn.Module]:
    """Return a step of DTensor's tensor parallelism, or of FSDP2."""
    if name == "tp2":
        current = dict(longest)
        step = dtensor_tp(model, current)

        def run(batch: Batch) -> Tensor | None:
            current.update(batch)
            return step.run()

        return run, model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def run_own(batch: Batch) -> Tensor:
        own = {key: value.chunk(NUM_RANKS)[dist.get_rank()] for key, value in batch.items()}
        loss = model(**own).loss
        loss.backward()
        return loss

    return run_own, model


def with_optimizer(step: Callable[[Batch], Any], model: nn.Module) -> Callable[[Batch], None]:
    kinds: dict[type, list[Tensor]] = {}  # DTensors and tensors need separate groups
    for parameter in model.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": group} for group in kinds.values()], lr=1e-4)

    def run(batch: Batch) -> None:
        step(batch)
        optimizer.step()
        optimizer.zero_grad()

    return run


def counted_traces() -> Any:
    from autopart.recipe import make_plan

    return mock.patch.object(make_plan, "trace", wraps=make_plan.trace)


def timed(step: Callable[[Batch], None], batch: Batch) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    step(batch)
    return time.perf_counter() - start_s


def resident_mb() -> float:
    return psutil.Process().memory_info().rss / 1e6


if __name__ == "__main__":
    main()
