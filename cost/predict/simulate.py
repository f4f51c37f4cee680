"""Simulation of a plan's training step, from the schedule's actions and their predicted durations."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from autopart.common.files import write_whole
from autopart.common.text import TEXT_WIDTH, ShownAsText, quantity
from autopart.cost.hardware.profile import Hardware
from autopart.cost.hardware.profile import names as hardware_names
from autopart.cost.predict.collective_costs import time_s
from autopart.cost.predict.step_trace import chrome_trace, memory_counters, read_trace, with_measured
from autopart.cost.predict.timeline import Durations, Timeline, timeline
from autopart.cost.systems.host_time import LIMITS
from autopart.cost.systems.likely_range import LikelyRange, likely_range
from autopart.cost.systems.system import System
from autopart.errors import OptionError, PlanError
from autopart.ir.mesh import Mesh
from autopart.ir.run.report_terms import TIMING_PARTS
from autopart.ir.run.schedules import Schedule, can_run
from autopart.plans.figure_errors import reading_figures
from autopart.plans.headlines import fit_text, fits, step_size, utilisation

if TYPE_CHECKING:
    from autopart.plans.plan import Plan

_BACKWARDS = ("recompute", "input_backward", "weight_backward")


@dataclass(frozen=True)
class CollectiveTime:
    """Count, bytes sent and seconds of one kind of collective over one axis in one step.

    The values are those of the rank that spends the most time on these collectives.
    """

    axis: str
    kind: str
    count: int
    bytes: int
    seconds: float


@dataclass(frozen=True, repr=False)
class Simulation(ShownAsText):
    """Prediction of one training step, including AdamW's update. Its text (`print`) is a table.

    Seconds and bytes are those of one rank. Ranks that differ only on `dp` or `tp` have the same values.

    Args:
        timeline: the actions of each `pp` coordinate over time.
        num_devices: ranks of the mesh.
        model_flops: FLOPs of the model's matrix products, forward and backward.
        recomputed_flops: FLOPs that are recomputed, over all ranks.
        peak_flops_per_s: peak FLOP/s of a device for the dtypes of its products.
        peak_memory_bytes: for each stage, the peak memory in bytes of the rank that runs it.
        collectives: the collectives of a step.
        parts: {kind of work: seconds on the busiest rank}, including `idle`.
        peak_dtype: description of the dtypes of `peak_flops_per_s`.
        memory: for each `pp` coordinate, the rank's bytes by kind, as in `Plan.memory`.
        plan: the plan; None if a step was estimated without a plan.
    """

    timeline: Timeline
    num_devices: int
    model_flops: float
    recomputed_flops: float
    peak_flops_per_s: float
    peak_memory_bytes: tuple[int, ...]
    collectives: tuple[CollectiveTime, ...]
    parts: Mapping[str, float] = field(repr=False)
    peak_dtype: str = ""
    memory: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    plan: Plan | None = field(default=None, repr=False, compare=False)

    @cached_property
    def step_time_s(self) -> float:
        """Seconds of a step, from its start until the last rank has updated its parameters."""
        return self.timeline.step_time_s

    @property
    def bubble_fraction(self) -> float:
        """Idle time of the pipeline divided by its busy time, as in PTD-P (`Timeline.bubble_fraction`)."""
        return self.timeline.bubble_fraction

    @property
    def tflops_per_device(self) -> float:
        """Model TFLOP/s per device. The backward counts twice the FLOPs of the forward."""
        return self.model_flops / self.num_devices / self.step_time_s / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs as a share of the devices' peak (Chowdhery et al. 2022, arXiv:2204.02311, appendix B)."""
        return self.tflops_per_device * 1e12 / self.peak_flops_per_s

    @property
    def hfu(self) -> float:
        """Executed FLOPs (model FLOPs and recomputed FLOPs) as a share of the devices' peak."""
        return self.mfu * (1 + self.recomputed_flops / self.model_flops) if self.model_flops else 0.0

    @property
    def likely_range(self) -> LikelyRange | None:
        """Range of the step time, from the errors of published runs of the same kind.

        It is None for hardware without published runs: profiles of CPUs and of your own machine.
        """
        name = self.plan.hardware if self.plan is not None else ""
        if name not in hardware_names() or name.startswith("cpu"):
            return None
        waits = self.parts.get("host", 0.0) > LIMITS * self.step_time_s
        return likely_range(self.step_time_s, self.num_devices, len(self.timeline.spans), waits)

    def figures(self) -> dict[str, Any]:
        """Return the figures of the step that `Plan.cost` stores: seconds, FLOP/s, utilisation and bubble."""
        return {
            "step_time_s": self.step_time_s, "tflops_per_device": self.tflops_per_device, "mfu": self.mfu,
            "hfu": self.hfu, "peak_flops_per_s": self.peak_flops_per_s, "peak_dtype": self.peak_dtype,
            "bubble_fraction": self.bubble_fraction, "parts_s": dict(self.parts),
        }  # fmt: skip

    def as_data(self) -> dict[str, Any]:
        """Return the prediction as JSON data, without the timeline."""
        rows = [asdict(row) for row in self.collectives]
        data = {**self.figures(), "peak_memory_bytes": list(self.peak_memory_bytes), "collectives": rows}
        if self.plan is not None:
            likely = self.likely_range
            data |= {} if likely is None else {"likely_range": likely._asdict()}
            data |= {"step": step_size(self.plan), "fits": fits(self.plan)}
        return data

    def save_trace(self, path: str | Path, measured: str | Path | None = None) -> None:
        """Write the predicted step in the Chrome trace format, for ui.perfetto.dev or chrome://tracing.

        Each `pp` coordinate is a process with two threads: the actions of the schedule, and the work at the end of the
        step (gradient reduction and optimizer).

        Args:
            measured: a trace of `pm.profile`, whose steps the file shows below the predicted step.
        Raises OptionError if the file cannot be written, or if `measured` is not a trace.

        Example:
            >>> autopart.simulate(plan).save_trace("step.json")    # doctest: +SKIP
        """
        trace = chrome_trace(self.timeline)
        if measured is not None:
            trace = with_measured(trace, read_trace(measured))
        _write_trace(path, trace)

    def save_memory(self, path: str | Path) -> None:
        """Write the predicted memory over the step as counters of a Chrome trace, for ui.perfetto.dev.

        Each `pp` coordinate is a process with one counter: bytes by kind, stacked. Memory that is only briefly
        allocated inside an operator is left out. Raises OptionError if the file cannot be written.

        Example:
            >>> autopart.simulate(plan).save_memory("memory.json")    # doctest: +SKIP
        """
        _write_trace(path, memory_counters(self.timeline, self.memory))

    def __str__(self) -> str:
        plan = self.plan
        sizes = dict.fromkeys(self.peak_memory_bytes)
        likely = self.likely_range
        rows = [
            ("step", _seconds(self.step_time_s) + (f", of {step_size(plan)}" if plan and step_size(plan) else "")),
            *([("likely", f"{_seconds(likely.low_s)} to {_seconds(likely.high_s)}: of {likely.rows} published runs of "
                f"this kind ({likely.kind}), 80 % were in this range")] if likely else []),
            ("per device", utilisation(self.figures())),
            ("bubble", f"{self.bubble_fraction:.4g} of the busy time"),
            ("peak memory", ", ".join(f"{size / 1e9:.4g} GB" for size in sizes)),
            *([("memory", fit_text(plan))] if plan and fit_text(plan) else []),
            *((kind, _seconds(seconds)) for kind, seconds in self.parts.items()),
            *((f"{row.axis} {row.kind}", f"{row.count} of {row.bytes / max(1, row.count) / 1e6:.4g} MB, "
               f"{_seconds(row.seconds)}") for row in self.collectives),
        ]  # fmt: skip
        width = max(len(label) for label, _ in rows) + 2
        return "\n".join(
            fill(text, TEXT_WIDTH, initial_indent=f"{label:<{width}}", subsequent_indent=" " * width)
            for label, text in rows
        )


