"""Tokens per second and GPU over sequence length, log-log, one line per model, as an SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from _svg import line, text, write

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 460, 70, 30, 30, 50
COLORS = ("#4c78a8", "#f58518", "#54a24b")


def draw(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """`rows`: of `lengths.py`. Writes an SVG, every point with its mesh."""
    lengths = sorted({row["positions"] for row in rows})
    low = math.floor(math.log10(min(row["tokens_per_s"] for row in rows)))
    high = math.ceil(math.log10(max(row["tokens_per_s"] for row in rows)))

    def x(length: int) -> float:
        share = math.log2(length / lengths[0]) / max(1.0, math.log2(lengths[-1] / lengths[0]))
        return LEFT + 30 + share * (WIDTH - LEFT - RIGHT - 160)

    def y(tokens: float) -> float:
        return TOP + (high - math.log10(tokens)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = list[str]()
    for length in lengths:
        parts.append(line([(x(length), TOP), (x(length), HEIGHT - BOTTOM)], "#ddd"))
        parts.append(text(x(length), HEIGHT - BOTTOM + 18, f"{length // 1024}K", "middle"))
    for tokens in (10**power for power in range(low, high + 1)):
        parts.append(line([(LEFT, y(tokens)), (WIDTH - RIGHT, y(tokens))], "#ddd"))
        parts.append(text(LEFT - 8, y(tokens) + 4, f"{tokens:,}", "end"))
    for color, model in zip(COLORS, dict.fromkeys(row["model"] for row in rows), strict=False):
        of_model = [row for row in rows if row["model"] == model]
        parts.append(line([(x(row["positions"]), y(row["tokens_per_s"])) for row in of_model], color))
        for row in of_model:
            at, tokens = x(row["positions"]), row["tokens_per_s"]
            parts.append(f'<circle cx="{at:.1f}" cy="{y(tokens):.1f}" r="4" fill="{color}"/>')
            said = f"{model}: {tokens:,.0f}, {row['mesh'].partition(', zero')[0]}"
            parts.append(text(at + 6, y(tokens) - 8, said, "start", color))
    parts.append(text(LEFT, TOP - 10, "predicted tokens/s a GPU", "start"))
    parts.append(text((LEFT + WIDTH) / 2, HEIGHT - 12, "positions of a sequence", "middle"))
    write(path, WIDTH, HEIGHT, parts)
