"""DistributedDataParallel's communication hooks, run on the gradients of a partitioned model.

A hook is called `hook(state, bucket)` and gives a future of the bucket's new values (torch.distributed.GradBucket,
torch.distributed.algorithms.ddp_comm_hooks).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from autopart.errors import UsageError
from autopart.runtime.gradients.reducer import flatten, unflatten

Hook = Callable[..., Any]

NEEDS_DDP = ("optimizer_overlap_hooks", "ddp_zero_hook", "mixed_precision_hooks")
"""The modules of torch's hooks that reach into DistributedDataParallel itself."""


class Bucket:
    """What a hook is given of a bucket, as `torch.distributed.GradBucket`: gradients that are sent together."""

    def __init__(self, index: int, is_last: bool, parameters: Sequence[Tensor], gradients: Sequence[Tensor]):
        self._index, self._is_last, self._parameters = index, is_last, list(parameters)
        self._buffer = flatten(gradients)

    def index(self) -> int:
        """Its number, from 0."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last one of a step."""
        return self._is_last

    def buffer(self) -> Tensor:
        """All gradients, one behind the other: one dim."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Put another tensor in the buffer's place."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Views of the buffer in the shapes of the parameters."""
        return unflatten(self._buffer, self._parameters)

    def parameters(self) -> list[Tensor]:
        return self._parameters


def check_hook(hook: Any, state: Any) -> None:
    """Raises UsageError for what cannot be a hook of a partitioned model."""
    module = getattr(hook, "__module__", "") or ""
    if not callable(hook):
        raise UsageError(f"hook={hook!r} is not a function", hint="pm.register_comm_hook(state, hook), as of DDP")
    if module.rpartition(".")[2] in NEEDS_DDP:
        raise UsageError(
            f"the hook {getattr(hook, '__qualname__', hook)} reaches into DistributedDataParallel",
            why="a partitioned model has no reducer or bucket views of DDP to hand out",
            hint="a hook of gradients alone, as those of default_hooks and powerSGD_hook",
        )
    names = list(inspect.signature(hook).parameters)
    if len(names) != 2:
        raise UsageError(f"a hook with the arguments {', '.join(names) or '(none)'}",
                         why="it is called with a state and a bucket", hint="def hook(state, bucket): ...")  # fmt: skip


def in_group(state: Any, hook: Hook, group: dist.ProcessGroup) -> Any:
    """The state with which a hook runs among the data-parallel ranks, where it does not say whom it is for: a group of
    None stands for all ranks of the world."""
    first = next(iter(inspect.signature(hook).parameters), "")
    if state is None and first == "process_group":
        return group
    if hasattr(state, "process_group") and state.process_group is None:
        state.process_group = group
    return state


def run_hook(
    state: Any, hook: Hook, buckets: Sequence[Mapping[str, Tensor]], parameters: Mapping[str, Tensor], num_ranks: int
) -> dict[str, Tensor]:
    """{name: its new gradient} of buckets of {name: this rank's part of it}. A hook divides by the number of ranks, and
    is given so many times the part. One bucket waits for another: on gloo ranks would mix them up."""
    new_gradients: dict[str, Tensor] = {}
    for bucket in buckets:  # torch's own hooks cannot view a matrix of no elements
        new_gradients |= {name: gradient for name, gradient in bucket.items() if not gradient.numel()}
    filled = [{name: gradient for name, gradient in bucket.items() if gradient.numel()} for bucket in buckets]
    buckets = [bucket for bucket in filled if bucket]
    for index, bucket in enumerate(buckets):
        owners = [parameters[name] for name in bucket]
        hook_bucket = Bucket(
            index, index == len(buckets) - 1, owners, [gradient * num_ranks for gradient in bucket.values()]
        )
        future = hook(state, hook_bucket)
        values = future.wait() if hasattr(future, "wait") else future
        values = values[0] if isinstance(values, (list, tuple)) else values
        pieces = unflatten(values.view(-1), owners)
        new_gradients |= {
            name: piece.to(owner.dtype) for name, piece, owner in zip(bucket, pieces, owners, strict=True)
        }
    return new_gradients
