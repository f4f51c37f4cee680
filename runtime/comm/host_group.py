"""Communication between all ranks of a mesh on the CPU, in rounds of small groups.

Ranks compare numbers and texts at start-up and at every call. One gloo group of N ranks would pass each message around
a ring of N ranks, and connect every rank with every other. Here, a collective runs in rounds, and a rank communicates
with at most `MAX_RANKS - 1` others in each round. So its time grows with the logarithm of the number of ranks.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopart.runtime.comm.watchdog import Watch, finish

MAX_RANKS = 16
"""Largest size of a round's group, unless the number of ranks has a larger prime factor."""
BROADCAST_BYTES = 2**28


class HostGroup:
    """All ranks of a mesh, connected by CPU process groups of at most `MAX_RANKS` ranks.

    With N = a * b ranks, round 1 connects ranks whose positions differ only in `position % a`, round 2 ranks that
    differ only in `position // a`. After both rounds, a value has reached all ranks.

    Attributes:
        ranks: global ranks, sorted.
        index: index of this process in `ranks`.
        watch: the watchdog of this process. None for torch's "fake" backend, which has no other processes.
    """

    def __init__(self, order: Sequence[int], num_same_rows: int, timeout: timedelta):
        """Create the process groups. A collective call.

        Args:
            order: the global ranks by position. Each `num_same_rows` successive ranks compute the same samples.
            timeout: time limit of the connection between ranks.
        """
        rank, self.order, self.ranks = dist.get_rank(), list(order), sorted(order)
        self.index = self.ranks.index(rank)
        same_rows = round_sizes(num_same_rows)
        rounds = groups_of_rounds(order, [*same_rows, *round_sizes(len(order) // num_same_rows)] or [1])
        self._num_row_rounds = len(same_rows)
        self._members = [next(ranks for ranks in groups if rank in ranks) for groups in rounds]
        self.groups = [own_group(ranks, timeout) for ranks in rounds]
        self.watch: Watch | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def gather_objects(self, mine: Any) -> list[Any]:
        """All-gather an object of each rank. Return the objects in the order of `ranks`.

        Equal objects are sent once. On the "fake" backend, all objects equal `mine`.
        """
        packed = pickle.dumps(mine)
        holders = {packed: [self.index]}
        for group in self.groups:
            merged: dict[bytes, list[int]] = {}
            for theirs in _gather_bytes(pickle.dumps(holders), group):
                for data, indices in pickle.loads(theirs).items():
                    merged.setdefault(data, []).extend(indices)
            holders = merged
        objects = [mine] * self.size
        for data, indices in holders.items():
            if data != packed:
                for index in indices:
                    objects[index] = pickle.loads(data)
        return objects

    def all_reduce(self, values: Tensor, operation: Any) -> None:
        """All-reduce a CPU tensor in place. Raises HangError if a rank does not arrive."""
        for group in self.groups:
            finish(dist.all_reduce(values, operation, group=group, async_op=True), group)

    def broadcast(self, values: Tensor, first: int = 0) -> Tensor:
        """Overwrite a contiguous CPU tensor by the values of the rank with index `first`. Return the tensor.

        Values are sent as bytes, so that every dtype works.
        """
        position = self.order.index(self.ranks[first])
        for group, members in zip(self.groups, self._members, strict=True):
            position, digit = divmod(position, len(members))
            for part in values.reshape(-1).view(torch.uint8).split(BROADCAST_BYTES):
                finish(dist.broadcast(part, members[digit], group=group, async_op=True), group)
        return values

    def begin_extremes(
        self, numbers: Sequence[float], num_shared: int
    ) -> Callable[[], tuple[list[float], list[float]]]:
        """Start to compare numbers between ranks. Return a function that waits for the result.

        The function returns two lists: the largest value of each number on any rank, and the largest difference of each
        number between two ranks. It raises HangError if a rank does not arrive.

        Args:
            num_shared: how many numbers are compared between all ranks. The numbers after them are only compared
                between ranks that compute the same samples, and have no largest value.
        """
        extremes = torch.tensor([numbers, [-number for number in numbers]], dtype=torch.float64)
        if not self._num_row_rounds:
            extremes[:, num_shared:] = 0.0
        rows, work = _begin_gather(extremes, self.groups[0])

        def wait() -> tuple[list[float], list[float]]:
            nonlocal rows, work
            for done, group in enumerate(self.groups, 1):
                finish(work, group)
                extremes = rows.amax(0)
                if done == self._num_row_rounds:  # from now on, the largest difference in place of the largest number
                    extremes[0, num_shared:] = extremes[:, num_shared:].sum(0)
                    extremes[1, num_shared:] = 0.0
                if done < len(self.groups):
                    rows, work = _begin_gather(extremes, self.groups[done])
            return extremes[0].tolist(), extremes.sum(0).tolist()

        return wait


def _begin_gather(mine: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work | None]:
    """Start an all-gather of a CPU tensor. Gloo sends half as many messages for it as for an all-reduce."""
    rows = torch.empty(group.size(), *mine.shape, dtype=mine.dtype)
    return rows, dist.all_gather(list(rows), mine, group=group, async_op=True)


def _gather_bytes(mine: bytes, group: dist.ProcessGroup) -> list[bytes]:
    packed = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    sizes, work = _begin_gather(torch.tensor(packed.numel()), group)
    finish(work, group)
    rows, work = _begin_gather(F.pad(packed, (0, int(sizes.max()) - packed.numel())), group)
    finish(work, group)
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]


def round_sizes(num_ranks: int) -> list[int]:
    """Factorize a number of ranks into group sizes of few rounds, each at most `MAX_RANKS` if possible.

    >>> round_sizes(4), round_sizes(48), round_sizes(16384), round_sizes(38), round_sizes(1)
    ([4], [16, 3], [16, 16, 16, 4], [2, 19], [])
    """
    sizes: list[int] = []
    size, rest = 1, num_ranks
    for factor in itertools.takewhile(lambda factor: factor <= num_ranks, itertools.count(2)):
        while rest % factor == 0:
            rest //= factor
            if size * factor > MAX_RANKS and size > 1:
                sizes.append(size)
                size = 1
            size *= factor
        if rest == 1:
            break
    return [*sizes, size] if size > 1 else sizes


def groups_of_rounds(order: Sequence[int], sizes: Sequence[int]) -> list[list[list[int]]]:
    """Return the lists of ranks that communicate in each round.

    >>> groups_of_rounds([0, 1, 2, 3], [2, 2])
    [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    """
    positions = torch.arange(len(order)).reshape(*reversed(sizes))
    rounds = []
    for dim, size in enumerate(reversed(sizes)):
        rows = positions.movedim(dim, -1).reshape(-1, size).tolist()
        rounds.append([[order[place] for place in row] for row in rows])
    return rounds[::-1]


def own_group(
    rank_lists: Sequence[Sequence[int]], timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup:  # fmt: skip
    """Create process groups of ranks, and return the group that contains this process.

    If the lists cover all processes, every process creates all groups. Otherwise each process creates only its own
    group, and torch names the group by the number of groups that the process has created. All members of a group must
    therefore have created equally many groups before. If not, they use different names and wait for each other forever.

    Args:
        rank_lists: the ranks of each group. They do not overlap.
        backend: default gloo, or "fake" if the default process group has torch's fake backend.
    """
    backend = backend or ("fake" if dist.get_backend() == "fake" else "gloo")
    mine: dist.ProcessGroup | None = None
    together = sum(map(len, rank_lists)) == dist.get_world_size()
    for ranks in rank_lists:
        if dist.get_rank() in ranks:
            mine = dist.new_group(
                list(ranks), timeout=timeout, backend=backend, use_local_synchronization=not together
            )  # fmt: skip
        elif together:
            dist.new_group(list(ranks), timeout=timeout, backend=backend)
    assert mine is not None
    return mine
