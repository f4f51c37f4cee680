"""Loss curves over steps, as an SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from _svg import line, text, write

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 420, 60, 20, 20, 50
COLORS = {"fp32": "#4c78a8", "bf16": "#e45756", "muon": "#54a24b"}
DASHES = ("", "6 4", "2 3")


def draw(curves: Mapping[str, Sequence[float]], path: str) -> None:
    """`curves`: the loss of every step, by `mesh, setting`. One colour a setting, one kind of line a mesh."""
    steps = max(len(curve) for curve in curves.values())
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))

    def x(step: int) -> float:
        return LEFT + step / (steps - 1) * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = list[str]()
    for half in range(math.ceil(low * 2), math.floor(high * 2) + 1):
        at = y(half / 2)
        parts.append(line([(LEFT, at), (WIDTH - RIGHT, at)], "#ddd"))
        parts.append(text(LEFT - 8, at + 4, f"{half / 2:.1f}", "end"))
    for step in range(0, steps, max(1, steps // 10)):
        parts.append(text(x(step), HEIGHT - BOTTOM + 18, str(step), "middle"))
    meshes = list(dict.fromkeys(title.rpartition(", ")[0] for title in curves))
    for number, (title, curve) in enumerate(curves.items()):
        mesh, _, setting = title.rpartition(", ")
        color, dashes = COLORS[setting], DASHES[meshes.index(mesh)]
        parts.append(line([(x(step), y(loss)) for step, loss in enumerate(curve)], color, dashes))
        at = TOP + 14 + 16 * number
        parts.append(line([(WIDTH - 260, at - 4), (WIDTH - 220, at - 4)], color, dashes))
        parts.append(text(WIDTH - 212, at, title, "start"))
    parts.append(text((LEFT + WIDTH) / 2, HEIGHT - 12, "step", "middle") + text(LEFT, TOP - 6, "loss", "end"))
    write(path, WIDTH, HEIGHT, parts)
