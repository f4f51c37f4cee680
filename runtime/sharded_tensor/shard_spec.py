"""Sharding of a tensor (like DTensor's `spec`), and differentiable collectives.

A value that is computed from sharded tensors is either sharded like the tensors or replicated. Every rank computes an
equal loss, so the gradient of a replicated value is replicated too. This rule determines the backward of each
collective in this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopart.ir.sharding import DimSharding
from autopart.runtime.comm.collectives import PRIMITIVES
from autopart.runtime.comm.process_mesh import Process, of_all_stages


@dataclass(frozen=True)
class DimShard:
    """Split of a dim over the ranks of a mesh axis, with the index of this rank's shard."""

    axis: str
    cut: DimSharding
    index: int

    @property
    def dim(self) -> int:
        return self.cut.dim

    def on_dim(self, dim: int) -> DimShard:
        return replace(self, cut=replace(self.cut, dim=dim))

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that is equal for two splits if they give each rank the same elements of the dim."""
        return self.axis, self.cut.size, self.cut.sections, self.cut.num_shards


@dataclass(frozen=True)
class ShardSpec:
    """Full shape of a tensor, and the splits that give this rank's shard.

    Attributes:
        name: name of the parameter, or of the parameter from which the value was computed.
        shards: splits, outer mesh axis first. Empty if the rank stores the full tensor. Under `pp`, such a tensor
            has a spec too, because other stages do not store it.
        is_derived: True for a value computed, under `pp`, from the full parameter. It must not be combined with values
            of other parameters, because this rank lacks the parameters of other stages.
    """

    name: str
    shape: tuple[int, ...]
    shards: tuple[DimShard, ...]
    process: Process
    is_derived: bool = False

    @property
    def axes(self) -> set[str]:
        return {shard.axis for shard in self.shards}

    @property
    def local_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        for shard in self.shards:
            shape[shard.dim] = shard.cut.length(shard.index)
        return tuple(shape)

    @property
    def has_empty_shards(self) -> bool:
        """True on all ranks if any rank has an empty shard of the tensor."""
        return any(shard.cut.length(index) == 0 for shard in self.shards for index in range(shard.cut.num_shards))

    def of_dim(self, dim: int) -> tuple[DimShard, ...]:
        return tuple(shard for shard in self.shards if shard.dim == dim)

    def numel(self) -> int:
        return math.prod(self.shape)

    def permuted(self, dims: Sequence[int]) -> ShardSpec:
        """Return the spec of `tensor.permute(dims)`."""
        shape = tuple(self.shape[dim] for dim in dims)
        return replace(self, shape=shape, shards=tuple(s.on_dim(list(dims).index(s.dim)) for s in self.shards))

    def reduced(self, dims: Sequence[int], keepdim: bool) -> ShardSpec:
        """Return the spec of the result of a reduction over `dims`."""
        kept_dims = [dim for dim in range(len(self.shape)) if dim not in dims]
        shards = [shard for shard in self.shards if shard.dim in kept_dims]
        if keepdim:
            shape = tuple(1 if dim in dims else size for dim, size in enumerate(self.shape))
            return replace(self, shape=shape, shards=tuple(shards))
        shape = tuple(self.shape[dim] for dim in kept_dims)
        return replace(self, shape=shape, shards=tuple(shard.on_dim(kept_dims.index(shard.dim)) for shard in shards))

    def take(self, full: Tensor) -> Tensor:
        """Return this rank's shard of a full tensor, or of a tensor that broadcasts to the full shape."""
        offset = len(self.shape) - full.ndim
        for shard in self.shards:
            dim = shard.dim - offset
            if dim >= 0 and full.size(dim) != 1:
                full = replace(shard.cut, dim=dim).take(full, shard.index)
        return full

    def gather(self, local: Tensor) -> Tensor:
        """Gather the full tensor on every rank. A differentiable collective call."""
        for shard in reversed(self.shards):
            with reported(self.process, self.name):
                local = _Gather.apply(local, shard, self.process)
        return local

    def partial_gradient(self, value: Tensor, axes: set[str]) -> Tensor:
        """Return `value` unchanged, and all-reduce its gradient over `axes` in backward.

        It serves if ranks along `axes` combine a replicated value with different shards of another tensor: each rank
        then computes only a part of the value's gradient.
        """
        if value.requires_grad and torch.is_grad_enabled():
            for axis in sorted(axes):
                value = _ReduceGradient.apply(value, axis, self)
        return value

    def combine(self, local: Tensor, axes: Sequence[str], reduce: Callable[[Tensor], Tensor]) -> Tensor:
        """Reduce the local values of all ranks along each axis in `axes`, one axis after the other.

        Args:
            reduce: function that reduces a stack of the ranks' values over dim 0.
        """
        for axis in axes:
            local = reduce(_StackRanks.apply(local, axis, self))
        return local


