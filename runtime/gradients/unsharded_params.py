"""ZeRO 1 and 2: parameters that are stored sharded stay unsharded from the begin of a step to its end.

Stage graphs gather a parameter at each use. With `zero=3` they do so, and keep the unsharded parameter for as long as a
block uses it. With ZeRO 1 and 2 all parameters are unsharded once, in buckets, when a call begins. The graphs use the
unsharded parameters, and autograd accumulates into their gradients. With `zero=1` a gradient is reduce-scattered once,
after all microbatches; with `zero=2` after each microbatch. Optimizers see the shards. (Rajbhandari et al. 2020,
arXiv:1910.02054, sections 5.1 and 5.2.) If a `dp_sync` method reduces gradients, the method receives the unsharded
gradient instead (`gradient_sync.py`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from autopart.ir.program import Program, Stage
from autopart.ir.run.buckets import BUCKET_BYTES, by_first_use, kinds
from autopart.ir.run.unshard_policy import ParameterGather, unsharded_for_step
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.gradients.double_backward import DifferentiableReduceScatter
from autopart.runtime.gradients.reducer import AllReduceBucket, Finish, Pending, ReduceBucket, Waits, added
from autopart.runtime.gradients.shard_buckets import ShardBucket, ShardedParam, make_shard_buckets

NUM_PREFETCHED = 2
"""All-gathers in flight when a step begins. Each needs its unsharded bytes twice until it has arrived."""


class UnshardedParams:
    """Unsharded parameters of a program's stages on this rank. Between calls their storages are freed.

    Attributes:
        parameters: {name: unsharded parameter}, used by the graphs.
        parts: {name: this rank's shard}.
        buckets: per stage, in the order of their use.
        shared: buckets of parameters that several stages of this rank use.
        sent: {name: tensor that receives the unsharded gradient}, for parameters whose gradients a method reduces.
    """

    def __init__(
        self, program: Program, stages: Sequence[Stage], process: Process, parts: Mapping[str, Tensor],
        sent: Mapping[str, Tensor],
    ):  # fmt: skip
        program.dp_sync.check_program(program)
        gather_ways, mesh = unsharded_for_step(program, stages), program.mesh
        self.sent = sent
        self.parts = {name: parts[name] for name in gather_ways}
        self.each_microbatch = program.zero == 2
        self.in_flight: deque[Pending] = deque()
        self.to_gather: deque[UnshardedBucket] = deque()
        self.parameters: dict[str, nn.Parameter] = {}
        self.buckets: list[list[UnshardedBucket]] = [[] for _ in stages]
        self.shared: list[UnshardedBucket] = []
        if not gather_ways:
            return
        orders = [by_first_use(stage.graph.graph, gather_ways) for stage in stages]
        uses = Counter(name for order in orders for name in order)
        shared_names = [name for name, count in uses.items() if count > 1]
        rows = [*([name for name in order if uses[name] == 1] for order in orders), shared_names]
        for names, buckets in zip(rows, [*self.buckets, self.shared], strict=True):
            full_stored = {name: program.parameters[name].unsharded_to_sync(mesh) for name in names}
            axes = {name: (gather_ways[name].axis, *(full_stored[name] or program.parameters[name]).reduced_over(mesh))
                    for name in names}  # fmt: skip
            for names_of_kind in kinds(names, {name: (axes[name], full_stored[name] is None) for name in names}):
                group, *others = [process.beside(axis) for axis in axes[names_of_kind[0]]]
                stored = [self._stored(name, gather_ways[name], group.size()) for name in names_of_kind]
                for one in make_shard_buckets(stored, group, BUCKET_BYTES, others):
                    buckets.append(UnshardedBucket(self, one) if full_stored[names_of_kind[0]] is None else
                                   UnshardedGradBucket(self, one, program.reduce_dtype))  # fmt: skip

    @property
    def all_buckets(self) -> list[UnshardedBucket]:
        return [bucket for buckets in (*self.buckets, self.shared) for bucket in buckets]

    def _stored(self, name: str, way: ParameterGather, ranks: int) -> ShardedParam:
        """Describe a parameter and create its unsharded parameter, with an empty storage."""
        part = self.parts[name]
        stored = ShardedParam.of(name, part, way, ranks)
        if name in self.sent:  # as without ZeRO: autograd accumulates in the parameter dtype
            stored = replace(stored, grad_dtype=part.dtype)
        empty = part.new_empty(stored.shape, dtype=stored.read_dtype)
        unsharded = self.parameters[name] = nn.Parameter(empty, requires_grad=part.requires_grad)
        unsharded.untyped_storage().resize_(0)
        return stored

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Unshard all parameters in this context, and reshard them (free their storages) at its end."""
        try:
            for name, unsharded in self.parameters.items():
                unsharded.requires_grad_(self.parts[name].requires_grad)
                unsharded.untyped_storage().resize_(unsharded.nbytes)
            with self.gathering():
                yield
        finally:
            for bucket in self.all_buckets:
                bucket.kept.clear()
            for unsharded in self.parameters.values():
                unsharded.grad = None
                unsharded.untyped_storage().resize_(0)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Gather all buckets in this context, prefetching some ahead of the bucket that graphs use."""
        try:
            self.to_gather = deque(self.all_buckets)
            for _ in range(NUM_PREFETCHED):
                self.gather_next()
            yield
        finally:
            self.to_gather.clear()
            for bucket in self.all_buckets:
                bucket.wait_for_unshard()

    def gather_next(self) -> None:
        """Start the all-gather of the next bucket that has not been started."""
        if self.to_gather:
            self.to_gather.popleft().gather()


class UnshardedBucket(ReduceBucket):
    """Parameters that share one all-gather and one reduce-scatter, unsharded for a step."""

    def __init__(self, unsharded: UnshardedParams, parts: ShardBucket):
        self.unsharded, self.parts, self.names, self.each = unsharded, parts, parts.names, unsharded.each_microbatch
        self.in_flight = unsharded.in_flight
        self.wait: Callable[[], list[Tensor]] | None = None
        self.kept: dict[str, Tensor] = {}
        """{parameter: accumulated gradient of earlier microbatches}, if its reduce dtype is of higher precision than
        its compute dtype."""

    @torch.no_grad()
    def keep(self) -> None:
        """Accumulate in the reduce dtype, if it has higher precision, after a microbatch that is not the last."""
        for one in self.parts.stored if not self.each else ():
            unsharded = self.unsharded.parameters[one.name]
            if one.grad_dtype != one.read_dtype and (gradient := _take_gradient(unsharded)) is not None:
                grad = gradient.to(one.grad_dtype)
                self.kept[one.name] = self.kept[one.name].add_(grad) if one.name in self.kept else grad

    @torch.no_grad()
    def gather(self) -> None:
        """Start the all-gather into the unsharded parameters, or into new memory in a differentiable call."""
        targets = [self.unsharded.parameters[name].detach() for name in self.names]
        shards = [self.unsharded.parts[name] for name in self.names]
        self.wait = self.parts.gather(shards, targets if self.pending is None else None)

    @torch.no_grad()
    def wait_for_unshard(self) -> None:
        self.values(())

    def values(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Wait for the all-gather of this bucket at its first use, and start that of a following bucket."""
        while self in self.unsharded.to_gather:
            self.unsharded.gather_next()
        if self.wait is None:
            return []
        values, self.wait = self.wait(), None
        self.unsharded.gather_next()
        return values

    def send(self, grads: Sequence[Tensor], present: Sequence[int]) -> Waits:
        return self.parts.scatter(grads, [self.parts.stored[i] for i in present], [None for _ in present])

    def differentiable_reduce(self, grads: Sequence[Tensor], present: Sequence[int]) -> Sequence[Tensor]:
        return DifferentiableReduceScatter.apply(self.parts, present, *grads)

    @torch.no_grad()
    def begin(self, is_last: bool = True) -> Finish | None:
        """Start to reduce-scatter the unsharded gradients, to be accumulated into the gradients of the shards."""
        reduces_further = is_last and bool(self.parts.others)
        present = [one for one in self.parts.stored
                   if self.unsharded.parameters[one.name].grad is not None or one.name in self.kept
                   or (reduces_further and self.unsharded.parts[one.name].grad is not None)]  # fmt: skip
        if not present:
            return None
        earlier = [_take_gradient(self.unsharded.parts[one.name]) for one in present] if reduces_further else None
        wait = self.parts.scatter([self._take_accumulated(one.name) for one in present], present, earlier)
        return added(wait, [self.unsharded.parts[one.name] for one in present])

    def _take_accumulated(self, name: str) -> Tensor:
        """Take the accumulated unsharded gradient of all microbatches out of `.grad`."""
        unsharded, earlier = self.unsharded.parameters[name], self.kept.pop(name, None)
        grad = _take_gradient(unsharded)
        if grad is None:
            return torch.zeros_like(unsharded) if earlier is None else earlier
        return grad if earlier is None else earlier.add_(grad)


class UnshardedGradBucket(UnshardedBucket):
    """Parameters that share one all-gather, and whose unsharded gradients a method receives.

    The gradients are all-reduced over all other axes first.
    """

    def __init__(self, unsharded: UnshardedParams, parts: ShardBucket, reduce_dtype: torch.dtype | None):
        super().__init__(unsharded, parts)
        self.sent = {name: unsharded.sent[name] for name in self.names}
        self.sums = None
        if parts.others:
            self.sums = AllReduceBucket(self.sent, parts.others, unsharded.in_flight, reduce_dtype)

    @torch.no_grad()
    def begin(self, is_last: bool = True) -> Finish | None:
        for one in self.parts.stored:
            if self.unsharded.parameters[one.name].grad is not None or one.name in self.kept:
                self.sent[one.name].grad = self._local_term(one, self._take_accumulated(one.name))
        return None if self.sums is None else self.sums.begin(is_last)

    def send(self, grads: Sequence[Tensor], present: Sequence[int]) -> Waits:
        stored = [self.parts.stored[i] for i in present]
        terms = [self._local_term(one, grad) for one, grad in zip(stored, grads, strict=True)]
        copies = [term.clone() for term in terms] if self.sums is None else []  # autograd may use them elsewhere
        wait = self.sums.send(terms, present) if self.sums is not None else lambda: copies
        return added(wait, [self.sent[one.name] for one in stored])

    def differentiable_reduce(self, grads: Sequence[Tensor], present: Sequence[int]) -> Sequence[Tensor]:
        raise AssertionError("rejected at the begin of the backward: DataSync.watched")

    def _local_term(self, one: ShardedParam, grad: Tensor) -> Tensor:
        """Return this rank's term of the gradient sum. Of a replicated sum only the first rank contributes."""
        grad = grad.to(one.dtype)
        return grad if one.sums or self.parts.group.rank() == 0 else torch.zeros_like(grad)


def _take_gradient(parameter: Tensor) -> Tensor | None:
    grad, parameter.grad = parameter.grad, None
    return grad
