"""A sharding rule fitted to one call: which factors the dims of its inputs and outputs are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import fx

Dim = tuple[str, ...]
"""The factors of one dim, outermost first; `()` for a dim of size 1 that is broadcast."""
Dims = tuple[Dim, ...]
SELECTED = "selected"
"""A factor of size 1 that marks a dim of selected elements: of the others of the dim only some are there."""


@dataclass(frozen=True)
class Pattern:
    """A rule fitted to one call: the factors of every dim of every tensor input and output, and the factors' sizes.

    `whole`: factors that may not be sharded. `linear`: sets of inputs that may all be partial sums together, the
    output then being one too. `lookup`: a factor that may be sharded only by a special local operator
    (`embedding`, `cross_entropy_loss`). `tied`: the inputs that are positions in a selection (`ir/selection.py`), of
    elements that lie on the same rank when a factor is cut. `routes`: it sends rows to their experts, or
    brings them back. `joined`: factors that are concatenations, with the sizes
    of their sections (`cat`, `split_with_sizes`): a dim of such a factor holds all sections or, if it is smaller, one
    of them. `local`: how the call is written for one rank (`passes/rules/local_forms.py`), where it is not the
    traced one on local operands.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    linear: tuple[tuple[int, ...], ...] = ()
    lookup: str = ""
    flops: int = 0
    joined: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tied: frozenset[int] = frozenset()
    routes: Literal["", "out", "back"] = ""
    local: Callable[..., fx.Node | None] | None = field(default=None, compare=False)

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """Every factor, in order of first appearance."""
        return tuple(dict.fromkeys(f for dims in (*self.inputs, *self.outputs) for dim in dims for f in dim))

    def __str__(self) -> str:
        """`b s k, n k -> b s n`; a dim that merges factors is `(b s)`, one of none `1`, a tensor without dims `()`."""
        values = [[" ".join(map(_dim_text, dims)) or "()" for dims in side] for side in (self.inputs, self.outputs)]
        return " -> ".join(map(", ".join, values))

    @property
    def key(self) -> tuple:
        """Equal for equal patterns, and hashable."""
        sizes, joined = tuple(self.sizes.items()), tuple(self.joined.items())
        rest = (self.flops, joined, self.tied, self.routes)
        return self.inputs, self.outputs, sizes, self.whole, self.linear, self.lookup, *rest


def is_innermost(pattern: Pattern, factor: str) -> bool:
    """Whether every dim that has a factor has no other one inside it."""
    return all(dim[-1] == factor for dims in (*pattern.inputs, *pattern.outputs) for dim in dims if factor in dim)


def _dim_text(factors: tuple[str, ...]) -> str:
    return factors[0] if len(factors) == 1 else f"({' '.join(factors)})" if factors else "1"
