"""What carries a method's messages between data-parallel ranks: process groups, or lists where all ranks are here.

A method is written once, for a list of the ranks that this process is: one, or all of them.
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
"""What a rank averages: (rank, weight), itself among them."""


class Wire(Protocol):
    """`num_ranks` ranks that a method is for, of which `here` are run by this process. All calls are collective, and
    take and give a list with an entry for each of those `here`."""

    num_ranks: int
    here: Sequence[int]

    def to_all(self, sent: Sequence[Tensor]) -> list[list[Tensor]]:
        """Every rank gets what every rank sends: tensors of the same form; in the order of ranks."""

    def to_each(self, sent: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Every rank sends each rank a vector of its own: `sent[i][r]` to rank r, as long from every rank i."""

    def from_first(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """What the first rank sends; the others give a tensor of the same form."""

    def exchange(
        self, values: Sequence[Tensor], weights: Sequence[Weights], to: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Every rank's weighted average of what ranks have, in the order of ranks; `to`: whom it sends its own."""

    def sum(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The sum of what ranks have."""


class Lists:
    """All ranks, in one process."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self.here: Sequence[int] = range(num_ranks)

    def to_all(self, sent: Sequence[Tensor]) -> list[list[Tensor]]:
        return [list(sent)] * self.num_ranks

    def to_each(self, sent: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        return [list(received) for received in zip(*sent, strict=True)]

    def from_first(self, sent: Sequence[Tensor]) -> list[Tensor]:
        return [sent[0]] * self.num_ranks

    def exchange(
        self, values: Sequence[Tensor], weights: Sequence[Weights], to: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        return [weighted([values[rank] for rank, _ in row], row) for row in weights]

    def sum(self, values: Sequence[Tensor]) -> list[Tensor]:
        total = torch.stack(list(values)).sum(0)
        return [total] * self.num_ranks


class Group:
    """The ranks of a process group, one of which is here."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.num_ranks = group, group.size()
        self.here: Sequence[int] = [group.rank()]

    def to_all(self, sent: Sequence[Tensor]) -> list[list[Tensor]]:
        (mine,), device = sent, sent[0].device
        mine = self._on_wire(mine)
        rows = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        with watching(self.group.group_name):
            dist.all_gather(rows, mine, group=self.group)
        return [[row.to(device) for row in rows]]

    def to_each(self, sent: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        (mine,) = sent
        device, elements = mine[0].device, mine[self.here[0]].numel()
        flat = self._on_wire(torch.cat(list(mine)))
        received = flat.new_empty(self.num_ranks * elements)
        with watching(self.group.group_name):
            dist.all_to_all_single(
                received, flat, [elements] * self.num_ranks, [one.numel() for one in mine], self.group
            )
        return [list(received.to(device).split(elements)) if elements else [received.to(device)] * self.num_ranks]

    def from_first(self, sent: Sequence[Tensor]) -> list[Tensor]:
        (mine,) = sent
        received = self._on_wire(mine)
        with watching(self.group.group_name):
            dist.broadcast(received, group=self.group, group_src=0)
        return [received.to(mine.device)]

    def exchange(
        self, values: Sequence[Tensor], weights: Sequence[Weights], to: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        ((mine,), (row,), (receivers,)) = values, weights, to
        sent, rank = self._on_wire(mine), self.here[0]
        received = {other: torch.empty_like(sent) for other, _ in row if other != rank}
        sends = [dist.P2POp(dist.isend, sent, group=self.group, group_peer=other) for other in receivers]
        gets = [dist.P2POp(dist.irecv, got, group=self.group, group_peer=other) for other, got in received.items()]
        with watching(self.group.group_name):
            for work in dist.batch_isend_irecv([*sends, *gets]) if sends or gets else ():
                work.wait()
        return [weighted([mine if other == rank else received[other].to(mine.device) for other, _ in row], row)]

    def sum(self, values: Sequence[Tensor]) -> list[Tensor]:
        (total,) = values
        with watching(self.group.group_name):
            dist.all_reduce(total := total.clone(), group=self.group)
        return [total]

    def _on_wire(self, values: Tensor) -> Tensor:
        """Where it can be sent from: gloo sends nothing but sums from a GPU."""
        return (
            values.contiguous().cpu() if values.is_cuda and is_gloo(self.group, values.device) else values.contiguous()
        )


def weighted(values: Sequence[Tensor], weights: Weights) -> Tensor:
    """The sum of tensors times their weights, in their order."""
    total = values[0] * weights[0][1]
    for value, (_, weight) in zip(values[1:], weights[1:], strict=True):
        total = total + value * weight
    return total
