"""Curves of losses over steps, as an SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 420, 60, 20, 20, 50
COLORS = {"fp32": "#4c78a8", "bf16": "#e45756"}
DASHES = ("", "6 4", "2 3")


def draw(curves: Mapping[str, Sequence[float]], path: str) -> None:
    """`curves`: the loss of every step, by `mesh, precision`. One colour a precision, one kind of line a mesh."""
    steps = max(len(curve) for curve in curves.values())
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))

    def x(step: int) -> float:
        return LEFT + step / (steps - 1) * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for half in range(math.ceil(low * 2), math.floor(high * 2) + 1):
        at = y(half / 2)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, at + 4, f"{half / 2:.1f}", "end"))
    for step in range(0, steps, max(1, steps // 10)):
        parts.append(_text(x(step), HEIGHT - BOTTOM + 18, str(step), "middle"))
    meshes = list(dict.fromkeys(title.rpartition(", ")[0] for title in curves))
    for number, (title, curve) in enumerate(curves.items()):
        mesh, _, precision = title.rpartition(", ")
        stroke = f'fill="none" stroke="{COLORS[precision]}" stroke-dasharray="{DASHES[meshes.index(mesh)]}"'
        points = " ".join(f"{x(step):.1f},{y(loss):.2f}" for step, loss in enumerate(curve))
        parts.append(f'<polyline points="{points}" {stroke}/>')
        at = TOP + 14 + 16 * number
        parts.append(f'<path d="M{WIDTH - 260} {at - 4}h40" {stroke}/>' + _text(WIDTH - 212, at, title, "start"))
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 12, "step", "middle") + _text(LEFT, TOP - 6, "loss", "end"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    with open(path, "w") as file:
        file.write("\n".join([head, *parts, "</svg>"]) + "\n")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}" fill="#333">{escape(text)}</text>'
