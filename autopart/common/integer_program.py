"""Integer programs, built constraint by constraint and solved with HiGHS (scipy)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

ProgramRow = tuple[list[tuple[Any, Any]], float, float]
"""A constraint: (column, factor) of each term of a sum, and the lower and upper bound of the sum."""


def integer_program(
    cost: np.ndarray, rows: Sequence[ProgramRow], upper: np.ndarray, whole: np.ndarray, options: Mapping[str, Any]
) -> Any:
    """Minimize a linear cost over bounded variables with HiGHS.

    Each variable is between 0 and `upper`. The variables in `whole` are integers.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    entries = [(i, column, factor) for i, (row, _, _) in enumerate(rows) for column, factor in row]
    at, columns, factors = zip(*entries, strict=True)
    matrix = csr_array((factors, (at, columns)), shape=(len(rows), len(cost)))
    between = LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows])
    return milp(cost, integrality=whole, bounds=Bounds(0, upper), constraints=between, options=dict(options))
