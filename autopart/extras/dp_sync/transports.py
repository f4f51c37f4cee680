"""Transports of `dp_sync` messages: a process group, or lists if all ranks are in one process.

The code of a method is independent of the transport. All arguments are lists with one entry per rank that runs in this
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.compat.torch_internals import is_gloo
from autopart.runtime.comm.watchdog import watching

Weights = Sequence[tuple[int, float]]
"""Weights of a rank's average: (rank, weight) of each peer, including itself."""


class SyncTransport(Protocol):
    """Transport of messages between the `num_ranks` data ranks of a method.

    `here`: the local ranks, which run in this process. All methods of this class are collective calls. They take and
    return lists with one entry per local rank.
    """

    num_ranks: int
    here: Sequence[int]

    def all_gather_equal(self, sent: Sequence[Tensor]) -> list[list[Tensor]]:
        """All-gather tensors of equal shape. Returns the tensors of all ranks, in rank order."""

    def all_to_all_vectors(self, sent: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Send the vector `sent[i][r]` from the i-th local rank to rank r. Return the received vectors.

        For each r, the vectors that all ranks send to rank r must have equal lengths.
        """

    def broadcast_first(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """Broadcast the first rank's tensor. All other ranks pass a tensor of that shape and dtype."""

    def exchange(
        self, values: Sequence[Tensor], weights: Sequence[Weights], to: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Exchange values between neighbours, and return the weighted average of each local rank.

        Args:
            values: value of each local rank.
            weights: for each local rank, the (rank, weight) pairs that it averages.
            to: for each local rank, the ranks that need its value.
        """

    def sum(self, values: Sequence[Tensor]) -> list[Tensor]:
        """All-reduce the values to their sum."""


class ListTransport:
    """Transport if all ranks run in one process: values are lists with one tensor per rank."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self.here: Sequence[int] = range(num_ranks)

    def all_gather_equal(self, sent: Sequence[Tensor]) -> list[list[Tensor]]:
        return [list(sent)] * self.num_ranks

    def all_to_all_vectors(self, sent: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        return [list(received) for received in zip(*sent, strict=True)]

    def broadcast_first(self, sent: Sequence[Tensor]) -> list[Tensor]:
        return [sent[0]] * self.num_ranks

    def exchange(
        self, values: Sequence[Tensor], weights: Sequence[Weights], to: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        return [weighted([values[rank] for rank, _ in row], row) for row in weights]

    def sum(self, values: Sequence[Tensor]) -> list[Tensor]:
        total = torch.stack(list(values)).sum(0)
        return [total] * self.num_ranks


class GroupTransport:
    """Transport between the ranks of a process group. One rank is local: the rank of this process."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.num_ranks = group, group.size()
        self.here: Sequence[int] = [group.rank()]

    def all_gather_equal(self, sent: Sequence[Tensor]) -> list[list[Tensor]]:
        (local,), device = sent, sent[0].device
        local = self._to_transport(local)
        rows = [torch.empty_like(local) for _ in range(self.num_ranks)]
        with watching(self.group.group_name):
            dist.all_gather(rows, local, group=self.group)
        return [[row.to(device) for row in rows]]

    def all_to_all_vectors(self, sent: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        (local,) = sent
        device, elements = local[0].device, local[self.here[0]].numel()
        flat = self._to_transport(torch.cat(list(local)))
        received = flat.new_empty(self.num_ranks * elements)
        with watching(self.group.group_name):
            dist.all_to_all_single(
                received, flat, [elements] * self.num_ranks, [one.numel() for one in local], self.group
            )
        return [list(received.to(device).split(elements)) if elements else [received.to(device)] * self.num_ranks]

    def broadcast_first(self, sent: Sequence[Tensor]) -> list[Tensor]:
        (local,) = sent
        received = self._to_transport(local)
        with watching(self.group.group_name):
            dist.broadcast(received, group=self.group, group_src=0)
        return [received.to(local.device)]

    def exchange(
        self, values: Sequence[Tensor], weights: Sequence[Weights], to: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        ((local,), (row,), (receivers,)) = values, weights, to
        sent, rank = self._to_transport(local), self.here[0]
        received = {other: torch.empty_like(sent) for other, _ in row if other != rank}
        sends = [dist.P2POp(dist.isend, sent, group=self.group, group_peer=other) for other in receivers]
        receives = [dist.P2POp(dist.irecv, got, group=self.group, group_peer=other) for other, got in received.items()]
        with watching(self.group.group_name):
            for work in dist.batch_isend_irecv([*sends, *receives]) if sends or receives else ():
                work.wait()
        return [weighted([local if other == rank else received[other].to(local.device) for other, _ in row], row)]

    def sum(self, values: Sequence[Tensor]) -> list[Tensor]:
        (total,) = values
        with watching(self.group.group_name):
            dist.all_reduce(total := total.clone(), group=self.group)
        return [total]

    def _to_transport(self, values: Tensor) -> Tensor:
        """Return the values on a device from which the group can send them.

        With gloo, GPU tensors are copied to the CPU, because gloo supports only reductions of GPU tensors.
        """
        return (
            values.contiguous().cpu() if values.is_cuda and is_gloo(self.group, values.device) else values.contiguous()
        )


def weighted(values: Sequence[Tensor], weights: Weights) -> Tensor:
    """Return the weighted sum of tensors, added in the order of `weights`."""
    total = values[0] * weights[0][1]
    for value, (_, weight) in zip(values[1:], weights[1:], strict=True):
        total = total + value * weight
    return total
