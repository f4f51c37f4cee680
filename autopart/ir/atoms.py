"""Atoms: the independent factors of the size of a tensor dim, each of which can be sharded by itself.

A dim of size 1024 that merges 8 samples and 128 tokens has the atoms 8 (kind "batch") and 128 (kind "data").
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import tensor_inputs
from autopart.ir.pattern import Pattern

BATCH, FEATURE, DATA_DIM = "batch", "feature", "data"
"""Kinds of atoms: samples of the batch, dims of a weight, other dims (tokens, pixels)."""
_COUNTED = "counted by "


class Atom(NamedTuple):
    size: int
    kind: str


Atoms = tuple[Atom, ...]


def selected_atoms(dims: Iterable[Atoms], selection: str) -> Atoms:
    """Return the atoms of the output dim of boolean indexing, `x[mask]`.

    An atom is a factor of a dim's size that can be sharded by itself. The output dim merges all dims that the mask
    covers, so it has the atoms of all these dims. Atoms of kind "batch" keep their kind. All others get a
    data-dependent kind, with which they cannot be sharded.

    Args:
        dims: the atoms of each dim of the mask.
        selection: name of the mask.
    """
    kind = _COUNTED + selection
    return tuple(atom if atom.kind == BATCH else Atom(atom.size, kind) for dim in dims for atom in dim)


def selections_in(atoms: Atoms) -> set[str]:
    """Return the kinds of the atoms that come from boolean indexing, `x[mask]`: one kind for each mask.

    An atom is a factor of a dim's size that can be sharded by itself.
    """
    return {atom.kind for atom in atoms if atom.kind.startswith(_COUNTED)}


def factor_atoms(node: fx.Node, pattern: Pattern) -> dict[str, Atoms]:
    """Return {letter of a sharding rule: atoms of the input dims that have this letter}.

    An atom is a factor of a dim's size that can be sharded by itself. If inputs have different atoms for a letter, the
    function prefers data-dependent atoms, then atoms of weights, then atoms of the batch.
    """
    by_factor: dict[str, Atoms] = {}
    for dims, source in zip(pattern.inputs, tensor_inputs(node), strict=True):
        for dim, atoms in zip(dims, facts(source)["atoms"], strict=True):
            for factor, part in zip(dim, split_atoms(atoms, [pattern.sizes[f] for f in dim]), strict=True):
                if factor not in by_factor or _rank(part) > _rank(by_factor[factor]):
                    by_factor[factor] = part
                elif len(kinds := selections_in(part) | selections_in(by_factor[factor])) > 1:
                    # Dims of two selections cannot be sharded.
                    by_factor[factor] = (Atom(pattern.sizes[factor], min(kinds)),)
    return by_factor


def _rank(atoms: Atoms) -> int:
    kinds = {atom.kind for atom in atoms}
    return 3 if selections_in(atoms) else 2 if FEATURE in kinds else 1 if BATCH in kinds else 0


def split_atoms(atoms: Atoms, sizes: list[int]) -> list[Atoms]:
    """Distribute the atoms of a dim over the factors (letters) of a sharding rule that make up the dim.

    An atom is a factor of a dim's size that can be sharded by itself. For example, one atom of size 32 is split into
    atoms of sizes 4 and 8 for factors of sizes 4 and 8.

    Args:
        sizes: sizes of the factors, outermost first.
    """
    if len(sizes) == 1:
        return [atoms]
    parts: list[Atoms] = []
    remaining = list(atoms)
    for size in sizes:
        part: list[Atom] = []
        missing = size
        while missing > 1 and remaining:
            atom = remaining.pop(0)
            common = math.gcd(atom.size, missing)
            if common == 1 and atom.size > 1:
                kind = atom.kind if len({a.kind for a in atoms}) == 1 else DATA_DIM
                return [(Atom(s, kind),) for s in sizes]
            part.append(Atom(common, atom.kind))
            missing //= common
            if atom.size > common:
                remaining.insert(0, Atom(atom.size // common, atom.kind))
        if missing == 1 and not part and remaining and remaining[0].size == 1:
            part.append(remaining.pop(0))
        parts.append(tuple(part) or (Atom(size, DATA_DIM),))
    return parts
