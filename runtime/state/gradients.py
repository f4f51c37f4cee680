"""Gradient synchronisation, once a step: partial sums over mesh axes, and tied parameters between their stages.

Gradients are summed in flat buckets, so that many small tensors cost one collective; Li et al. 2020
(arXiv:2006.15704, section 3.2.2) has the reasons and the default size. A bucket holds one dtype and one set of axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.ir.program import Program
from autopart.runtime.comm.processes import Process
from autopart.runtime.comm.stage_ranks import groups_along, owners
from autopart.runtime.comm.watch import sum_over

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Bucket:
    """Tensors that are summed in one collective per axis. `owners`: the `pp` coordinates that share them, if tied."""

    names: tuple[str, ...]
    axes: tuple[str, ...] = ()
    owners: tuple[int, ...] = ()


def axis_buckets(tensors: Mapping[str, Tensor], program: Program, bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """The buckets of those `tensors` whose gradients end as partial sums, in their order."""
    keyed = [(program.parameters[name].grad_axes, name) for name in tensors]
    axes = [(tuple(a for a in grad_axes if program.mesh.size(a) > 1), name) for grad_axes, name in keyed]
    chunks = _chunks([(key, name) for key, name in axes if key], tensors, bucket_bytes)
    return [Bucket(names, axes=key) for key, names in chunks]


def tied_buckets(
    tensors: Mapping[str, Tensor], program: Program, stage_style: str, bucket_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """The buckets of those `tensors` that several `pp` coordinates hold, in the program's order on every rank."""
    keyed = [(tuple(sorted(owners(program, stored, stage_style))), name) for name, stored in program.parameters.items()]
    shared = [(key, name) for key, name in keyed if len(key) > 1 and name in tensors]
    return [Bucket(names, owners=key) for key, names in _chunks(shared, tensors, bucket_bytes)]


def _chunks(
    keyed: Iterable[tuple[Any, str]], tensors: Mapping[str, Tensor], bucket_bytes: int
) -> list[tuple[Any, tuple[str, ...]]]:
    """Names by key and dtype, each row cut where it would pass `bucket_bytes`."""
    rows: dict[tuple[Any, torch.dtype], list[list[str]]] = {}
    sizes: dict[tuple[Any, torch.dtype], int] = {}
    for key, name in keyed:
        kind = (key, tensors[name].dtype)
        size_bytes = tensors[name].nbytes
        if kind not in rows or sizes[kind] + size_bytes > bucket_bytes:
            rows.setdefault(kind, []).append([])
            sizes[kind] = 0
        rows[kind][-1].append(name)
        sizes[kind] += size_bytes
    return [(key, tuple(names)) for (key, _), buckets in rows.items() for names in buckets]


def flatten(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """One vector of all elements, a copy; `dtype`: in another than theirs."""
    if dtype in (None, tensors[0].dtype):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype, device=tensors[0].device)
    for tensor, piece in zip(tensors, unflatten(flat, tensors), strict=True):
        piece.copy_(tensor)  # without a second copy of all
    return flat


def _sent_dtype(program: Program, grad: Tensor) -> torch.dtype:
    """What a gradient is summed in: its own dtype, or that of the program's mixed precision."""
    return program.reduce_dtype if program.reduce_dtype is not None and grad.is_floating_point() else grad.dtype


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `flatten`: views of `flat` in the shapes of `like`."""
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


# --- On process groups.


def sync_gradients(parameters: Mapping[str, Tensor], program: Program, process: Process, stage_style: str) -> None:
    """Completes every `.grad` of this rank's `parameters` ({name: local parameter}), in place."""
    with_grad = {name: parameter for name, parameter in parameters.items() if parameter.grad is not None}
    for bucket in axis_buckets(with_grad, program):
        _sum_bucket(parameters, program, bucket, [process.groups[axis] for axis in bucket.axes])
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    for bucket in tied_buckets(trained, program, stage_style):
        _sum_bucket(parameters, program, bucket, [process.owner_groups[bucket.owners]])


def summed_names(tensors: Mapping[str, Tensor], program: Program, stage_style: str) -> frozenset[str]:
    """Those of the `tensors` ({name: local parameter}) whose gradients ranks sum once a step."""
    buckets = (*axis_buckets(tensors, program), *tied_buckets(tensors, program, stage_style))
    return frozenset(name for bucket in buckets for name in bucket.names)


