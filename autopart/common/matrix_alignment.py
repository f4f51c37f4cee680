"""Alignment of matrix rows: kernels load rows whose size is a multiple of 16 bytes fastest."""

from __future__ import annotations

import math
from collections.abc import Iterable

MULTIPLE = 8
"""Values of 16 bits in 16 bytes."""

MOST_UNALIGNED = 3
"""Of an odd number of values."""


def unaligned(rows: Iterable[int]) -> int:
    """Return a penalty for 16-bit matrices with these row lengths, by the worst length.

    0: a multiple of 16 bytes, 2: an even number of values, 3: an odd number. On an H200 the logarithms of the rates
    are about proportional to it.

    >>> unaligned([4096, 50304]), unaligned([4096, 30522]), unaligned([4096, 50257])
    (0, 2, 3)
    """
    common = math.gcd(MULTIPLE, *rows)
    return MOST_UNALIGNED if common == 1 else 2 * (common < MULTIPLE)
