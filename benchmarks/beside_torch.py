"""Compare a training step of autopart with torch's own parallelism, for a Llama on two ranks.

A step is forward, backward and fused AdamW. The cases are compared with:

    zero0        DistributedDataParallel
    zero1, 2     fully_shard of every block and of the root, reshard_after_forward=False
    zero3        fully_shard of every block and of the root
    tp2          parallelize_module: Megatron's plan, with vocabulary-parallel embedding and loss
    pp2          PipelineStage of the halves, 1F1B, with equally many microbatches
    pp2-profile  the same; autopart plans with a hardware profile of the link
    pp2-ahead    the same; autopart uses a schedule that overlaps sends, with one more microbatch in memory

Both sides of a case run in the same two processes, step by step in turn, so that noise affects both equally. Figures
are medians of the ratios of neighbouring steps. The loss and a gradient of both are compared first.

The link "gloo" is the host's memory, and sending uses the processor. The link "sleep" uses no processor time
(`_sleeping.py`). At its rate, torch's communication takes half as long as compute: a third of a step without overlap.
With "sleep" samples are longer, so that gloo's own work is small. Processes also keep freed memory, as on GPUs;
otherwise pages of large tensors would be mapped again at every step.

    python benchmarks/beside_torch.py [--quick] [--json] [--only NAME ...] [--links gloo sleep] [--trace FILE.svg]
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _sleeping import LINK, NAME, register
from _step_picture import Lanes, lanes_of_step, picture
from torch import Tensor, nn
from two_ranks import MICROBATCHES, NUM_RANKS, PROBE, Batch, Sizes, Step, Time, build, dtensor_tp, hand_pp, timed

LARGE = Sizes(hidden=768, mlp=2048, layers=4, vocab=4096, rows=4, seq=64, warm_ups=2, rounds=16)
OVER_LINK = replace(LARGE, seq=512)
KEPT_MEMORY = {f"MALLOC_{what}_": str(2**36) for what in ("MMAP_THRESHOLD", "TRIM_THRESHOLD")}
QUICK = Sizes(hidden=64, mlp=128, layers=2, vocab=256, rows=4, seq=32, warm_ups=1, rounds=2)
Make = Callable[[nn.Module, Batch], Step]


@dataclass(frozen=True)
class Case:
    """One way to train, by autopart and by torch. `waits_at_once`: neither side runs anything beside what is sent.
    `knows_link`: autopart plans by a profile of it."""

    name: str
    mesh: str
    options: dict[str, Any]
    theirs: Make
    waits_at_once: bool = False
    knows_link: bool = False

    @property
    def tolerance(self) -> float:
        return 2e-2 if "precision" in self.options else 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--only", nargs="+", choices=[c.name for c in CASES], help="leave the other cases out")
    parser.add_argument("--links", nargs="+", choices=list(AIMS), default=list(AIMS), help="what ranks send over")
    parser.add_argument("--rounds", type=int, help="how many steps of each side are measured")
    parser.add_argument("--trace", type=Path, help="draw a step of zero3 over the sleeping link, and measure nothing")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for link in ["sleep"] if arguments.trace else arguments.links:
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, KEPT_MEMORY if link == "sleep" else {}):
            mp.spawn(rank_main, (folder, link, arguments), nprocs=NUM_RANKS)
            rows = json.loads(Path(folder, "rows").read_text())
        if not arguments.trace:
            ROWS.extend(rows)
    if arguments.json:
        print(json.dumps({"benchmark": "beside_torch", "load": os.getloadavg(), "rows": ROWS}))


ROWS: list[dict[str, Any]] = []


def rank_main(rank: int, folder: str, link: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    register()
    backend = NAME if link == "sleep" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    sizes = QUICK if arguments.quick else OVER_LINK if link == "sleep" else LARGE
    if arguments.trace:
        rows: Any = []
        traced(sizes, arguments.trace)
    else:
        chosen = [c for c in CASES if arguments.only is None or c.name in arguments.only]
        rows = []
        if rank == 0:
            heading(link)
        for case in chosen:
            rows.append(measured(case, sizes, link, arguments.rounds or sizes.rounds, Path(folder, "profile.json")))
            if rank == 0:
                report(rows[-1])
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


# --- Both sides of a case.


def trained(make: Make, model: nn.Module, batch: Batch) -> Step:
    """A step with its optimizer."""
    step = make(copy.deepcopy(model), batch)
    kinds: dict[type, list[Tensor]] = {}  # the fused kernel takes tensors and DTensors apart
    for parameter in step.parameters:
        kinds.setdefault(type(parameter.data), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": group} for group in kinds.values()], lr=1e-4, fused=True)

    def run() -> Tensor | None:
        loss = step.run()
        optimizer.step()
        return loss

    whole = copy.copy(step)
    whole.run = run
    return whole


def autopart_on(mesh: str, **options: Any) -> Make:
    def make(model: nn.Module, batch: Batch) -> Step:
        import autopart

        size = model.get_parameter(PROBE).numel()
        pm = autopart.parallelize(model, mesh, example_kwargs=batch, **options)

        def probe() -> Tensor | None:
            if mesh != "dp2":
                return pm.full_grads()[PROBE]
            return joined(pm.get_parameter(PROBE).grad, size)

        return Step(lambda: pm.step(**batch), pm, probe)

    return make


def data_parallel(model: nn.Module, batch: Batch) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model)
    return Step(_on_own_rows(wrapped, batch), wrapped, lambda: model.get_parameter(PROBE).grad)


def sharded(reshard: bool, low: bool = False) -> Make:
    def make(model: nn.Module, batch: Batch) -> Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)

        def probe() -> Tensor:
            grad: Any = model.get_parameter(PROBE).grad
            return joined(grad.to_local(), grad.numel())

        return Step(_on_own_rows(model, batch), model, probe)

    return make


def joined(part: Tensor, size: int) -> Tensor:
    """All of a gradient of which ranks may have parts. What torch compiles to gather them waits with Python's lock,
    which the thread of the sleeping link needs."""
    if part.numel() == size:
        return part
    parts: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(parts, part)
    return torch.cat(parts)


def _on_own_rows(model: nn.Module, batch: Batch) -> Callable[[], Tensor]:
    """A step on this rank's rows of the batch. Its loss is known to both ranks once they are compared."""
    own = {name: tensor.chunk(NUM_RANKS)[dist.get_rank()] for name, tensor in batch.items()}

    def run() -> Tensor:
        loss = model(**own).loss
        loss.backward()
        return loss.detach()

    return run


