"""Sample calls that prove the sharding rules, by family. An operator with a rule needs at least one: add a line."""

from . import indexing, pointwise, products, recurrent, reductions, views, windows, with_itself
from .not_claimed import NOT_CLAIMED
from .sample import Sample, bools, call, data, ints, labels, x

FAMILIES = (pointwise, products, windows, views, reductions, indexing, recurrent)
SAMPLES = [sample for family in FAMILIES for sample in family.SAMPLES]
TRIED = [sample for family in FAMILIES if family is not recurrent for sample in family.SAMPLES]
"""Calls of which every sharding can be tried: recurrent kernels crash on arguments that do not fit each other."""
_WRITTEN = {sample.operator for sample in with_itself.SAMPLES}
_CHANGED = {s.operator: s for s in with_itself.with_repeated_tensors(SAMPLES) if s.operator not in _WRITTEN}
WITH_ITSELF = [*with_itself.SAMPLES, *_CHANGED.values()]
"""Calls that pass one tensor as several operands: written ones, and one of each other operator, changed to do so."""

PROGRAMS_WITH_ITSELF = with_itself.PROGRAMS

__all__ = [
    "NOT_CLAIMED",
    "PROGRAMS_WITH_ITSELF",
    "SAMPLES",
    "TRIED",
    "WITH_ITSELF",
    "Sample",
    "bools",
    "call",
    "data",
    "ints",
    "labels",
    "x",
]
