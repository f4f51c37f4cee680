"""Alignment of matrix rows: kernels load rows whose size is a multiple of 16 bytes fastest."""

from __future__ import annotations

import math
from collections.abc import Iterable

MULTIPLE = 8
"""Number of 16-bit values in 16 bytes."""

MOST_UNALIGNED = 3
"""Penalty for rows with an odd number of values."""


def unaligned(rows: Iterable[int]) -> int:
    """Return a penalty for 16-bit matrices with these row lengths, by the worst length.

    The penalty is 0 if a row is a multiple of 16 bytes, 2 for another even number of values, and 3 for an odd number.
    On an H200, the logarithm of the speed falls about linearly with it.

    >>> unaligned([4096, 50304]), unaligned([4096, 30522]), unaligned([4096, 50257])
    (0, 2, 3)
    """
    common = math.gcd(MULTIPLE, *rows)
    return MOST_UNALIGNED if common == 1 else 2 * (common < MULTIPLE)
