"""Atoms of traced values: a dim is the product of atoms, sizes that are sharded independently.

For example, a dim of 8 samples x 128 tokens has the atoms 8 (of kind "batch") and 128 (of kind "data").
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
    """Return the atoms of a dim that boolean indexing produces.

    They are the atoms of all dims of the mask. Only those of the batch can be sharded.
    """
    kind = _COUNTED + selection
    return tuple(atom if atom.kind == BATCH else Atom(atom.size, kind) for dim in dims for atom in dim)


def selections_in(atoms: Atoms) -> set[str]:
    """Return the kinds of the atoms whose size is data-dependent, one kind per selection by a mask."""
    return {atom.kind for atom in atoms if atom.kind.startswith(_COUNTED)}


def factor_atoms(node: fx.Node, pattern: Pattern) -> dict[str, Atoms]:
    """Return {factor of a sharding rule: its atoms}, read from the inputs that contain the factor.

    If inputs have different atoms for a factor, data-dependent atoms take precedence, then atoms of weights, then atoms
    of the batch.
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
    """Split the atoms of a dim among its factors, whose sizes are given: one atom of 32 into 4 and 8."""
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
