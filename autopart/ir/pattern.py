"""Sharding rule of one operator call: the factors of each dim of its tensor inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import fx

Dim = tuple[str, ...]
"""Factors (letters of a sharding rule) of a dim, outermost first; `()` for a broadcast dim of size 1."""
Dims = tuple[Dim, ...]
SELECTED = "selected"
"""Marker factor (size 1) of a dim produced by boolean indexing: its length is data-dependent."""


@dataclass(frozen=True)
class Pattern:
    """The einsum-like sharding rule of one operator call, such as `b s k, n k -> b s n`.

    Each dim of a tensor is a list of factors (the letters). If a factor is sharded, all dims that contain it are
    sharded.

    Attributes:
        inputs: the dims of each tensor input.
        outputs: the dims of each output.
        sizes: the size of each factor.
        whole: factors that cannot be sharded.
        linear: sets of inputs, by index. If all inputs of one set are partial sums, the output is a partial sum.
        lookup: a factor that can be sharded only if ranks run another operator in place of the call, such as a
            vocabulary-parallel embedding.
        all_reduces: number of all-reduces in this other operator, each of the size of its output.
        flops: FLOPs of the call.
        joined: {factor: section sizes} of concatenated dims (`cat`, `split_with_sizes`).
        tied: positions of the inputs that contain indices of elements selected by a mask (`ir/selection.py`). Such an
            input is sharded in the same way as the selected elements.
        routes: "out" if the call dispatches tokens to experts, "back" if it combines the outputs of experts.
        context: "ring" if the call is attention that can run as ring attention: keys and values are sharded like
            queries and rotate around a ring of ranks.
        local: function that writes the call for one rank, if the original call would be wrong on shards.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    linear: tuple[tuple[int, ...], ...] = ()
    lookup: str = ""
    all_reduces: int = 0
    flops: int = 0
    joined: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tied: frozenset[int] = frozenset()
    routes: Literal["", "out", "back"] = ""
    context: Literal["", "ring"] = ""
    local: Callable[..., fx.Node | None] | None = field(default=None, compare=False)

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """All factors, such as `b`, `s` and `k`, in order of first appearance."""
        return tuple(dict.fromkeys(f for dims in (*self.inputs, *self.outputs) for dim in dims for f in dim))

    def __str__(self) -> str:
        """Return `b s k, n k -> b s n`.

        A dim that merges factors prints as `(b s)`, a dim without factors as `1`, and a tensor without dims as `()`.
        """
        values = [[" ".join(map(_dim_text, dims)) or "()" for dims in side] for side in (self.inputs, self.outputs)]
        return " -> ".join(map(", ".join, values))

    @property
    def key(self) -> tuple:
        """Hashable key of all fields except `local`."""
        sizes, joined = tuple(self.sizes.items()), tuple(self.joined.items())
        rest = (self.all_reduces, self.flops, joined, self.tied, self.routes, self.context)
        return self.inputs, self.outputs, sizes, self.whole, self.linear, self.lookup, *rest


def is_innermost(pattern: Pattern, factor: str) -> bool:
    """Return True if the factor is the innermost factor of every dim that contains it."""
    return all(dim[-1] == factor for dims in (*pattern.inputs, *pattern.outputs) for dim in dims if factor in dim)


def _dim_text(factors: tuple[str, ...]) -> str:
    return factors[0] if len(factors) == 1 else f"({' '.join(factors)})" if factors else "1"
