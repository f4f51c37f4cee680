"""Asynchronous all-gather, reduce-scatter and all-reduce that overlap with computation.

Gloo's own collectives do more work than needed: its all-gather copies the full tensor once more, and its reduce-scatter
sends the full tensor to all ranks. Here, each rank sends its shard directly to every other rank. In a reduce-scatter it
sends each rank only the chunk that this rank sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.compat.torch_internals import gather_collective, is_gloo, scatter_collective
from autopart.runtime.comm.watchdog import limit, sum_over, watching

Wait = Callable[[], Tensor]


def begin_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Wait:
    """Start an all-gather of the ranks' shards `part` into `whole`. Return a function that waits for it.

    The function raises HangError if a rank does not arrive.
    """
    if not _uses_gloo(group, part):
        return _begin(gather_collective(), whole, part, group)
    if part.is_cuda:
        wait = _gather_by_sends(torch.empty_like(whole, device="cpu"), part.cpu(), group)
        return lambda: whole.copy_(wait())
    return _gather_by_sends(whole, part, group)


def begin_scatter(flat: Tensor, group: dist.ProcessGroup) -> Wait:
    """Start a reduce-scatter of a vector into equal chunks. Return a function that gives the local chunk.

    The function waits for the chunk, and raises HangError if a rank does not arrive.
    """
    if not _uses_gloo(group, flat):
        return _begin(scatter_collective(), flat.new_empty(flat.numel() // group.size()), flat, group)
    if flat.is_cuda:
        wait = _scatter_by_sends(flat.cpu(), group)
        return lambda: wait().to(flat.device)
    return _scatter_by_sends(flat, group)


def begin_sum(flat: Tensor, groups: Sequence[dist.ProcessGroup]) -> Callable[[], None]:
    """Start an in-place all-reduce over several groups, and return a function that waits for it."""
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


def _gather_by_sends(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Wait:
    rows = whole.view(group.size(), -1).unbind()
    finish = _exchange([part] * group.size(), rows, group)
    rows[group.rank()].copy_(part)

    def wait() -> Tensor:
        finish()
        return whole

    return wait


def _scatter_by_sends(flat: Tensor, group: dist.ProcessGroup) -> Wait:
    rank, rows = group.rank(), flat.view(group.size(), -1).unbind()
    received = [row if index == rank else torch.empty_like(row) for index, row in enumerate(rows)]
    finish = _exchange(rows, received, group)

    def wait() -> Tensor:
        """Wait, and return the sum in rank order. The sum is stored in a receive buffer."""
        finish()
        first, second, *others = received
        total = second.add_(first) if rank == 0 else first.add_(second)
        for other in others:
            total.add_(other)
        return total

    return wait


def _exchange(rows: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup) -> Callable[[], None]:
    """Start to send one row to every other rank, and to receive one row from each.

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
