"""Buckets of sharded parameters: one all-gather and one gradient reduce-scatter per bucket.

The shards of all parameters of a bucket are concatenated in a flat vector. If a dim splits unevenly, shards are padded.
If ranks compute different samples, each rank has a partial gradient, and the gradients of the bucket are
reduce-scattered. If all ranks compute all samples, each rank has the complete gradient and slices out its shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.ir.run.buckets import bucketed, kinds
from autopart.ir.run.unshard_policy import GATHERS, ParameterGather
from autopart.ir.sharding import DimSharding
from autopart.runtime.comm.async_collectives import begin_all_gather, begin_all_reduce, begin_reduce_scatter
from autopart.runtime.gradients.reductions import ReduceStrategy, Reduction, finished, flatten


@dataclass(frozen=True)
class ShardedParam:
    """Description of a parameter that is sharded over a mesh axis, for collectives over that axis.

    Attributes:
        name: name of the parameter.
        shape: shape of the parameter on this rank without this sharding. It may be sharded over other axes.
        cut: how the parameter is split over the axis.
        sums: True if each rank has a partial gradient; False if the gradient is replicated.
        dtype: dtype of the shard.
        read_dtype: dtype of the unsharded parameter. A shard is cast to it before the all-gather.
        grad_dtype: dtype in which gradients are reduced.
    """

    name: str
    shape: tuple[int, ...]
    cut: DimSharding
    sums: bool
    dtype: torch.dtype
    read_dtype: torch.dtype
    grad_dtype: torch.dtype

    @staticmethod
    def of(name: str, shard: Tensor, gather: ParameterGather, ranks: int) -> ShardedParam:
        """Describe a parameter, given this rank's shard and the parameter's all-gather in the stage graph."""
        shape = (*shard.shape[: gather.dim], gather.size, *shard.shape[gather.dim + 1 :])
        cut = DimSharding(gather.dim, gather.size, gather.sections, ranks)
        read = gather.dtype or shard.dtype
        return ShardedParam(name, shape, cut, GATHERS[gather.operator], shard.dtype, read, gather.grad_dtype or read)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of a shard in collectives: all shards are padded to the size of the longest shard."""
        return (*self.shape[: self.cut.dim], self.cut.length(0), *self.shape[self.cut.dim + 1 :])

    def zeros(self, rank: int, device: torch.device) -> Tensor:
        """Return zeros with the shape and dtype of a rank's shard."""
        shape = (*self.shape[: self.cut.dim], self.cut.length(rank), *self.shape[self.cut.dim + 1 :])
        return torch.zeros(shape, dtype=self.dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded parameter."""
        return math.prod(self.shape) * self.read_dtype.itemsize


@dataclass(frozen=True)
class ShardCollectives(ReduceStrategy):
    """All-gather and reduce-scatter of several parameters of one dtype, over `group`.

    Attributes:
        others: groups over which the gradient shards are all-reduced after the reduce-scatter (HSDP).
    """

    stored: tuple[ShardedParam, ...]
    group: dist.ProcessGroup
    others: tuple[dist.ProcessGroup, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.stored)

    @property
    def reduces_shards(self) -> bool:  # type: ignore[override]
        return bool(self.others)

    @property
    def accumulate_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        first = self.stored[0]
        return first.grad_dtype if first.grad_dtype != first.read_dtype else None

    def gather(
        self, local_shards: Sequence[Tensor], into: Sequence[Tensor] | None = None
    ) -> Callable[[], list[Tensor]]:
        """Start the all-gather. Return a function that waits and returns the unsharded parameters.

        Args:
            local_shards: this rank's shards.
            into: tensors that receive the unsharded parameters. None: new tensors.
        """
        ranks, flat = self.group.size(), self._flat_shards(local_shards)
        is_view = self.stored[0].cut.is_contiguous and len(local_shards) == 1
        target = into[0].view(-1) if is_view and into is not None else flat.new_empty(ranks * flat.numel())
        wait = begin_all_gather(target, flat, self.group)

        def wait_for_unshard() -> list[Tensor]:
            received = wait()
            if is_view:
                return [received.view(self.stored[0].shape)]
            rows = received.view(ranks, -1)
            unsharded = []
            for index, (one, (start, end)) in enumerate(zip(self.stored, self._spans(), strict=True)):
                shards = [one.cut.trimmed(row[start:end].view(one.padded_shape), i) for i, row in enumerate(rows)]
                if into is None:
                    unsharded.append(one.cut.join(shards))
                else:
                    unsharded.append(torch.cat(shards, one.cut.dim, out=into[index]))
            return unsharded

        return wait_for_unshard

    def start(
        self, grads: Sequence[Tensor], present: Sequence[int], earlier: Sequence[Tensor | None] | None, is_owned: bool
    ) -> Reduction:
        """Return a generator that reduce-scatters gradients, then all-reduces the shards over `others`."""
        stored, rank = [self.stored[i] for i in present], self.group.rank()
        wait = self._begin_reduce(grads, stored)
        del grads
        yield
        flat = wait()
        del wait  # free the unsharded gradients
        chunks = [
            one.cut.trimmed(chunk.view(one.padded_shape), rank)
            for one, chunk in zip(stored, flat.split([math.prod(one.padded_shape) for one in stored]), strict=True)
        ]
        if self.others and earlier is not None:
            _add(chunks, earlier)
            del earlier
            wait_for_sum = begin_all_reduce(flat, self.others)
            yield
            wait_for_sum()
        return [chunk.to(one.dtype).contiguous() for one, chunk in zip(stored, chunks, strict=True)]

    def differentiable_reduce(self, grads: Sequence[Tensor], present: Sequence[int]) -> Sequence[Tensor]:
        return _DifferentiableReduceScatter.apply(self, present, *grads)

    def _begin_reduce(self, grads: Sequence[Tensor], stored: Sequence[ShardedParam]) -> Callable[[], Tensor]:
        """Start to compute this rank's gradient shards. Return a function that waits for and returns them.

        The shards are concatenated in a new vector. Replicated gradients need no communication.
        """
        dtype = stored[0].grad_dtype
        if not stored[0].sums:
            rank = self.group.rank()
            shards = [one.cut.padded(one.cut.take(grad, rank)) for one, grad in zip(stored, grads, strict=True)]
            part = flatten(shards, dtype)
            return lambda: part
        if len(stored) == 1 and stored[0].cut.is_contiguous:
            return begin_reduce_scatter(grads[0].contiguous().view(-1).to(dtype), self.group)
        return begin_reduce_scatter(_rank_major(stored, grads, self.group.size()), self.group)

    def _flat_shards(self, parts: Sequence[Tensor]) -> Tensor:
        padded = [one.cut.padded(part) for one, part in zip(self.stored, parts, strict=True)]
        dtype = self.stored[0].read_dtype
        return padded[0].to(dtype).reshape(-1) if len(padded) == 1 else flatten(padded, dtype)

    def _spans(self) -> Iterable[tuple[int, int]]:
        return pairwise(accumulate((math.prod(one.padded_shape) for one in self.stored), initial=0))


def _rank_major(stored: Sequence[ShardedParam], grads: Sequence[Tensor], ranks: int) -> Tensor:
    """Concatenate gradients for a reduce-scatter: first all shards of rank 0, then all of rank 1, ..."""
    length = sum(math.prod(one.padded_shape) for one in stored)
    flat = grads[0].new_zeros(ranks, length, dtype=stored[0].grad_dtype)
    start = 0
    for one, grad in zip(stored, grads, strict=True):
        size = math.prod(one.padded_shape)
        for row, (begin, count) in zip(flat, (one.cut.spans(i)[0] for i in range(ranks)), strict=True):
            target = row[start : start + size].view(one.padded_shape)
            target.narrow(one.cut.dim, 0, count).copy_(grad.narrow(one.cut.dim, begin, count))
        start += size
    return flat.view(-1)


def _add(chunks: Sequence[Tensor], earlier: Sequence[Tensor | None]) -> None:
    for chunk, prior in zip(chunks, earlier, strict=True):
        if prior is not None:
            chunk.add_(prior)


class _DifferentiableReduceScatter(torch.autograd.Function):
    """Differentiable reduce-scatter of gradients. Its backward is a differentiable all-gather.

    `present`: index in the bucket of each gradient's parameter.
    """

    @staticmethod
    def forward(ctx: Any, shards: ShardCollectives, present: Sequence[int], *grads: Tensor) -> tuple[Tensor, ...]:
        ctx.shards, ctx.present = shards, present
        return tuple(part.clone() for part in finished(shards.start(grads, present, [None for _ in present], False)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_DifferentiableAllGather.apply(ctx.shards, ctx.present, *grads)


class _DifferentiableAllGather(torch.autograd.Function):
    """Differentiable all-gather of shards. Its backward is a differentiable reduce-scatter.

    `present`: index in the bucket of each shard's parameter.
    """

    @staticmethod
    def forward(ctx: Any, shards: ShardCollectives, present: Sequence[int], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.shards, ctx.present = shards, present
        local, rank = dict(zip(present, parts, strict=True)), shards.group.rank()
        sent = [local.get(i, one.zeros(rank, parts[0].device)) for i, one in enumerate(shards.stored)]
        unsharded = shards.gather(sent)()
        return tuple(unsharded[i].clone() for i in present)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_DifferentiableReduceScatter.apply(ctx.shards, ctx.present, *grads)


def make_shard_collectives(
    stored: Sequence[ShardedParam],
    group: dist.ProcessGroup,
    most_bytes: int | None,
    others: Sequence[dist.ProcessGroup],
) -> list[ShardCollectives]:
    """Group parameters, which are sorted by first use, into buckets (`autopart.ir.run.buckets`).

    Return one `ShardCollectives` per bucket.
    """
    by_name = {one.name: one for one in stored}
    same_kind = kinds(list(by_name), {one.name: (one.dtype, one.read_dtype, one.sums) for one in stored})
    rows = [row for names in same_kind for row in bucketed({name: by_name[name].nbytes for name in names}, most_bytes)]
    return [ShardCollectives(tuple(by_name[name] for name in row), group, tuple(others)) for row in rows]
