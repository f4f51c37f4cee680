"""DDP communication hooks on the gradients of a partitioned model.

A hook is called as `hook(state, bucket)` and returns a future of the bucket's new values (torch.distributed.GradBucket,
torch.distributed.algorithms.ddp_comm_hooks).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from autopart.errors import OptionError, UsageError
from autopart.ir.layout import mesh_axes_of
from autopart.ir.program import Program
from autopart.runtime.gradients.reductions import flatten, unflatten

Hook = Callable[..., Any]

NEEDS_DDP = ("optimizer_overlap_hooks", "ddp_zero_hook", "mixed_precision_hooks")
"""Modules of torch's hooks that access internals of DistributedDataParallel."""


class HookBucket:
    """Gradients that one hook call reduces, with the interface of `torch.distributed.GradBucket`."""

    def __init__(self, index: int, is_last: bool, parameters: Sequence[Tensor], gradients: Sequence[Tensor]):
        self._index, self._is_last, self._parameters = index, is_last, list(parameters)
        self._buffer = flatten(gradients)

    def index(self) -> int:
        """Return the number of this bucket in the step, from 0."""
        return self._index

    def is_last(self) -> bool:
        """Return True for the last bucket of a step."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return all gradients as one vector: flattened and concatenated."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the buffer."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Return views of the buffer in the shapes of the parameters."""
        return unflatten(self._buffer, self._parameters)

    def parameters(self) -> list[Tensor]:
        return self._parameters


def check_hook(hook: Any) -> None:
    """Raise UsageError for a hook that a partitioned model cannot run."""
    module = getattr(hook, "__module__", "") or ""
    if not callable(hook):
        raise UsageError(f"hook={hook!r} is not a function", hint="pm.register_comm_hook(state, hook), as in DDP")
    if module.rpartition(".")[2] in NEEDS_DDP:
        raise UsageError(
            f"the hook {getattr(hook, '__qualname__', hook)} needs DistributedDataParallel",
            why="it accesses DDP's reducer or bucket views, which a partitioned model does not have",
            hint="a hook that only reads and writes gradients, as in default_hooks and powerSGD_hook",
        )
    names = list(inspect.signature(hook).parameters)
    if len(names) != 2:
        raise UsageError(
            f"the communication hook takes the arguments {', '.join(names) or '(none)'}",
            why="it must take two arguments: a state and a bucket", hint="def hook(state, bucket): ...",
        )  # fmt: skip


def check_hookable(program: Program) -> None:
    """Raise OptionError or UsageError for a program whose gradients a hook cannot reduce."""
    if not program.dp_sync.is_default:
        raise OptionError(
            f"a communication hook cannot be combined with dp_sync='{program.dp_sync}'", hint="use one of the two",
            why="both define what data-parallel ranks send each other",
        )  # fmt: skip
    axis = next(iter(program.mesh.along("rows")), "")
    if not axis:
        raise UsageError(
            "a communication hook needs data-parallel ranks", why=f"the mesh {program.mesh} has none",
            hint="a mesh with the axis dp, such as 'dp2'",
        )  # fmt: skip
    zero_axis_of = {name: program.mesh.stored_over(stored.layout) for name, stored in program.parameters.items()}
    sharded = [name for name, axes in zero_axis_of.items() if axes is not None and axis in mesh_axes_of(axes)]
    if sharded:
        raise OptionError(
            f"a communication hook cannot be combined with parameters sharded over {axis}",
            why=f"the gradient of '{sharded[0]}' is reduce-scattered",
            hint="zero=0, or a mesh such as 'dpr2,dp2': parameters are sharded over dp, and the hook reduces over dpr",
        )


def in_group(state: Any, hook: Hook, group: dist.ProcessGroup) -> Any:
    """Return the hook's state. If its process group is None, set it to the data-parallel group.

    DDP hooks interpret None as the group of all ranks, which would be wrong on a mesh.
    """
    first = next(iter(inspect.signature(hook).parameters), "")
    if state is None and first == "process_group":
        return group
    if hasattr(state, "process_group") and state.process_group is None:
        state.process_group = group
    return state


def run_hook(
    state: Any, hook: Hook, buckets: Sequence[Mapping[str, Tensor]], parameters: Mapping[str, Tensor], num_ranks: int
) -> dict[str, Tensor]:
    """Run the hook on every bucket, and return {name: new gradient}.

    Hooks compute the mean over ranks, but the sum of the partial gradients is needed. They therefore get `num_ranks`
    times the partial gradient. Buckets run one at a time, because gloo could mix up concurrent collectives of different
    buckets.

    Args:
        state, hook: the user's hook, and the state that it is called with.
        buckets: {name: this rank's partial gradient} of each bucket.
        parameters: {name: parameter}.
        num_ranks: data-parallel size.
    """
    new_gradients: dict[str, Tensor] = {}
    for bucket in buckets:  # torch's own hooks cannot view an empty matrix
        new_gradients |= {name: gradient for name, gradient in bucket.items() if not gradient.numel()}
    filled = [{name: gradient for name, gradient in bucket.items() if gradient.numel()} for bucket in buckets]
    buckets = [bucket for bucket in filled if bucket]
    for index, bucket in enumerate(buckets):
        owners = [parameters[name] for name in bucket]
        hook_bucket = HookBucket(
            index, index == len(buckets) - 1, owners, [gradient * num_ranks for gradient in bucket.values()]
        )
        future = hook(state, hook_bucket)
        values = future.wait() if hasattr(future, "wait") else future
        values = values[0] if isinstance(values, (list, tuple)) else values
        chunks = unflatten(values.view(-1), owners)
        new_gradients |= {
            name: piece.to(owner.dtype) for name, piece, owner in zip(bucket, chunks, owners, strict=True)
        }
    return new_gradients