def simulate(plan: Plan, *, system: str | None = None) -> Simulation:
    """Predict a training step of a plan on the hardware that the plan was made for.

    The schedule's actions are those that the runtime executes, with durations from `plan.timing`. As in the runtime,
    weights are prefetched, and gradient reduction overlaps with the last backward, except for the last bucket. The
    field `overlap` of the hardware profile is the share of an overlapped collective that costs no time.

    Args:
        system: another training system that runs the plan: the name of a description (`megatron`, `nanotron`), or the
            path of a JSON file. None: autopart's runtime.
    Raises PlanError for a plan without `timing`, and OptionError for an unknown system.

    Example:
        >>> plan = autopart.plan(model, "dp8,tp8", example_kwargs=batch)    # doctest: +SKIP
        >>> print(autopart.simulate(plan))                                  # doctest: +SKIP
    """
    if not plan.timing:
        raise PlanError(
            "the plan has no 'timing'", why="a plan that autopart has made stores the durations of its stages there",
            hint="make the plan again with autopart.plan(...), or keep this entry in the file",
        )  # fmt: skip
    with reading_figures(plan):
        if system is not None:
            cost: Any = plan.cost
            return replace(cost.run_by(System.load(system)), plan=plan)
        return replace(simulated(plan.timing, plan.schedule, plan.mesh_object(), plan.memory), plan=plan)