def work_alone(model: nn.Module, batch: Batch) -> Step:
    """A rank's work without anything that is sent."""
    return Step(_on_own_rows(model, batch), model, lambda: None)


PIPELINE: dict[str, Any] = {"schedule": "1f1b", "microbatches": MICROBATCHES}
AHEAD: dict[str, Any] = PIPELINE | {"schedule": "interleaved_1f1b", "virtual_stages": 1}
CASES = (
    Case("zero0", "dp2", {"zero": 0}, data_parallel),
    Case("zero1", "dp2", {"zero": 1}, sharded(False)),
    Case("zero2", "dp2", {"zero": 2}, sharded(False)),
    Case("zero3", "dp2", {"zero": 3}, sharded(True)),
    Case("zero1-bf16", "dp2", {"zero": 1, "precision": "bf16"}, sharded(False, True)),
    Case("zero2-bf16", "dp2", {"zero": 2, "precision": "bf16"}, sharded(False, True)),
    Case("zero3-bf16", "dp2", {"zero": 3, "precision": "bf16"}, sharded(True, True)),
    Case("tp2", "tp2", {}, dtensor_tp, waits_at_once=True),
    Case("pp2", "pp2", PIPELINE, hand_pp),
    Case("pp2-profile", "pp2", PIPELINE, hand_pp, knows_link=True),
    Case("pp2-ahead", "pp2", AHEAD, hand_pp, knows_link=True),
)
AIMS = {"gloo": 1.0, "sleep": 0.95}
"""{link: the ratio of wall times at most}."""


# --- Measuring.


