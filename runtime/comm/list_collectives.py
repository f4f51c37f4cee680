"""Collectives for all ranks in one process: functions of a list of local tensors, in rank order.

They compute the same results as `collectives.PRIMITIVES`, without process groups. `runtime/lockstep.py` uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from autopart.ir.sharding import DimSharding
from autopart.ops.expert_dispatch import DispatchPlan, count_rows
from autopart.runtime.comm.ring_attention import ring_attention_of_lists

Primitives = Mapping[str, Callable[..., list[Tensor]]]
"""{name of a primitive collective: function of the list of local tensors of one group}."""


def _identity(values: list[Tensor], *cuts: DimSharding) -> list[Tensor]:
    return [value.view_as(value) for value in values]


def _all_reduce(values: list[Tensor]) -> list[Tensor]:
    total = torch.stack(values).sum(0)
    return [total.clone() for _ in values]


def _own(values: list[Tensor]) -> list[Tensor]:
    return [values[0].clone(), *(torch.zeros_like(value) for value in values[1:])]


def _slice(values: list[Tensor], cut: DimSharding) -> list[Tensor]:
    return [cut.take(value, index) for index, value in enumerate(values)]


def _pad(values: list[Tensor], cut: DimSharding) -> list[Tensor]:
    return [cut.place(value, index) for index, value in enumerate(values)]


def _all_gather(values: list[Tensor], cut: DimSharding) -> list[Tensor]:
    full = cut.join(values)
    return [full.clone() for _ in values]


def _reduce_scatter(values: list[Tensor], cut: DimSharding) -> list[Tensor]:
    return _slice(_all_reduce(values), cut)


def _all_to_all(values: list[Tensor], source: DimSharding, target: DimSharding) -> list[Tensor]:
    return _slice(_all_gather(values, source), target)


def _dispatch(values: list[Tensor], routes: Sequence[DispatchPlan]) -> list[Tensor]:
    sent = [route.rows_of(value).split(route.sends) for value, route in zip(values, routes, strict=True)]
    return [torch.cat(parts) for parts in zip(*sent, strict=True)]


def _combine(values: list[Tensor], routes: Sequence[DispatchPlan]) -> list[Tensor]:
    sent = [value.split(route.receives) for value, route in zip(values, routes, strict=True)]
    return [route.tokens_of(torch.cat(parts)) for route, parts in zip(routes, zip(*sent, strict=True), strict=True)]


def _all_reduce_max(values: Sequence[Tensor]) -> list[Tensor]:
    total = torch.stack([value.detach() for value in values]).amax(0)
    return [total.clone() for _ in values]


def _exchange_counts(experts: Sequence[Tensor], num_experts: int, num_ranks: int) -> list[Tensor]:
    sends = torch.stack([count_rows(expert, num_experts, num_ranks) for expert in experts])
    return [counts.cpu() for counts in torch.stack([sends, sends.t()], 1)]


LIST_PRIMITIVES: Primitives = {
    "identity": _identity,
    "all_reduce": _all_reduce,
    "own": _own,
    "slice": _slice,
    "pad": _pad,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "dispatch": _dispatch,
    "combine": _combine,
}

LIST_OPERATORS: Mapping[str, Callable[..., Sequence[Tensor]]] = {
    "all_reduce_max": _all_reduce_max, "exchange_counts": _exchange_counts, "ring_attention": ring_attention_of_lists
}  # fmt: skip
"""{operator: function of the list of a group's values and other arguments}, except layout conversions."""
