"""Ring attention: keys and values rotate around the ranks of an axis.

A rank starts to send keys and values to the next rank before it computes with them. In the backward, the gradients of
keys and values rotate together with the keys and values. After the last step, the gradients arrive at the rank that
owns the keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.compat.torch_internals import is_gloo, resolve_group
from autopart.ir.mask_structure import QueryRun
from autopart.ir.sharding import DimSharding
from autopart.ops.blockwise_attention import KeyBlockVisit, attend_visits, visit_backward
from autopart.ops.differentiate_once import check_differentiated_once
from autopart.ops.masked_attention import runs_of
from autopart.runtime.comm.watchdog import watching

_NOT_TWICE = (
    "its backward exchanges tensors between ranks, and this exchange cannot be differentiated",
    'context="ulysses" or context="gather"',
)


class _Rotation:
    """Asynchronous rotation by one rank: send tensors to the next rank, receive from the previous rank."""

    def __init__(self, group: dist.ProcessGroup, sent: Sequence[Tensor], length: int):
        self.group, self.device = group, sent[0].device
        on_host = self.device.type == "cuda" and is_gloo(group, self.device)
        self.sent = [(x.cpu() if on_host else x).contiguous() for x in sent]
        self.received = [x.new_empty(*x.shape[:2], length, x.size(3)) for x in self.sent]
        after, before = ((group.rank() + step) % group.size() for step in (1, -1))
        sends = [dist.P2POp(dist.isend, x, group=group, group_peer=after) for x in self.sent]
        gets = [dist.P2POp(dist.irecv, x, group=group, group_peer=before) for x in self.received]
        # Even and odd ranks differ in order: over blocking links, two ranks that both send first would deadlock.
        order = [*sends, *gets] if group.rank() % 2 == 0 else [*gets, *sends]
        with watching(group.group_name):
            self.works = dist.batch_isend_irecv(order)

    def arrive(self) -> list[Tensor]:
        with watching(self.group.group_name):
            for work in self.works:
                work.wait()
        return [x.to(self.device) for x in self.received]


def _ring_steps(
    group: dist.ProcessGroup, cut: DimSharding, pair: list[Tensor]
) -> Iterator[tuple[int, int, list[Tensor]]]:
    """Yield (rank that owns the keys, length of the next shard, [keys, values]) for each step of the ring.

    The first step has the local keys and values. While the caller computes a step, its keys and values are sent to the
    next rank.
    """
    ranks, there = group.size(), pair
    for step in range(ranks):
        rank = (group.rank() - step) % ranks
        length = cut.length((rank - 1) % ranks)
        moving = _Rotation(group, there, length) if step < ranks - 1 else None
        yield rank, length, there
        there = moving.arrive() if moving is not None else there


class Ring(torch.autograd.Function):
    """Autograd function: ring attention of this rank's queries to the keys of all ranks of a group."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, group_name: str, cut: DimSharding,
        scale: float | None, runs: Sequence[QueryRun],
    ) -> Tensor:  # fmt: skip
        group = resolve_group(group_name)
        steps = _ring_steps(group, cut, [key, value])
        output, total = attend_visits(query, (
            (keys, values, KeyBlockVisit(cut, group.rank(), rank, mask, scale, runs))
            for rank, _, (keys, values) in steps
        ))  # fmt: skip
        ctx.save_for_backward(query, key, value, mask, output, total)
        ctx.group, ctx.cut, ctx.scale, ctx.runs = group, cut, scale, runs
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 8
        check_differentiated_once("ring attention", *_NOT_TWICE)
        query, key, value, mask, output, total = ctx.saved_tensors
        group, cut = ctx.group, ctx.cut
        of_query = torch.zeros_like(query)
        grads = [torch.zeros_like(key), torch.zeros_like(value)]
        for rank, length, (keys, values) in _ring_steps(group, cut, [key, value]):
            of = KeyBlockVisit(cut, group.rank(), rank, mask, ctx.scale, ctx.runs)
            visit_backward([of_query, *grads], grad, output, total, query, keys, values, of)
            grads = _Rotation(group, grads, length).arrive()
        return of_query, grads[0], grads[1], None, None, None, None, None


class RingOfLists(torch.autograd.Function):
    """Autograd function: ring attention for all ranks in one process, computed one rank after the other."""

    @staticmethod
    def forward(
        ctx: Any, masks: Sequence[Tensor | None], cut: DimSharding, scale: float | None, *sides: Tensor
    ) -> tuple[Tensor, ...]:
        ranks = len(masks)
        queries, keys, values = (sides[i * ranks : (i + 1) * ranks] for i in range(3))
        ctx.masks, ctx.cut, ctx.scale, ctx.kept = masks, cut, scale, []
        for here in range(ranks):
            order = [(here - step) % ranks for step in range(ranks)]
            ctx.kept.append(attend_visits(queries[here], (
                (keys[rank], values[rank], KeyBlockVisit(cut, here, rank, masks[here], scale)) for rank in order
            )))  # fmt: skip
        ctx.save_for_backward(*sides)
        return tuple(result for result, _ in ctx.kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        check_differentiated_once("ring attention", *_NOT_TWICE)
        sides, ranks = ctx.saved_tensors, len(grads)
        queries, keys, values = (sides[i * ranks : (i + 1) * ranks] for i in range(3))
        side_grads = [torch.zeros_like(side) for side in sides]
        for here in range(ranks):
            output, total = ctx.kept[here]
            for step in range(ranks):
                rank = (here - step) % ranks
                of = KeyBlockVisit(ctx.cut, here, rank, ctx.masks[here], ctx.scale)
                added = [side_grads[i] for i in (here, ranks + rank, 2 * ranks + rank)]
                visit_backward(added, grads[here], output, total, queries[here], keys[rank], values[rank], of)
        return None, None, None, *side_grads


def ring_attention(
    query: Tensor, axis: str, key: Tensor, value: Tensor, mask: Tensor | None, size: int, sections: Sequence[int],
    scale: float | None = None, runs: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Compute ring attention on this rank. It implements `torch.ops.autopart.ring_attention`."""
    cut = DimSharding(2, size, tuple(sections), resolve_group(axis).size())
    return Ring.apply(query, key, value, mask, axis, cut, scale, runs_of(runs))


def ring_attention_of_lists(
    queries: Sequence[Tensor], keys: Sequence[Tensor], values: Sequence[Tensor], masks: Sequence[Tensor] | None,
    size: int, sections: Sequence[int], scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute ring attention for all ranks of an axis in one process. Arguments are lists by rank."""
    cut = DimSharding(2, size, tuple(sections), len(queries))
    return RingOfLists.apply(masks or [None] * len(queries), cut, scale, *queries, *keys, *values)
