"""Speed penalty of matrices whose rows are not a multiple of 16 bytes, which GPU kernels load slowly."""

from __future__ import annotations

import math
from collections.abc import Iterable

MULTIPLE = 8
"""Number of 16-bit values in 16 bytes."""

MOST_UNALIGNED = 3
"""Penalty if a row has an odd number of values: the largest one."""


def unaligned(rows: Iterable[int]) -> int:
    """Return the alignment penalty of an operator whose 16-bit matrices have rows of these lengths.

    The penalty is 0 if the length of every row is a multiple of 8 values (16 bytes). Otherwise it is 3 if a length is
    odd, and 2 if all lengths are even. Measurements on an H200 gave this scale: the logarithm of the operator's speed
    falls about linearly with the penalty.

    >>> unaligned([4096, 50304]), unaligned([4096, 30522]), unaligned([4096, 50257])
    (0, 2, 3)
    """
    common = math.gcd(MULTIPLE, *rows)
    return MOST_UNALIGNED if common == 1 else 2 * (common < MULTIPLE)