def total_over_stages(total: Tensor | None, process: Process) -> Tensor:
    """Return, on every rank, the sum of the totals of all pipeline stages. The sum is differentiable.

    A stage's total depends only on the stage's parameters, so backward needs no reduction.

    Args:
        total: this stage's total; None if the stage has no total.
    """
    if "pp" not in process.groups:
        return torch.zeros((), device=process.device) if total is None else total
    dtypes = of_all_stages(None if total is None else total.dtype, process)
    dtype = next((dtype for dtype in dtypes if dtype is not None), torch.float32)
    local_total = torch.zeros((), dtype=dtype, device=process.device) if total is None else total.to(dtype)
    return ShardSpec("", (), (), process).combine(local_total, ["pp"], lambda stack: stack.sum(0))


@contextmanager
def reported(process: Process, name: str) -> Iterator[None]:
    """Context manager: if a collective in it hangs, the watchdog's error names parameter `name`."""
    with nullcontext() if process.watch is None else process.watch.inside(f"an operation on parameter '{name}'"):
        yield


def _on_wire(x: Tensor, process: Process, send: Callable[[Tensor], Tensor]) -> Tensor:
    """Run the collective `send` on the rank's device and in a dtype that every backend supports.

    Returns the result in the dtype and on the device of `x`.
    """
    if x.is_complex():
        return torch.view_as_complex(_on_wire(torch.view_as_real(x), process, send).contiguous())
    sent = x.to(process.device, {torch.bool: torch.uint8, torch.int16: torch.int32}.get(x.dtype, x.dtype))
    return send(sent).to(x.device, x.dtype)


class _Gather(torch.autograd.Function):
    """Autograd function: all-gather over one mesh axis. Backward takes this rank's shard of the gradient.

    Backward needs no reduction, because the gradient is replicated.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, shard: DimShard, process: Process) -> Tensor:
        ctx.shard, ctx.process = shard, process
        group = process.along(shard.axis).group_name
        return _on_wire(local, process, lambda x: PRIMITIVES["all_gather"](x, group, shard.cut))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Take.apply(grad, ctx.shard, ctx.process), None, None


class _Take(torch.autograd.Function):
    """Autograd function: take this rank's shard of a replicated value. Backward all-gathers the gradients."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, shard: DimShard, process: Process) -> Tensor:
        ctx.shard, ctx.process = shard, process
        return shard.cut.take(full, shard.index).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Gather.apply(grad.contiguous(), ctx.shard, ctx.process), None, None


class _StackRanks(torch.autograd.Function):
    """Autograd function: stack the values of all ranks of an axis. Backward takes this rank's entry."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, axis: str, spec: ShardSpec) -> Tensor:
        ctx.axis, ctx.spec = axis, spec
        group, size = spec.process.along(axis).group_name, spec.process.mesh.size(axis)
        with reported(spec.process, spec.name):
            cut = DimSharding(0, size, (), size)
            return _on_wire(local.unsqueeze(0), spec.process, lambda x: PRIMITIVES["all_gather"](x, group, cut))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _UnstackRanks.apply(grad, ctx.axis, ctx.spec), None, None


class _UnstackRanks(torch.autograd.Function):
    """Autograd function: select this rank's entry of stacked values. Backward stacks all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, stacked: Tensor, axis: str, spec: ShardSpec) -> Tensor:
        ctx.axis, ctx.spec = axis, spec
        process = spec.process
        return stacked[process.mesh.index(process.coordinates, axis)].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _StackRanks.apply(grad.contiguous(), ctx.axis, ctx.spec), None, None


class _ReduceGradient(torch.autograd.Function):
    """Autograd function: identity in forward. Backward all-reduces the gradient over an axis."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: str, spec: ShardSpec) -> Tensor:
        ctx.axis, ctx.spec = axis, spec
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _StackRanks.apply(grad.contiguous(), ctx.axis, ctx.spec).sum(0), None, None
