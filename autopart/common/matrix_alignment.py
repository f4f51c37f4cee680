"""Sizes that matrix units like: rows of a multiple of 16 bytes, which they load at once."""

from __future__ import annotations

import math
from collections.abc import Iterable

MULTIPLE = 8
"""Values of 16 bits in 16 bytes."""

MOST_UNALIGNED = 3
"""Of an odd number of values."""


def unaligned(rows: Iterable[int]) -> int:
    """How badly matrices in 16 bits with so many values in a row suit kernels: 0 whole 16 bytes, 2 an even number of
    values, 3 an odd one (on an H200 the logarithms of their rates are about so far apart). The worst matrix of a
    product decides.

    >>> unaligned([4096, 50304]), unaligned([4096, 30522]), unaligned([4096, 50257])
    (0, 2, 3)
    """
    common = math.gcd(MULTIPLE, *rows)
    return MOST_UNALIGNED if common == 1 else 2 * (common < MULTIPLE)
