"""Gradients are summed over ranks while the backward still runs: a bucket at a time, as soon as it is complete.

A stage's buckets are in the order in which its backward completes them, the last block first. What tells that a
gradient has come is a hook on the node of autograd that adds it to `.grad`. Buckets begin in their order, whatever order
their gradients come in, so that all ranks send the same ones to each other (Li et al. 2020, arXiv:2006.15704, section
3.2.3). Where a schedule runs the weights' part of a backward by itself, no such node runs: a bucket begins when that
part ends.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.runtime.comm.watch import sum_over, watching

IN_FLIGHT = 2
"""How many buckets are sent at a time: each holds a copy of its gradients."""

Finish = Callable[[], None]


class Bucket(Protocol):
    """Gradients that are summed in one collective. `each`: after every microbatch, and not once a step."""

    names: tuple[str, ...]
    each: bool

    def begin(self) -> Finish | None:
        """Begins to sum the gradients that are there, and gives what waits for the sums and puts them in their place;
        None where there are none."""


class SumBucket:
    """Gradients of whole parameters, summed in place, over one group after the other."""

    each = False

    def __init__(self, parameters: Mapping[str, Tensor], groups: Sequence[dist.ProcessGroup]):
        self.names, self.parameters, self.groups = tuple(parameters), parameters, groups

    @torch.no_grad()
    def begin(self) -> Finish | None:
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not grads:
            return None
        alone = len(grads) == 1 and grads[0].is_contiguous()
        flat = grads[0] if alone else torch.cat([grad.reshape(-1) for grad in grads])
        first, *others = self.groups
        with watching(first.group_name):
            work = dist.all_reduce(flat, group=first, async_op=True)

        @torch.no_grad()
        def finish() -> None:
            with watching(first.group_name):
                work.wait()
            for group in others:
                sum_over(group, flat)
            if not alone:
                for grad, piece in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                    grad.copy_(piece.view(grad.shape))

        return finish


class Reducer:
    """Sums the gradients of a stage's parameters while its backwards run.

    Args:
        buckets: in the order in which a backward completes them.
        leaves: {name: the tensor that autograd adds the gradient to}.
        microbatches: how many backwards a step has.
    """

    def __init__(self, buckets: Sequence[Bucket], leaves: Mapping[str, Tensor], microbatches: int):
        self.buckets, self.leaves, self.microbatches = buckets, leaves, microbatches
        self.nodes: dict[str, Any] = {}
        self.is_armed = False
        self.missing: list[int] = []
        self.next = self.backwards = 0
        self.begun: deque[Finish] = deque()

    def arm(self) -> None:
        """A step begins."""
        self.abandon()
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
        finish = bucket.begin() if bucket.each or self.backwards >= self.microbatches - 1 else None
        if finish is not None:
            self.begun.append(finish)
        while len(self.begun) > IN_FLIGHT:
            self.begun.popleft()()

    def _begin_rest(self) -> None:
        while self.next < len(self.buckets):
            self._begin_next()

    def after_backward(self) -> None:
        """A microbatch's backward has ended."""
        if self.is_armed:
            self._begin_rest()
            self.backwards += 1
            if self.backwards < self.microbatches:
                self._begin_microbatch()

    def finish(self) -> None:
        """Waits for all sums. The step has no more backwards."""
        while self.begun:
            self.begun.popleft()()
        self.is_armed = False

    def abandon(self) -> None:
        """A step has failed."""
        self.is_armed = False
        self.begun.clear()
