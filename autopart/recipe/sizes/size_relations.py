"""Relations between the sizes of traced calls, which derived calls must fulfil as well.

An example: all traced calls have 128 tokens in total, and the program contains the number 128. The traces do not show
whether this number is the total or a constant. A call with another total is therefore not derived from these traces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial

from autopart.recipe.sizes.size_formula import NotDerivable, Sizes, products_of

_Term = Callable[[Sizes], int]


class SizeRelations:
    """Relations that hold in all traced calls: constant products, proportional sizes, linear dependencies.

    Args:
        calls: values of the size variables in each traced call.

    >>> SizeRelations([(4, 32), (8, 16), (2, 64)]).check((4, 20))
    Traceback (most recent call last):
    autopart.recipe.sizes.size_formula.NotDerivable: sizes that were related in all traced calls are not
    """

    def __init__(self, calls: Sequence[Sizes]):
        self._basis = _echelon([_homogeneous(call) for call in calls])
        terms = _terms(len(calls[0]))
        columns = [[term(call) for call in calls] for term in terms]
        self._constant = [
            (term, column[0]) for term, column in zip(terms, columns, strict=True) if len({*column}) == 1
        ]  # fmt: skip
        self._related: list[tuple[_Term, _Term, Sequence[int], Sequence[int]]] = []
        for (one, left), (other, right) in itertools.combinations(zip(terms, columns, strict=True), 2):
            if _are_proportional(left, right):
                self._related.append((one, other, [left[0], 0], [right[0], 0]))
            elif len({*left}) > 2 and _are_proportional(_differences(left), _differences(right)):
                last = max(range(len(left)), key=lambda index: abs(left[index] - left[0]))
                self._related.append((one, other, [left[0], left[last]], [right[0], right[last]]))

    def check(self, sizes: Sizes) -> None:
        """Raise NotDerivable if these sizes violate a relation that holds in all traced calls."""
        related = (
            _are_proportional(_differences([*left, one(sizes)]), _differences([*right, other(sizes)]))
            for one, other, left, right in self._related
        )
        is_constant = (term(sizes) == value for term, value in self._constant)
        if not (_is_in_span(_homogeneous(sizes), self._basis) and all(is_constant) and all(related)):
            raise NotDerivable("sizes that were related in all traced calls are not")


def _terms(number: int) -> list[_Term]:
    """Return functions of the sizes: each size, each product of two, and each sum of two different sizes."""
    products: list[_Term] = [partial(_combined, math.prod, variables) for variables in products_of(number)]
    return products + [partial(_combined, sum, pair) for pair in itertools.combinations(range(number), 2)]


def _combined(combine: Callable[[Iterable[int]], int], variables: Sequence[int], sizes: Sizes) -> int:
    return combine(sizes[variable] for variable in variables)


def _homogeneous(sizes: Sizes) -> list[Fraction]:
    return [Fraction(1), *map(Fraction, sizes)]


def _differences(values: Sequence[int]) -> list[int]:
    return [value - values[0] for value in values[1:]]


def _are_proportional(left: Sequence[int], right: Sequence[int]) -> bool:
    return all(a * d == b * c for (a, b), (c, d) in itertools.combinations(zip(left, right, strict=True), 2))


def _echelon(rows: Sequence[list[Fraction]]) -> list[list[Fraction]]:
    basis: list[list[Fraction]] = []
    for row in rows:
        rest = _reduced(row, basis)
        if any(rest):
            basis.append(rest)
    return basis


def _is_in_span(row: list[Fraction], basis: Sequence[list[Fraction]]) -> bool:
    return not any(_reduced(row, basis))


def _reduced(row: list[Fraction], basis: Sequence[list[Fraction]]) -> list[Fraction]:
    for known in basis:
        pivot = next(index for index, entry in enumerate(known) if entry)
        factor = row[pivot] / known[pivot]
        row = [entry - factor * of_known for entry, of_known in zip(row, known, strict=True)]
    return row
