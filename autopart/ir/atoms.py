"""What the dims of a traced value are made of, and so what every factor of a rule counts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import tensor_inputs
from autopart.ir.pattern import Pattern

BATCH, FEATURE, DATA_DIM = "batch", "feature", "data"
"""Kinds of atoms: rows of the batch, something of a weight, the rest."""
_COUNTED = "counted by "


class Atom(NamedTuple):
    size: int
    kind: str


Atoms = tuple[Atom, ...]


def counted_atoms(dims: Iterable[Atoms], selection: str) -> Atoms:
    """What a dim of selected elements is made of: the dims of the mask, of which only rows of the batch may be cut."""
    kind = _COUNTED + selection
    return tuple(atom if atom.kind == BATCH else Atom(atom.size, kind) for dim in dims for atom in dim)


def selections_in(atoms: Atoms) -> set[str]:
    """The kinds of the atoms of which nobody knows how many there are."""
    return {atom.kind for atom in atoms if atom.kind.startswith(_COUNTED)}


def factor_atoms(node: fx.Node, pattern: Pattern) -> dict[str, Atoms]:
    """The atoms of every factor of a rule, from the inputs that have it; a weight's word counts over data's."""
    by_factor: dict[str, Atoms] = {}
    for dims, source in zip(pattern.inputs, tensor_inputs(node), strict=True):
        for dim, atoms in zip(dims, facts(source)["atoms"], strict=True):
            for factor, part in zip(dim, cut_atoms(atoms, [pattern.sizes[f] for f in dim]), strict=True):
                if factor not in by_factor or _rank(part) > _rank(by_factor[factor]):
                    by_factor[factor] = part
                elif len(kinds := selections_in(part) | selections_in(by_factor[factor])) > 1:
                    by_factor[factor] = (Atom(pattern.sizes[factor], min(kinds)),)  # of two selections: cut on no axis
    return by_factor


def _rank(atoms: Atoms) -> int:
    kinds = {atom.kind for atom in atoms}
    return 3 if selections_in(atoms) else 2 if FEATURE in kinds else 1 if BATCH in kinds else 0


def cut_atoms(atoms: Atoms, sizes: list[int]) -> list[Atoms]:
    """Cut a dim's atoms into the factors of a rule, e.g. one atom of 32 into 4 and 8."""
    if len(sizes) == 1:
        return [atoms]
    parts: list[Atoms] = []
    rest = list(atoms)
    for size in sizes:
        part: list[Atom] = []
        need = size
        while need > 1 and rest:
            atom = rest.pop(0)
            take = math.gcd(atom.size, need)
            if take == 1 and atom.size > 1:
                kind = atom.kind if len({a.kind for a in atoms}) == 1 else DATA_DIM
                return [(Atom(s, kind),) for s in sizes]
            part.append(Atom(take, atom.kind))
            need //= take
            if atom.size > take:
                rest.insert(0, Atom(atom.size // take, atom.kind))
        if need == 1 and not part and rest and rest[0].size == 1:
            part.append(rest.pop(0))
        parts.append(tuple(part) or (Atom(size, DATA_DIM),))
    return parts
