"""Reduce gradients in buckets while the backward runs, each bucket as soon as it is complete.

The buckets of a stage are sorted by the order in which its backward completes them: the last block comes first. A hook
on the autograd node that accumulates into `.grad` reports that a gradient is ready. Buckets start in their sorted
order, whatever order their gradients come in, so that all ranks launch the same collectives in the same order (Li et
al. 2020, arXiv:2006.15704, section 3.2.3). If a schedule runs the weight part of a backward separately, the
accumulation nodes do not run. Then a bucket starts when the weight part ends.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.compat.torch_function_internals import on_local_values
from autopart.ir.run.buckets import BUCKET_BYTES, SHARD_BUCKETS_IN_FLIGHT, SUM_BUCKETS_IN_FLIGHT
from autopart.ops.differentiate_once import check_differentiated_once
from autopart.runtime.comm.async_collectives import begin_sum
from autopart.runtime.comm.collectives import all_reduce_once_more

if TYPE_CHECKING:
    from autopart.runtime.gradients.no_sync import NoSync

Finish = Callable[[], "Finish | None"]
"""Waits for a reduction and stores its result; or starts a reduction over the next group, and returns its `Finish`."""

Waits = Callable[[], "list[Tensor] | Waits | None"]
"""Waits for a reduction and returns its result, or None after storing it; or starts a reduction over the next group,
and returns its `Waits`."""


class ReduceBoundary:
    """Autograd boundary of a parameter bucket: identity in forward, gradient reduction in backward.

    Two autograd nodes overlap the reduction with the backward of a differentiable call. `_StartReduce` is inserted
    where the block that uses the parameters begins. Its backward starts the collective when all their gradients are
    ready. `_WaitReduce` is created before anything else, and its backward waits for the collective. Autograd runs the
    nodes created last first, so it waits only after everything else has run.
    """

    names: tuple[str, ...]
    in_flight: deque[Pending]
    max_in_flight: int = SHARD_BUCKETS_IN_FLIGHT
    """Maximum number of buckets in flight, including this one."""

    small_bytes: int = 0
    """Total bytes up to which a differentiable call may have more buckets in flight. Such a call copies all
    gradients."""

    unreduced: NoSync | None = None
    """State of `no_sync()`; None if this bucket does not support it."""

    pending: Pending | None = None
    arrived: Sequence[Tensor] = ()
    crossed: dict[str, Tensor] | None = None

    def begin_call(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin a differentiable call with these {name: parameter}. Graphs use them until `end_call`."""
        self.pending, self.arrived = arrive([tensors[name] for name in self.names])
        self.crossed = None

    def end_call(self) -> None:
        self.pending, self.arrived, self.crossed = None, (), None

    def enter(self, names: Sequence[str], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors that a graph uses for the parameters `names`, at their first use.

        Outside a differentiable call that is `tensors`, after waiting for the unshard.
        """
        if self.pending is None:
            self.wait_for_unshard()
            return tuple(tensors)
        if self.crossed is None:  # once for all microbatches
            self.crossed = dict(zip(self.names, self.cross(self.pending, self.arrived), strict=True))
        return tuple(self.crossed[name] for name in names)

    def wait_for_unshard(self) -> None:
        """Wait until the parameters of the bucket are unsharded."""

    def values(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the values that graphs use for these tensors."""
        raise NotImplementedError

    def send(self, grads: Sequence[Tensor], present: Sequence[int]) -> Waits:
        """Start to reduce the gradients of the tensors at positions `present`. Return a function that waits."""
        raise NotImplementedError

    def differentiable_reduce(self, grads: Sequence[Tensor], present: Sequence[int]) -> Sequence[Tensor]:
        """Return the gradients that `send` computes, in differentiable form (`create_graph=True`)."""
        raise NotImplementedError

    def cross(self, pending: Pending, arrived: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors that graphs use in place of the outputs of `arrive`."""
        return _StartReduce.apply(self, pending, *arrived)


class ReduceBucket(ReduceBoundary):
    """Gradients that are reduced in one collective.

    Attributes:
        each: the bucket is reduced after every microbatch, not once per step.
        takes_memory: the collective needs a copy or a receive buffer, so few such buckets are in flight at a time.
    """

    each: bool = False
    needs_buffer: bool = True

    def begin(self, is_last: bool = True) -> Finish | None:
        """Start to reduce the gradients that exist; None if there are none.

        The returned function waits and stores the result. `is_last`: no later microbatch adds to these gradients.
        """
        raise NotImplementedError

    def keep(self) -> None:
        """Accumulate after a microbatch that is not the last. Autograd does so in the parameters' dtype."""


def arrive(tensors: Sequence[Tensor]) -> tuple[Pending, tuple[Tensor, ...]]:
    """Return identities of tensors whose backward waits for the reduction after all else has run.

    The reduction is started by the backward of `ReduceBoundary.cross`.
    """
    pending = Pending()
    return pending, _WaitReduce.apply(pending, *tensors)


@dataclass(eq=False)
class Pending:
    """Gradients of a bucket whose reduction is in flight or finished."""

    wait: Waits | None = None
    sums: list[Tensor] | None = None
    size_bytes: int = 0

    def advance(self) -> None:
        """Wait for the collective in flight. The result may be another collective, over the next group."""
        if self.wait is not None:
            result = self.wait()
            self.sums, self.wait = (None, result) if callable(result) else (result, None)

    def taken(self) -> list[Tensor] | None:
        """Wait for the reduced gradients and release them. None: they have been stored already.

        This object drops its references, because autograd copies a gradient that something else references.
        """
        while self.wait is not None:
            self.advance()
        sums, self.sums = self.sums, None
        return sums


class _StartReduce(torch.autograd.Function):
    """Start of a reduction. Forward returns the tensors that graphs use.

    Backward starts to reduce their gradients and returns stride-0 placeholders of their shapes.
    """

    @staticmethod
    def forward(ctx: Any, crossing: ReduceBoundary, pending: Pending, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.crossing, ctx.pending = crossing, pending
        ctx.was_open = crossing.unreduced is not None and crossing.unreduced.is_open
        ctx.placeholders = [tensor.new_empty(()).expand(tensor.shape) for tensor in tensors]
        values = tuple(crossing.values(tensors))
        return _as_trained(ctx, values, 2)

    @staticmethod
    @on_local_values
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [i for i, grad in enumerate(grads) if grad is not None]
        present_grads = [grad for grad in grads if grad is not None]
        if present and ctx.crossing.unreduced is not None and ctx.crossing.unreduced.leave(ctx.was_open):
            check_differentiated_once(
                "gradients of parameters inside no_sync()",
                "each rank has a partial gradient until the last call reduces them",
                "this call outside of no_sync()",
            )
            ctx.pending.sums = present_grads
        elif present and torch.is_grad_enabled():
            ctx.pending.sums = list(ctx.crossing.differentiable_reduce(present_grads, present))
        elif present:
            in_flight, crossing = ctx.crossing.in_flight, ctx.crossing
            ctx.pending.size_bytes = sum(grad.nbytes for grad in present_grads)
            while len(in_flight) >= crossing.max_in_flight and (
                ctx.pending.size_bytes + sum(one.size_bytes for one in in_flight) > crossing.small_bytes
            ):
                in_flight.popleft().advance()
            ctx.pending.wait = crossing.send(present_grads, present)
            in_flight.append(ctx.pending)
        return None, None, *(ctx.placeholders[i] if i in present else None for i in range(len(grads)))


class _WaitReduce(torch.autograd.Function):
    """End of a reduction. Forward is the identity; backward waits for the gradients in flight."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.pending = pending
        return _as_trained(ctx, tuple(tensor.view_as(tensor) for tensor in tensors), 1)

    @staticmethod
    @on_local_values
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        reduced = ctx.pending.taken()
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


def added(wait: Waits, shards: Sequence[Tensor]) -> Finish:
    """Return a function that waits for gradient shards and accumulates them into `.grad` of these shards."""

    @torch.no_grad()
    def finish() -> Finish | None:
        result = wait()
        if callable(result):
            return added(result, shards)
        for shard, grad in zip(shards, result or (), strict=True):
            shard.grad = grad.contiguous() if shard.grad is None else shard.grad.add_(grad)
        return None

    return finish


class AllReduceBucket(ReduceBucket):
    """Gradients of unsharded parameters, all-reduced over one group after the other."""

    max_in_flight = SUM_BUCKETS_IN_FLIGHT
    small_bytes = SUM_BUCKETS_IN_FLIGHT * BUCKET_BYTES

    def __init__(
        self, parameters: Mapping[str, Tensor], groups: Sequence[dist.ProcessGroup], in_flight: deque[Pending],
        reduce_dtype: torch.dtype | None = None, unreduced: NoSync | None = None,
    ):  # fmt: skip
        self.names, self.parameters, self.groups, self.in_flight = tuple(parameters), parameters, groups, in_flight
        self.reduce_dtype, self.unreduced = reduce_dtype, unreduced
        first = next(iter(parameters.values()))
        self.needs_buffer = len(parameters) > 1 or sent_dtype(reduce_dtype, first) != first.dtype

    @torch.no_grad()
    def begin(self, is_last: bool = True) -> Finish | None:
        """Start the all-reduce. A single gradient is reduced in place, without a copy.

        Several gradients become views of the reduced bucket, as with DDP's `gradient_as_bucket_view`. If the bucket has
        another dtype, the results are copied back.
        """
        parameters = [p for p in self.parameters.values() if p.grad is not None]
        grads = [p.grad for p in parameters if p.grad is not None]
        if not grads:
            return None
        dtype = sent_dtype(self.reduce_dtype, grads[0])
        alone = len(grads) == 1 and grads[0].is_contiguous() and grads[0].dtype == dtype
        flat = grads[0] if alone else flatten(grads, dtype)
        wait = self._all_reduce(flat)

        @torch.no_grad()
        def finish() -> None:
            wait()
            if alone:
                return
            for parameter, grad, reduced in zip(parameters, grads, unflatten(flat, grads), strict=True):
                if reduced.dtype == grad.dtype and grad.is_contiguous():  # a fused optimizer needs contiguous gradients
                    parameter.grad = reduced
                else:
                    grad.copy_(reduced)

        return finish

    def values(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.view_as(tensor) for tensor in tensors]

    def send(self, grads: Sequence[Tensor], present: Sequence[int]) -> Callable[[], list[Tensor]]:
        flat, dtype = flatten(grads, sent_dtype(self.reduce_dtype, grads[0])), grads[0].dtype
        wait, placeholders = self._all_reduce(flat), [grad.new_empty(()).expand(grad.shape) for grad in grads]

        def wait_for_all_reduce() -> list[Tensor]:
            wait()
            return [reduced.to(dtype) for reduced in unflatten(flat, placeholders)]

        return wait_for_all_reduce

    def differentiable_reduce(self, grads: Sequence[Tensor], present: Sequence[int]) -> Sequence[Tensor]:
        reduced = list(grads)
        for group in self.groups:
            reduced = [all_reduce_once_more(grad, group) for grad in reduced]
        return reduced

    def _all_reduce(self, flat: Tensor) -> Callable[[], None]:
        return begin_sum(flat, self.groups)


def flatten(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Copy all elements into one vector. `dtype`: of the vector, if it is not that of the tensors."""
    if dtype in (None, tensors[0].dtype):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype, device=tensors[0].device)
    for tensor, chunk in zip(tensors, unflatten(flat, tensors), strict=True):
        chunk.copy_(tensor)  # casts in place of a second full copy
    return flat


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `flat` in the shapes of `like`: the inverse of `flatten`."""
    chunks = flat.split([tensor.numel() for tensor in like])
    return [chunk.view(tensor.shape) for chunk, tensor in zip(chunks, like, strict=True)]


def sent_dtype(reduce_dtype: torch.dtype | None, grad: Tensor) -> torch.dtype:
    """Return the dtype in which a gradient is reduced: that of mixed precision if set, or its own."""
    return reduce_dtype if reduce_dtype is not None and grad.is_floating_point() else grad.dtype


class Reducer:
    """Reduces the gradients of a stage's parameters while its backwards run.

    Args:
        buckets: in the order in which a backward completes them.
        leaves: {name: the tensor that autograd accumulates the gradient into}.
        microbatches: backwards per step.
        shared: buckets whose gradients other stages of this rank also accumulate into.
        shard_reduce_axes: {parameter that is unsharded block by block: axes over which the gradient of its shard is
            all-reduced once a step}.
    """

    def __init__(
        self, buckets: Sequence[ReduceBucket], leaves: Mapping[str, Tensor], microbatches: int,
        shared: Sequence[ReduceBucket] = (),
        shard_reduce_axes: Mapping[str, tuple[str, ...]] | None = None,
    ):  # fmt: skip
        self.buckets, self.leaves, self.microbatches, self.shared = buckets, leaves, microbatches, shared
        self.shard_reduce_axes = shard_reduce_axes or {}
        self.nodes: dict[str, Any] = {}
        self.is_armed = False
        self.before_first: Callable[[], None] = _nothing
        self.missing: list[int] = []
        self.next = self.backwards = 0
        self.begun: deque[tuple[ReduceBucket, Finish]] = deque()
        self.next_reductions: list[Finish] = []
        """Reductions over further groups. They work in the memory of the reduced gradients."""
        self.completed: set[str] = set()
        """Shards whose gradients of earlier microbatches are part of a reduction that is complete or in flight."""

    @property
    def is_last(self) -> bool:
        """True if no further backward of the step follows the current one, or outside a step."""
        return not self.is_armed or self.backwards >= self.microbatches - 1

    def take_earlier(self, name: str, part: Tensor) -> Tensor | None:
        """Take the gradient that a shard has from earlier microbatches, once, in a step's last backward."""
        if not self.is_armed or name in self.completed:
            return None
        self.completed.add(name)
        earlier, part.grad = part.grad, None
        return earlier

    def arm(self, before_first: Callable[[], None]) -> None:
        """Begin a step. `before_first` is called before the first bucket is launched, possibly more than once."""
        self.abandon()
        self.before_first = before_first
        for index, bucket in enumerate(self.buckets):
            for name in bucket.names:
                if name not in self.nodes and self.leaves[name].requires_grad:
                    self._add_hook(index, name)
        self.is_armed, self.backwards = True, 0
        self._begin_microbatch()

    def _add_hook(self, index: int, name: str) -> None:
        """Hook the accumulation node of a parameter.

        The node lives as long as this object, so its hook must not keep this object alive.
        """
        leaf, added = self.leaves[name], weakref.WeakMethod(self._on_gradient)
        view: Any = leaf.view_as(leaf).grad_fn
        node = self.nodes[name] = view.next_functions[0][0]

        def hook(*_: Any) -> None:
            method = added()
            if method is not None:
                method(index)

        node.register_hook(hook)

    def _begin_microbatch(self) -> None:
        self.next = 0
        self.missing = [sum(self.leaves[name].requires_grad for name in bucket.names) for bucket in self.buckets]

    def _on_gradient(self, index: int) -> None:
        if self.is_armed:
            self.missing[index] -= 1
            while self.next < len(self.buckets) and self.missing[self.next] <= 0:
                self._begin_next()

    def _begin_next(self) -> None:
        bucket = self.buckets[self.next]
        self.next += 1
        if not bucket.each and not self.is_last:
            return
        self.before_first()
        while bucket.needs_buffer and sum(one.needs_buffer for one, _ in self.begun) >= bucket.max_in_flight:
            self._finish_first()
        finish = bucket.begin(self.is_last)
        if finish is not None:
            self.begun.append((bucket, finish))

    def _finish_first(self) -> None:
        _, finish = self.begun.popleft()
        next_reduction = finish()
        if next_reduction is not None:
            self.next_reductions.append(next_reduction)

    def after_backward(self) -> None:
        """Launch the remaining buckets after the backward of a microbatch."""
        if self.is_armed:
            while self.next < len(self.buckets):
                self._begin_next()
            self.backwards += 1
            is_finished = self.backwards == self.microbatches
            for bucket in (*self.shared, *(() if is_finished else self.buckets)):
                bucket.keep()
            if not is_finished:
                self._begin_microbatch()

    def finish(self) -> None:
        """Wait for all reductions. The step has no more backwards."""
        while self.begun:
            self._finish_first()
        for finish in self.next_reductions:
            finish()
        self.next_reductions.clear()
        self.is_armed = False

    def abandon(self) -> None:
        """Drop all pending reductions of a step that failed."""
        self.is_armed, self.before_first = False, _nothing
        self.begun.clear()
        self.next_reductions.clear()
        self.completed.clear()


def _nothing() -> None:
    pass
