"""Gradient reductions that overlap with compute, and the queue of reductions in flight.

A reduction is a generator that yields after it has launched a collective. The caller can compute before it resumes the
generator, which waits for the collective.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.ir.run.buckets import BUCKET_BYTES, SHARD_BUCKETS_IN_FLIGHT, SUM_BUCKETS_IN_FLIGHT
from autopart.runtime.comm.async_collectives import begin_all_reduce
from autopart.runtime.comm.collectives import all_reduce_once_more

Reduction = Generator[None, None, "list[Tensor] | None"]
"""Generator that reduces gradients. Its result is the gradients, or None if it has stored them.

It launches a collective, then yields while the collective is in flight. When resumed, it waits for the collective.
"""


class ReduceStrategy:
    """Interface of the collectives that reduce the gradients of a bucket.

    Attributes:
        max_in_flight: maximum number of reductions in flight that need a buffer, including the one to launch.
        small_bytes: in a backward that the user starts, more reductions can be in flight if their total bytes are at
            most `small_bytes`.
        reduces_shards: True if, after a reduce-scatter, gradient shards are all-reduced over further groups once per
            step (HSDP).
        accumulate_dtype: dtype in which a step accumulates gradients of several microbatches. None: autograd
            accumulates them in the dtype of the parameters.
    """

    max_in_flight: int = SHARD_BUCKETS_IN_FLIGHT
    small_bytes: int = 0
    reduces_shards: bool = False
    accumulate_dtype: torch.dtype | None = None

    def is_in_place(self, leaf: Tensor) -> bool:
        """Return True if the gradient of a bucket with only this parameter can be reduced without a copy."""
        return False

    def start(
        self, grads: Sequence[Tensor], present: Sequence[int], earlier: Sequence[Tensor | None] | None, is_owned: bool
    ) -> Reduction:
        """Return the reduction of gradients as a generator. Its first `next` launches the first collective.

        Args:
            grads: the gradients.
            present: index in the bucket of each gradient's parameter.
            earlier: gradient shards of earlier microbatches, to add before the all-reduce of shards over further groups
                (HSDP, `reduces_shards`). None: this call does not all-reduce shards.
            is_owned: True if nothing else uses `grads`, so that the reduction may write to them.
        """
        raise NotImplementedError

    def differentiable_reduce(self, grads: Sequence[Tensor], present: Sequence[int]) -> Sequence[Tensor]:
        """Return the reduced gradients, with an autograd graph (`create_graph=True`)."""
        raise NotImplementedError


def into_grads(reduction: Reduction, targets: Sequence[Tensor]) -> Reduction:
    """Extend a reduction: add its results to `.grad` of `targets` at the end."""
    grads = yield from reduction
    assert grads is not None
    for target, grad in zip(targets, grads, strict=True):
        target.grad = grad if target.grad is None else target.grad.add_(grad)
    return None


@dataclass(eq=False)
class Pending:
    """Handle of the reduction of a bucket's gradients, which is in flight or finished.

    Attributes:
        reduction: the generator of the reduction. None before its launch and after its last collective.
        grads: reduced gradients. None: the reduction has stored them in `.grad`.
        size_bytes: bytes of the buffer.
        needs_buffer: True if the reduction needs a copy or a receive buffer.
    """

    reduction: Reduction | None = None
    grads: list[Tensor] | None = None
    size_bytes: int = 0
    needs_buffer: bool = True

    def advance(self) -> None:
        """Wait for the collective in flight, if there is one. Launch the next collective, if there is one."""
        if self.reduction is None:
            return
        try:
            with torch.no_grad():
                next(self.reduction)
        except StopIteration as end:
            self.reduction, self.grads = None, end.value

    def finish(self) -> list[Tensor] | None:
        """Wait for the reduced gradients and return them. None: the reduction has stored them in `.grad`.

        This object then drops its references to them, so that autograd can store them in `.grad` without a copy.
        """
        while self.reduction is not None:
            self.advance()
        grads, self.grads = self.grads, None
        return grads


def finished(reduction: Reduction) -> list[Tensor]:
    """Run a reduction to its end and return the reduced gradients."""
    return Pending(reduction).finish() or []


class ReductionQueue:
    """Queue of the reductions in flight on this rank, in launch order. The order is equal on all ranks."""

    def __init__(self) -> None:
        self.first: list[Pending] = []
        """Reductions whose first collective is in flight."""
        self.further: list[Pending] = []
        """Reductions over further groups, which need no buffer: they reduce the first collective's result in place."""

    def launch(self, pending: Pending, reduction: Reduction, max_in_flight: int, small_bytes: int = 0) -> None:
        """Launch a reduction. If too many buffers are in flight, first wait for earlier reductions.

        Args:
            pending: handle that receives the reduced gradients.
            reduction: the reduction.
            max_in_flight: maximum number of buffers in flight, including the buffer of this reduction.
            small_bytes: more than `max_in_flight` buffers may be in flight if their total bytes are at most this.
        """
        self.first, self.further = (
            [one for one in row if one.reduction is not None and one is not pending]
            for row in (self.first, self.further)
        )
        while pending.needs_buffer:
            buffers = [one.size_bytes for one in self.first if one.needs_buffer]
            if len(buffers) < max_in_flight or sum(buffers) + pending.size_bytes <= small_bytes:
                break
            self._advance_oldest()
        pending.reduction = reduction
        pending.advance()
        if pending.reduction is not None:
            self.first.append(pending)

    def _advance_oldest(self) -> None:
        pending = self.first.pop(0)
        pending.advance()
        if pending.reduction is not None:
            self.further.append(pending)

    def finish(self) -> None:
        """Wait for all reductions."""
        while self.first:
            self._advance_oldest()
        for pending in self.further:
            pending.finish()
        self.further.clear()

    def clear(self) -> None:
        """Drop the reductions of a step that failed."""
        self.first.clear()
        self.further.clear()


