"""Formatting of text: numbers with a unit prefix, indented lines, and strings without quotes."""

from __future__ import annotations

import html
import math
import shutil
import sys
import textwrap
from collections.abc import Iterable

TEXT_WIDTH = 80


def terminal_width(default: int) -> int:
    """Return the columns of the terminal on standard output, or `default` if the output is no terminal."""
    return shutil.get_terminal_size((default, 24)).columns if sys.stdout.isatty() else default


def quantity(number: float, unit: str) -> str:
    """Format a number with three digits and a decimal prefix.

    >>> quantity(6738415616, ""), quantity(12288, "B"), quantity(0.0000997, "s"), quantity(0, "B")
    ('6.74 G', '12.3 kB', '99.7 µs', '0 B')
    """
    if number == 0 or not math.isfinite(number):
        return f"{number:g} {unit}".rstrip()
    power = math.floor(math.log10(abs(number)) / 3 + 1e-12)
    if float(f"{abs(number) / 1000**power:.3g}") >= 1000:  # rounding has reached the next prefix
        power += 1
    lowest = -3 if unit == "s" else 0
    power = min(max(power, lowest), 6)
    prefix = ("n", "µ", "m", "", "k", "M", "G", "T", "P", "E")[power + 3]
    return f"{float(f'{number / 1000**power:.3g}'):g} {prefix}{unit}".rstrip()


def indented(lines: Iterable[str]) -> list[str]:
    """Return the non-empty lines, indented and wrapped to the width of a terminal."""
    return [textwrap.fill(line, TEXT_WIDTH, initial_indent="  ", subsequent_indent="    ") for line in lines if line]


class ShownText(str):
    """String whose `repr` has no quotes, so that a notebook or Python prompt shows it as plain text."""

    def __repr__(self) -> str:
        return str(self)


class ShownAsText:
    """Base of results that a notebook and a Python prompt show as their text, `str(result)`.

    Dataclasses pass `repr=False`, so that they inherit this `repr`.
    """

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"
