"""Drawing functions for the SVG figures of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape


def line(points: Sequence[tuple[float, float]], color: str, dashes: str = "") -> str:
    """Through all points. `dashes`: as `stroke-dasharray`."""
    way = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path d="M{way}" stroke="{color}" fill="none"{dashed}/>'


def text(x: float, y: float, words: str, anchor: str, color: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'


def write(path: str, width: int, height: int, parts: Sequence[str]) -> None:
    """An SVG of these parts on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    ground = f'<rect width="{width}" height="{height}" fill="white"/>'
    with open(path, "w") as file:
        file.write("\n".join([head, ground, *parts, "</svg>"]) + "\n")