def simulated(
    timing: Mapping[str, Any], schedule: Schedule, mesh: Mesh, memory: Sequence[Mapping[str, Any]],
    overlap_sends: bool | None = None,
) -> Simulation:  # fmt: skip
    """Simulate a step from the fields of a plan.

    Args:
        timing: durations of each stage and rank (`Plan.timing`).
        memory: for each `pp` coordinate, the rank's bytes by kind (`Plan.memory`).
        overlap_sends: True if sends overlap with compute; None: as in `torch.distributed.pipelining`.
    """
    stages, ranks = timing["stages"], timing["ranks"]
    num_stages = sum(not row.get("tail") for row in stages)
    seconds = {part: [math.fsum(row.get(part, {}).values()) for row in stages] for part in TIMING_PARTS}
    whole = [math.fsum(parts) for parts in zip(*(seconds[part] for part in _BACKWARDS), strict=True)]
    # The input backward and the weight backward both use recomputed values, so the stage does not split its backward.
    parts = zip(whole, seconds["recompute"], seconds["input_backward"], seconds["weight_backward"], strict=True)
    inputs, weights = zip(*((all_, 0.0) if again else (i, w) for all_, again, i, w in parts), strict=True)
    received = [row["receives_s"] for row in stages[1:]]
    durations = Durations(
        seconds["forward"], whole, inputs, weights, received, received,
        [row["gradient_sum_s"] for row in ranks], timing.get("hidden_sums", 0.0),
        [row["optimizer_s"] + sum(row.get(name, 0.0) for name in ("gather_s", "methods_s", "owners_s"))
         for row in ranks],
        timing.get("tied", ()), _host(stages), timing.get("host_waits", False) and mesh.size("pp") > 1,
    )  # fmt: skip
    ran = timeline(
        schedule.name, num_stages, mesh.size("pp"), schedule.microbatches, durations, overlap_sends=overlap_sends,
        has_tail=len(stages) > num_stages,
    )  # fmt: skip
    home = {span.stage: rank for rank, spans in enumerate(ran.spans) for span in spans}
    return Simulation(
        ran, mesh.num_ranks, 3.0 * timing["forward_flops"], timing.get("recomputed_flops", 0),
        timing["peak_flops_per_s"], tuple(memory[home[stage]]["total"] for stage in range(num_stages)),
        _collectives(stages, home, schedule.microbatches), _parts(stages, ranks, ran, home, schedule.microbatches),
        timing.get("peak_dtype", ""), tuple(memory),
    )  # fmt: skip


def _write_trace(path: str | Path, trace: Mapping[str, Any]) -> None:
    try:
        write_whole(Path(path), json.dumps(trace))
    except OSError as error:
        raise OptionError(f"cannot write the trace to {path}", why=error.strerror or str(error)) from error


