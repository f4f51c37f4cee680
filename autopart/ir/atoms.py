"""Atoms: the independent sizes whose product is each dim of a traced value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import tensor_inputs
from autopart.ir.pattern import Pattern

BATCH, FEATURE, DATA_DIM = "batch", "feature", "data"
"""Kinds of atoms: samples of the batch, dims of a weight, the rest."""
_COUNTED = "counted by "


class Atom(NamedTuple):
    size: int
    kind: str


Atoms = tuple[Atom, ...]


def selected_atoms(dims: Iterable[Atoms], selection: str) -> Atoms:
    """Return the atoms of a dim of selected elements.

    They are the atoms of the mask's dims. Of these, only atoms of the batch can be sharded.
    """
    kind = _COUNTED + selection
    return tuple(atom if atom.kind == BATCH else Atom(atom.size, kind) for dim in dims for atom in dim)


def selections_in(atoms: Atoms) -> set[str]:
    """Return the kinds of the atoms whose size is data-dependent."""
    return {atom.kind for atom in atoms if atom.kind.startswith(_COUNTED)}


def factor_atoms(node: fx.Node, pattern: Pattern) -> dict[str, Atoms]:
    """Return the atoms of each factor of a rule, read from the inputs that have the factor.

    If inputs differ, data-dependent atoms take precedence, then those of weights, then those of the batch.
    """
    by_factor: dict[str, Atoms] = {}
    for dims, source in zip(pattern.inputs, tensor_inputs(node), strict=True):
        for dim, atoms in zip(dims, facts(source)["atoms"], strict=True):
            for factor, part in zip(dim, split_atoms(atoms, [pattern.sizes[f] for f in dim]), strict=True):
                if factor not in by_factor or _rank(part) > _rank(by_factor[factor]):
                    by_factor[factor] = part
                elif len(kinds := selections_in(part) | selections_in(by_factor[factor])) > 1:
                    by_factor[factor] = (Atom(pattern.sizes[factor], min(kinds)),)  # two selections: cannot be sharded
    return by_factor


def _rank(atoms: Atoms) -> int:
    kinds = {atom.kind for atom in atoms}
    return 3 if selections_in(atoms) else 2 if FEATURE in kinds else 1 if BATCH in kinds else 0


def split_atoms(atoms: Atoms, sizes: list[int]) -> list[Atoms]:
    """Split a dim's atoms among the factors of a rule, e.g. one atom of 32 into 4 and 8."""
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
