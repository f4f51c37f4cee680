"""Gradients are summed over ranks while the backward still runs: a bucket at a time, as soon as it is complete.

A stage's buckets are in the order in which its backward completes them, the last block first. What tells that a
gradient has come is a hook on the node of autograd that adds it to `.grad`. Buckets begin in their order, whatever
order their gradients come in, so that all ranks send the same ones to each other (Li et al. 2020, arXiv:2006.15704,
section 3.2.3). Where a schedule runs the weights' part of a backward by itself, no such node runs: a bucket begins when
that part ends.
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
from autopart.ir.run.buckets import BUCKET_BYTES, SUMS_UNDER_WAY, UNDER_WAY
from autopart.ops.differentiate_once import check_differentiated_once
from autopart.runtime.comm.async_collectives import begin_sum
from autopart.runtime.comm.collectives import all_reduce_once_more

if TYPE_CHECKING:
    from autopart.runtime.gradients.no_sync import Unsummed

Finish = Callable[[], "Finish | None"]
"""Waits for sums and puts them in their place; or begins to sum them over more ranks, and gives what waits for that."""

Waits = Callable[[], "list[Tensor] | Waits | None"]
"""Waits for sums and gives them, or None where it puts them in their place; or begins to sum them over more ranks, and
gives what waits for that."""


class Crossing:
    """Parameters on their way into the graphs of one differentiable call, and their gradients on the way out.

    Two nodes of autograd sum gradients beside the backward. `_Leave`, made where the block begins that reads them, has
    a backward that begins the collective as soon as all their gradients are there; `_Arrive`, made before all else, one
    that waits for it: autograd runs what was made last first, so that it waits when all else has run.
    """

    names: tuple[str, ...]
    under_way: deque[Pending]
    most_under_way: int = UNDER_WAY
    """How many are sent at a time, with this one."""

    small_bytes: int = 0
    """In a differentiable call, which copies all: more may be sent at a time if they are no more than this together."""

    unsummed: Unsummed | None = None
    """Which calls leave their gradients as they are."""

    pending: Pending | None = None
    arrived: Sequence[Tensor] = ()
    crossed: dict[str, Tensor] | None = None

    def begin_call(self, tensors: Mapping[str, Tensor]) -> None:
        """Until `end_call` graphs read what is differentiated by these."""
        self.pending, self.arrived = arrive([tensors[name] for name in self.names])
        self.crossed = None

    def end_call(self) -> None:
        self.pending, self.arrived, self.crossed = None, (), None

    def enter(self, names: Sequence[str], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What a graph reads of the parameters of these names, which it has as `tensors`, where it first reads one."""
        if self.pending is None:
            self.be_there()
            return tuple(tensors)
        if self.crossed is None:  # once for all microbatches
            self.crossed = dict(zip(self.names, self.cross(self.pending, self.arrived), strict=True))
        return tuple(self.crossed[name] for name in names)

    def be_there(self) -> None:
        """Waits for what graphs read."""

    def values(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What graphs read of these tensors."""
        raise NotImplementedError

    def send(self, grads: Sequence[Tensor], present: Sequence[int]) -> Waits:
        """Begins to sum the gradients of what is at these positions, and gives what waits for those of the tensors."""
        raise NotImplementedError

    def differentiable_sums(self, grads: Sequence[Tensor], present: Sequence[int]) -> Sequence[Tensor]:
        """Return what `send` makes of these gradients, in a form that can be differentiated (`create_graph=True`)."""
        raise NotImplementedError

    def cross(self, pending: Pending, arrived: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What graphs read of tensors from `arrive`."""
        return _Leave.apply(self, pending, *arrived)


class Bucket(Crossing):
    """Gradients that are summed in one collective. `each`: after every microbatch, and not once a step. `takes_memory`:
    it is sent from a copy, or received beside what is there, so few are under way at a time."""

    each: bool = False
    takes_memory: bool = True

    def begin(self, is_last: bool = True) -> Finish | None:
        """Begins to sum the gradients that are there, and gives what waits for the sums and puts them in their place;
        None where there are none. `is_last`: no microbatch has more."""
        raise NotImplementedError

    def keep(self) -> None:
        """After a microbatch that is not the last. Autograd adds gradients up in the dtype of their parameters."""


def arrive(tensors: Sequence[Tensor]) -> tuple[Pending, tuple[Tensor, ...]]:
    """Tensors whose gradients are waited for when all else has run, if they `cross` later."""
    pending = Pending()
    return pending, _Arrive.apply(pending, *tensors)


@dataclass(eq=False)
class Pending:
    """Gradients that are under way, then there."""

    wait: Waits | None = None
    sums: list[Tensor] | None = None
    size_bytes: int = 0

    def advance(self) -> None:
        """Waits for the ranks that sum them now; others may be next."""
        if self.wait is not None:
            result = self.wait()
            self.sums, self.wait = (None, result) if callable(result) else (result, None)

    def taken(self) -> list[Tensor] | None:
        """Those of all ranks, which nothing else holds afterwards: autograd copies a gradient that is held. None: they
        are in their place."""
        while self.wait is not None:
            self.advance()
        sums, self.sums = self.sums, None
        return sums


class _Leave(torch.autograd.Function):
    """What graphs read of tensors; backward begins to sum the gradients, and gives empty ones of their form."""

    @staticmethod
    def forward(ctx: Any, crossing: Crossing, pending: Pending, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.crossing, ctx.pending = crossing, pending
        ctx.was_open = crossing.unsummed is not None and crossing.unsummed.is_open
        ctx.forms = [tensor.new_empty(()).expand(tensor.shape) for tensor in tensors]
        values = tuple(crossing.values(tensors))
        return _as_trained(ctx, values, 2)

    @staticmethod
    @on_local_values
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [i for i, grad in enumerate(grads) if grad is not None]
        present_grads = [grad for grad in grads if grad is not None]
        if present and ctx.crossing.unsummed is not None and ctx.crossing.unsummed.leave(ctx.was_open):
            check_differentiated_once(
                "gradients of parameters inside no_sync()",
                "each rank has its part of a gradient there, until the last call sums them",
                "this call outside of no_sync()",
            )
            ctx.pending.sums = present_grads
        elif present and torch.is_grad_enabled():
            ctx.pending.sums = list(ctx.crossing.differentiable_sums(present_grads, present))
        elif present:
            under_way, crossing = ctx.crossing.under_way, ctx.crossing
            ctx.pending.size_bytes = sum(grad.nbytes for grad in present_grads)
            while len(under_way) >= crossing.most_under_way and (
                ctx.pending.size_bytes + sum(one.size_bytes for one in under_way) > crossing.small_bytes
            ):
                under_way.popleft().advance()
            ctx.pending.wait = crossing.send(present_grads, present)
            under_way.append(ctx.pending)
        return None, None, *(ctx.forms[i] if i in present else None for i in range(len(grads)))


class _Arrive(torch.autograd.Function):
    """Identity; backward waits for the gradients that are under way."""

    @staticmethod
    def forward(ctx: Any, pending: Pending, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.pending = pending
        return _as_trained(ctx, tuple(tensor.view_as(tensor) for tensor in tensors), 1)

    @staticmethod
    @on_local_values
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        sums = ctx.pending.taken()
        if sums is None:
            return None, *(None for _ in grads)
        each = iter(sums)
        return None, *(None if grad is None else next(each) for grad in grads)


def _as_trained(ctx: Any, values: tuple[Tensor, ...], others: int) -> tuple[Tensor, ...]:
    """Values of tensors, of which the frozen ones stay frozen; `others`: arguments before these."""
    frozen = [value for value, needed in zip(values, ctx.needs_input_grad[others:], strict=True) if not needed]
    ctx.mark_non_differentiable(*frozen)
    return values


def added(wait: Waits, parts: Sequence[Tensor]) -> Finish:
    """What waits for gradients, and adds them to those of these parts."""

    @torch.no_grad()
    def finish() -> Finish | None:
        result = wait()
        if callable(result):
            return added(result, parts)
        for part, piece in zip(parts, result or (), strict=True):
            part.grad = piece.contiguous() if part.grad is None else part.grad.add_(piece)
        return None

    return finish


class SumBucket(Bucket):
    """Gradients of whole parameters, summed over one group after the other."""

    most_under_way = SUMS_UNDER_WAY
    small_bytes = SUMS_UNDER_WAY * BUCKET_BYTES

    def __init__(
        self, parameters: Mapping[str, Tensor], groups: Sequence[dist.ProcessGroup], under_way: deque[Pending],
        reduce_dtype: torch.dtype | None = None, unsummed: Unsummed | None = None,
    ):  # fmt: skip
        self.names, self.parameters, self.groups, self.under_way = tuple(parameters), parameters, groups, under_way
        self.reduce_dtype, self.unsummed = reduce_dtype, unsummed
        first = next(iter(parameters.values()))
        self.takes_memory = len(parameters) > 1 or sent_dtype(reduce_dtype, first) != first.dtype

    @torch.no_grad()
    def begin(self, is_last: bool = True) -> Finish | None:
        """A gradient that is alone is summed in place. Others become views of their sum, as with DDP's
        `gradient_as_bucket_view`; where that is in another dtype it is copied back."""
        owners = [p for p in self.parameters.values() if p.grad is not None]
        grads = [p.grad for p in owners if p.grad is not None]
        if not grads:
            return None
        dtype = sent_dtype(self.reduce_dtype, grads[0])
        alone = len(grads) == 1 and grads[0].is_contiguous() and grads[0].dtype == dtype
        flat = grads[0] if alone else flatten(grads, dtype)
        wait = self._sum(flat)

        @torch.no_grad()
        def finish() -> None:
            wait()
            if alone:
                return
            for owner, grad, piece in zip(owners, grads, unflatten(flat, grads), strict=True):
                if piece.dtype == grad.dtype and grad.is_contiguous():  # a fused optimizer reads it as it lies
                    owner.grad = piece
                else:
                    grad.copy_(piece)

        return finish

    def values(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.view_as(tensor) for tensor in tensors]

    def send(self, grads: Sequence[Tensor], present: Sequence[int]) -> Callable[[], list[Tensor]]:
        flat, dtype = flatten(grads, sent_dtype(self.reduce_dtype, grads[0])), grads[0].dtype
        wait, forms = self._sum(flat), [grad.new_empty(()).expand(grad.shape) for grad in grads]

        def sums() -> list[Tensor]:
            wait()
            return [piece.to(dtype) for piece in unflatten(flat, forms)]

        return sums

    def differentiable_sums(self, grads: Sequence[Tensor], present: Sequence[int]) -> Sequence[Tensor]:
        sums = list(grads)
        for group in self.groups:
            sums = [all_reduce_once_more(grad, group) for grad in sums]
        return sums

    def _sum(self, flat: Tensor) -> Callable[[], None]:
        return begin_sum(flat, self.groups)


def flatten(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """One vector of all elements, a copy; `dtype`: in another than theirs."""
    if dtype in (None, tensors[0].dtype):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype, device=tensors[0].device)
    for tensor, piece in zip(tensors, unflatten(flat, tensors), strict=True):
        piece.copy_(tensor)  # without a second copy of all
    return flat


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `flatten`: views of `flat` in the shapes of `like`."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def sent_dtype(reduce_dtype: torch.dtype | None, grad: Tensor) -> torch.dtype:
    """What a gradient is summed in: its own dtype, or that of mixed precision."""
    return reduce_dtype if reduce_dtype is not None and grad.is_floating_point() else grad.dtype


class Reducer:
    """Sums the gradients of a stage's parameters while its backwards run.

    Args:
        buckets: in the order in which a backward completes them.
        leaves: {name: the tensor that autograd adds the gradient to}.
        microbatches: how many backwards a step has.
        shared: buckets that stages beside this one add to as well.
        parts_summed_over: {parameter that is gathered block by block: the axes over which the gradient of its part is
            summed once a step}.
    """

    def __init__(
        self, buckets: Sequence[Bucket], leaves: Mapping[str, Tensor], microbatches: int, shared: Sequence[Bucket] = (),
        parts_summed_over: Mapping[str, tuple[str, ...]] | None = None,
    ):  # fmt: skip
        self.buckets, self.leaves, self.microbatches, self.shared = buckets, leaves, microbatches, shared
        self.parts_summed_over = parts_summed_over or {}
        self.nodes: dict[str, Any] = {}
        self.is_armed = False
        self.before_first: Callable[[], None] = _nothing
        self.missing: list[int] = []
        self.next = self.backwards = 0
        self.begun: deque[tuple[Bucket, Finish]] = deque()
        self.going_on: list[Finish] = []
        """What is summed over more ranks: in no memory but that of the sums."""
        self.completed: set[str] = set()
        """The parts whose gradients of earlier microbatches are in a sum that is complete or under way."""

    @property
    def is_last(self) -> bool:
        """Whether no backward of the step follows the one that runs, or none is of a step."""
        return not self.is_armed or self.backwards >= self.microbatches - 1

    def take_earlier(self, name: str, part: Tensor) -> Tensor | None:
        """In the last backward of a step: the gradient of a part from those before, once; it has none then."""
        if not self.is_armed or name in self.completed:
            return None
        self.completed.add(name)
        earlier, part.grad = part.grad, None
        return earlier

    def arm(self, before_first: Callable[[], None]) -> None:
        """A step begins; `before_first` is called before the first bucket is sent, maybe more than once."""
        self.abandon()
        self.before_first = before_first
        for index, bucket in enumerate(self.buckets):
            for name in bucket.names:
                if name not in self.nodes and self.leaves[name].requires_grad:
                    self._watch(index, name)
        self.is_armed, self.backwards = True, 0
        self._begin_microbatch()

    def _watch(self, index: int, name: str) -> None:
        """The node lives as long as this does; its hook must not keep this alive."""
        leaf, added = self.leaves[name], weakref.WeakMethod(self._added)
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

    def _added(self, index: int) -> None:
        """A gradient of a bucket has come."""
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
        while bucket.takes_memory and sum(one.takes_memory for one, _ in self.begun) >= bucket.most_under_way:
            self._finish_first()
        finish = bucket.begin(self.is_last)
        if finish is not None:
            self.begun.append((bucket, finish))

    def _finish_first(self) -> None:
        _, finish = self.begun.popleft()
        goes_on = finish()
        if goes_on is not None:
            self.going_on.append(goes_on)

    def after_backward(self) -> None:
        """A microbatch's backward has ended."""
        if self.is_armed:
            while self.next < len(self.buckets):
                self._begin_next()
            self.backwards += 1
            have_run = self.backwards == self.microbatches
            for bucket in (*self.shared, *(() if have_run else self.buckets)):
                bucket.keep()
            if not have_run:
                self._begin_microbatch()

    def finish(self) -> None:
        """Waits for all sums. The step has no more backwards."""
        while self.begun:
            self._finish_first()
        for finish in self.going_on:
            finish()
        self.going_on.clear()
        self.is_armed = False

    def abandon(self) -> None:
        """A step has failed."""
        self.is_armed, self.before_first = False, _nothing
        self.begun.clear()
        self.going_on.clear()
        self.completed.clear()


def _nothing() -> None:
    pass