def _host(stages: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return {kind of action: [seconds of the CPU, by stage]}; {} if the plan does not count the CPU."""
    if not any(row.get("host") for row in stages):
        return {}
    host = {part: [row.get("host", {}).get(part, 0.0) for row in stages] for part in TIMING_PARTS}
    whole = [math.fsum(parts) for parts in zip(*(host[part] for part in _BACKWARDS), strict=True)]
    splits = [not again for again in host["recompute"]]
    return {
        "F": host["forward"], "B": whole,
        "I": [s if split else every for s, every, split in zip(host["input_backward"], whole, splits, strict=True)],
        "W": [s if split else 0.0 for s, split in zip(host["weight_backward"], splits, strict=True)],
    }  # fmt: skip


AHEAD = "interleaved_1f1b"
"""Schedule that `schedule_notes` compares with 1F1B: eager 1F1B.

With one stage per rank, it is 1F1B with twice as many warm-up forwards, so that no rank waits for sends (Zhuang et al.
2023, arXiv:2211.05322).
"""


def schedule_notes(
    timing: Mapping[str, Any], schedule: Schedule, mesh: Mesh, memory: Sequence[Mapping[str, Any]], step: Simulation,
    hardware: Hardware,
) -> tuple[str, ...]:  # fmt: skip
    """Return a note for a 1F1B plan if a schedule that overlaps sends with compute is faster.

    Returns no note if the sent values are so small that latency dominates.

    Args:
        timing: durations of each stage and rank (`Plan.timing`).
        memory: for each `pp` coordinate, the rank's bytes by kind (`Plan.memory`).
        step: the simulated step of the plan.
    """
    pp, microbatches = mesh.size("pp"), schedule.microbatches
    if schedule.name != "1f1b" or pp * microbatches > LONGEST or not can_run(AHEAD, pp, pp, microbatches):
        return ()
    latency_s = time_s("send", pp, 0, hardware, mesh.stride("pp"))
    if max(row["receives_s"] for row in timing["stages"][1:]) < 2 * latency_s:
        return ()
    ahead = simulated(timing, replace(schedule, name=AHEAD), mesh, memory)
    if ahead.step_time_s > WAITS * step.step_time_s:
        return ()
    before, after = (quantity(one.step_time_s, "s") for one in (step, ahead))
    held, more = (max(max(stages.values()) for stages in one.timeline.in_flight) for one in (step, ahead))
    return (
        f"ranks wait for sends between stages; schedule='{AHEAD}' with virtual_stages=1 overlaps sends with compute: "
        f"{after} per step instead of {before}, with up to {more} instead of {held} microbatches in flight",
    )


SLACK = 1e-9
"""Largest share of the busy seconds that is due to rounding."""

WAITS = 0.95
"""A note recommends overlapped sends if they reduce the step time to at most this share of the 1F1B time."""

LONGEST = 10_000
"""Maximum number of stage forwards in a step that `schedule_notes` simulates."""


def training_time_s(
    tokens: float, parameters: float, devices: int, peak_flops_per_s: float, utilisation: float, recompute: bool = True
) -> float:
    """Return the seconds of a complete training run.

    The formula is 8 T P / (N F U) with every layer recomputed and 6 T P / (N F U) without (Narayanan et al. 2021,
    section 5.1). It leaves out the FLOPs of attention and of the head.

    Args:
        tokens: T, training tokens.
        parameters: P.
        devices: N.
        peak_flops_per_s: F, per device.
        utilisation: U, share of the peak.

    >>> round(training_time_s(300e9, 175e9, 1024, 312e12, 0.4347) / 86400, 1)
    35.0
    """
    return (8 if recompute else 6) * tokens * parameters / (devices * peak_flops_per_s * utilisation)


def _parts(
    stages: list[Mapping[str, Any]], ranks: list[Mapping[str, float]], ran: Timeline, home: Mapping[int, int],
    microbatches: int,
) -> dict[str, float]:  # fmt: skip
    """Return {kind of work: seconds in a step} of the rank that computes longest.

    Args:
        home: {stage: the rank that runs it}.
    """
    busiest = max(range(len(ran.spans)), key=ran.busy_s.__getitem__)
    kinds: defaultdict[str, float] = defaultdict(float)
    for row in stages:
        if home[row["stage"]] == busiest:
            for part in TIMING_PARTS:
                for kind, seconds in row.get(part, {}).items():
                    kinds[kind] += (1 if row.get("tail") else microbatches) * seconds
    once = ranks[busiest]
    worked_s = math.fsum(kinds.values())
    waited_s = ran.busy_s[busiest] - worked_s
    if waited_s > SLACK * worked_s:  # the device waited for the CPU
        kinds["host"] = waited_s
    hidden = ran.spans[busiest][-1].end_s - ran.grad_sums[busiest][0]  # this share overlaps with the last backward
    sums = once["gradient_sum_s"] - hidden
    last = {"gradient sums": sums, "parameter gathers": once.get("gather_s", 0.0),
            "dp_sync": once.get("methods_s", 0.0), "optimizer": once["optimizer_s"],
            "owner exchange": once.get("owners_s", 0.0)}  # fmt: skip
    idle = ran.step_time_s - ran.busy_s[busiest] - math.fsum(last.values())
    last["idle"] = idle if idle > SLACK * ran.step_time_s else 0.0
    return {kind: seconds for kind, seconds in (kinds | last).items() if seconds}


def _collectives(
    stages: list[Mapping[str, Any]], home: Mapping[int, int], microbatches: int
) -> tuple[CollectiveTime, ...]:
    totals: defaultdict[tuple[str, str], defaultdict[int, list[float]]] = defaultdict(
        lambda: defaultdict(lambda: [0, 0, 0.0])
    )
    for row in stages:
        for moved in row["collectives"]:
            total = totals[moved["axis"], moved["kind"]][home[row["stage"]]]
            for i, name in enumerate(("count", "bytes", "seconds")):
                total[i] += (1 if row.get("tail") else microbatches) * moved[name]
    most = {key: max(by_rank.values(), key=lambda total: total[2]) for key, by_rank in totals.items()}
    return tuple(CollectiveTime(*key, int(count), int(size), seconds) for key, (count, size, seconds) in most.items())


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us"