def connect_tied(program: Program, process: Process, stage_style: str) -> None:
    """Makes the process groups that tied parameters need. Every rank calls this with the same program."""
    found = {tuple(sorted(owners(program, stored, stage_style))) for stored in program.parameters.values()}
    for key in sorted(key for key in found if len(key) > 1):
        process.connect_owners(key)


def _sum_bucket(
    parameters: Mapping[str, Tensor], program: Program, bucket: Bucket, groups: Sequence[dist.ProcessGroup]
) -> None:
    """Sums in place; a gradient that is alone in its bucket is not copied."""
    grads = [_gradient(parameters[name]) for name in bucket.names]
    dtype = _sent_dtype(program, grads[0])
    alone = len(grads) == 1 and grads[0].is_contiguous() and grads[0].dtype == dtype
    flat = grads[0] if alone else flatten(grads, dtype)
    for group in groups:
        dist.all_reduce(flat, group=group)
    if not alone:
        for grad, piece in zip(grads, unflatten(flat, grads), strict=True):
            grad.copy_(piece)


def _gradient(parameter: Tensor) -> Tensor:
    """Its gradient; zeros where this stage's part of a tied parameter got none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class _SumGradients(torch.autograd.Function):
    """Identity forward; backward sums the gradients of all its tensors over the groups, in one flat vector."""

    @staticmethod
    def forward(
        ctx: Any, groups: Sequence[dist.ProcessGroup], program: Program, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.groups, ctx.program = groups, program
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [grad for grad in grads if grad is not None]
        if not present:
            return None, None, *grads
        flat = flatten(present, _sent_dtype(ctx.program, present[0]))
        for group in ctx.groups:
            sum_over(group, flat)
        pieces = iter(unflatten(flat, present))
        return None, None, *(None if grad is None else next(pieces).to(grad.dtype) for grad in grads)


def synchronised(parameters: Mapping[str, Tensor], program: Program, process: Process) -> dict[str, Tensor]:
    """Stand-ins for the parameters whose gradients end as partial sums, for one forward pass: their gradients are
    complete when backward has run.

    Each backward adds its own complete gradient to `.grad`, so accumulation over several calls stays right.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    wrapped: dict[str, Tensor] = {}
    for bucket in axis_buckets(trained, program):
        groups = [process.groups[axis] for axis in bucket.axes]
        members = _SumGradients.apply(groups, program, *(parameters[name] for name in bucket.names))
        wrapped.update(zip(bucket.names, members, strict=True))
    return wrapped


# --- On lists of tensors, for the run of all ranks in one process.


def sync_gradients_lockstep(
    parameters: Mapping[int, Mapping[str, Tensor]],
    program: Program,
    *,
    stage_style: str = "loop",
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """What `sync_gradients` does, for all ranks in one process: {rank: {name: local parameter}}, in place."""
    mesh = program.mesh
    by_stage: dict[int, list[int]] = {}
    for rank in parameters:
        by_stage.setdefault(mesh.coordinates(rank).get("pp", 0), []).append(rank)
    for ranks in by_stage.values():
        with_grad = {name: p for name, p in parameters[ranks[0]].items() if p.grad is not None}
        for bucket in axis_buckets(with_grad, program, bucket_bytes):
            for axis in bucket.axes:
                for group in groups_along(mesh, ranks, axis):
                    _sum_bucket_list([parameters[rank] for rank in group], program, bucket)
    for column in groups_along(mesh, list(parameters), "pp"):
        trained = {name: p for rank in column for name, p in parameters[rank].items() if p.requires_grad}
        for bucket in tied_buckets(trained, program, stage_style, bucket_bytes):
            group = [rank for rank in column if mesh.coordinates(rank)["pp"] in bucket.owners]
            _sum_bucket_list([parameters[rank] for rank in group], program, bucket)


def _sum_bucket_list(group: Sequence[Mapping[str, Tensor]], program: Program, bucket: Bucket) -> None:
    grads = [[_gradient(local[name]) for name in bucket.names] for local in group]
    dtype = _sent_dtype(program, grads[0][0])
    flat = torch.stack([flatten(row, dtype) for row in grads]).sum(0)
    for row in grads:
        for grad, piece in zip(row, unflatten(flat, row), strict=True):
            grad.copy_(piece)
