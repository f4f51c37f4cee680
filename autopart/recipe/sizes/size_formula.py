"""Integers of a program as formulas of the sizes of its inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

Sizes = tuple[int, ...]
"""Sizes of the variable dims of a call's inputs, such as (batch size, sequence length)."""


class NotDerivable(Exception):
    """Error: a program cannot be derived from traced ones. The text is the reason."""


@dataclass(frozen=True)
class SizeFormula:
    """Formula of sizes: `unit * (factor * product + offset)**power * scale / divisor`.

    In the formula, `product` and `scale` are the products of the sizes of the variables that the attributes
    `variables` and `scale` list.

    >>> SizeFormula((0, 1), 1, 0, divisor=2).at((8, 77))
    308
    >>> SizeFormula((0,), 2, 2, scale=(0,)).at((16,))
    544
    >>> SizeFormula((0,), 1, 4, divisor=4, power=2).at((16,))  # number of pairs of (16 + 4) / 2 chunks
    100
    """

    variables: tuple[int, ...]
    factor: int
    offset: int
    divisor: int = 1
    scale: tuple[int, ...] = ()
    power: int = 1
    unit: int = 1

    def at(self, sizes: Sizes) -> int:
        """Return the value for these sizes.

        Raises NotDerivable if the value is not an integer: the sizes are not divisible by `divisor`, unlike the sizes
        of the traces.
        """
        product = math.prod(sizes[variable] for variable in self.variables)
        scale = math.prod(sizes[variable] for variable in self.scale)
        base = self.factor * product + self.offset
        number, rest = divmod(self.unit * base**self.power * scale, self.divisor)
        if rest:
            raise NotDerivable(f"a size is {number} + {rest}/{self.divisor} for {sizes}")
        return number


def fit_integer(values: Sequence[int], sizes: Sequence[Sizes]) -> SizeFormula:
    """Return the formula that gives the values of an integer in several traces.

    A formula with an offset must hold in three traces with different products of its variables, a formula without an
    offset in two. If several formulas hold, the one with fewest variables is used. A scaled offset, as in the stride
    `n * (n + 1)`, is tried next, and a square, as in the size `(n + 1)**2`, last.

    Args:
        values: the integer in each trace.
        sizes: values of the size variables in each trace.
    Raises:
        NotDerivable: no formula holds, or there are too few traces to confirm it.
    """
    found = [*_fitted(values, sizes, ())]
    if not any(not formula.offset for formula in found):
        found += [formula for scale in products_of(len(sizes[0])) for formula in _fitted(values, sizes, scale)]
    if not found:
        found += _fitted_squares(values, sizes)
    if not found:
        raise NotDerivable(f"no formula of {list(sizes)} gives {list(values)}, or too few traces confirm it")
    return next((formula for formula in found if not formula.offset), found[0])


def _fitted(values: Sequence[int | Fraction], sizes: Sequence[Sizes], scale: tuple[int, ...]) -> Iterator[SizeFormula]:
    """Yield the formulas with this `scale` that hold in all traces.

    If `scale` has variables, only formulas with an offset are yielded, because formulas without an offset need no
    `scale`.
    """
    scales = [math.prod(one[variable] for variable in scale) for one in sizes]
    if not all(scales):
        return
    quotients = [Fraction(value, factor) for value, factor in zip(values, scales, strict=True)]
    for variables in products_of(len(sizes[0])) if not scale else [(v,) for v in range(len(sizes[0]))]:
        products = [math.prod(one[variable] for variable in variables) for one in sizes]
        known = dict(zip(products, quotients, strict=True))
        if len(known) < 2 or any(known[product] != value for product, value in zip(products, quotients, strict=True)):
            continue
        (first, low), (second, high), *_ = known.items()
        factor = (high - low) / (second - first)
        offset = low - factor * first
        if all(factor * product + offset == value for product, value in known.items()):
            divisor = math.lcm(factor.denominator, offset.denominator)
            if (len(known) > 2 and factor) if offset else not scale:
                yield SizeFormula(variables, int(factor * divisor), int(offset * divisor), divisor, scale)


def _fitted_squares(values: Sequence[int], sizes: Sequence[Sizes]) -> Iterator[SizeFormula]:
    """Yield the formulas with `power=2` that hold in all traces.

    `sqrt(value / values[0])` has a formula with an offset.
    """
    found = [_root(Fraction(value, values[0])) for value in values] if values[0] else []
    roots = [root for root in found if root is not None]
    if len(roots) == len(values):
        affine = [root for root in _fitted(roots, sizes, ()) if root.offset]
        yield from (replace(root, divisor=root.divisor**2, power=2, unit=values[0]) for root in affine)


def _root(number: Fraction) -> Fraction | None:
    """Return the square root of a number, None if it is not rational."""
    if number < 0:
        return None
    root = Fraction(math.isqrt(number.numerator), math.isqrt(number.denominator))
    return root if root * root == number else None


def products_of(number: int) -> Iterator[tuple[int, ...]]:
    """Yield the variables of each product that a formula may use: single ones, then pairs (also `v * v`)."""
    for length in (1, 2):
        yield from itertools.combinations_with_replacement(range(number), length)
