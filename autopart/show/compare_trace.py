"""`autopart.compare`: the predicted step of a plan next to a measured step from a trace."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopart.common.text import ShownAsText, quantity
from autopart.cost.predict.simulate import Simulation, simulate
from autopart.cost.predict.step_trace import read_trace
from autopart.ir.run.report_terms import MEASURED_STEP
from autopart.plans.plan import Plan

_COLLECTIVES = {
    "all_reduce": r"all_?reduce", "all_gather": r"all_?gather", "reduce_scatter": r"reduce_?scatter",
    "all_to_all": r"all_?to_?all", "send": r"send|recv",
}  # fmt: skip
_MATMUL = re.compile(r"gemm|gemv|cutlass|nvjet|cublas|aten::(mm|bmm|addmm|addmv|baddbmm|_?linear|mkldnn)\b", re.I)
_ATTENTION = re.compile(r"attention|flash|fmha", re.I)
_OPTIMIZER = re.compile(r"^Optimizer\.step|multi_tensor_apply|fused_adam", re.I)
_ACTION = re.compile(r"^(forward|backward)(_\w+| of the \w+)? \d+", re.I)
_HOST = re.compile(r"^(c10d::|_c10d_functional::|autograd::|record_param_comms)")
"""CPU operators that start communication or wait for it. The communication itself has other events."""


@dataclass(frozen=True)
class ComparedRow:
    """Predicted and measured seconds of one kind of work in a step; None if they are unknown.

    Args:
        group: "step", "operators", "collectives" or "schedule".
    """

    group: str
    name: str
    predicted_s: float | None
    measured_s: float | None

    @property
    def difference_s(self) -> float:
        """Measured minus predicted seconds."""
        return (self.measured_s or 0.0) - (self.predicted_s or 0.0)


@dataclass(frozen=True, repr=False)
class TraceComparison(ShownAsText):
    """Result of `compare`. Its text is a table, with the largest differences first.

    Args:
        rows: the step, then all kinds of work by the size of their difference.
        rank: the rank of the trace.
        num_steps: number of steps in the trace. Measured seconds are means of these steps.
        hardware: the hardware of the prediction.
    """

    rows: tuple[ComparedRow, ...]
    rank: int
    num_steps: int
    hardware: str

    def as_data(self) -> dict[str, Any]:
        """Return the comparison as JSON data."""
        rows = [asdict(row) | {"difference_s": row.difference_s} for row in self.rows]
        return {"rank": self.rank, "num_steps": self.num_steps, "hardware": self.hardware, "rows": rows}

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows) + 2
        steps = f"{self.num_steps} measured step{'s' * (self.num_steps > 1)}"
        head = f"rank {self.rank}, mean of {steps}; predicted for {self.hardware or 'no hardware'}"
        titles = f"{'':<13}{'':<{width}}{'predicted':>12}{'measured':>12}{'difference':>13}  measured/predicted"
        return "\n".join([head, titles, *(self._line(row, width) for row in self.rows)])

    def _line(self, row: ComparedRow, width: int) -> str:
        predicted, measured = ("-" if one is None else quantity(one, "s") for one in (row.predicted_s, row.measured_s))
        both = row.predicted_s and row.measured_s is not None
        ratio = f"{row.measured_s / row.predicted_s:.3g}" if both else "-"  # type: ignore[operator]
        difference = f"{'+' * (row.difference_s > 0)}{quantity(row.difference_s, 's')}"
        return f"{row.group:<13}{row.name:<{width}}{predicted:>12}{measured:>12}{difference:>13}  {ratio}"


def compare(plan: Plan | str | Path, trace: str | Path, *, steps: int | None = None) -> TraceComparison:
    """Compare the predicted step of a plan with a measured one, by kind of operator, collective and stage.

    Args:
        plan: a plan, or the path of one.
        trace: a trace file of `pm.profile`, of `torch.profiler` (`export_chrome_trace`), or of `Simulation.save_trace`.
        steps: number of training steps in the trace.  [default: the steps that the trace marks, or 1]
    Raises OptionError for a file that is no trace.

    Collectives of a measured trace have no mesh axis, so their predictions are sums over axes. They include the
    gradient reduction at the end of a step, under the name all_reduce.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    data = read_trace(trace)
    spans = [event for event in data["traceEvents"] if event.get("ph") == "X" and "name" in event]
    spans = [span for span in spans if all(isinstance(span.get(key), int | float) for key in ("ts", "dur"))]
    rank = int((data.get("distributedInfo") or {}).get("rank", 0))
    pp = plan.mesh_object().coordinates(rank).get("pp", 0) if rank < plan.mesh_object().num_ranks else 0
    if all(span.get("cat") == "predicted" for span in spans):
        spans = [span for span in spans if span.get("pid") == pp]
    else:  # a trace may show the predicted step, too
        spans = [span for span in spans if span.get("cat") != "predicted"]
    marks = [span for span in spans if span["name"] == MEASURED_STEP or str(span["name"]).startswith("ProfilerStep#")]
    num_steps = steps or len({(span["name"], span["ts"]) for span in marks if span.get("cat") != "gpu_user_annotation"})
    num_steps = max(1, num_steps)
    simulation = simulate(plan)
    measured = {key: seconds / num_steps for key, seconds in _measured(spans, marks).items()}
    predicted = _predicted(simulation, pp)
    has_operators = any(group == "operators" for group, _ in measured)
    rows = [
        ComparedRow(group, name, predicted.get((group, name)), measured.get((group, name)))
        for group, name in dict.fromkeys([*predicted, *measured])
        if has_operators or group not in ("operators", "collectives")
    ]
    rows.sort(key=lambda row: (row.group != "step", -abs(row.difference_s)))
    return TraceComparison(tuple(rows), rank, num_steps, plan.hardware)


