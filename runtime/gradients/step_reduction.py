"""Gradient reductions once per step: over mesh axes, and between stages for tied parameters.

Gradients are all-reduced in flat buckets, so that many small tensors need only one collective. Li et al. 2020
(arXiv:2006.15704, section 3.2.2) give the reasons and the default size. All gradients of a bucket have one dtype and
are reduced over one set of axes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.ir.program import Program, Stage
from autopart.ir.run.buckets import ALONE_BYTES, BUCKET_BYTES, bucket_by_kind, bucketed, by_first_use, kinds
from autopart.ir.run.unshard_policy import storing_axes
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.comm.stage_ranks import groups_along, owners
from autopart.runtime.gradients.param_bucket import ParamBucket
from autopart.runtime.gradients.reducer import Reducer
from autopart.runtime.gradients.reductions import AllReduceStrategy, ReductionQueue, flatten, sent_dtype, unflatten
from autopart.runtime.gradients.unsharded_params import UnshardedParams
from autopart.runtime.shards.shard_state import flattened_axes

if TYPE_CHECKING:
    from autopart.runtime.gradients.no_sync import NoSync


@dataclass(frozen=True)
class AllReduceGroup:
    """Bucket of tensors that are all-reduced together, in one collective per axis.

    Attributes:
        names: names of the tensors.
        axes: mesh axes over which the tensors are reduced.
        owners: for tensors that are tied between stages, the `pp` coordinates that store them.
    """

    names: tuple[str, ...]
    axes: tuple[str, ...] = ()
    owners: tuple[int, ...] = ()


def axis_buckets(
    tensors: Mapping[str, Tensor], program: Program, bucket_bytes: int = BUCKET_BYTES
) -> list[AllReduceGroup]:
    """Return buckets of the tensors whose gradients are partial sums over mesh axes."""
    axes = {name: program.parameters[name].reduced_over(program.mesh) for name in tensors}
    partial = {name: tensor for name, tensor in tensors.items() if axes[name]}
    return [AllReduceGroup(names, axes=axes[names[0]]) for names in bucket_by_kind(partial, axes, bucket_bytes)]


def tied_buckets(
    tensors: Mapping[str, Tensor], program: Program, stage_style: str, bucket_bytes: int = BUCKET_BYTES
) -> list[AllReduceGroup]:
    """Return buckets of the tensors that several pipeline stages store (tied tensors)."""
    tied = {name: stored for name, stored in program.parameters.items() if len(stored.stages) > 1}
    owners_of = {name: tuple(sorted(owners(program, stored, stage_style))) for name, stored in tied.items()}
    shared = {name: tensors[name] for name, owner_list in owners_of.items() if len(owner_list) > 1 and name in tensors}
    return [
        AllReduceGroup(names, owners=owners_of[names[0]]) for names in bucket_by_kind(shared, owners_of, bucket_bytes)
    ]


def accumulate_earlier(before: Mapping[Tensor, Tensor | None]) -> None:
    """Add to `.grad` the gradients that parameters had before a step.

    `before`: {parameter: gradient before the step}.
    """
    for parameter, earlier in before.items():
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)


# --- With process groups.


def stage_reducers(
    program: Program,
    stages: Sequence[Stage],
    process: Process,
    parameters: Mapping[str, Tensor],
    unsharded: UnshardedParams,
    unreduced: NoSync,
    queue: ReductionQueue,
    splits_backward: bool,
) -> tuple[list[Reducer], list[ParamBucket]]:
    """Return (reducer of each stage, buckets of parameters that several of these stages use).

    The gradients of a shared bucket are complete when all stages that use it have run their backwards.
    """
    uses = Counter(name for stage in stages for name in stage.parameters)
    reduce_axes = {
        name: program.parameters[name].reduced_over(program.mesh) for name in uses if name not in unsharded.parameters
    }
    shard_axes = {name: axes for name, axes in reduce_axes.items()
                 if uses[name] == 1 and program.mesh.stored_over(program.parameters[name].layout)}  # fmt: skip

    def all_reduce_buckets(names: Iterable[str]) -> list[ParamBucket]:
        axes = {name: reduce_axes[name] for name in names if name in reduce_axes and name not in shard_axes}
        same_kind = kinds([n for n in axes if axes[n]], {n: (axes[n], parameters[n].dtype) for n in axes})
        sizes = [{name: parameters[name].nbytes for name in group} for group in same_kind]
        rows = [row for group in sizes for row in bucketed(group, alone_bytes=ALONE_BYTES)]
        strategies = [
            AllReduceStrategy([process.overlap_group(axis) for axis in axes[row[0]]], program.reduce_dtype)
            for row in rows
        ]
        return [
            ParamBucket({name: parameters[name] for name in row}, strategy, queue, unreduced=unreduced)
            for row, strategy in zip(rows, strategies, strict=True)
        ]

    shared = [*all_reduce_buckets(name for name, count in uses.items() if count > 1), *unsharded.shared]
    reducers = []
    for stage, unsharded_buckets in zip(stages, unsharded.buckets, strict=True):
        order = by_first_use(stage.graph.graph, stage.parameters)
        buckets = [*all_reduce_buckets(name for name in order if uses[name] == 1), *unsharded_buckets]
        buckets.sort(key=lambda bucket: min(map(order.index, bucket.names)), reverse=True)
        reducers.append(Reducer(buckets, queue, program.runs_of(stage), splits_backward, shared, shard_axes))
    return reducers, shared


def sync_gradients(parameters: Mapping[str, Tensor], program: Program, process: Process, stage_style: str) -> None:
    """Reduce all gradients of this rank over mesh axes, and gradients of tied parameters over stages.

    The reductions write to `.grad`.

    Args:
        parameters: {name: local parameter}.
    """
    with_grad = {name: parameter for name, parameter in parameters.items() if parameter.grad is not None}
    for bucket in axis_buckets(with_grad, program):
        _sum_bucket(parameters, program, bucket, [process.groups[axis] for axis in bucket.axes])
    sync_tied(parameters, program, process, stage_style)


def sync_tied(parameters: Mapping[str, Tensor], program: Program, process: Process, stage_style: str) -> None:
    """All-reduce the gradients of tied parameters over the stages that store them, in place.

    The gradients must already be reduced over the mesh axes.
    """
    if "pp" not in process.groups:
        return
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    for bucket in tied_buckets(trained, program, stage_style):
        _sum_bucket(parameters, program, bucket, [process.owner_groups[bucket.owners]])


def all_reduced_names(tensors: Mapping[str, Tensor], program: Program, stage_style: str) -> frozenset[str]:
    """Return the names of parameters whose gradients are all-reduced once per step.

    Args:
        tensors: {name: local parameter}.
    """
    buckets = (*axis_buckets(tensors, program), *tied_buckets(tensors, program, stage_style))
    return frozenset(name for bucket in buckets for name in bucket.names)


def create_reduce_groups(program: Program, process: Process) -> None:
    """Create the process groups that gradient reductions need.

    These are groups of flattened axes, and a second group per axis for reductions that overlap with compute. Every rank
    must call this function with the same program.
    """
    mesh = program.mesh
    stored_tensors = [stored.unsharded_to_sync(mesh) or stored for stored in program.parameters.values()]
    axes = {axis for stored in stored_tensors for axis in stored.reduced_over(mesh)}
    sharded_axes = storing_axes(program)
    for axis in (axis for axis in mesh.sizes if axis in axes and axis not in sharded_axes):
        process.overlap_group(axis)
    for axis in sharded_axes:
        process.along(axis)
        process.overlap_group(axis)
    for axis in flattened_axes(program):
        process.along(axis)


def create_tied_groups(program: Program, process: Process, stage_style: str) -> None:
    """Create the process groups of tied parameters. Every rank must call this with the same program."""
    keys = {tuple(sorted(owners(program, stored, stage_style))) for stored in program.parameters.values()}
    for key in sorted(key for key in keys if len(key) > 1):
        process.connect_owners(key)


def _sum_bucket(
    parameters: Mapping[str, Tensor], program: Program, group: AllReduceGroup, groups: Sequence[dist.ProcessGroup]
) -> None:
    """All-reduce the gradients of a bucket. A gradient that is None counts as zeros."""
    tensors = {name: parameters[name] for name in group.names}
    for tensor in tensors.values():
        gradient_of(tensor)
    queue = ReductionQueue()
    ParamBucket(tensors, AllReduceStrategy(groups, program.reduce_dtype), queue).reduce_accumulated()
    queue.finish()


def gradient_of(parameter: Tensor) -> Tensor:
    """Return `.grad` of a parameter. If it is None, first set it to zeros.

    `.grad` is None if a stage did not use its copy of a tied parameter in this step.
    """
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


# --- With lists of tensors, for a run of all ranks in one process.


def sync_gradients_lockstep(
    parameters: Mapping[int, Mapping[str, Tensor]],
    program: Program,
    *,
    stage_style: str = "loop",
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Do what `sync_gradients` does, for all ranks in one process.

    Gradients that a `dp_sync` method would reduce are all-reduced instead.

    Args:
        parameters: {rank: {name: local parameter}}.
    """
    mesh, program = program.mesh, program.without_methods()
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


def _sum_bucket_list(group: Sequence[Mapping[str, Tensor]], program: Program, bucket: AllReduceGroup) -> None:
    grads = [[gradient_of(local[name]) for name in bucket.names] for local in group]
    dtype = sent_dtype(program.reduce_dtype, grads[0][0])
    flat = torch.stack([flatten(row, dtype) for row in grads]).sum(0)
    for row in grads:
        for grad, reduced in zip(row, unflatten(flat, row), strict=True):
            grad.copy_(reduced)
