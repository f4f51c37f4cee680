"""Rule of `einsum`, derived from its equation."""

from __future__ import annotations

from collections import Counter

from torch import fx

from autopart.ir.graph import shape, tensor_inputs
from autopart.ir.pattern import Pattern
from autopart.passes.rules.factors import UNARY_LINEAR
from autopart.passes.rules.notation import Rule


def einsum(node: fx.Node) -> Pattern | None:
    """Return the rule of an `einsum`.

    The letters of its equation are the factors. None if an operand repeats a letter.
    """
    shapes = [shape(n) for n in tensor_inputs(node)]
    terms, result = read_equation(node.args[0], [len(s) for s in shapes])
    if any(max(Counter(term).values(), default=1) > 1 for term in (*terms, result)):
        return None
    line = f"{', '.join(map(' '.join, terms))} -> {' '.join(result)}"
    if len(terms) == 1:
        rule = Rule(line, linear=UNARY_LINEAR)
    else:
        letters = " ".join(set().union(*terms))
        rule = Rule(line, linear=tuple((i,) for i in range(len(terms))), matmul=(letters,))
    return rule.instantiate(shapes, [shape(node)])


def read_equation(equation: str, ndims: list[int]) -> tuple[list[list[str]], list[str]]:
    """Split an einsum equation into the letters of each operand, and the letters of the result.

    Dims of an ellipsis are named `...1`, `...2`, from the right.

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
