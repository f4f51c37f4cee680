"""Compare predicted and measured training steps of GPT-2 small, on two processes of one thread each.

The machine is calibrated first, on the same processes (`autopart.calibrate`); then `autopart.simulate` predicts the
step on tp2, pp2 and dp2, and the step is run: forward, backward, gradient reduction, fused AdamW. The processor time
of a rank's thread, in total and by operator, is shown too; other work on the machine changes it less. Memory is the
peak that torch's allocator hands out in a step; gradients are freed before it.

    python benchmarks/predicted.py [--quick] [--json] [--only tp2 ...] [--hardware PROFILE]

With `--json` the last line is one JSON object. Other work on the machine affects step and calibration, though
not at the same time: load averages are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import autopart

NUM_RANKS = 2
MESHES: dict[str, dict[str, Any]] = {"tp2": {}, "pp2": {"schedule": "1f1b", "microbatches": 4}, "dp2": {}}
TARGETS = {"step": 0.15, "memory": 0.10}  # relative errors
KINDS = {  # by the names of aten operators
    "matmul": ("mm", "addmm", "bmm", "baddbmm"),
    "attention": ("_scaled_dot_product", "_flash_attention"),
    "optimizer": ("_fused_adam",),
    "gradient sums": ("cat", "clone"),  # in and out of buckets; predicted with their communication
}
COMPUTED = (*KINDS, "other")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # The allocator keeps what it has, as PyTorch's performance guide advises (by jemalloc or tcmalloc): glibc's gives
    # large blocks back to the kernel, and every step would pay again for memory that is new to the process.
    "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776",
}
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    rows: int = 4
    seq: int = 128
    warm_ups: int = 1
    rounds: int = 5
    quick: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model on tp2, two rounds, a quick calibration")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--only", nargs="+", choices=MESHES, help="leave the others out")
    parser.add_argument("--hardware", help="a profile in place of a calibration")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, arguments), nprocs=NUM_RANKS)


def rank_main(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    sizes = Sizes(seq=32, rounds=2, quick=True) if arguments.quick else Sizes()
    load = [os.getloadavg()[0]]
    hardware = arguments.hardware or f"{folder}/here.json"
    meshes = arguments.only or (list(MESHES)[:1] if sizes.quick else MESHES)
    calibration = None if arguments.hardware else autopart.calibrate(hardware, quick=sizes.quick)
    dist.barrier()
    rows = {mesh: measure(mesh, hardware, sizes, Path(folder, f"trace{rank}.json")) for mesh in meshes}
    load.append(os.getloadavg()[0])
    if rank == 0:
        report(sizes, rows, load)
        if arguments.json:
            errors = calibration.errors() if calibration else {}
            print(json.dumps({"benchmark": "predicted", "load": load, "calibration": errors, "meshes": rows}))
    dist.destroy_process_group()


def build(sizes: Sizes) -> tuple[nn.Module, Batch]:
    """The same GPT-2 and batch on every rank, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    small = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**(small if sizes.quick else {}), embd_pdrop=0, attn_pdrop=0, resid_pdrop=0, use_cache=False)
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # which transformers would fall back to, with a warning
    ids = torch.randint(0, config.vocab_size, (sizes.rows, sizes.seq))
    return model, {"input_ids": ids, "labels": ids.clone()}


# --- Measuring.


class Step:
    """A training step on a mesh, as it is predicted: forward, backward, sums of gradients, AdamW."""

    def __init__(self, mesh: str, hardware: str, sizes: Sizes):
        model, self.batch = build(sizes)
        self.pm = autopart.parallelize(
            model, mesh, example_kwargs=self.batch, hardware=hardware, **MESHES.get(mesh, {}), sequence_parallel=False
        )
        self.optimizer = torch.optim.AdamW(self.pm.parameters(), fused=True)

    def run(self) -> None:
        self.pm.step(**self.batch)
        self.optimizer.step()

    def timed(self) -> tuple[float, float]:
        """Seconds from a common start until the slowest rank is done, and processor seconds of this thread."""
        self.optimizer.zero_grad()
        dist.barrier()
        start_s, thread_start_s = time.perf_counter(), time.thread_time()
        self.run()
        taken_s = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
        thread_s = time.thread_time() - thread_start_s
        dist.all_reduce(taken_s, dist.ReduceOp.MAX)
        return float(taken_s), thread_s

    def by_operator(self) -> dict[str, tuple[int, float]]:
        """Calls and processor seconds of every aten operator in a step."""
        self.optimizer.zero_grad()
        dist.barrier()
        with Clock() as clock:
            self.run()
        return dict(clock.found)


