"""Gradients of sharded parameters that can be differentiated again (`create_graph=True`).

The backward of a reduce-scatter is an all-gather, and the other way around. So the two functions in this file are each
other's backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopart.runtime.gradients.shard_buckets import ShardBucket


class DifferentiableReduceScatter(torch.autograd.Function):
    """Differentiable reduce-scatter of the gradients of the bucket's parameters at positions `present`."""

    @staticmethod
    def forward(ctx: Any, bucket: ShardBucket, present: Sequence[int], *grads: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket, ctx.present = bucket, present
        result: Any = bucket.scatter(grads, [bucket.stored[i] for i in present], [None for _ in present])
        while callable(result):
            result = result()
        return tuple(part.clone() for part in result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_DifferentiableAllGather.apply(ctx.bucket, ctx.present, *grads)


class _DifferentiableAllGather(torch.autograd.Function):
    """Differentiable all-gather of the bucket's parameters at positions `present`."""

    @staticmethod
    def forward(ctx: Any, bucket: ShardBucket, present: Sequence[int], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket, ctx.present = bucket, present
        local, rank = dict(zip(present, parts, strict=True)), bucket.group.rank()
        sent = [local.get(i, one.zeros(rank, parts[0].device)) for i, one in enumerate(bucket.stored)]
        unsharded = bucket.gather(sent)()
        return tuple(unsharded[i].clone() for i in present)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *DifferentiableReduceScatter.apply(ctx.bucket, ctx.present, *grads)
