"""Collectives of the program, with plain `torch.distributed` calls.

Each function takes a tensor and the name of a mesh axis, such as "tp". Its docstring gives its forward; the table
`BACKWARD` gives the collective that its gradient needs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.extras.code_export.package_sharding import DimSharding

GROUPS: dict[str, dist.ProcessGroup] = {}
"""{mesh axis: process group of the ranks that differ from this rank only on the axis}."""
COORDINATES: dict[str, int] = {}
"""{mesh axis: index of this rank on the axis}."""


def device() -> torch.device:
    """Return the device on which this rank computes: its GPU with nccl, else the CPU."""
    is_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")


def connect(mesh: dict[str, int], axes: list[str]) -> None:
    """Create the process groups of this rank. The last axis of the mesh varies fastest with the rank.

    Args:
        mesh: {axis: number of ranks}.
        axes: axes to create groups for. `dp_cp` is the group of the ranks that differ on `dp` and `cp`.
    """
    names = list(mesh)
    everyone = list(product(*(range(size) for size in mesh.values())))
    mine = everyone[dist.get_rank()]
    COORDINATES.update(zip(names, mine, strict=True))
    for axis in axes:
        dims = [names.index(part) for part in axis.removesuffix(" backward").split("_")]
        lists: dict[Any, list[int]] = {}
        for rank, at in enumerate(everyone):
            lists.setdefault(tuple(i for dim, i in enumerate(at) if dim not in dims), []).append(rank)
        for ranks in lists.values():
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                GROUPS[axis] = group


def axis_index(axis: str) -> int:
    """Return the index of this rank on a mesh axis."""
    return COORDINATES[axis]


# --- What the collectives do: functions of a tensor, a process group, and the sharded dims.


def _identity(x: Tensor, group: dist.ProcessGroup, *dims: DimSharding) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _own(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.clone() if group.rank() == 0 else torch.zeros_like(x)


def _slice(x: Tensor, group: dist.ProcessGroup, dim: DimSharding) -> Tensor:
    return dim.take(x, group.rank())


def _pad(x: Tensor, group: dist.ProcessGroup, dim: DimSharding) -> Tensor:
    return dim.place(x, group.rank())


def _all_gather(x: Tensor, group: dist.ProcessGroup, dim: DimSharding) -> Tensor:
    shard = dim.padded(x)
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard, group=group)
    return dim.join([dim.trimmed(one, rank) for rank, one in enumerate(shards)])


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: DimSharding) -> Tensor:
    shards = torch.cat([dim.padded(dim.take(x, rank)) for rank in range(group.size())])
    mine = shards.new_empty(shards.size(0) // group.size(), *shards.shape[1:])
    # Newer versions of torch have another name for it.
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(mine, shards, group=group)
    return dim.trimmed(mine, group.rank()).contiguous()


def _all_to_all(x: Tensor, group: dist.ProcessGroup, source: DimSharding, target: DimSharding) -> Tensor:
    x = source.padded(x)
    sent = torch.cat([target.padded(target.take(x, rank)) for rank in range(group.size())])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    blocks = [source.trimmed(block, rank) for rank, block in enumerate(received.chunk(group.size()))]
    return source.join([target.trimmed(block, group.rank()) for block in blocks])


class _Collective(torch.autograd.Function):
    """Autograd function: one collective in forward, and one in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: Callable, backward: Callable,
        dims: tuple[DimSharding, ...], dtype: torch.dtype | None, grad_dtype: torch.dtype | None,
    ) -> Tensor:  # fmt: skip
        ctx.group, ctx.backward_of, ctx.dims = group, backward, dims
        ctx.dtype, ctx.grad_dtype = x.dtype, grad_dtype
        ctx.set_materialize_grads(False)
        result: Tensor = forward(x if dtype is None else x.to(dtype), group, *dims)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is not None:
            grad = grad if ctx.grad_dtype is None else grad.to(ctx.grad_dtype)
            grad = ctx.backward_of(grad, ctx.group, *reversed(ctx.dims)).to(ctx.dtype)
        return grad, None, None, None, None, None, None


