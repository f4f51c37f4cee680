"""Buckets of parameters that are unsharded together and whose gradients are reduced together.

In `step()`, gradients accumulate in `.grad`, and the `Reducer` starts the reduction of each bucket.

In a backward that the user starts, gradients may be results of `torch.autograd.grad`, not in `.grad`. Autograd
functions therefore reduce them. Each bucket has two such functions, so that the reduction overlaps with the backward.
`_StartReduce` is inserted before the first use of the bucket's parameters, and its backward starts the reduction.
`_WaitReduce` runs before all other autograd functions in forward, and its backward waits for the reduction. Autograd
runs the backward of nodes in reverse order of their creation, so the backward of `_WaitReduce` runs at the end.
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
    """Interface of the all-gather that unshards the parameters of a bucket."""

    def values(self) -> list[Tensor]:
        """Wait for the all-gather, and return the unsharded parameters."""

    def reshard(self) -> None:
        """Free the unsharded parameters, which the current backward no longer needs."""


class ParamBucket:
    """Parameters whose gradients are reduced together.

    Args:
        stored: {name: this rank's parameter or shard}.
        strategy: object that reduces the gradients.
        queue: reductions in flight on this rank.
        leaves: tensors into whose `.grad` autograd accumulates during a step. None: the tensors in `stored`.
        targets: tensors whose `.grad` receives reduced gradients. None: the tensors in `stored`.
        unshard: all-gather of the parameters. None: the parameters are not sharded.
        each_microbatch: True to reduce gradients after every microbatch (ZeRO-2), False to reduce once per step.
        unreduced: state of `no_sync()`. None: the bucket does not support `no_sync()`.
        reducer: with ZeRO-3: reducer of the stage. Autograd functions then reduce gradients in `step()` too.
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
        """(Pending reduction, results of `_WaitReduce`) of the differentiable call that is running."""
        self.crossed: dict[str, Tensor] | None = None

    def reduce(
        self, grads: Sequence[Tensor], present: Sequence[int], earlier: Sequence[Tensor | None] | None, is_owned: bool
    ) -> Reduction:
        return self.strategy.start(grads, present, earlier, is_owned)

    # --- In a step.

    def reduce_accumulated(self, is_last: bool = True) -> None:
        """Launch the reduction of the gradients that a step has accumulated, if there are any.

        `is_last`: True if no later microbatch adds to these gradients.
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
        """Return the gradient that a parameter has accumulated since the last reduction, and reset it.

        Args:
            position: index of the parameter in the bucket.
        """
        leaf, earlier = self.leaves[position], self.accumulated.pop(position, None)
        grad = _take_gradient(leaf)
        if grad is None:
            return torch.zeros_like(leaf) if earlier is None else earlier
        return grad if earlier is None else earlier.add_(grad)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add `.grad` to a sum over microbatches in the strategy's `accumulate_dtype`, and reset `.grad`.

        The reducer calls it after a microbatch's backward, if later backwards add to the gradients. It does nothing if
        the strategy has no `accumulate_dtype`, because autograd then accumulates in `.grad`.
        """
        dtype = self.strategy.accumulate_dtype
        for position, leaf in enumerate(self.leaves if dtype is not None and not self.each_microbatch else ()):
            if (gradient := _take_gradient(leaf)) is not None:
                grad = gradient.to(dtype)
                earlier = self.accumulated.get(position)
                self.accumulated[position] = grad if earlier is None else earlier.add_(grad)

    # --- In a differentiable call.

    def begin_call(self) -> None:
        """Prepare the bucket for a differentiable call, whose backward reduces the gradients."""
        self.arrival, self.crossed = self._arrive(), None

    def end_call(self) -> None:
        self.arrival = self.crossed = None

    def _arrive(self) -> tuple[Pending, Sequence[Tensor]]:
        pending = Pending(size_bytes=self.size_bytes)
        return pending, _WaitReduce.apply(pending, *self.stored)

    def cross(self) -> tuple[Tensor, ...]:
        """Return unsharded parameters. The backward of a graph that uses them reduces their gradients."""
        pending, arrived = self.arrival or self._arrive()
        return _StartReduce.apply(self, pending, *arrived)

    def enter(self, names: Sequence[str], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return unsharded parameters to a graph, which calls this method at the first use of the bucket.

        In a differentiable call, the backward of the returned tensors reduces their gradients. In `step()`, this method
        waits for the all-gather and returns `tensors`.

        Args:
            names: names of the parameters.
            tensors: the parameters, into whose `.grad` autograd accumulates.
        """
        if self.arrival is None:
            if self.unshard is not None:
                self.unshard.values()
            return tuple(tensors)
        if self.crossed is None:  # one reduction for all microbatches
            self.crossed = dict(zip(self.names, self.cross(), strict=True))
        return tuple(self.crossed[name] for name in names)

    def reduce_in_backward(self, pending: Pending, grads: list[Tensor], present: Sequence[int], was_open: bool) -> None:
        """Start to reduce gradients, in the backward of a differentiable call.

        Args:
            pending: object that receives the reduction, and then the reduced gradients.
            grads: the gradients.
            present: index in the bucket of each gradient's parameter.
            was_open: True if the forward ran inside `no_sync()`.
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
    """Autograd function that unshards a bucket in forward, and starts to reduce its gradients in backward.

    Its backward returns placeholders (tensors of stride 0). The backward of `_WaitReduce` replaces them by the reduced
    gradients.
    """

    @staticmethod
    def forward(ctx: Any, bucket: ParamBucket, pending: Pending, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.bucket, ctx.pending = bucket, pending
        ctx.was_open = bucket.unreduced is not None and bucket.unreduced.is_open
        ctx.placeholders = [tensor.new_empty(()).expand(tensor.shape) for tensor in tensors]
        unshard = bucket.unshard
        values = [tensor.view_as(tensor) for tensor in tensors] if unshard is None else unshard.values()
        return _mark_frozen(ctx, tuple(values), 2)

    @staticmethod
    @on_local_values
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [i for i, grad in enumerate(grads) if grad is not None]
        if present:
            present_grads = [grad for grad in grads if grad is not None]
            ctx.bucket.reduce_in_backward(ctx.pending, present_grads, present, ctx.was_open)
        return None, None, *(ctx.placeholders[i] if i in present else None for i in range(len(grads)))


class _WaitReduce(torch.autograd.Function):
    """Autograd function: identity in forward. Backward waits for the reduced gradients and returns them."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.pending = pending
        return _mark_frozen(ctx, tuple(tensor.view_as(tensor) for tensor in tensors), 1)

    @staticmethod
    @on_local_values
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        reduced = ctx.pending.finish()
        if reduced is None:
            return None, *(None for _ in grads)
        remaining = iter(reduced)
        return None, *(None if grad is None else next(remaining) for grad in grads)


def _mark_frozen(ctx: Any, values: tuple[Tensor, ...], num_leading: int) -> tuple[Tensor, ...]:
    """Mark the outputs for frozen parameters as non-differentiable. Return all outputs.

    Args:
        num_leading: number of arguments of the autograd function that precede its tensors.
    """
    frozen = [
        value for value, needs_grad in zip(values, ctx.needs_input_grad[num_leading:], strict=True) if not needs_grad
    ]
    ctx.mark_non_differentiable(*frozen)
    return values


def _take_gradient(parameter: Tensor) -> Tensor | None:
    grad, parameter.grad = parameter.grad, None
    return grad
