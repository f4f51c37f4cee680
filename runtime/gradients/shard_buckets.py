"""Parameters that a rank stores in parts over an axis, brought together and taken apart again in buckets.

A bucket is one collective: the parts of all its parameters lie one behind the other in a flat vector, padded where the
shards of a dim are of unequal sizes. Its gradient goes the other way, summed on the way (`sums`) where every rank has
its own rows; where all ranks compute all rows it is whole already, and each takes its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.ir.run.buckets import bucketed, kinds
from autopart.ir.run.unshard_policy import GATHERS, Way
from autopart.ir.sharding import Cut
from autopart.runtime.comm.async_collectives import begin_gather, begin_scatter, begin_sum
from autopart.runtime.gradients.reducer import Waits, flatten


@dataclass(frozen=True)
class Stored:
    """A parameter stored in parts. `shape`: of its whole on this rank, other axes' cuts done. `sums`: whether its
    gradient is a partial sum on every rank, and not the same. `dtype`: of the part; `read_dtype`: of the whole, to
    which a part is cast before it is sent; `grad_dtype`: in which gradients are summed."""

    name: str
    shape: tuple[int, ...]
    cut: Cut
    sums: bool
    dtype: torch.dtype
    read_dtype: torch.dtype
    grad_dtype: torch.dtype

    @staticmethod
    def of(name: str, part: Tensor, way: Way, ranks: int) -> Stored:
        """A parameter of which this rank has this part, gathered in this way."""
        shape = (*part.shape[: way.dim], way.size, *part.shape[way.dim + 1 :])
        cut, read = Cut(way.dim, way.size, way.sections, ranks), way.dtype or part.dtype
        return Stored(name, shape, cut, GATHERS[way.operator], part.dtype, read, way.grad_dtype or read)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Of a part as it is sent."""
        return (*self.shape[: self.cut.dim], self.cut.length(0), *self.shape[self.cut.dim + 1 :])

    def zeros(self, rank: int, device: torch.device) -> Tensor:
        """Zeros in the form of a rank's part."""
        shape = (*self.shape[: self.cut.dim], self.cut.length(rank), *self.shape[self.cut.dim + 1 :])
        return torch.zeros(shape, dtype=self.dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return math.prod(self.shape) * self.read_dtype.itemsize


@dataclass(frozen=True)
class PartBucket:
    """Parameters of one dtype that are gathered, and whose gradients are scattered, in one collective of `group`.
    `others`: over which their parts' gradients are summed then."""

    stored: tuple[Stored, ...]
    group: dist.ProcessGroup
    others: tuple[dist.ProcessGroup, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.stored)

    def gather(self, parts: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> Callable[[], list[Tensor]]:
        """Begins to gather the whole of each parameter, and gives what waits for it; `into`: where they are to be."""
        ranks, flat = self.group.size(), self._sent(parts)
        only = self.stored[0].cut.is_in_order and len(parts) == 1
        target = into[0].view(-1) if only and into is not None else flat.new_empty(ranks * flat.numel())
        wait = begin_gather(target, flat, self.group)

        def whole() -> list[Tensor]:
            received = wait()
            if only:
                return [received.view(self.stored[0].shape)]
            rows = received.view(ranks, -1)
            wholes = []
            for index, (one, (start, end)) in enumerate(zip(self.stored, self._places(), strict=True)):
                shards = [one.cut.trimmed(row[start:end].view(one.padded_shape), i) for i, row in enumerate(rows)]
                if into is None:
                    wholes.append(one.cut.join(shards))
                else:
                    wholes.append(torch.cat(shards, one.cut.dim, out=into[index]))
            return wholes

        return whole

    def scatter(
        self, grads: Sequence[Tensor], stored: Sequence[Stored], earlier: Sequence[Tensor | None] | None
    ) -> Waits:
        """Begins to make each rank's part of these gradients, those of some `stored` of the bucket, and gives what
        waits for them, one group after the other.

        Args:
            earlier: what is added to the parts before they are summed over the other groups; None: they are not.
        """
        wait, rank = self._begin_scatter(grads, stored), self.group.rank()

        def parts(flat: Tensor) -> list[Tensor]:
            pieces = flat.split([math.prod(one.padded_shape) for one in stored])
            pairs = zip(stored, pieces, strict=True)
            return [one.cut.trimmed(piece.view(one.padded_shape), rank) for one, piece in pairs]

        def in_dtype(flat: Tensor) -> list[Tensor]:
            return [piece.to(one.dtype) for one, piece in zip(stored, parts(flat), strict=True)]

        def scattered() -> list[Tensor] | Waits:
            flat = wait()
            if not self.others or earlier is None:
                return in_dtype(flat)
            for piece, added in zip(parts(flat), earlier, strict=True):
                if added is not None:
                    piece.add_(added)
            wait_for_others = begin_sum(flat, self.others)

            def summed() -> list[Tensor]:
                wait_for_others()
                return in_dtype(flat)

            return summed

        return scattered

    def _begin_scatter(self, grads: Sequence[Tensor], stored: Sequence[Stored]) -> Callable[[], Tensor]:
        """Begins to make this rank's parts of gradients, in a flat vector of its own."""
        dtype = stored[0].grad_dtype
        if not stored[0].sums:
            rank = self.group.rank()
            shards = [one.cut.padded(one.cut.take(grad, rank)) for one, grad in zip(stored, grads, strict=True)]
            part = flatten(shards, dtype)
            return lambda: part
        if len(stored) == 1 and stored[0].cut.is_in_order:
            return begin_scatter(grads[0].contiguous().view(-1).to(dtype), self.group)
        return begin_scatter(_flat(stored, grads, self.group.size()), self.group)

    def _sent(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts one behind the other, in the dtype of the wholes."""
        padded = [one.cut.padded(part) for one, part in zip(self.stored, parts, strict=True)]
        dtype = self.stored[0].read_dtype
        return padded[0].to(dtype).reshape(-1) if len(padded) == 1 else flatten(padded, dtype)

    def _places(self) -> Iterable[tuple[int, int]]:
        """Where each part lies in the flat vector."""
        return pairwise(accumulate((math.prod(one.padded_shape) for one in self.stored), initial=0))


def _flat(stored: Sequence[Stored], grads: Sequence[Tensor], ranks: int) -> Tensor:
    """All shards of the first rank, then those of the second, and so on."""
    length = sum(math.prod(one.padded_shape) for one in stored)
    flat = grads[0].new_zeros(ranks, length, dtype=stored[0].grad_dtype)
    start = 0
    for one, grad in zip(stored, grads, strict=True):
        size = math.prod(one.padded_shape)
        for row, (begin, count) in zip(flat, (one.cut.spans(i)[0] for i in range(ranks)), strict=True):
            place = row[start : start + size].view(one.padded_shape)
            place.narrow(one.cut.dim, 0, count).copy_(grad.narrow(one.cut.dim, begin, count))
        start += size
    return flat.view(-1)


def part_buckets(
    stored: Sequence[Stored], group: dist.ProcessGroup, most_bytes: int | None, others: Sequence[dist.ProcessGroup]
) -> list[PartBucket]:
    """The buckets of parameters, in the order of their use (`autopart.ir.run.buckets`)."""
    named = {one.name: one for one in stored}
    same_kind = kinds(list(named), {one.name: (one.dtype, one.read_dtype, one.sums) for one in stored})
    rows = [row for names in same_kind for row in bucketed({name: named[name].nbytes for name in names}, most_bytes)]
    return [PartBucket(tuple(named[name] for name in row), group, tuple(others)) for row in rows]
