"""Rules of boolean indexing: the operator `positions` returns the indices of selected elements.

Other operators read from or write to a tensor at these indices. The dim of selected elements has the factors of the
mask's dims, `(m0 m1 selected)`, although it has only the selected elements. If the batch is sharded, a rank selects
from its local samples, and the indices count from the rank's first sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopart.ir.atoms import BATCH, selections_in, split_atoms
from autopart.ir.facts import facts
from autopart.ir.graph import shape
from autopart.ir.pattern import SELECTED, Dim, Pattern
from autopart.ir.selection import is_selection, positions_of
from autopart.passes.rules.factors import names, pattern
from autopart.passes.rules.local_forms import LocalCall

aten = torch.ops.aten


def positions(node: fx.Node) -> Pattern | None:
    """Return the rule of `positions` (indices where a mask is True), which merges the dims of the mask.

    None if the number of selected elements is fixed.
    """
    if not is_selection(node):
        return None
    dims = names(len(shape(node.args[0])), "m")
    merged = (*(f for (f,) in dims), SELECTED)
    return pattern(node, [dims], [[merged]] * len(dims), known={SELECTED: 1}, local=_where)


def _where(call: LocalCall) -> fx.Node:
    return call.emit(aten.where.default, call.args[0])


@dataclass(frozen=True)
class SelectionTie:
    """Relation between a tensor and the boolean mask that selects elements of the tensor.

    Args:
        selected: factors of the dim of selected elements.
        dims: {dim of the tensor: factor of the equal dim of the mask}.
        sizes: {factor: size}.
    """

    selected: Dim
    dims: Mapping[int, Dim]
    sizes: Mapping[str, int]


def tie(source: Sequence[int], places: Mapping[int, fx.Node]) -> SelectionTie | None:
    """Relate a tensor that is indexed to the boolean mask from which all its indices are computed.

    Returns None if the indices come from several masks or from no mask, or if no dim of the tensor equals a dim of the
    mask.

    Args:
        source: shape of the tensor.
        places: {indexed dim of the tensor: its index}.
    """
    index_positions = {at: position for at, index in places.items() if (position := positions_of(index)) is not None}
    selections = {(one.selection, one.mask) for one in index_positions.values()}
    if (
        len(selections) != 1
        or len(index_positions) < len(places)
        or any(len(shape(index)) != 1 for index in places.values())
    ):
        return None
    mask = index_positions[min(index_positions)].mask
    factors = [f"m{i}" for i in range(len(mask))]
    dims: dict[int, Dim] = {}
    for at, position in index_positions.items():
        factor = (factors[position.dim],)
        if source[at] == mask[position.dim] and factor not in dims.values():
            dims[at] = factor
    sizes = {**dict(zip(factors, mask, strict=True)), SELECTED: 1}
    return SelectionTie((*factors, SELECTED), dims, sizes) if dims else None


def shifts_indices(node: fx.Node, position: int, source: fx.Node, pattern: Pattern) -> bool:
    """Return True if a call would use wrong indices when its input `position` is sharded over the batch.

    This happens if the input contains indices of selected elements (`mask.nonzero()`): each rank counts them from its
    first sample, not from the first sample of the batch. The result is False for operators that index with them
    (`Pattern.tied`), because these operators expect local indices.
    """
    indices = positions_of(source)
    if indices is None or position in pattern.tied or positions_of(node) is not None:
        return False
    (dim,) = [atoms for atoms in facts(source)["atoms"] if selections_in(atoms)][:1] or [()]
    return any(atom.kind == BATCH for atom in split_atoms(dim, list(indices.mask))[indices.dim])