class Clock(TorchDispatchMode):
    """The processor time of this thread in every operator, forward and backward; waiting for others takes none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: defaultdict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start_s = time.thread_time()
        result = func(*args, **(kwargs or {}))
        taken_s = time.thread_time() - start_s
        if func.namespace == "aten":
            count, total_s = self.found[func.overloadpacket.__name__]
            self.found[func.overloadpacket.__name__] = count + 1, total_s + taken_s
        return result


def measure(mesh: str, hardware: str, sizes: Sizes, trace: Path) -> dict[str, Any]:
    """One mesh: predicted and measured, the same on every rank."""
    step = Step(mesh, hardware, sizes)
    predicted = autopart.simulate(step.pm.plan)
    for _ in range(sizes.warm_ups):
        step.run()
    times_s, threads_s = zip(*(step.timed() for _ in range(sizes.rounds)), strict=True)
    operators = step.by_operator()
    ranks: list[dict[str, Any]] = [{}] * NUM_RANKS
    mine = {"thread_s": min(threads_s), "operators": operators, "kinds_s": by_kind(operators)}
    dist.all_gather_object(ranks, mine | {"peak_bytes": peak_bytes(step, trace)})
    rows = [step.pm.plan.memory[rank if mesh == "pp2" else 0] for rank in range(NUM_RANKS)]
    return {
        "predicted_s": predicted.step_time_s, "median_s": statistics.median(times_s), "min_s": min(times_s),
        "predicted_parts_s": dict(predicted.parts), "predicted_kinds_s": [computed(step.pm.plan, row) for row in rows],
        "predicted_peak_bytes": [row["total"] for row in rows], "ranks": ranks,
    }  # fmt: skip


def computed(plan: autopart.Plan, row: dict[str, Any]) -> dict[str, float]:
    """Predicted seconds of a step by kind, of the rank with this row of the plan's memory."""
    kinds: defaultdict[str, float] = defaultdict(float)
    for stage in (plan.timing["stages"][index] for index in row["stages"]):
        for part in ("forward", "input_backward", "weight_backward"):
            for kind in COMPUTED:
                kinds[kind] += stage[part].get(kind, 0.0) * plan.schedule.microbatches
    once = plan.timing["ranks"][plan.memory.index(row)]
    return kinds | {"optimizer": once["optimizer_s"], "gradient sums": once["gradient_sum_s"]}


def by_kind(operators: dict[str, tuple[int, float]]) -> dict[str, float]:
    kinds: defaultdict[str, float] = defaultdict(float)
    for name, (_, seconds) in operators.items():
        kinds[next((k for k, starts in KINDS.items() if name.startswith(starts)), "other")] += seconds
    return dict(kinds)


def peak_bytes(step: Step, path: Path) -> int:
    """The most that torch's allocator has handed out at a time in a step, by the profiler's record of every piece."""
    step.optimizer.zero_grad()
    before = [*step.pm.parameters(), *step.pm.buffers(), *step.batch.values()]
    before += [v for state in step.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    storages = [tensor.untyped_storage() for tensor in before]
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step.run()
    found.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "[memory]"]
    now = most = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    for event in sorted(events, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return most


def report(sizes: Sizes, rows: dict[str, dict[str, Any]], load: list[float]) -> None:
    print(f"GPT-2 {'tiny' if sizes.quick else 'small'}, batch {sizes.rows} x {sizes.seq}, ", end="")
    print(f"float32, {NUM_RANKS} processes; {sizes.rounds} rounds; ", end="")
    print(f"load average {load[0]:.1f} before, {load[-1]:.1f} after\n")
    print(f"step   {'predicted s':>12}{'fastest s':>11}{'error':>8}{'median s':>10}{'error':>8}   target ", end="")
    print(f"{TARGETS['step']:.0%}")
    for mesh, row in rows.items():
        of_min, of_median = (row["predicted_s"] / row[key] - 1 for key in ("min_s", "median_s"))
        print(f"{mesh:<7}{row['predicted_s']:>12.3f}{row['min_s']:>11.3f}{of_min:>+8.1%}", end="")
        print(f"{row['median_s']:>10.3f}{of_median:>+8.1%}")
    print(f"\nmemory, MB {'predicted':>10}{'measured':>10}{'error':>8}   target {TARGETS['memory']:.0%}")
    for mesh, row in rows.items():
        for rank, (predicted, found) in enumerate(zip(row["predicted_peak_bytes"], row["ranks"], strict=True)):
            peak = found["peak_bytes"]
            print(f"{mesh} rank {rank} {predicted / 1e6:>9.1f}{peak / 1e6:>10.1f}{predicted / peak - 1:>+8.1%}")
    print("\nprocessor seconds of a step   predicted | measured, rank 0 and rank 1")
    for mesh, row in rows.items():
        pairs = [(p, rank["kinds_s"]) for p, rank in zip(row["predicted_kinds_s"], row["ranks"], strict=True)]
        for kind in COMPUTED:
            found = "   ".join(f"{p.get(kind, 0):>8.3f} | {m.get(kind, 0):>7.3f}" for p, m in pairs)
            print(f"{mesh:<6}{kind:<20}{found}")
        sums = [(sum(p.values()), rank["thread_s"]) for (p, _), rank in zip(pairs, row["ranks"], strict=True)]
        found = "   ".join(f"{p:>8.3f} | {m:>7.3f} {p / m - 1:>+6.1%}" for p, m in sums)
        print(f"{mesh:<6}{'all of the thread':<20}{found}")
    for mesh, row in rows.items():
        print(f"\n{mesh}: what takes most on rank 0 (calls, processor seconds); predicted by part")
        operators = sorted(row["ranks"][0]["operators"].items(), key=lambda item: -item[1][1])[:10]
        print("  " + ", ".join(f"{name} {count} {seconds:.3f}" for name, (count, seconds) in operators))
        print("  " + ", ".join(f"{part} {seconds:.3f}" for part, seconds in row["predicted_parts_s"].items()))


if __name__ == "__main__":
    main()
