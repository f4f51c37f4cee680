"""ZeRO-1 and ZeRO-2: parameters are unsharded when a step begins, and resharded when it ends.

A stage graph has an all-gather at each use of a parameter, which ZeRO-3 uses (`unshard_blocks.py`). With ZeRO-1 and
ZeRO-2 these all-gathers are removed. Instead, the runtime unshards all parameters in buckets when a call begins, and
autograd accumulates gradients of the unsharded parameters. Gradients are reduce-scattered once, after all microbatches
(`zero=1`), or after each microbatch (`zero=2`). Optimizers only see the shards (Rajbhandari et al. 2020,
arXiv:1910.02054, sections 5.1 and 5.2).

If a `dp_sync` method reduces gradients, the method gets the unsharded gradient (`gradient_sync.py`).
"""

from __future__ import annotations

import itertools
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
from autopart.runtime.gradients.param_bucket import ParamBucket
from autopart.runtime.gradients.reductions import AllReduceStrategy, ReduceStrategy, Reduction, ReductionQueue
from autopart.runtime.gradients.shard_collectives import ShardCollectives, ShardedParam, make_shard_collectives

NUM_PREFETCHED = 2
"""Number of all-gathers in flight when a step begins.

Until it has finished, an all-gather needs twice the bytes of its unsharded parameters.
"""


class UnshardedParams:
    """Unsharded parameters of a program's stages on this rank. Their memory is freed between calls.

    Attributes:
        parameters: {name: unsharded parameter}, which the graphs use.
        shards: {name: this rank's shard}.
        buckets: for each stage, its buckets in the order of their use.
        shared: buckets of parameters that several stages of this rank use.
        sent: {name of a parameter with a `dp_sync` method: tensor whose `.grad` receives the unsharded gradient}.
    """

    def __init__(
        self, program: Program, stages: Sequence[Stage], process: Process, shards: Mapping[str, Tensor],
        sent: Mapping[str, Tensor], queue: ReductionQueue,
    ):  # fmt: skip
        program.dp_sync.check_program(program)
        gather_ways, mesh = unsharded_for_step(program, stages), program.mesh
        self.sent, self.queue, self.reduce_dtype = sent, queue, program.reduce_dtype
        self.shards = {name: shards[name] for name in gather_ways}
        self.each_microbatch = program.zero == 2
        self.unshards: list[StepUnshard] = []
        """All-gathers of all buckets, in the order of their use."""
        self.to_gather: deque[StepUnshard] = deque()
        self.is_in_place = True
        """True if all-gathers write into the unsharded parameters."""
        self.parameters: dict[str, nn.Parameter] = {}
        self.buckets: list[list[ParamBucket]] = [[] for _ in stages]
        self.shared: list[ParamBucket] = []
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
                group, *others = [process.overlap_group(axis) for axis in axes[names_of_kind[0]]]
                stored = [self._stored(name, gather_ways[name], group.size()) for name in names_of_kind]
                for_method = full_stored[names_of_kind[0]] is not None
                buckets += [self._bucket(one, for_method)
                            for one in make_shard_collectives(stored, group, BUCKET_BYTES, others)]  # fmt: skip

    def _bucket(self, shards: ShardCollectives, for_method: bool) -> ParamBucket:
        """Create a bucket of unsharded parameters.

        Args:
            for_method: True if a `dp_sync` method reduces the unsharded gradients over the data ranks.
        """
        self.unshards.append(StepUnshard(self, shards))
        return ParamBucket(
            {name: self.shards[name] for name in shards.names},
            UnshardedGradReduce(shards, self.reduce_dtype) if for_method else shards,
            self.queue,
            leaves=[self.parameters[name] for name in shards.names],
            targets=[self.sent[name] for name in shards.names] if for_method else None,
            unshard=self.unshards[-1],
            each_microbatch=self.each_microbatch,
        )

    def _stored(self, name: str, way: ParameterGather, ranks: int) -> ShardedParam:
        """Create the unsharded parameter `name` with a freed storage. Return a description of its sharding."""
        part = self.shards[name]
        stored = ShardedParam.of(name, part, way, ranks)
        if name in self.sent:  # as without ZeRO, autograd accumulates in the parameter dtype
            stored = replace(stored, grad_dtype=part.dtype)
        empty = part.new_empty(stored.shape, dtype=stored.read_dtype)
        unsharded = self.parameters[name] = nn.Parameter(empty, requires_grad=part.requires_grad)
        unsharded.untyped_storage().resize_(0)
        return stored

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context manager that unshards all parameters, and frees the unsharded parameters at its end."""
        try:
            for name, unsharded in self.parameters.items():
                unsharded.requires_grad_(self.shards[name].requires_grad)
                unsharded.untyped_storage().resize_(unsharded.nbytes)
            with self.gathering(is_in_place=True):
                yield
        finally:
            for bucket in itertools.chain(*self.buckets, self.shared):
                bucket.accumulated.clear()
            for unsharded in self.parameters.values():
                unsharded.grad = None
                unsharded.untyped_storage().resize_(0)

    @contextmanager
    def gathering(self, is_in_place: bool = False) -> Iterator[None]:
        """Context manager in which buckets are all-gathered one after the other, each before its use.

        Args:
            is_in_place: True to gather into the unsharded parameters. False to gather into new memory, for a
                differentiable call.
        """
        self.is_in_place = is_in_place
        try:
            self.to_gather = deque(self.unshards)
            for _ in range(NUM_PREFETCHED):
                self.gather_next()
            yield
        finally:
            self.to_gather.clear()
            for unshard in self.unshards:
                unshard.values()

    def gather_next(self) -> None:
        """Start the all-gather of the next bucket, if there is one."""
        if self.to_gather:
            self.to_gather.popleft().gather()


class StepUnshard:
    """All-gather of the parameters of one bucket, once per step or differentiable call."""

    def __init__(self, unsharded: UnshardedParams, shards: ShardCollectives):
        self.unsharded, self.shards = unsharded, shards
        self.wait: Callable[[], list[Tensor]] | None = None

    @torch.no_grad()
    def gather(self) -> None:
        """Start the all-gather of the bucket's parameters."""
        names, unsharded = self.shards.names, self.unsharded
        targets = [unsharded.parameters[name].detach() for name in names] if unsharded.is_in_place else None
        self.wait = self.shards.gather([unsharded.shards[name] for name in names], targets)

    @torch.no_grad()
    def values(self) -> list[Tensor]:
        """Wait for the all-gather of this bucket, and return its parameters. Also prefetch the next bucket."""
        while self in self.unsharded.to_gather:
            self.unsharded.gather_next()
        if self.wait is None:
            return []
        values, self.wait = self.wait(), None
        self.unsharded.gather_next()
        return values

    def reshard(self) -> None:
        """Do nothing, because `UnshardedParams.gathered` or autograd frees the parameters."""


