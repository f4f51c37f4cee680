"""The most memory that a training step of a Llama holds on a rank of dp2, beside what its plan says.

Every level of ZeRO, with all recomputation or none, in float32 and with mixed precision. What is held is what torch's
allocator has handed out at a time, by the profiler's record of every piece: parameters, gradients, AdamW's moments,
activations, and what is sent. The least of several steps: threads that send hold a moment longer what they have sent.

    python benchmarks/memory.py [--quick] [--json] [--zero 0 1 2 3] [--recompute none selective full]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from two_ranks import NUM_RANKS, Sizes, build

LARGE = Sizes(hidden=768, mlp=2304, layers=12, vocab=8192, rows=4, seq=128, rounds=2)
QUICK = Sizes(hidden=256, mlp=512, layers=2, vocab=512, rows=4, seq=64, rounds=2)
RECOMPUTE, PRECISIONS = ("none", "selective", "full"), (None, "bf16")
AIM = 3.0
"""Percent that a plan may be off."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--zero", nargs="+", type=int, default=[0, 1, 2, 3], help="levels of ZeRO")
    parser.add_argument("--recompute", nargs="+", default=list(RECOMPUTE), help="what is run again in the backward")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, arguments), nprocs=NUM_RANKS)
        found = json.loads(Path(folder, "found").read_text())
    if arguments.json:
        print(json.dumps({"benchmark": "memory", **found}))


def rank_main(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    sizes = QUICK if arguments.quick else LARGE
    rows = []
    for zero, recompute, precision in itertools.product(arguments.zero, arguments.recompute, PRECISIONS):
        gc.collect()
        row = measured(sizes, zero, recompute, precision)
        if rank == 0:
            if not rows:
                print(f"Llama of {row['parameters'] / 1e6:.0f}M parameters, dp2, batch {sizes.rows} x {sizes.seq}\n")
                print(f"{'zero':<5} {'recompute':<10} {'precision':<9} {'held MB':>9} {'plan MB':>9} {'off %':>7}")
            print(f"{zero:<5} {recompute:<10} {precision or 'fp32':<9} {row['held_bytes'] / 1e6:>9.1f} "
                  f"{row['plan_bytes'] / 1e6:>9.1f} {row['off_percent']:>7.2f}", flush=True)  # fmt: skip
        rows.append(row)
    if rank == 0:
        worst = max(abs(row["off_percent"]) for row in rows)
        print(f"\nfarthest off: {worst:.2f} %; the aim is {AIM:g} %")
        Path(folder, "found").write_text(json.dumps({"rows": rows, "worst_percent": worst}))
    dist.destroy_process_group()


def measured(sizes: Sizes, zero: int, recompute: str, precision: str | None) -> dict[str, Any]:
    """What is held, and what the plan says, of one way to train."""
    import autopart

    model, batch = build(sizes)
    options: dict[str, Any] = {"precision": precision} if precision else {}
    pm = autopart.parallelize(model, "dp2", example_kwargs=batch, zero=zero, recompute=recompute, **options)
    parameters = sum(p.numel() for p in model.parameters())
    del model
    optimizer = torch.optim.AdamW(pm.parameters(), fused=True)

    def step() -> None:
        pm.step(**batch)
        optimizer.step()

    step()
    optimizer.zero_grad()
    moments = [value for values in optimizer.state.values() for value in values.values()]
    lasting = memory_of([*pm.parameters(), *pm.buffers(), *batch.values(), *moments])
    held = []
    for _ in range(sizes.rounds):
        dist.barrier()
        held.append(lasting + most_allocated(step))
        optimizer.zero_grad()
    everyones = torch.tensor(min(held))
    dist.all_reduce(everyones, dist.ReduceOp.MIN)  # both ranks do the same
    held_bytes, plan_bytes = int(everyones), pm.plan.memory[0]["total"]
    return {
        "zero": zero, "recompute": recompute, "precision": precision or "fp32", "parameters": parameters,
        "held_bytes": held_bytes, "plan_bytes": plan_bytes, "off_percent": 100 * (plan_bytes / held_bytes - 1),
    }  # fmt: skip


def memory_of(tensors: Iterable[Any]) -> int:
    """Bytes of the storages of these, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def most_allocated(call: Callable[[], Any]) -> int:
    """How many bytes more than before there are at a time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    taken = [e["args"]["Bytes"] for e in sorted(events, key=lambda e: e.get("ts", 0)) if e["name"] == "[memory]"]
    return max(accumulate(taken, initial=0))


if __name__ == "__main__":
    main()
