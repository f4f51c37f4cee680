"""Timeline of a training step: lanes for compute on the main thread and for communication."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from _sleeping import Link
from torch.profiler import ProfilerActivity, profile, record_function

MARKER = "the step begins"
NEAR_S = 0.001
"""Operators that are less apart are one rectangle."""
COLORS = {"forward": "#4c78a8", "backward": "#f58518", "optimizer": "#54a24b", "all-gather": "#72b7b2",
          "reduce-scatter": "#e45756"}  # fmt: skip
WIDTH, LEFT, LANE, GAP = 1000, 110, 26, 8


class Span(NamedTuple):
    """What runs from when to when, in seconds since the step began."""

    what: str
    start_s: float
    end_s: float


class Lanes(NamedTuple):
    """`rows`: {name of a lane: what is in it}."""

    title: str
    rows: dict[str, list[Span]]
    time_s: float


def lanes_of_step(title: str, step: Callable[[], Any], link: Link) -> Lanes:
    """Runs a step under torch's profiler, and takes its operators and what was sent."""
    link.sent.clear()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        began_s = time.perf_counter()
        with record_function(MARKER):
            pass
        step()
        time_s = time.perf_counter() - began_s
    events = found.events()
    marker = next(event for event in events if event.name == MARKER)
    mine = [event for event in events if event.cpu_parent is None and event.thread == marker.thread]
    work: list[Span] = []
    for event in sorted(mine, key=lambda event: event.time_range.start):
        start_s, end_s = ((at - marker.time_range.start) / 1e6 for at in (event.time_range.start, event.time_range.end))
        what = kind_of(event.name)
        if what is None or start_s < 0:
            continue
        if work and work[-1].what == what and start_s - work[-1].end_s < NEAR_S:
            work[-1] = work[-1]._replace(end_s=end_s)
        else:
            work.append(Span(what, start_s, end_s))
    sent = [Span(one.what, one.start_s - began_s, one.end_s - began_s) for one in link.sent if one.what in COLORS]
    rows = {"work": work}
    for what in ("all-gather", "reduce-scatter"):
        rows[what] = [span for span in sent if span.what == what]
    return Lanes(title, rows, time_s)


def kind_of(name: str) -> str | None:
    """What an event of the main thread is part of; None: it waits, or is none of the step's work."""
    if name == MARKER or "c10d" in name or "gloo" in name:
        return None
    if name.startswith("autograd::engine"):
        return "backward"
    return "optimizer" if "Optimizer" in name else "forward"


def picture(steps: Sequence[Lanes]) -> str:
    """An SVG of these steps, one below the other, on one scale of time."""
    longest_s = max(one.time_s for one in steps)
    scale = (WIDTH - LEFT - 20) / longest_s
    drawn: list[str] = []
    top = 34
    for index, what in enumerate(COLORS):
        drawn.append(f'<rect x="{LEFT + 150 * index}" y="10" width="12" height="12" fill="{COLORS[what]}"/>')
        drawn.append(f'<text x="{LEFT + 150 * index + 17}" y="20">{what}</text>')
    for one in steps:
        top += 22
        drawn.append(f'<text x="10" y="{top}" font-weight="bold">{escape(one.title)}: {one.time_s:.2f} s</text>')
        top += 8
        for lane, spans in one.rows.items():
            drawn.append(f'<text x="10" y="{top + 17}">{lane}</text>')
            drawn.append(f'<rect x="{LEFT}" y="{top}" width="{one.time_s * scale:.1f}" height="{LANE}" fill="#eee"/>')
            for span in spans:
                x, width = LEFT + span.start_s * scale, max(0.3, (span.end_s - span.start_s) * scale)
                drawn.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{LANE}" '
                             f'fill="{COLORS[span.what]}" stroke="white" stroke-width="0.4"/>')  # fmt: skip
            top += LANE + GAP
    size = f'width="{WIDTH}" height="{top + 10}" viewBox="0 0 {WIDTH} {top + 10}"'
    style = 'font-family="sans-serif" font-size="12"'
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
