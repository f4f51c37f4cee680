"""Launch the reduction of each bucket as soon as a step's backwards have completed its gradients.

The buckets of a stage are sorted by the order in which the backward completes them, so the last block comes first.
Hooks on autograd's accumulation nodes signal that a gradient is ready. Buckets are always launched in sorted order, so
all ranks launch their collectives in one order (Li et al. 2020, arXiv:2006.15704, section 3.2.3). If a schedule runs
the weight backward separately (zero-bubble), autograd runs no accumulation nodes. All buckets are then launched when
the weight backward ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from autopart.runtime.gradients.param_bucket import ParamBucket
from autopart.runtime.gradients.reductions import ReductionQueue


class Reducer:
    """Launches the gradient reductions of one stage during a step.

    Args:
        buckets: buckets of the stage, in the order in which a backward completes their gradients.
        queue: reductions in flight on this rank.
        microbatches: backwards per step.
        splits_backward: True if the schedule runs the weight backward separately (zero-bubble), one weight after the
            other.
        shared: buckets whose parameters other stages of this rank use too.
        shard_reduce_axes: {ZeRO-3 parameter: axes over which the gradient of its shard is all-reduced, once per step}.
    """

    def __init__(
        self, buckets: Sequence[ParamBucket], queue: ReductionQueue, microbatches: int, splits_backward: bool = False,
        shared: Sequence[ParamBucket] = (), shard_reduce_axes: Mapping[str, tuple[str, ...]] | None = None,
    ):  # fmt: skip
        self.buckets, self.queue, self.microbatches, self.shared = buckets, queue, microbatches, shared
        self.splits_backward, self.shard_reduce_axes = splits_backward, shard_reduce_axes or {}
        self.nodes: dict[str, Any] = {}
        self.is_armed = False
        self.missing: list[int] = []
        self.next = self.backwards = 0
        self.completed: set[str] = set()
        """Shards whose gradients of earlier microbatches are part of a reduction that is complete or in flight."""

    @property
    def is_last(self) -> bool:
        """True if the current backward is the last one of the step."""
        return self.backwards >= self.microbatches - 1

    def take_earlier(self, name: str, shard: Tensor) -> Tensor | None:
        """Return the gradient of a shard from earlier microbatches, which is in `.grad`, and reset `.grad`.

        It is called in the last backward of a step. A second call for a shard in one step returns None.
        """
        if name in self.completed:
            return None
        self.completed.add(name)
        earlier, shard.grad = shard.grad, None
        return earlier

    def arm(self) -> None:
        """Begin a step: from now on, hooks on gradients launch reductions."""
        for index, bucket in enumerate(self.buckets):
            for name, leaf in zip(bucket.names, bucket.leaves, strict=True):
                if name not in self.nodes and leaf.requires_grad:
                    self._add_hook(index, name, leaf)
        self.is_armed, self.backwards = True, 0
        self._begin_microbatch()

    def disarm(self) -> None:
        """End a step: hooks launch no reductions until the next `arm`."""
        self.is_armed = False
        self.completed.clear()

    def _add_hook(self, index: int, name: str, leaf: Tensor) -> None:
        """Add a hook to the autograd node that accumulates the gradient of a parameter.

        The hook has only a weak reference to this reducer, so that the reducer can be freed.
        """
        on_gradient = weakref.WeakMethod(self._on_gradient)
        view: Any = leaf.view_as(leaf).grad_fn
        node = self.nodes[name] = view.next_functions[0][0]

        def hook(*_: Any) -> None:
            method = on_gradient()
            if method is not None:
                method(index)

        node.register_hook(hook)

    def _begin_microbatch(self) -> None:
        self.next = 0
        self.missing = [sum(leaf.requires_grad for leaf in bucket.leaves) for bucket in self.buckets]

    def _on_gradient(self, index: int) -> None:
        if self.is_armed:
            self.missing[index] -= 1
            while self.next < len(self.buckets) and self.missing[self.next] <= 0:
                self._begin_next()

    def _begin_next(self) -> None:
        bucket = self.buckets[self.next]
        self.next += 1
        if bucket.each_microbatch or self.is_last:
            bucket.reduce_accumulated(self.is_last)

    def after_backward(self) -> None:
        """Launch the remaining buckets at the end of a microbatch's backward."""
        if self.is_armed:
            while self.next < len(self.buckets):
                self._begin_next()
            self.backwards += 1
            is_finished = self.backwards == self.microbatches
            for bucket in (*self.shared, *(() if is_finished else self.buckets)):
                bucket.accumulate()
            if not is_finished:
                self._begin_microbatch()
