"""What an axis may cut of a factor that axes solved for before, which are inside it, cut already."""

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


class Taken(NamedTuple):
    """How an axis that was solved for before cuts a factor of an operator, and over how many ranks."""

    strategy: Strategy
    ranks: int


def positions_divide(node: fx.Node, factor: str, parts: int) -> bool:
    """Whether what is innermost in a factor is positions, as many on each of so many parts."""
    pattern = facts(node)["pattern"]
    assert pattern is not None, "without a rule nothing is cut"
    atoms = factor_atoms(node, pattern).get(factor, ())
    return bool(atoms) and atoms[-1].kind == DATA_DIM and atoms[-1].size % parts == 0


def cut_inside(node: fx.Node, option: Strategy, taken: Sequence[Taken], ranks: int) -> Strategy | None:
    """An option that cuts features of values which other axes cut, heads say, over so many ranks more: another atom of
    what they are made of as it is, the same one in as many sections as it has parts. None: it cannot be cut."""
    pattern = facts(node)["pattern"]
    assert pattern is not None, "without a rule nothing is cut"
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
    """A cut inside each of so many parts, into which other axes have cut what this one cuts."""
    return shard(place.dim, (num_sections(place.sections) * parts,)) if place.is_shard else place


def _sections_of_both(pattern: Pattern, option: Strategy, other: Strategy) -> tuple[int, int] | None:
    """Into how many sections two options cut a factor where it is a dim of its own; None where it is none."""
    operands = (*pattern.inputs, *pattern.outputs)
    for dims, a, b in zip(operands, option.places, other.places, strict=True):
        if a.is_shard and b.is_shard and dims[a.dim] == (option.factor,):
            return num_sections(a.sections), num_sections(b.sections)
    return None