Seconds = dict[tuple[str, str], float]
"""{(group, name of a kind of work): seconds}."""


def _predicted(simulation: Simulation, pp: int) -> Seconds:
    """Return the predicted seconds of a step, on the rank at the coordinate `pp`."""
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    seconds["step", "step"] = simulation.step_time_s
    for kind in ("matmul", "attention", "other", "optimizer"):
        if kind in simulation.parts:
            seconds["operators", kind] += simulation.parts[kind]
    for row in simulation.collectives:
        seconds["collectives", row.kind] += row.seconds
    if sums := simulation.timeline.grad_sums[pp]:
        seconds["collectives", "all_reduce"] += sums[1] - sums[0]
    for span in simulation.timeline.spans[pp]:
        seconds["schedule", "forward" if span.kind == "F" else "backward"] += span.end_s - span.start_s
    return {key: value for key, value in seconds.items() if value}


def _measured(spans: Sequence[Mapping[str, Any]], marks: Sequence[Mapping[str, Any]]) -> Seconds:
    """Return the measured seconds of all steps in a trace."""
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    host_marks = [span for span in marks if span.get("cat") != "gpu_user_annotation"]
    timed = host_marks or [span for span in spans if span.get("cat") in ("cpu_op", "kernel", "predicted")]
    if host_marks:
        seconds["step", "step"] = _total(timed)
    elif timed:
        ends = [span["ts"] + span["dur"] for span in timed]
        seconds["step", "step"] = (max(ends) - min(span["ts"] for span in timed)) / 1e6
    for span in spans:
        if span.get("cat") != "gpu_user_annotation" and (action := _ACTION.match(str(span["name"]))):
            seconds["schedule", action[1].lower()] += span["dur"] / 1e6
    kernels = [span for span in spans if span.get("cat") == "kernel"]
    operators = [span for span in spans if span.get("cat") == "cpu_op"]
    is_optimizer = [span for span in spans if _OPTIMIZER.match(str(span["name"])) and span.get("cat") != "kernel"]
    for span in spans:
        kind = _collective_kind(str(span["name"]))
        if kind and (span.get("cat") == "kernel" or str(span["name"]).startswith("gloo:")):
            seconds["collectives", kind] += span["dur"] / 1e6
    if kernels:
        for span in kernels:
            if not _collective_kind(str(span["name"])):
                seconds["operators", _operator_kind(str(span["name"]))] += span["dur"] / 1e6
        return dict(seconds)
    for span, self_us in _self_times(operators):
        name = str(span["name"])
        if _HOST.match(name) or name.startswith("gloo:") or _inside(span, is_optimizer):
            continue
        seconds["operators", _operator_kind(name)] += self_us / 1e6
    if is_optimizer:
        seconds["operators", "optimizer"] += _total(is_optimizer)
    return dict(seconds)


def _total(spans: Iterable[Mapping[str, Any]]) -> float:
    return sum(span["dur"] for span in spans) / 1e6


def _inside(span: Mapping[str, Any], outer: Sequence[Mapping[str, Any]]) -> bool:
    return any(one["ts"] <= span["ts"] < one["ts"] + one["dur"] for one in outer)


def _collective_kind(name: str) -> str:
    if not re.match(r"nccl|gloo:", name):
        return ""
    return next((kind for kind, pattern in _COLLECTIVES.items() if re.search(pattern, name, re.I)), "")


def _operator_kind(name: str) -> str:
    if _ATTENTION.search(name):
        return "attention"
    if _MATMUL.search(name):
        return "matmul"
    return "optimizer" if _OPTIMIZER.search(name) else "other"


def _self_times(operators: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], float]]:
    """Return (operator, microseconds without the operators that it calls).

    An operator of attention or a matrix product keeps the time of the operators that it calls.
    """
    by_thread: defaultdict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for span in operators:
        by_thread[span.get("pid"), span.get("tid")].append(span)
    times: list[tuple[Mapping[str, Any], list[float]]] = []
    for spans in by_thread.values():
        spans.sort(key=lambda span: (span["ts"], -span["dur"]))
        running: list[tuple[Mapping[str, Any], list[float], bool]] = []
        for span in spans:
            while running and span["ts"] >= running[-1][0]["ts"] + running[-1][0]["dur"]:
                running.pop()
            if running and running[-1][2]:
                continue
            if running:
                running[-1][1][0] -= span["dur"]
            left = [float(span["dur"])]
            whole = _operator_kind(str(span["name"])) in ("attention", "matmul")
            running.append((span, left, whole))
            times.append((span, left))
    return [(span, max(0.0, left[0])) for span, left in times]
