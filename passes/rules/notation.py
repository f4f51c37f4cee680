"""Notation of sharding rules: one einsum-like line per operator, written for one mesh axis.

In `"... k, n k -> ... n"` the first input has any leading dims and a dim `k`. Dims with one name have the same indices.
`(g r)` is one dim with two factors, the outer one first. A factor that only inputs have is summed over.
`Rule.instantiate` fits a line to the shapes of one call and returns a `Pattern`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from torch import fx

from autopart.ir.pattern import Dim, Dims, Pattern
from autopart.passes.rules.local_forms import LocalForm


@dataclass(frozen=True)
class Rule:
    """One entry of the table: a line, and what a line cannot express.

    `whole`: factors that cannot be sharded. `linear`: sets of inputs that can be partial sums at once.
    `matmul`: products whose doubled sizes are the FLOPs (`("... k n",)`). `also`: alternative lines, tried in turn
    (without optional weights, with a mask). `when`: condition on the call's other arguments. `lookup`, `all_reduces`,
    `local` and `routes`: as in `Pattern`.
    """

    text: str
    whole: str = ""
    linear: tuple[tuple[int, ...], ...] = ()
    lookup: str = ""
    matmul: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    when: Callable[[fx.Node], bool] = field(default=lambda node: True, compare=False)
    local: LocalForm | None = field(default=None, compare=False)
    routes: Literal["", "out", "back"] = ""
    all_reduces: int = 0

    def instantiate(self, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Pattern | None:
        """Return the pattern of the first line that fits these shapes, or None.

        >>> Rule("... k, n k -> ... n").instantiate([(2, 3, 8), (4, 8)], [(2, 3, 4)]).sizes
        {'...2': 2, '...1': 3, 'k': 8, 'n': 4}
        """
        fitted = (self._fitted(text, inputs, outputs) for text in (self.text, *self.also))
        return next((pattern for pattern in fitted if pattern is not None), None)

    def _fitted(self, text: str, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Pattern | None:
        left, right = parse(text)
        if len(left) != len(inputs) or len(right) != len(outputs):
            return None
        fitted = [_fit(terms, shape) for terms, shape in zip((*left, *right), (*inputs, *outputs), strict=True)]
        if any(dims is None for dims in fitted):
            return None
        sizes: dict[str, int] = {}
        for dims, shape in zip(fitted, (*inputs, *outputs), strict=True):
            for dim, size in zip(dims or (), shape, strict=True):
                if len(dim) == 1:
                    sizes[dim[0]] = max(size, sizes.get(dim[0], 1))
        if not _solve_groups(fitted, (*inputs, *outputs), sizes):
            return None
        dims_of = []
        for i, (dims, shape) in enumerate(zip(fitted, (*inputs, *outputs), strict=True)):
            unbroadcast = []
            for dim, size in zip(dims or (), shape, strict=True):
                full = math.prod(sizes[f] for f in dim)
                if size != full and (size != 1 or i >= len(inputs)):  # inputs may broadcast, outputs may not
                    return None
                unbroadcast.append(dim if size == full else ())
            dims_of.append(tuple(unbroadcast))
        flops = sum(2 * _product(term, sizes) for term in self.matmul)
        named = self.whole.split()
        unshardable = frozenset(f for f in sizes if f in named or ("..." in named and f.startswith("...")))
        split = len(inputs)
        operands = tuple(dims_of[:split]), tuple(dims_of[split:])
        return Pattern(
            *operands, sizes, unshardable, self.linear, self.lookup, self.all_reduces, flops, local=self.local,
            routes=self.routes,
        )  # fmt: skip


@cache
def parse(text: str) -> tuple[tuple[tuple[Dim, ...], ...], tuple[tuple[Dim, ...], ...]]:
    """Return the operands left and right of the arrow, as tuples of dims. `("...",)` matches any dims.

    >>> parse("(g r) d -> d")
    (((('g', 'r'), ('d',)),), ((('d',),),))
    """
    sides = text.split("->")
    assert len(sides) == 2, f"rule '{text}' needs one arrow"
    return tuple(tuple(_parse_operand(operand) for operand in side.split(",")) for side in sides)  # type: ignore[return-value]


def _parse_operand(text: str) -> tuple[Dim, ...]:
    terms = re.findall(r"\(([^)]*)\)|(\S+)", text)
    return tuple(tuple(group.split()) if group else (name,) for group, name in terms)


def _fit(terms: tuple[Dim, ...], shape: Sequence[int]) -> Dims | None:
    """Replace `...` by named dims, numbered from the right, until the terms match the rank of the shape."""
    if ("...",) not in terms:
        return terms if len(terms) == len(shape) else None
    at = terms.index(("...",))
    spare = len(shape) - (len(terms) - 1)
    if spare < 0:
        return None
    return terms[:at] + tuple((f"...{i}",) for i in range(spare, 0, -1)) + terms[at + 1 :]


def _solve_groups(fitted: Sequence, shapes: Sequence, sizes: dict[str, int]) -> bool:
    """Compute the size of each factor that appears only inside groups from the other factors of its group."""
    for dims, shape in zip(fitted, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            unknown = [f for f in dim if f not in sizes]
            if len(unknown) > 1:
                return False
            if unknown:
                sizes[unknown[0]] = size // math.prod(sizes[f] for f in dim if f in sizes)
    return True


def _product(term: str, sizes: Mapping[str, int]) -> int:
    """Return the product of the named sizes; `...` includes all ellipsis dims."""
    named = math.prod(sizes.get(f, 1) for f in term.split() if f != "...")
    return named * (math.prod(s for f, s in sizes.items() if f.startswith("...")) if "..." in term.split() else 1)
