"""Rules of what selects elements by a mask, and reads and writes them: rows stay on the rank that has them.

A dim of selected elements is made of the mask's dims, `(m0 m1 selected)`, with what is not selected left out. Cut over
rows, it is what a rank selects of its own rows, and their positions count from the rank's first row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopart.ir.atoms import BATCH, cut_atoms, selections_in
from autopart.ir.facts import facts
from autopart.ir.graph import shape
from autopart.ir.pattern import SELECTED, Dim, Pattern
from autopart.ir.selection import is_selection, positions_of
from autopart.passes.rules.factors import names, pattern
from autopart.passes.rules.local_forms import LocalCall

aten = torch.ops.aten


def positions(node: fx.Node) -> Pattern | None:
    """The dims of the mask are merged; a selection of a known number is made of all rows."""
    if not is_selection(node):
        return None
    dims = names(len(shape(node.args[0])), "m")
    merged = (*(f for (f,) in dims), SELECTED)
    return pattern(node, [dims], [[merged]] * len(dims), known={SELECTED: 1}, local=_where)


def _where(call: LocalCall) -> fx.Node:
    """torch's own operator, of which a compiler knows that nobody knows its size."""
    return call.emit(aten.where.default, call.args[0])


@dataclass(frozen=True)
class Tie:
    """How a tensor and the positions at which it is read or written hang together.

    `selected`: the factors of a dim of selected elements. `dims`: of the tensor's dims that are dims of the mask, the
    factor. `sizes`: of these factors.
    """

    selected: Dim
    dims: Mapping[int, Dim]
    sizes: Mapping[str, int]


def tie(source: Sequence[int], places: Mapping[int, fx.Node]) -> Tie | None:
    """The tie of a tensor of a shape that is indexed by `places`, {dim: index}; None without one."""
    held = {at: position for at, index in places.items() if (position := positions_of(index)) is not None}
    selections = {(one.selection, one.mask) for one in held.values()}
    if len(selections) != 1 or len(held) < len(places) or any(len(shape(index)) != 1 for index in places.values()):
        return None
    mask = held[min(held)].mask
    factors = [f"m{i}" for i in range(len(mask))]
    dims: dict[int, Dim] = {}
    for at, position in held.items():
        factor = (factors[position.dim],)
        if source[at] == mask[position.dim] and factor not in dims.values():
            dims[at] = factor
    sizes = {**dict(zip(factors, mask, strict=True)), SELECTED: 1}
    return Tie((*factors, SELECTED), dims, sizes) if dims else None


def moves_rows(node: fx.Node, position: int, source: fx.Node, pattern: Pattern) -> bool:
    """Whether cutting an input over rows would change what it says: positions count from a rank's first row, which only
    what reads and writes at them knows."""
    held = positions_of(source)
    if held is None or position in pattern.tied or positions_of(node) is not None:
        return False
    (dim,) = [atoms for atoms in facts(source)["atoms"] if selections_in(atoms)][:1] or [()]
    return any(atom.kind == BATCH for atom in cut_atoms(dim, list(held.mask))[held.dim])