BACKWARD = {
    "sum_grad": (_identity, _all_reduce),
    "own_grad": (_identity, _own),
    "own": (_own, _identity),
    "own_both": (_own, _own),
    "slice": (_slice, _all_gather),
    "slice_pad": (_slice, _pad),
    "all_gather": (_all_gather, _slice),
    "all_gather_sum": (_all_gather, _reduce_scatter),
    "all_reduce": (_all_reduce, _identity),
    "all_reduce_both": (_all_reduce, _all_reduce),
    "reduce_scatter": (_reduce_scatter, _all_gather),
    "all_to_all": (_all_to_all, _all_to_all),
}
"""{collective: (what its forward does, what its backward does)}."""


def _run(
    name: str, x: Tensor, axis: str, *dims: DimSharding, dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    result: Tensor = _Collective.apply(x, GROUPS[axis], *BACKWARD[name], dims, dtype, grad_dtype)
    return result


def _dim(x: Tensor, axis: str, dim: int, size: int, sections: tuple[int, ...] | list[int] = ()) -> DimSharding:
    return DimSharding(dim % x.ndim, size, tuple(sections), GROUPS[axis].size())


# --- The collectives that the stages call.


def sum_grad(x: Tensor, axis: str, **dtypes: Any) -> Tensor:
    """Return `x`. The gradient is all-reduced."""
    return _run("sum_grad", x, axis, **dtypes)


def own_grad(x: Tensor, axis: str, **dtypes: Any) -> Tensor:
    """Return `x`. Only the first rank of the axis gets the gradient."""
    return _run("own_grad", x, axis, **dtypes)


def own(x: Tensor, axis: str, **dtypes: Any) -> Tensor:
    """Return `x` on the first rank of the axis, and zeros on other ranks."""
    return _run("own", x, axis, **dtypes)


def own_both(x: Tensor, axis: str, **dtypes: Any) -> Tensor:
    """Return `x` on the first rank, and zeros on other ranks. The gradient is treated equally."""
    return _run("own_both", x, axis, **dtypes)


def all_reduce(x: Tensor, axis: str, **dtypes: Any) -> Tensor:
    """Sum over the axis."""
    return _run("all_reduce", x, axis, **dtypes)


def all_reduce_both(x: Tensor, axis: str, **dtypes: Any) -> Tensor:
    """Sum over the axis. The gradient is all-reduced, too."""
    return _run("all_reduce_both", x, axis, **dtypes)


def all_reduce_max(x: Tensor, axis: str) -> Tensor:
    """Return the maximum over the axis, without a gradient."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, dist.ReduceOp.MAX, group=GROUPS[axis])
    return x


def slice(x: Tensor, axis: str, dim: int, size: int, sections: Any = (), **dtypes: Any) -> Tensor:
    """Return this rank's shard of a replicated tensor. The gradient is all-gathered."""
    return _run("slice", x, axis, _dim(x, axis, dim, size, sections), **dtypes)


def slice_pad(x: Tensor, axis: str, dim: int, size: int, sections: Any = (), **dtypes: Any) -> Tensor:
    """Return this rank's shard of a replicated tensor. The gradient is zero in other shards."""
    return _run("slice_pad", x, axis, _dim(x, axis, dim, size, sections), **dtypes)


def all_gather(x: Tensor, axis: str, dim: int, size: int, sections: Any = (), **dtypes: Any) -> Tensor:
    """Return the full tensor, given this rank's shard. The gradient is sliced."""
    return _run("all_gather", x, axis, _dim(x, axis, dim, size, sections), **dtypes)


def all_gather_sum(x: Tensor, axis: str, dim: int, size: int, sections: Any = (), **dtypes: Any) -> Tensor:
    """Return the full tensor, given this rank's shard. The gradient is reduce-scattered."""
    return _run("all_gather_sum", x, axis, _dim(x, axis, dim, size, sections), **dtypes)


def reduce_scatter(x: Tensor, axis: str, dim: int, size: int, sections: Any = (), **dtypes: Any) -> Tensor:
    """Sum over the axis and return this rank's shard. The gradient is all-gathered."""
    return _run("reduce_scatter", x, axis, _dim(x, axis, dim, size, sections), **dtypes)


def all_to_all(
    x: Tensor, axis: str, source_dim: int, target_dim: int, source_sections: Any = (), target_sections: Any = (),
    **dtypes: Any,
) -> Tensor:  # fmt: skip
    """Return a tensor that is sharded along `target_dim`, given one that is sharded along `source_dim`."""
    source = _dim(x, axis, source_dim, x.size(source_dim) * GROUPS[axis].size(), source_sections)
    target = _dim(x, axis, target_dim, x.size(target_dim), target_sections)
    return _run("all_to_all", x, axis, source, target, **dtypes)
