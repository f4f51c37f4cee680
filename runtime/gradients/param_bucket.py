"""Buckets of parameters: unsharded together, with gradients reduced together.

In a step gradients accumulate in `.grad`, and the `Reducer` starts the reduction of a bucket from `.grad`. The user's
own backward may be `torch.autograd.grad`, so reduced gradients pass through autograd. Two autograd nodes per bucket
overlap the reduction with the backward. `_StartReduce` is inserted before the block that uses the parameters. Its
backward starts the reduction when all gradients of the bucket are ready. `_WaitReduce` is created before all other
nodes, and its backward waits. Autograd runs the nodes created last first, so it waits only after all other nodes have
run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from autopart.compat.torch_function_internals import on_local_values
from autopart.ops.differentiate_once import check_differentiated_once
from autopart.runtime.gradients.reductions import Pending, ReduceStrategy, Reduction, ReductionQueue, into_grads

if TYPE_CHECKING:
    from autopart.runtime.gradients.no_sync import NoSync
    from autopart.runtime.gradients.reducer import Reducer


class UnshardStrategy(Protocol):
    """All-gather of the parameters of a bucket."""

    def values(self) -> list[Tensor]:
        """Wait for the all-gather, and return the unsharded parameters."""

    def reshard(self) -> None:
        """Release the unsharded parameters, because the current backward uses them no more."""


class ParamBucket:
    """Parameters whose gradients are reduced together.

    Args:
        stored: {name: this rank's parameter or shard}.
        strategy: reduces the gradients.
        queue: reductions in flight on this rank.
        leaves: tensors that autograd accumulates into during a step, if they are not the stored ones.
        targets: tensors whose `.grad` receives reduced gradients, if they are not the stored ones.
        unshard: gathers the parameters. None: they are not sharded.
        each_microbatch: reduce gradients after every microbatch of a step, not once.
        unreduced: state of `no_sync()`. None: the bucket does not support it.
        reducer: the stage's reducer if autograd nodes start the reduction in `step()` too (ZeRO 3), else None.
    """

    def __init__(
        self, stored: Mapping[str, Tensor], strategy: ReduceStrategy, queue: ReductionQueue, *,
        leaves: Iterable[Tensor] | None = None, targets: Iterable[Tensor] | None = None,
        unshard: UnshardStrategy | None = None, each_microbatch: bool = False, unreduced: NoSync | None = None,
        reducer: Reducer | None = None,
    ):  # fmt: skip
        self.names, self.stored = tuple(stored), list(stored.values())
        self.leaves = self.stored if leaves is None else list(leaves)
        self.targets = self.stored if targets is None else list(targets)
        self.strategy, self.queue, self.unshard, self.each_microbatch = strategy, queue, unshard, each_microbatch
        self.unreduced, self.reducer = unreduced, reducer
        self.size_bytes = sum(leaf.nbytes for leaf in self.leaves)
        self.needs_buffer = len(self.leaves) > 1 or not strategy.is_in_place(self.leaves[0])
        self.accumulated: dict[int, Tensor] = {}
        """{position: gradient of earlier microbatches}, in the strategy's `accumulate_dtype`."""
        self.arrival: tuple[Pending, Sequence[Tensor]] | None = None
        """Result of `_arrive` for the differentiable call that is running."""
        self.crossed: dict[str, Tensor] | None = None

    def reduce(
        self, grads: Sequence[Tensor], present: Sequence[int], earlier: Sequence[Tensor | None] | None, is_owned: bool
    ) -> Reduction:
        return self.strategy.start(grads, present, earlier, is_owned)

    # --- In a step.

    def reduce_accumulated(self, is_last: bool = True) -> None:
        """Launch the reduction of the gradients that a step has accumulated, if there are any.

        `is_last`: no later microbatch adds to these gradients.
        """
        pending = Pending(size_bytes=self.size_bytes, needs_buffer=self.needs_buffer)
        self.queue.launch(pending, self._reduce_accumulated(is_last), self.strategy.max_in_flight)

    def _reduce_accumulated(self, is_last: bool) -> Reduction:
        further = is_last and self.strategy.reduces_shards
        present = [
            position
            for position, (leaf, target) in enumerate(zip(self.leaves, self.targets, strict=True))
            if leaf.grad is not None or position in self.accumulated or (further and target.grad is not None)
        ]
        if not present:
            return None
        targets = [self.targets[i] for i in present]
        earlier = [_take_gradient(target) for target in targets] if further else None
        grads = [self._take_accumulated(position) for position in present]
        reduction = self.reduce(grads, present, earlier, is_owned=True)
        del grads, earlier  # the reduction frees them as early as it can
        return (yield from into_grads(reduction, targets))

    def _take_accumulated(self, position: int) -> Tensor:
        """Take the gradient that has accumulated over microbatches since the last reduction."""
        leaf, earlier = self.leaves[position], self.accumulated.pop(position, None)
        grad = _take_gradient(leaf)
        if grad is None:
            return torch.zeros_like(leaf) if earlier is None else earlier
        return grad if earlier is None else earlier.add_(grad)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add gradients to the sums in the strategy's `accumulate_dtype`, after each microbatch but the last."""
        dtype = self.strategy.accumulate_dtype
        for position, leaf in enumerate(self.leaves if dtype is not None and not self.each_microbatch else ()):
            if (gradient := _take_gradient(leaf)) is not None:
                grad = gradient.to(dtype)
                earlier = self.accumulated.get(position)
                self.accumulated[position] = grad if earlier is None else earlier.add_(grad)

    # --- In a differentiable call.

    def begin_call(self) -> None:
        """Begin a differentiable call, whose backward reduces the gradients."""
        self.arrival, self.crossed = self._arrive(), None

    def end_call(self) -> None:
        self.arrival = self.crossed = None

    def _arrive(self) -> tuple[Pending, Sequence[Tensor]]:
        pending = Pending(size_bytes=self.size_bytes)
        return pending, _WaitReduce.apply(pending, *self.stored)

    def cross(self) -> tuple[Tensor, ...]:
        """Return tensors for graphs in place of the parameters. Their backward reduces the gradients."""
        pending, arrived = self.arrival or self._arrive()
        return _StartReduce.apply(self, pending, *arrived)

    def enter(self, names: Sequence[str], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return tensors for a graph in place of the parameters `names`, at the first use of the bucket.

        In a differentiable call, the backward of these tensors reduces gradients. In a step they are `tensors`,
        unchanged, after waiting for the all-gather.
        """
        if self.arrival is None:
            if self.unshard is not None:
                self.unshard.values()
            return tuple(tensors)
        if self.crossed is None:  # once for all microbatches
            self.crossed = dict(zip(self.names, self.cross(), strict=True))
        return tuple(self.crossed[name] for name in names)

    def reduce_in_backward(self, pending: Pending, grads: list[Tensor], present: Sequence[int], was_open: bool) -> None:
        """Reduce the gradients of the bucket's parameters at positions `present`, and store them in `pending`.

        `was_open`: the forward ran inside `no_sync()`.
        """
        if self.unreduced is not None and self.unreduced.leave(was_open):
            check_differentiated_once(
                "gradients of parameters inside no_sync()",
                "each rank has a partial gradient until the last call reduces them",
                "this call outside of no_sync()",
            )
            pending.grads = grads
            return
        if self.unshard is not None:
            self.unshard.reshard()
        if torch.is_grad_enabled():
            pending.grads = list(self.strategy.differentiable_reduce(grads, present))
            return
        reduction = self._reduce_in_backward(grads, present)
        self.queue.launch(pending, reduction, self.strategy.max_in_flight, self.strategy.small_bytes)

    def _reduce_in_backward(self, grads: Sequence[Tensor], present: Sequence[int]) -> Reduction:
        step = self.reducer if self.reducer is not None and self.reducer.is_armed else None
        earlier: list[Tensor | None] | None = None
        if self.strategy.reduces_shards and (step is None or step.is_last):
            earlier = [None if step is None else step.take_earlier(self.names[i], self.stored[i]) for i in present]
        reduction = self.reduce(grads, present, earlier, is_owned=False)
        del grads, earlier  # the reduction frees them as early as it can
        if self.targets is not self.stored or (step is not None and not step.splits_backward):
            reduction = into_grads(reduction, [self.targets[i] for i in present])
        return (yield from reduction)


class _StartReduce(torch.autograd.Function):
    """Autograd function at the start of a reduction. Forward returns tensors for graphs.

    Backward starts to reduce the gradients of these tensors, and returns stride-0 placeholders of their shapes.
    """

    @staticmethod
    def forward(ctx: Any, bucket: ParamBucket, pending: Pending, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.bucket, ctx.pending = bucket, pending
        ctx.was_open = bucket.unreduced is not None and bucket.unreduced.is_open
        ctx.placeholders = [tensor.new_empty(()).expand(tensor.shape) for tensor in tensors]
        unshard = bucket.unshard
        values = [tensor.view_as(tensor) for tensor in tensors] if unshard is None else unshard.values()
        return _as_trained(ctx, tuple(values), 2)

    @staticmethod
    @on_local_values
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [i for i, grad in enumerate(grads) if grad is not None]
        if present:
            present_grads = [grad for grad in grads if grad is not None]
            ctx.bucket.reduce_in_backward(ctx.pending, present_grads, present, ctx.was_open)
        return None, None, *(ctx.placeholders[i] if i in present else None for i in range(len(grads)))


class _WaitReduce(torch.autograd.Function):
    """Autograd function at the end of a reduction. Forward is the identity; backward waits for the result."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.pending = pending
        return _as_trained(ctx, tuple(tensor.view_as(tensor) for tensor in tensors), 1)

    @staticmethod
    @on_local_values
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        reduced = ctx.pending.finish()
        if reduced is None:
            return None, *(None for _ in grads)
        remaining = iter(reduced)
        return None, *(None if grad is None else next(remaining) for grad in grads)


def _as_trained(ctx: Any, values: tuple[Tensor, ...], num_leading: int) -> tuple[Tensor, ...]:
    """Mark values of frozen tensors as non-differentiable.

    `num_leading`: number of arguments before the tensors.
    """
    frozen = [
        value for value, needs_grad in zip(values, ctx.needs_input_grad[num_leading:], strict=True) if not needs_grad
    ]
    ctx.mark_non_differentiable(*frozen)
    return values


def _take_gradient(parameter: Tensor) -> Tensor | None:
    grad, parameter.grad = parameter.grad, None
    return grad
