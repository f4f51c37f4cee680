"""Gradients of parameters that are stored in parts, in a form that can be differentiated again.

A gradient has the placements of its parameter in the other order: what the gradient is summed and cut by, its own
gradient is gathered by, and so on. So the two functions here are each other's backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopart.runtime.gradients.shard_buckets import PartBucket


class Scattered(torch.autograd.Function):
    """This rank's parts of the gradients of those parameters of a bucket that are at these positions."""

    @staticmethod
    def forward(ctx: Any, bucket: PartBucket, present: Sequence[int], *grads: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket, ctx.present = bucket, present
        result: Any = bucket.scatter(grads, [bucket.stored[i] for i in present], [None for _ in present])
        while callable(result):
            result = result()
        return tuple(part.clone() for part in result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_Gathered.apply(ctx.bucket, ctx.present, *grads)


class _Gathered(torch.autograd.Function):
    """The wholes of those parameters of a bucket that are at these positions."""

    @staticmethod
    def forward(ctx: Any, bucket: PartBucket, present: Sequence[int], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.bucket, ctx.present = bucket, present
        here, rank = dict(zip(present, parts, strict=True)), bucket.group.rank()
        sent = [here.get(i, one.zeros(rank, parts[0].device)) for i, one in enumerate(bucket.stored)]
        wholes = bucket.gather(sent)()
        return tuple(wholes[i].clone() for i in present)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *Scattered.apply(ctx.bucket, ctx.present, *grads)
