"""Accuracy or loss of `dp_sync=` methods over step time, with the range over seeds, as an SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from _svg import line, text, write

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 560, 70, 20, 20, 60
LINK = 10
FAMILIES = {"gossip": "#54a24b", "exact_diffusion": "#54a24b", "gradient_tracking": "#54a24b", "local": "#b279a2",
            "diloco": "#b279a2", "all_reduce": "#000000"}  # fmt: skip
OTHER = "#4c78a8"
MARKS_MS = (30, 50, 100, 200, 500, 1000, 2000)


def draw(rows: Mapping[str, Mapping[str, Any]], path: str) -> None:
    """`rows`: of `dp_sync.py`. Writes an SVG: milliseconds of a step over links of 10 Gb/s, and GPT-2's loss."""
    milliseconds = {name: {int(link): ms for link, ms in row["links_ms"].items()}[LINK] for name, row in rows.items()}
    losses = [row["loss"] for row in rows.values()]
    low, high = min(mean - off for mean, off in losses), max(mean + off for mean, off in losses)
    first, last = math.log10(min(milliseconds.values())) - 0.05, math.log10(max(milliseconds.values())) + 0.3

    def x(ms: float) -> float:
        return LEFT + (math.log10(ms) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = list[str]()
    for ms in (ms for ms in MARKS_MS if first < math.log10(ms) < last):
        parts.append(line([(x(ms), TOP), (x(ms), HEIGHT - BOTTOM)], "#ddd"))
        parts.append(text(x(ms), HEIGHT - BOTTOM + 18, str(ms), "middle"))
    for loss in (tenth / 5 for tenth in range(math.ceil(low * 5), math.floor(high * 5) + 1)):
        parts.append(line([(LEFT, y(loss)), (WIDTH - RIGHT, y(loss))], "#ddd"))
        parts.append(text(LEFT - 8, y(loss) + 4, f"{loss:.1f}", "end"))
    for name, row in rows.items():
        (mean, off), at, color = row["loss"], x(milliseconds[name]), FAMILIES.get(name.partition(":")[0], OTHER)
        parts.append(line([(at, y(mean - off)), (at, y(mean + off))], color))
        parts.append(f'<circle cx="{at:.1f}" cy="{y(mean):.1f}" r="4" fill="{color}"/>')
        side, anchor = (-7, "end") if name == "all_reduce" else (7, "start")
        parts.append(text(at + side, y(mean) + 4, name, anchor, color))
    parts.append(text((LEFT + WIDTH) / 2, HEIGHT - 16, "predicted ms of a step: GPT-2 small, dp16, 10 Gb/s", "middle"))
    parts.append(text(LEFT, TOP - 6, "loss on unseen text after 300 steps of a small GPT-2 on dp4", "start"))
    write(path, WIDTH, HEIGHT, parts)