def measured(case: Case, sizes: Sizes, link: str, rounds: int, file: Path) -> dict[str, Any]:
    """The ratios of a case. `file`: for the profile of a link."""
    gc.collect()
    LINK.rate_bytes_per_s, LINK.is_blocking = float("inf"), case.waits_at_once
    model, batch = build(sizes)
    work_s = None
    if link == "sleep":
        alone = trained(work_alone, model, batch)
        work_s = statistics.median(timed(alone).wall_s for _ in range(5))
        del alone
    rate_bytes_per_s = LINK.rate_bytes_per_s if work_s is None else rate_of(trained(case.theirs, model, batch), work_s)
    theirs = trained(case.theirs, model, batch)
    options = case.options | ({"hardware": profile(link, rate_bytes_per_s, file)} if case.knows_link else {})
    ours = trained(autopart_on(case.mesh, **options), model, batch)
    check_equal(case, ours, theirs)
    LINK.rate_bytes_per_s = rate_bytes_per_s
    pairs: list[tuple[Time, Time]] = []
    for number in range(sizes.warm_ups + rounds):
        turn = (ours, theirs) if number % 2 else (theirs, ours)
        taken = {id(step): timed(step) for step in turn}
        if number >= sizes.warm_ups:
            pairs.append((taken[id(ours)], taken[id(theirs)]))
    LINK.rate_bytes_per_s = float("inf")
    found = {side: {kind: statistics.median(getattr(pair[i], kind) for pair in pairs) for kind in ("wall_s", "cpu_s")}
             for i, side in enumerate(("autopart", "torch"))}  # fmt: skip
    ratios = {kind: sorted(getattr(a, kind) / getattr(b, kind) for a, b in pairs) for kind in ("wall_s", "cpu_s")}
    return {
        "case": case.name, "link": link, "rounds": rounds, **found,
        "wall_ratio": statistics.median(ratios["wall_s"]), "cpu_ratio": statistics.median(ratios["cpu_s"]),
        "wall_quartiles": [ratios["wall_s"][len(pairs) // 4], ratios["wall_s"][-1 - len(pairs) // 4]],
        "work_s": work_s, "load": os.getloadavg()[0],
    }  # fmt: skip


def rate_of(theirs: Step, work_s: float) -> float:
    """So fast that what torch sends in a step takes half as long as a step's work."""
    for _ in range(2):  # a first step sends more
        before = LINK.sent_bytes
        theirs.clear()
        theirs.run()
    return (LINK.sent_bytes - before) / (work_s / 2)


def profile(link: str, rate_bytes_per_s: float, file: Path) -> str:
    """The hardware profile of a link, by its name or path."""
    if link == "gloo":
        return "cpu-gloo"
    from autopart.cost.hardware import profile

    known = json.loads(Path(profile.__file__).with_name("profiles").joinpath("cpu-gloo.json").read_text())
    known |= {"name": "sleeping", "overlap": known["overlap"] | {"value": 1}}
    known["link_bytes_per_s"] |= {"value": rate_bytes_per_s}
    del known["collectives"]
    if dist.get_rank() == 0:
        file.write_text(json.dumps(known))
    dist.barrier()
    return str(file)


def check_equal(case: Case, ours: Step, theirs: Step) -> None:
    """Both sides must compute the same loss, and the same gradient at the far end of the backward."""
    found = []
    for step in (ours, theirs):
        step.clear()
        values = {"loss": step.run(), "gradient": step.probe()}
        everyones: list[Any] = [None] * NUM_RANKS
        own = {name: float(value.norm()) for name, value in values.items() if value is not None}
        dist.all_gather_object(everyones, own)
        known = {name: [one[name] for one in everyones if name in one] for name in values}
        found.append({name: statistics.mean(values) for name, values in known.items()})
    for name, mine in found[0].items():
        other = found[1][name]
        assert abs(mine - other) <= case.tolerance * other, f"{case.name}: {name} is {mine}, torch's {other}"


def heading(link: str) -> None:
    print(f"\n{link}: autopart over torch, medians of paired steps; the aim of the time is at most {AIMS[link]:g}\n")
    print(f"{'case':<12} {'time':>6} {'quartiles':>13} {'cpu':>6}   {'seconds':>15}   {'cpu seconds':>15}   load")


def report(row: dict[str, Any]) -> None:
    ours, theirs = row["autopart"], row["torch"]
    low, high = row["wall_quartiles"]
    ratios = f"{row['wall_ratio']:>6.3f} {low:>6.3f} {high:>6.3f} {row['cpu_ratio']:>6.3f}"
    wall, cpu = (f"{ours[kind]:>6.3f} / {theirs[kind]:<6.3f}" for kind in ("wall_s", "cpu_s"))
    print(f"{row['case']:<12} {ratios}   {wall}   {cpu}   {row['load']:.1f}", flush=True)


# --- The picture.


def traced(sizes: Sizes, file: Path) -> None:
    """Draws a step of zero3 of both sides, one below the other."""
    case = next(case for case in CASES if case.name == "zero3")
    model, batch = build(sizes)
    alone = trained(work_alone, model, batch)
    work_s = statistics.median(timed(alone).wall_s for _ in range(5))
    lanes: list[Lanes] = []
    theirs = trained(case.theirs, model, batch)
    ours = trained(autopart_on(case.mesh, **case.options), model, batch)
    check_equal(case, ours, theirs)
    LINK.rate_bytes_per_s = rate_of(theirs, work_s)
    for title, step in (("autopart, zero=3", ours), ("torch, fully_shard", theirs)):
        for _ in range(sizes.warm_ups):
            timed(step)
        step.clear()
        dist.barrier()
        lanes.append(lanes_of_step(title, step.run, LINK))
    if dist.get_rank() == 0:
        file.write_text(picture(lanes))


if __name__ == "__main__":
    main()
