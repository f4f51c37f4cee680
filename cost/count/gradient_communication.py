"""Gradient reduction and weight all-gathers of a stage that overlap with its compute."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial

import torch

from autopart.cost.predict.comm_buffers import (
    CommParameter,
    StageCommBuffers,
    WeightGroup,
    reduce_buckets,
    reduce_scatter_buckets,
)
from autopart.cost.predict.dp_sync_costs import carried
from autopart.ir.blocks.deduplication import NotDeduplicable, expand_blocks, later
from autopart.ir.facts import times
from autopart.ir.layout import local_shape
from autopart.ir.program import Program, Stage, StoredTensor
from autopart.ir.run.buckets import by_first_use
from autopart.ir.run.sync_option import MethodParameters, SyncMethod
from autopart.ir.run.unshard_policy import (
    ParameterGather,
    gather_groups,
    gather_of,
    gathers_stored,
    source_name,
    storing_axes,
)
from autopart.ir.sharding import DimSharding
from autopart.ir.trace import Trace


def stage_comm_buffers(
    trace: Trace, program: Program, stage: Stage, whole: Mapping[str, int], ways: Mapping[str, ParameterGather]
) -> StageCommBuffers:
    """Return the communication that overlaps with the compute of a stage.

    Args:
        whole: {parameter that stays unsharded for a step: its bytes}.
        ways: {parameter: how it is gathered}, with an entry for at least the parameters in `whole`.

    Raises NotDeduplicable if weights of a deduplicated block are gathered together with weights of another block.
    """
    mesh = program.mesh
    read = by_first_use(stage.graph.graph, (n for n in stage.parameters if trace.parameters[n].requires_grad))
    summed, scattered = dict[str, CommParameter](), dict[str, CommParameter]()
    for name in expand_blocks(trace.folds, read, str, partial(later, trace.folds)):
        stored = program.parameters[trace.originals[name]]
        if name in whole:
            scattered[name] = _weight(trace, program, stored, ways[stored.name], whole[name])
        elif stored.reduced_over(mesh) and not mesh.stored_over(stored.layout):
            summed[name] = _weight(trace, program, stored)
    sent = (*reduce_buckets(summed), *reduce_scatter_buckets(scattered, program.zero, program.microbatches))
    storing = storing_axes(program)
    nodes = [n for n in stage.graph.graph.nodes if gathers_stored(n, storing) and source_name(n) not in whole]
    gathered = {node: _weight(trace, program, program.parameters[source_name(node)], gather_of(node)) for node in nodes}
    together = gather_groups(nodes, lambda node: gathered[node].kind)
    if any(len({times(node) for node in row}) > 1 for row in together):
        raise NotDeduplicable("weights of a deduplicated block are gathered with those of another block")
    rows = tuple(WeightGroup.of({source_name(node): gathered[node] for node in row}, row[0]) for row in together)
    return StageCommBuffers(sent, rows, program.prefetch, {node: i for i, row in enumerate(together) for node in row})


def _weight(
    trace: Trace, program: Program, stored: StoredTensor, way: ParameterGather | None = None,
    whole_bytes: int | None = None
) -> CommParameter:  # fmt: skip
    """Return the sizes with which a parameter and its gradient are communicated.

    Args:
        way: its all-gather over data-parallel ranks; None if it is not sharded over data-parallel ranks.
        whole_bytes: bytes of the unsharded parameter, if it is not the sum of its shards.
    """
    dtype, ranks = trace.parameters[stored.name].dtype, program.mesh.size(way.axis) if way is not None else 1
    read = (stored.compute_dtype or dtype).itemsize / dtype.itemsize
    part = local_bytes(trace, program, stored)
    to_send = stored.unsharded_to_sync(program.mesh)
    is_trained = trace.parameters[stored.name].requires_grad
    axes = (to_send or stored).reduced_over(program.mesh) if is_trained else ()
    kind = program.mesh.stored_over(stored.layout), axes, dtype, to_send is None
    return CommParameter(
        part, part * read * ranks if whole_bytes is None else whole_bytes, read,
        reduce_dtype_of(dtype, program).itemsize / dtype.itemsize, kind,
        way is None or DimSharding(way.dim, way.size, way.sections, ranks).is_contiguous, bool(axes),
        to_send is not None,
    )  # fmt: skip


def reduce_dtype_of(stored: torch.dtype, program: Program) -> torch.dtype:
    """Return the dtype in which the gradient of a parameter of this dtype is reduced."""
    reduce = program.reduce_dtype
    return reduce if reduce is not None and stored.is_floating_point else stored


def exchanged_by_method(trace: Trace, program: Program, names: Iterable[str]) -> list[MethodParameters]:
    """Return what data-parallel ranks exchange for these parameters instead of an all-reduce, by method."""
    rows: dict[SyncMethod, list[tuple[float, int, tuple[int, ...]]]] = {}
    for name in names:
        stored, itemsize = program.parameters[name], trace.parameters[name].dtype.itemsize
        if stored.method is not None:
            size = local_bytes(trace, program, stored.unsharded_to_sync(program.mesh) or stored)
            rows.setdefault(stored.method, []).append((size / itemsize, itemsize, stored.shape))
    return [carried(method, sizes) for method, sizes in rows.items()]


def local_bytes(trace: Trace, program: Program, stored: StoredTensor) -> int:
    """Return the bytes of a rank's shard of a parameter."""
    sizes = {axis: program.mesh.size(axis) for axis in stored.layout}
    return math.prod(local_shape(stored.shape, stored.layout, sizes)) * trace.parameters[stored.name].dtype.itemsize
