"""Notation of sharding rules: one einsum-like line per operator, for one mesh axis.

In `"... k, n k -> ... n"` the first input has any number of leading dims and a dim `k`. The letters are factors. Dims
with one letter have equal size and are sharded together. `(g r)` is one dim of two factors, the outer one first. The
operator sums over a factor that no output has. `Rule.instantiate` fits a line to the shapes of one call and returns a
`Pattern`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from torch import fx

from autopart.ir.facts import CostNotes
from autopart.ir.graph import is_floating, shape, tensor_inputs
from autopart.ir.pattern import Dim, Dims, Pattern
from autopart.passes.rules.factors import output_shapes
from autopart.passes.rules.local_forms import LocalForm


@dataclass(frozen=True)
class Rule:
    """Properties of an operator that passes need, such as its sharding rule: a row of the table `RULES`.

    An operator without a sharding rule has neither `text` nor `of_call`.

    Args:
        text: the sharding rule, as a line in the notation above.
        whole: factors that cannot be sharded.
        linear: sets of inputs. If all inputs of a set are partial sums, the output is a partial sum.
        lookup: a factor that can be sharded only if ranks run another operator in place of the call, such as a
            vocabulary-parallel embedding.
        all_reduces: number of all-reduces in this other operator.
        local: function that writes the call for one rank, if the traced call would be wrong on shards.
        routes: "out" if the operator dispatches tokens to experts, "back" if it combines the outputs of experts.
        context: "ring" if the operator is attention that can run as ring attention.
        matmul: matrix products of the call, each as its factors (`"... k n"`). The FLOPs are twice the product of the
            factors' sizes.
        also: alternative lines, for calls with a mask or without optional weights. The first line that fits a call is
            used.
        when: function that returns True if the rule holds for a call.
        of_call: function that returns the rule fitted to a call (a `Pattern`), if it depends on the call's arguments.
        otherwise: rules for calls that this rule does not fit. The first rule that fits is used.
        takes_sparse: True if the rule holds for sparse tensors too.
        moves: True if the operator copies elements and computes nothing.
        keeps_weights: True if the operator converts a weight to another view or dtype. The operator then runs again at
            each use of the weight.
        keeps_masks: True if the operator converts a mask to another mask that selects as many elements.
        selects: True if the second argument selects elements of the first argument: a slice, or all elements equal to a
            number.
        has_gradient: True if the result may need a gradient.
        has_reduction: True if the operator is a loss with a `reduction` argument: 0 none, 1 mean (the default), 2 sum.
        draws_noise: True if the second argument is noise, which the local form can draw instead.
        cost: properties for the cost model that do not follow from the shapes of a call.
    """

    text: str = ""
    whole: str = ""
    linear: tuple[tuple[int, ...], ...] = ()
    lookup: str = ""
    matmul: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    when: Callable[[fx.Node], bool] = field(default=lambda node: True, compare=False)
    local: LocalForm | None = field(default=None, compare=False)
    routes: Literal["", "out", "back"] = ""
    context: Literal["", "ring"] = ""
    all_reduces: int = 0
    of_call: Callable[[fx.Node], Pattern | None] | None = None
    otherwise: tuple[Rule, ...] = ()
    takes_sparse: bool = False
    moves: bool = False
    keeps_weights: bool = False
    keeps_masks: bool = False
    selects: bool = False
    has_gradient: bool = True
    has_reduction: bool = False
    draws_noise: bool = False
    cost: CostNotes | None = None

    @property
    def is_for_sharding(self) -> bool:
        """True if this row of the operator table has a sharding rule. All other rows have only costs."""
        return bool(self.text) or self.of_call is not None

    def fit(self, node: fx.Node) -> Pattern | None:
        """Return the rule fitted to a call (a `Pattern`).

        None if neither this rule nor a rule in `otherwise` fits.
        """
        fitted = self._fit(node) if self.when(node) else None
        others = (rule.fit(node) for rule in self.otherwise)
        return fitted if fitted is not None else next((pattern for pattern in others if pattern is not None), None)

    def _fit(self, node: fx.Node) -> Pattern | None:
        if self.of_call is not None:
            return self.of_call(node)
        rule = self if is_floating(node) else replace(self, linear=())
        return rule.instantiate([shape(n) for n in tensor_inputs(node)], output_shapes(node)) if self.text else None

    def instantiate(self, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Pattern | None:
        """Fit the rule to the shapes of a call: return the `Pattern` of its first line that fits, or None.

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
        for dims, extents in zip(fitted, (*inputs, *outputs), strict=True):
            for dim, size in zip(dims or (), extents, strict=True):
                if len(dim) == 1:
                    sizes[dim[0]] = max(size, sizes.get(dim[0], 1))
        if not _solve_groups(fitted, (*inputs, *outputs), sizes):
            return None
        dims_of = []
        for i, (dims, extents) in enumerate(zip(fitted, (*inputs, *outputs), strict=True)):
            unbroadcast = []
            for dim, size in zip(dims or (), extents, strict=True):
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
            routes=self.routes, context=self.context,
        )  # fmt: skip


@cache
def parse(text: str) -> tuple[tuple[tuple[Dim, ...], ...], tuple[tuple[Dim, ...], ...]]:
    """Parse a line of the notation: return the dims of the operands left of the arrow, and right of it.

    The dim `("...",)` represents any number of dims.

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
    """Return the dims of an operand, with `...` replaced by as many named dims as the shape needs.

    The named dims are `...1`, `...2`, numbered from the right. None if the shape has too few dims. Without `...` the
    shape must not have more dims than the line.
    """
    if ("...",) not in terms:
        return terms if len(terms) == len(shape) else None
    at = terms.index(("...",))
    spare = len(shape) - (len(terms) - 1)
    if spare < 0:
        return None
    return terms[:at] + tuple((f"...{i}",) for i in range(spare, 0, -1)) + terms[at + 1 :]


def _solve_groups(fitted: Sequence, shapes: Sequence, sizes: dict[str, int]) -> bool:
    """Add to `sizes` the sizes of factors that appear only in merged dims, such as `r` in `(g r)`.

    Such a size is the size of the merged dim divided by the dim's other factors. Returns False if two factors of a dim
    are unknown.
    """
    for dims, extents in zip(fitted, shapes, strict=True):
        for dim, size in zip(dims, extents, strict=True):
            unknown = [f for f in dim if f not in sizes]
            if len(unknown) > 1:
                return False
            if unknown:
                sizes[unknown[0]] = size // math.prod(sizes[f] for f in dim if f in sizes)
    return True


def _product(term: str, sizes: Mapping[str, int]) -> int:
    named = math.prod(sizes.get(f, 1) for f in term.split() if f != "...")
    return named * (math.prod(s for f, s in sizes.items() if f.startswith("...")) if "..." in term.split() else 1)
