"""Solver for mixed-integer linear programs: HiGHS, called through scipy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

ProgramRow = tuple[list[tuple[Any, Any]], float, float]
"""A constraint: (column, factor) of each term of a sum, and the lower and upper bound of the sum."""


def integer_program(
    cost: np.ndarray, rows: Sequence[ProgramRow], upper: np.ndarray, is_integer: np.ndarray, options: Mapping[str, Any]
) -> Any:
    """Solve a mixed-integer linear program with HiGHS: minimize a linear cost under linear constraints.

    Args:
        cost: cost per unit of each variable.
        rows: the constraints, each with its (column, factor) pairs, lower bound and upper bound.
        upper: upper bound of each variable. All lower bounds are 0.
        is_integer: True for each variable that must be an integer.
        options: options of `scipy.optimize.milp`.
    Returns: the result object of `scipy.optimize.milp`.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    entries = [(i, column, factor) for i, (row, _, _) in enumerate(rows) for column, factor in row]
    at, columns, factors = zip(*entries, strict=True)
    matrix = csr_array((factors, (at, columns)), shape=(len(rows), len(cost)))
    between = LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows])
    return milp(cost, integrality=is_integer, bounds=Bounds(0, upper), constraints=between, options=dict(options))
