"""Timeline of a predicted step as events in the Chrome trace format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autopart.common.files import read_text
from autopart.common.json_text import parse_json
from autopart.cost.predict.timeline import Timeline
from autopart.errors import OptionError
from autopart.ir.run.report_terms import MEASURED_STEP

ACTION_NAMES = {"F": "forward", "B": "backward", "I": "backward of the inputs", "W": "backward of the weights"}
"""Names of the kinds of actions in traces and reports."""

CONSTANT_KINDS = ("parameters", "gradients", "optimizer", "buffers", "inputs")
"""Kinds of memory that are allocated for the whole step."""

_SCHEDULE, _END = 0, 1
_US = 1e6


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the trace as JSON data. Each `pp` coordinate is a process; times are microseconds."""
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(timeline.spans):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"pp {rank} (predicted)"}})
        for thread, name in ((_SCHEDULE, "schedule"), (_END, "gradients and optimizer")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
        for span in spans:
            events.append(
                _event(f"{ACTION_NAMES[span.kind]} {span.microbatch}", rank, _SCHEDULE, span.start_s, span.end_s)
                | {"args": {"stage": span.stage, "microbatch": span.microbatch}}
            )
        for name, (start_s, end_s) in (
            ("gradient reduction", timeline.grad_sums[rank]), ("optimizer", timeline.optimizers[rank])
        ):  # fmt: skip
            if end_s > start_s:
                events.append(_event(name, rank, _END, start_s, end_s))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def read_trace(path: str | Path) -> dict[str, Any]:
    """Return the JSON data of a file in the Chrome trace format.

    The entry `traceEvents` keeps only events that are JSON objects. Raises OptionError for a file that is no trace.
    """
    hint = "a trace of pm.profile(path, **batch), or of torch.profiler's export_chrome_trace"
    data = parse_json(read_text(Path(path), "trace", OptionError, hint), str(path), OptionError)
    events = data.get("traceEvents") if isinstance(data, Mapping) else data
    if not isinstance(events, list):
        raise OptionError(f"{path} is not a trace", why="it has no traceEvents", hint=hint)
    return {
        **(data if isinstance(data, Mapping) else {}),
        "traceEvents": [event for event in events if isinstance(event, dict)],
    }


def with_measured(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return one trace with the predicted step and the measured steps; both begin at time 0.

    Processes of the predicted step get numbers that the measured trace does not use.
    """
    events = [dict(event) for event in measured["traceEvents"]]
    timed = [event for event in events if isinstance(event.get("ts"), int | float)]
    marks = [event["ts"] for event in timed if event.get("name") == MEASURED_STEP]
    start_us = min(marks, default=min((event["ts"] for event in timed if event.get("ph") == "X"), default=0.0))
    first = 1 + max((event["pid"] for event in events if isinstance(event.get("pid"), int)), default=-1)
    for event in timed:
        event["ts"] -= start_us
    shifted = [{**event, "pid": first + event["pid"]} for event in predicted["traceEvents"]]
    return {**measured, **predicted, "traceEvents": [*shifted, *events]}


def memory_curve(timeline: Timeline, index: int, row: Mapping[str, Any]) -> list[tuple[float, int]]:
    """Return the bytes of activations of a rank over the step, as (seconds, bytes from then on).

    All microbatches are assumed to save equally many bytes.

    Args:
        index: `pp` coordinate of the rank.
        row: bytes of the rank by kind (`Plan.memory`).
    """
    in_flight = sum(row.get("in_flight") or [1]) or 1
    number = 1 + max(span.stage for spans in timeline.spans for span in spans)
    return timeline.memory([int(row.get("activations", 0) / in_flight)] * number)[index]


def memory_counters(timeline: Timeline, memory: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the bytes of each `pp` coordinate by kind over the step, as counters of a Chrome trace.

    Gradients are assumed to be allocated from the start of the step.
    """
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(memory[: len(timeline.spans)]):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"pp {rank} (predicted)"}})
        constant = {kind: int(row[kind]) for kind in CONSTANT_KINDS if row.get(kind)}
        curve = [*memory_curve(timeline, rank, row), (timeline.step_time_s, 0)]
        events += [
            {"ph": "C", "name": "memory (bytes)", "cat": "predicted", "pid": rank, "ts": time_s * _US,
             "args": {**constant, "activations": size}}
            for time_s, size in curve
        ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(name: str, rank: int, thread: int, start_s: float, end_s: float) -> dict[str, Any]:
    times = {"ts": start_s * _US, "dur": (end_s - start_s) * _US}
    return {"ph": "X", "name": name, "cat": "predicted", "pid": rank, "tid": thread, **times}
