"""Sizes that matrix units like: rows of a multiple of 16 bytes, which they load at once."""

from __future__ import annotations

import math
from collections.abc import Iterable

MULTIPLE = 8
"""Values of 16 bits in 16 bytes."""

MOST_UNALIGNED = int(math.log2(MULTIPLE))
"""Of rows with an odd number of values, which are loaded one by one."""


def unaligned(rows: Iterable[int]) -> int:
    """By how many halvings less than 16 bytes are loaded at once of matrices in 16 bits with so many values in a row;
    0: none. The least aligned matrix of a product decides.

    >>> unaligned([4096, 50304]), unaligned([4096, 30522]), unaligned([4096, 50257])
    (0, 2, 3)
    """
    common = math.gcd(MULTIPLE, *rows)
    return MOST_UNALIGNED - int(math.log2(common))
