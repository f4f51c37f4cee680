"""The primitive collectives as plain functions of the list of one group's local tensors, in the order of its ranks.

They compute what those on process groups do (`collectives.PRIMITIVES`), for the run of all ranks in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from autopart.ir.pieces import Cut

Primitives = Mapping[str, Callable[..., list[Tensor]]]
"""The primitive collectives, {name: function of the list of local tensors of one group}."""


def _identity(values: list[Tensor], *cuts: Cut) -> list[Tensor]:
    return [value.view_as(value) for value in values]


def _all_reduce(values: list[Tensor]) -> list[Tensor]:
    total = torch.stack(values).sum(0)
    return [total.clone() for _ in values]


def _own(values: list[Tensor]) -> list[Tensor]:
    return [values[0].clone(), *(torch.zeros_like(value) for value in values[1:])]


def _slice(values: list[Tensor], cut: Cut) -> list[Tensor]:
    return [cut.take(value, index) for index, value in enumerate(values)]


def _pad(values: list[Tensor], cut: Cut) -> list[Tensor]:
    return [cut.place(value, index) for index, value in enumerate(values)]


def _all_gather(values: list[Tensor], cut: Cut) -> list[Tensor]:
    full = cut.join(values)
    return [full.clone() for _ in values]


def _reduce_scatter(values: list[Tensor], cut: Cut) -> list[Tensor]:
    return _slice(_all_reduce(values), cut)


def _all_to_all(values: list[Tensor], source: Cut, target: Cut) -> list[Tensor]:
    return _slice(_all_gather(values, source), target)


LIST_PRIMITIVES: Primitives = {
    "identity": _identity,
    "all_reduce": _all_reduce,
    "own": _own,
    "slice": _slice,
    "pad": _pad,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