class UnshardedGradReduce(ReduceStrategy):
    """Reduction of unsharded gradients over all data axes except the axis of their `dp_sync` method."""

    def __init__(self, shards: ShardCollectives, reduce_dtype: torch.dtype | None):
        self.shards, self.accumulate_dtype = shards, shards.accumulate_dtype
        self.all_reduce = AllReduceStrategy(shards.others, reduce_dtype) if shards.others else None

    def start(self, grads: Sequence[Tensor], present: Sequence[int], earlier: object, is_owned: bool) -> Reduction:
        terms = [self._local_term(self.shards.stored[i], grad) for i, grad in zip(present, grads, strict=True)]
        del grads
        if self.all_reduce is None:
            return terms if is_owned else [term.clone() for term in terms]
        reduction = self.all_reduce.start(terms, present, None, is_owned)
        del terms
        return (yield from reduction)

    def differentiable_reduce(self, grads: Sequence[Tensor], present: Sequence[int]) -> Sequence[Tensor]:
        raise AssertionError("unreachable: create_graph=True is rejected before, for parameters with a dp_sync method")

    def _local_term(self, one: ShardedParam, grad: Tensor) -> Tensor:
        """Return the part of a gradient that this rank adds to the sum over the data ranks.

        A replicated gradient must count once, so the first rank returns it and all other ranks return zeros.
        """
        grad = grad.to(one.dtype)
        return grad if one.sums or self.shards.group.rank() == 0 else torch.zeros_like(grad)
