"""Rules of boolean indexing: selections, and reads and writes at selected elements.

A dim of selected elements has the mask's dims as factors, `(m0 m1 selected)`, without the elements that are not
selected. With a sharded batch, a rank selects from its local samples, and indices are relative to its first sample.
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
    """Rule of `positions`: merges the dims of the mask. None if the number of elements is given."""
    if not is_selection(node):
        return None
    dims = names(len(shape(node.args[0])), "m")
    merged = (*(f for (f,) in dims), SELECTED)
    return pattern(node, [dims], [[merged]] * len(dims), known={SELECTED: 1}, local=_where)


def _where(call: LocalCall) -> fx.Node:
    """Emit torch's `where`, whose output size compilers know to be data-dependent."""
    return call.emit(aten.where.default, call.args[0])


@dataclass(frozen=True)
class SelectionTie:
    """Relation of a tensor to the selection at whose indices it is read or written.

    `selected`: factors of a dim of selected elements. `dims`: {dim of the tensor that is a dim of the mask: its
    factor}. `sizes`: sizes of these factors.
    """

    selected: Dim
    dims: Mapping[int, Dim]
    sizes: Mapping[str, int]


def tie(source: Sequence[int], places: Mapping[int, fx.Node]) -> SelectionTie | None:
    """Return the relation of a tensor of shape `source` to the selection in `places`, or None.

    Args:
        source: shape of the tensor.
        places: {dim: index}.
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
    """Return True if sharding an input over the batch would change the meaning of its indices.

    Indices are relative to a rank's first sample, and only the operators that index with them allow for that.
    """
    indices = positions_of(source)
    if indices is None or position in pattern.tied or positions_of(node) is not None:
        return False
    (dim,) = [atoms for atoms in facts(source)["atoms"] if selections_in(atoms)][:1] or [()]
    return any(atom.kind == BATCH for atom in split_atoms(dim, list(indices.mask))[indices.dim])
