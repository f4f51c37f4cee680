"""The seconds that a program's operators take on a rank: what `autopart.simulate` needs of a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autopart.cost.collectives import time_s
from autopart.cost.hardware import Hardware
from autopart.cost.work import Work, flops_by_dtype, gradient_sum_s, optimizer_s
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program, Stage, StoredTensor
from autopart.passes.choose.partition import active_operators, matrix_work
from autopart.passes.count.counting import Counted, counted
from autopart.passes.count.footprint import Walk
from autopart.passes.count.memory import homes, local_bytes
from autopart.passes.count.tabulate import totals_of
from autopart.plans.plan import TIMING_PARTS, Schedule
from autopart.tracing.trace import Trace


def timing(
    trace: Trace, program: Program, schedule: Schedule, hardware: Hardware, walks: Sequence[Walk],
    compiled: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """What `autopart.simulate` needs of a plan, as data.

    The peak of a device for the dtypes that are multiplied; `forward_flops` of the model's matrix work on the global
    batch, `recomputed_flops` of what all ranks run again; `stages`, one row each, and `ranks`, one for each coordinate
    of `pp`; seconds are of one microbatch, of ranks of a step. `totals`: what the formulas of `Plan.cost` are made of.

    Args:
        walks: one of each stage.
        compiled: chains of pointwise operators are one kernel.
    """
    stages = counted(trace, program, walks, compiled)
    totals = totals_of(trace, program, walks, stages)
    seconds: dict[Work, float] = {}
    rows = [
        _stage_row(found, walk.stage, program, hardware, seconds) for walk, found in zip(walks, stages, strict=True)
    ]
    again = sum(work.flops.value * work.times for found in stages for one in found for work in one.recompute)
    ranks = program.mesh.num_ranks // program.mesh.size("pp")
    peak, dtype = hardware.peak_of(
        flops_by_dtype((work, 1) for found in stages for one in found for work in one.forward)
    )
    return {
        "peak_flops_per_s": peak, "peak_dtype": dtype,
        "forward_flops": sum(matrix_work(node) for node in active_operators(trace.graph)),
        "recomputed_flops": round(again * program.microbatches * ranks), "stages": rows,
        "ranks": [*_rank_rows(trace, program, schedule, hardware)], "totals": totals.as_data(),
    }  # fmt: skip


def _stage_row(
    found: Sequence[Counted], stage: Stage, program: Program, hardware: Hardware, seconds: dict[Work, float]
) -> dict[str, Any]:
    mesh = program.mesh
    parts: dict[str, dict[str, float]] = {part: defaultdict(float) for part in TIMING_PARTS}
    moved: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    later = (program.microbatches - 1) / program.microbatches  # the first microbatch's gradient is there, not added
    for one in found:
        for part, works in ((part, getattr(one, part)) for part in (*TIMING_PARTS, "accumulate")):
            for work in works:
                if work not in seconds:
                    seconds[work] = work.seconds(hardware, mesh)
                if part == "accumulate":
                    parts["weight_backward"][work.name] += seconds[work] * later
                    continue
                parts[part][work.name] += seconds[work]
                if work.axis:
                    for i, much in enumerate((1, work.sent_bytes(mesh), seconds[work])):
                        moved[work.axis, work.kind][i] += much
    size = sum(b.size_bytes for b in stage.receives)
    receives_s = time_s("send", mesh.size("pp"), size, hardware, mesh.stride("pp")) if size else 0.0
    collectives = [
        {"axis": axis, "kind": kind, "count": int(count), "bytes": round(sent), "seconds": _digits(took)}
        for (axis, kind), (count, sent, took) in moved.items()
    ]
    shown = {part: {kind: _digits(s) for kind, s in parts[part].items() if s} for part in TIMING_PARTS}
    return {
        "stage": stage.index, **shown, "collectives": collectives, "receives_bytes": size,
        "receives_s": _digits(receives_s),
    }  # fmt: skip


def _rank_rows(trace: Trace, program: Program, schedule: Schedule, hardware: Hardware) -> Iterator[Mapping[str, float]]:
    """Per coordinate of `pp`: the seconds of summing gradients, once a step, and of AdamW."""
    mesh, ranks = program.mesh, homes(program, schedule)
    for mine in ranks:
        sizes: dict[tuple[tuple[str, int, int], ...], int] = defaultdict(int)
        trained = 0
        for stored in program.parameters.values():
            if set(stored.stages) & mine and trace.parameters[stored.name].requires_grad:
                size = local_bytes(trace, program, stored)
                owners = sum(bool(set(stored.stages) & other) for other in ranks)
                sizes[_groups(stored, owners, mesh)] += size
                trained += size
        seconds = sum(gradient_sum_s(size, groups, hardware) for groups, size in sizes.items() if groups)
        yield {"gradient_sum_s": _digits(seconds), "optimizer_s": _digits(optimizer_s(trained, hardware))}


def _groups(stored: StoredTensor, owners: int, mesh: Mesh) -> tuple[tuple[str, int, int], ...]:
    """The groups of ranks that a gradient is summed over, one after the other: (axis, ranks, their distance)."""
    axes = [(axis, mesh.size(axis), mesh.stride(axis)) for axis in stored.grad_axes if mesh.size(axis) > 1]
    return (*axes, *([("pp", owners, mesh.stride("pp"))] if owners > 1 else []))


def _digits(seconds: float) -> float:
    return float(f"{seconds:.9g}")
