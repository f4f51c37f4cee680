"""Asynchronous all-gather, reduce-scatter and all-reduce that overlap with computation.

Gloo's collectives do more work than needed: its all-gather copies the full tensor once more, and its reduce-scatter
sends the full tensor to all ranks. With gloo, the functions of this module use point-to-point sends instead. In an
all-gather, each rank sends its shard to every other rank. In a reduce-scatter, each rank sends chunk i to rank i, which
sums all chunks that it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.compat.torch_internals import gather_collective, is_gloo, scatter_collective
from autopart.runtime.comm.watchdog import limit, sum_over, watching

Wait = Callable[[], Tensor]


def begin_all_gather(gathered: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Wait:
    """Start an all-gather of all ranks' `shard` into `gathered`. Return a function that waits for the end.

    The returned function raises HangError if a rank does not arrive.
    """
    if not _uses_gloo(group, shard):
        return _begin(gather_collective(), gathered, shard, group)
    if shard.is_cuda:
        wait = _gather_by_sends(torch.empty_like(gathered, device="cpu"), shard.cpu(), group)
        return lambda: gathered.copy_(wait())
    return _gather_by_sends(gathered, shard, group)


def begin_reduce_scatter(flat: Tensor, group: dist.ProcessGroup) -> Wait:
    """Start a reduce-scatter of a vector that is split into one equal chunk per rank.

    Returns a function that waits for this rank's chunk and returns it. That function raises HangError if a rank does
    not arrive.
    """
    if not _uses_gloo(group, flat):
        return _begin(scatter_collective(), flat.new_empty(flat.numel() // group.size()), flat, group)
    if flat.is_cuda:
        wait = _scatter_by_sends(flat.cpu(), group)
        return lambda: wait().to(flat.device)
    return _scatter_by_sends(flat, group)


def begin_all_reduce(flat: Tensor, groups: Sequence[dist.ProcessGroup]) -> Callable[[], None]:
    """Start an in-place all-reduce over one group after the other. Return a function that completes it.

    The all-reduce over the first group runs asynchronously. The function waits for it, and reduces over the other
    groups.
    """
    first, *others = groups
    with watching(first.group_name):
        work = dist.all_reduce(flat, group=first, async_op=True)

    def wait() -> None:
        with watching(first.group_name):
            work.wait()
        for group in others:
            sum_over(group, flat)

    return wait


def _uses_gloo(group: dist.ProcessGroup, values: Tensor) -> bool:
    return dist.get_backend(group) == "gloo" or (values.is_cuda and is_gloo(group, values.device))


def _begin(collective: Callable[..., dist.Work], output: Tensor, values: Tensor, group: dist.ProcessGroup) -> Wait:
    with watching(group.group_name):
        work = collective(output, values, group=group, async_op=True)

    def wait() -> Tensor:
        with watching(group.group_name):
            work.wait()
        return output

    return wait


def _gather_by_sends(gathered: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Wait:
    rows = gathered.view(group.size(), -1).unbind()
    finish = _exchange([shard] * group.size(), rows, group)
    rows[group.rank()].copy_(shard)

    def wait() -> Tensor:
        finish()
        return gathered

    return wait


def _scatter_by_sends(flat: Tensor, group: dist.ProcessGroup) -> Wait:
    rank, rows = group.rank(), flat.view(group.size(), -1).unbind()
    received = [row if index == rank else torch.empty_like(row) for index, row in enumerate(rows)]
    finish = _exchange(rows, received, group)

    def wait() -> Tensor:
        """Wait for the chunks of all ranks. Return their sum, added in rank order into a receive buffer."""
        finish()
        first, second, *others = received
        total = second.add_(first) if rank == 0 else first.add_(second)
        for other in others:
            total.add_(other)
        return total

    return wait


def _exchange(rows: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup) -> Callable[[], None]:
    """Start to send `rows[i]` to each other rank i, and to receive `received[i]` from that rank.

    Returns a function that waits for all sends and receives.
    """
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    with watching(group.group_name):
        works = [dist.irecv(received[rank], group=group, group_src=rank) for rank in others]
        works += [dist.isend(rows[rank], group=group, group_dst=rank) for rank in others]

    def wait() -> None:
        with watching(group.group_name):
            for work in works:
                assert work is not None
                work.wait(limit(group))

    return wait
