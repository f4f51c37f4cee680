"""The rule of `einsum`, whose equation is a rule line already."""

from __future__ import annotations

import math
from collections import Counter

from torch import fx

from autopart.ir.graph import shape, tensor_inputs
from autopart.ir.pattern import Dims, Pattern

from .factors import UNARY_LINEAR


def einsum(node: fx.Node) -> Pattern | None:
    """The factors are the letters of the equation; None where one operand has a letter twice (a diagonal)."""
    shapes = [shape(n) for n in tensor_inputs(node)]
    terms, result = read_equation(node.args[0], [len(s) for s in shapes])
    if any(max(Counter(term).values(), default=1) > 1 for term in (*terms, result)):
        return None
    sizes: dict[str, int] = {}
    for term, sizes_of in zip(terms, shapes, strict=True):
        for letter, size in zip(term, sizes_of, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    operands = tuple(_dims(term, sizes_of, sizes) for term, sizes_of in zip(terms, shapes, strict=True))
    if len(terms) == 1:
        return Pattern(operands, (_dims(result, shape(node), sizes),), sizes, linear=UNARY_LINEAR)
    linear = tuple((i,) for i in range(len(terms)))
    flops = 2 * math.prod(sizes.values())
    return Pattern(operands, (_dims(result, shape(node), sizes),), sizes, linear=linear, flops=flops)


def _dims(term: list[str], shape_: tuple[int, ...], sizes: dict[str, int]) -> Dims:
    return tuple((letter,) if sizes[letter] == size else () for letter, size in zip(term, shape_, strict=True))


def read_equation(equation: str, ndims: list[int]) -> tuple[list[list[str]], list[str]]:
    """The letters of every operand and of the result; the dims of an ellipsis are named `...1`, counted from the right.

    >>> read_equation("...ij,jk", [3, 2])
    ([['...1', 'i', 'j'], ['j', 'k']], ['...1', 'i', 'k'])
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    spare = [ndim - len(term.replace("...", "")) for term, ndim in zip(operands, ndims, strict=True)]
    terms = [_letters(term, count) for term, count in zip(operands, spare, strict=True)]
    if arrow:
        return terms, _letters(right, max(spare, default=0))
    counts = Counter(letter for term in terms for letter in term)
    dots = [f"...{i}" for i in range(max(spare, default=0), 0, -1)]
    return terms, [*dots, *sorted(letter for letter, n in counts.items() if n == 1 and "." not in letter)]


def _letters(term: str, spare: int) -> list[str]:
    before, dots, after = term.partition("...")
    return [*before, *(f"...{i}" for i in range(spare, 0, -1) if dots), *after]