class AllReduceStrategy(ReduceStrategy):
    """Strategy that all-reduces gradients of unsharded parameters in one flat tensor, group after group."""

    max_in_flight = SUM_BUCKETS_IN_FLIGHT
    small_bytes = SUM_BUCKETS_IN_FLIGHT * BUCKET_BYTES

    def __init__(self, groups: Sequence[dist.ProcessGroup], reduce_dtype: torch.dtype | None = None):
        self.groups, self.reduce_dtype = groups, reduce_dtype

    def is_in_place(self, leaf: Tensor) -> bool:
        return sent_dtype(self.reduce_dtype, leaf) == leaf.dtype

    def start(self, grads: Sequence[Tensor], present: Sequence[int], earlier: object, is_owned: bool) -> Reduction:
        """Return the all-reduce of gradients as a generator.

        A single gradient with `is_owned` is reduced in place. Several gradients are copied into a flat tensor. The
        results are views of the flat tensor, as with DDP's `gradient_as_bucket_view`. But if an owned gradient has
        another dtype or other strides than its view, the result is copied into the gradient.
        """
        dtype = sent_dtype(self.reduce_dtype, grads[0])
        in_place = is_owned and len(grads) == 1 and grads[0].is_contiguous() and grads[0].dtype == dtype
        flat = grads[0] if in_place else flatten(grads, dtype)
        if not is_owned:  # free the gradients
            grads = [grad.new_empty(()).expand(grad.shape) for grad in grads]
        wait = begin_all_reduce(flat, self.groups)
        yield
        wait()
        if in_place:
            return [flat]
        pairs = zip(grads, unflatten(flat, grads), strict=True)
        if not is_owned:
            return [reduced.to(grad.dtype) for grad, reduced in pairs]
        # A fused optimizer needs gradients with the strides of the parameter.
        return [
            reduced if reduced.dtype == grad.dtype and grad.is_contiguous() else grad.copy_(reduced)
            for grad, reduced in pairs
        ]

    def differentiable_reduce(self, grads: Sequence[Tensor], present: Sequence[int]) -> Sequence[Tensor]:
        for group in self.groups:
            grads = [all_reduce_once_more(grad, group) for grad in grads]
        return grads


def flatten(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Copy the elements of all tensors into one vector of `dtype`, by default the dtype of the tensors."""
    if dtype in (None, tensors[0].dtype):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype, device=tensors[0].device)
    for tensor, chunk in zip(tensors, unflatten(flat, tensors), strict=True):
        chunk.copy_(tensor)  # copying casts too, without a second full copy
    return flat


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat` in the shapes of `like`: the inverse of `flatten`."""
    chunks = flat.split([tensor.numel() for tensor in like])
    return [chunk.view(tensor.shape) for chunk, tensor in zip(chunks, like, strict=True)]


def sent_dtype(reduce_dtype: torch.dtype | None, grad: Tensor) -> torch.dtype:
    """Return the dtype in which a gradient is reduced: `reduce_dtype` if set, else the gradient's dtype."""
    return reduce_dtype if reduce_dtype is not None and grad.is_floating_point() else grad.dtype
