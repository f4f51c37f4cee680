"""ZeRO 1 and 2: the whole of a parameter that a rank stores in parts lives from a step's beginning to its end.

The graphs of stages gather a parameter where they read it. With `zero=3` they do so, and hold the whole for as long as
it is used. Here it is gathered once, in buckets, when a call begins; the graphs read it, and autograd adds to its
gradient, as if it were stored whole. With `zero=1` that gradient is scattered once, when all microbatches have added to
it; with `zero=2` after each one. What optimizers see are the parts. (Rajbhandari et al. 2020, arXiv:1910.02054,
sections 5.1 and 5.2.) Where data-parallel ranks bring gradients together by a method (`dp_sync`), it is not scattered
but handed to the method, whole (`runtime.sync.data_sync`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from autopart.ir.program import Program, Stage
from autopart.ir.run.buckets import BUCKET_BYTES, in_order_of_use, kinds
from autopart.ir.run.unshard_policy import Way, check_sent_whole, held_whole
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.gradients.double_backward import Scattered
from autopart.runtime.gradients.reducer import Bucket, Finish, Pending, SumBucket, Waits, added
from autopart.runtime.gradients.shard_buckets import PartBucket, Stored, part_buckets

GATHERED_AHEAD = 2
"""How many buckets are gathered at a time where a step begins: each takes its whole twice until it has come."""


class Wholes:
    """The whole parameters of a program's stages on this rank; between calls they have no memory.

    `parameters`: {name: the whole}, for graphs to read. `parts`: {name: this rank's part}. `buckets`: of each stage, in
    the order of their use; `shared`: of parameters that several of the stages read. `sent`: {name: the tensor whose
    gradient becomes the whole one}, of parameters whose gradients a method brings together.
    """

    def __init__(
        self, program: Program, stages: Sequence[Stage], process: Process, parts: Mapping[str, Tensor],
        sent: Mapping[str, Tensor],
    ):  # fmt: skip
        check_sent_whole(program)
        read, mesh = held_whole(program, stages), program.mesh
        self.sent = sent
        self.parts = {name: parts[name] for name in read}
        self.each_microbatch = program.zero == 2
        self.under_way: deque[Pending] = deque()
        self.to_gather: deque[WholeBucket] = deque()
        self.parameters: dict[str, nn.Parameter] = {}
        self.buckets: list[list[WholeBucket]] = [[] for _ in stages]
        self.shared: list[WholeBucket] = []
        if not read:
            return
        orders = [in_order_of_use(stage.graph.graph, read) for stage in stages]
        uses = Counter(name for order in orders for name in order)
        several = [name for name, count in uses.items() if count > 1]
        rows = [*([name for name in order if uses[name] == 1] for order in orders), several]
        for names, buckets in zip(rows, [*self.buckets, self.shared], strict=True):
            whole = {name: program.parameters[name].whole_to_send(mesh) for name in names}
            axes = {name: (read[name].axis, *(whole[name] or program.parameters[name]).summed_over(mesh))
                    for name in names}  # fmt: skip
            for same in kinds(names, {name: (axes[name], whole[name] is None) for name in names}):
                group, *others = [process.beside(axis) for axis in axes[same[0]]]
                stored = [self._stored(name, read[name], group.size()) for name in same]
                for one in part_buckets(stored, group, BUCKET_BYTES, others):
                    buckets.append(WholeBucket(self, one) if whole[same[0]] is None else
                                   SentBucket(self, one, program.reduce_dtype))  # fmt: skip

    @property
    def all_buckets(self) -> list[WholeBucket]:
        return [bucket for buckets in (*self.buckets, self.shared) for bucket in buckets]

    def _stored(self, name: str, way: Way, ranks: int) -> Stored:
        """A parameter, whose whole is made, without memory."""
        part = self.parts[name]
        stored = Stored.of(name, part, way, ranks)
        if name in self.sent:  # as without ZeRO, where autograd adds gradients up in the dtype of their parameters
            stored = replace(stored, grad_dtype=part.dtype)
        empty = part.new_empty(stored.shape, dtype=stored.read_dtype)
        whole = self.parameters[name] = nn.Parameter(empty, requires_grad=part.requires_grad)
        whole.untyped_storage().resize_(0)
        return stored

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, the whole parameters have their values where graphs read them."""
        try:
            for name, whole in self.parameters.items():
                whole.requires_grad_(self.parts[name].requires_grad)
                whole.untyped_storage().resize_(whole.nbytes)
            with self.gathering():
                yield
        finally:
            for bucket in self.all_buckets:
                bucket.kept.clear()
            for whole in self.parameters.values():
                whole.grad = None
                whole.untyped_storage().resize_(0)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Inside, buckets are gathered, some ahead of the one that graphs read."""
        try:
            self.to_gather = deque(self.all_buckets)
            for _ in range(GATHERED_AHEAD):
                self.gather_next()
            yield
        finally:
            self.to_gather.clear()
            for bucket in self.all_buckets:
                bucket.be_there()

    def gather_next(self) -> None:
        """Begins to gather the first bucket that is not."""
        if self.to_gather:
            self.to_gather.popleft().gather()


class WholeBucket(Bucket):
    """Parameters that are gathered, and whose gradients are scattered, in one collective."""

    def __init__(self, wholes: Wholes, parts: PartBucket):
        self.wholes, self.parts, self.names, self.each = wholes, parts, parts.names, wholes.each_microbatch
        self.under_way = wholes.under_way
        self.wait: Callable[[], list[Tensor]] | None = None
        self.kept: dict[str, Tensor] = {}
        """{parameter: the sum of its gradients of earlier microbatches}, where it is computed in a lower precision than
        its gradients are summed in."""

    @torch.no_grad()
    def keep(self) -> None:
        """After a microbatch that is not the last: gradients that are summed in a higher precision are added up in
        it."""
        for one in self.parts.stored if not self.each else ():
            whole = self.wholes.parameters[one.name]
            if one.grad_dtype != one.read_dtype and (taken := _taken_gradient(whole)) is not None:
                grad = taken.to(one.grad_dtype)
                self.kept[one.name] = self.kept[one.name].add_(grad) if one.name in self.kept else grad

    @torch.no_grad()
    def gather(self) -> None:
        """Begins to give the wholes their values; in a differentiable call they are in memory of their own."""
        wholes = [self.wholes.parameters[name].detach() for name in self.names]
        parts = [self.wholes.parts[name] for name in self.names]
        self.wait = self.parts.gather(parts, wholes if self.pending is None else None)

    @torch.no_grad()
    def be_there(self) -> None:
        self.values(())

    def values(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The wholes, where they are read first."""
        while self in self.wholes.to_gather:
            self.wholes.gather_next()
        if self.wait is None:
            return []
        values, self.wait = self.wait(), None
        self.wholes.gather_next()
        return values

    def send(self, grads: Sequence[Tensor], present: Sequence[int]) -> Waits:
        return self.parts.scatter(grads, [self.parts.stored[i] for i in present], [None for _ in present])

    def differentiable_sums(self, grads: Sequence[Tensor], present: Sequence[int]) -> Sequence[Tensor]:
        return Scattered.apply(self.parts, present, *grads)

    @torch.no_grad()
    def begin(self, is_last: bool = True) -> Finish | None:
        """Begins to add the gradients of the wholes, summed, to those of the parts."""
        goes_on = is_last and bool(self.parts.others)
        present = [one for one in self.parts.stored
                   if self.wholes.parameters[one.name].grad is not None or one.name in self.kept
                   or (goes_on and self.wholes.parts[one.name].grad is not None)]  # fmt: skip
        if not present:
            return None
        earlier = [_taken_gradient(self.wholes.parts[one.name]) for one in present] if goes_on else None
        wait = self.parts.scatter([self._taken(one.name) for one in present], present, earlier)
        return added(wait, [self.wholes.parts[one.name] for one in present])

    def _taken(self, name: str) -> Tensor:
        """The gradient of a whole of all microbatches, which it has no longer."""
        whole, kept = self.wholes.parameters[name], self.kept.pop(name, None)
        grad = _taken_gradient(whole)
        if grad is None:
            return torch.zeros_like(whole) if kept is None else kept
        return grad if kept is None else kept.add_(grad)


class SentBucket(WholeBucket):
    """Parameters that are gathered in one collective, and whose whole gradients go to a method, summed over all other
    axes."""

    def __init__(self, wholes: Wholes, parts: PartBucket, reduce_dtype: torch.dtype | None):
        super().__init__(wholes, parts)
        self.sent = {name: wholes.sent[name] for name in self.names}
        self.sums = None
        if parts.others:
            self.sums = SumBucket(self.sent, parts.others, wholes.under_way, reduce_dtype)

    @torch.no_grad()
    def begin(self, is_last: bool = True) -> Finish | None:
        for one in self.parts.stored:
            if self.wholes.parameters[one.name].grad is not None or one.name in self.kept:
                self.sent[one.name].grad = self._share(one, self._taken(one.name))
        return None if self.sums is None else self.sums.begin(is_last)

    def send(self, grads: Sequence[Tensor], present: Sequence[int]) -> Waits:
        stored = [self.parts.stored[i] for i in present]
        shares = [self._share(one, grad) for one, grad in zip(stored, grads, strict=True)]
        copies = [share.clone() for share in shares] if self.sums is None else []  # autograd may use them elsewhere
        wait = self.sums.send(shares, present) if self.sums is not None else lambda: copies
        return added(wait, [self.sent[one.name] for one in stored])

    def differentiable_sums(self, grads: Sequence[Tensor], present: Sequence[int]) -> Sequence[Tensor]:
        raise AssertionError("refused where the backward begins: DataSync.watched")

    def _share(self, one: Stored, grad: Tensor) -> Tensor:
        """This rank's term of the sum that a gradient is: where all ranks have the sum, the first one's is it."""
        grad = grad.to(one.dtype)
        return grad if one.sums or self.parts.group.rank() == 0 else torch.zeros_like(grad)


def _taken_gradient(parameter: Tensor) -> Tensor | None:
    grad, parameter.grad = parameter.grad, None
    return grad
