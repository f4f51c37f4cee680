"""Sharding of a dim over two mesh axes: an outer axis shards what an inner axis has sharded.

The dims of an operator are named by its rule, as in `b k, n k -> b n`. The code calls these names factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from autopart.ir.atoms import DATA_DIM, FEATURE, factor_atoms
from autopart.ir.decisions import Strategy
from autopart.ir.facts import facts
from autopart.ir.layout import Placement, num_sections, shard
from autopart.ir.pattern import Pattern


class InnerSharding(NamedTuple):
    """An operator's strategy on an inner axis, and the size of that axis.

    An inner axis is an axis that was solved earlier. The strategy shards a dim that another axis may shard too.
    """

    strategy: Strategy
    ranks: int


def sequence_divides(node: fx.Node, factor: str, parts: int) -> bool:
    """Return True if the innermost dim of a factor is a sequence whose length is a multiple of `parts`.

    A factor is a dim of the operator's sharding rule. It can merge several dims, such as (batch, sequence).
    """
    pattern = facts(node)["pattern"]
    assert pattern is not None, "an operator without a rule is not sharded"
    atoms = factor_atoms(node, pattern).get(factor, ())
    return bool(atoms) and atoms[-1].kind == DATA_DIM and atoms[-1].size % parts == 0


def shard_inside(node: fx.Node, option: Strategy, taken: Sequence[InnerSharding], ranks: int) -> Strategy | None:
    """Adapt a strategy to other axes that already shard the same factor (such as heads).

    The resulting strategy splits each shard of the other axes. A factor can merge dims, such as (heads, head size). If
    the strategy and the other axes shard different ones of these dims, the strategy is returned unchanged. Returns None
    if the factor cannot be sharded again.

    Args:
        option: strategy on this axis.
        taken: strategies on the other axes.
        ranks: size of this axis.
    """
    pattern = facts(node)["pattern"]
    assert pattern is not None, "an operator without a rule is not sharded"
    inner, parts = taken[-1].strategy, math.prod(one.ranks for one in taken)
    pairs = [(a, b) for a, b in zip(option.places, inner.places, strict=True) if a.is_shard]
    alike = all(b.is_shard and a.dim == b.dim and len(a.sections) < 2 > len(b.sections) for a, b in pairs)
    if option.factor in (pattern.lookup, *pattern.joined) or not alike:
        return None
    atoms, counts = factor_atoms(node, pattern).get(option.factor, ()), _sections_of_both(pattern, option, inner)
    if counts is None or not any(atom.kind == FEATURE for atom in atoms):
        return None
    if counts[0] != counts[1]:
        return option
    outer = 1
    for atom in atoms:
        if outer == counts[0] and atom.kind == FEATURE and atom.size % (parts * ranks) == 0:
            return replace(
                option,
                inputs=tuple([_in_parts(place, parts) for place in option.inputs]),
                outputs=tuple([_in_parts(place, parts) for place in option.outputs]),
            )
        outer *= atom.size
    return None


def _in_parts(place: Placement, parts: int) -> Placement:
    return shard(place.dim, (num_sections(place.sections) * parts,)) if place.is_shard else place


def _sections_of_both(pattern: Pattern, option: Strategy, other: Strategy) -> tuple[int, int] | None:
    """Return, for each of two strategies, the number of sections of a dim that both shard.

    A dim with sections (fused q, k and v: 3) is sharded section by section. None if no operand has a sharded dim that
    consists only of the factor (letter of the rule) that `option` shards.
    """
    operands = (*pattern.inputs, *pattern.outputs)
    for dims, a, b in zip(operands, option.places, other.places, strict=True):
        if a.is_shard and b.is_shard and dims[a.dim] == (option.factor,):
            return num_sections(a.sections), num_sections(b.sections)
    return None
