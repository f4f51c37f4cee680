"""Write the buffers that a model updates in its forward (batch-norm statistics, counters, codebooks).

Buffers are replicated on all ranks. After each forward, the ranks of a pipeline stage broadcast the new values of the
stage's buffers along `pp`, in flat buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.ir.program import BufferUpdate, Program, Stage
from autopart.runtime.batch.batch_split import merge_output
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.comm.stage_ranks import stage_coordinate
from autopart.runtime.gradients.reductions import flatten, unflatten
from autopart.tracing.python.assigned_buffers import FIRST_CALL, changed_shape

NewBuffers = Mapping[str, Tensor]
"""{buffer: its new value}."""


def buffer_updates_of(
    stage: Stage, program: Program, prologue: Sequence[Tensor], graph: Sequence[Sequence[Tensor]]
) -> NewBuffers:
    """Return {buffer: new value} for the buffers that a stage updates.

    Args:
        prologue: new values from the stage's prologue, the graph that runs on the global batch.
        graph: for each microbatch, new values from the stage's graph.
    """
    new = {update.name: value for update, value in zip(stage.prologue_updates, prologue, strict=True)}
    columns = zip(*graph, strict=True) if graph else ()
    for update, values in zip(stage.graph_updates, columns, strict=True):
        new[update.name] = merge_output(values, update.layout, program)
    return new


def write_buffers(
    buffers: Mapping[str, Tensor],
    by_stage: Mapping[int, NewBuffers],
    program: Program,
    process: Process,
    stage_style: str,
) -> None:
    """Write the new buffer values of all stages into this rank's `buffers`.

    Each stage's values are broadcast along `pp` to the ranks that do not run the stage.

    Args:
        by_stage: {stage: {buffer: new value}} of the stages that run on this rank.
    """
    for stage in program.stages:
        if not stage.updates:
            continue
        new = by_stage.get(stage.index, {})
        if "pp" in process.groups:
            owner = stage_coordinate(stage.index, program.num_stages, process.mesh.size("pp"), stage_style)
            new = _from_owner(buffers, new, stage.updates, owner, process)
        for update in stage.updates:  # an operator may return another shape than the trace has
            if new[update.name].shape != buffers[update.name].shape:
                old, now = buffers[update.name], new[update.name]
                raise changed_shape("the model", update.name, old, now, FIRST_CALL)
        with torch.no_grad():
            for update in stage.updates:
                buffers[update.name].copy_(new[update.name])


def _from_owner(
    buffers: Mapping[str, Tensor], values: NewBuffers, updates: Sequence[BufferUpdate], owner: int, process: Process
) -> NewBuffers:
    """Broadcast the new buffer values of a stage from `pp` coordinate `owner` to all ranks along `pp`."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for update in updates:
        by_dtype.setdefault(buffers[update.name].dtype, []).append(update.name)
    new: dict[str, Tensor] = {}
    for names in by_dtype.values():
        like = [buffers[name] for name in names]
        flat = flatten([values[name].to(process.device) for name in names] if owner == process.pp else like)
        dist.broadcast(flat, group=process.groups["pp"], group_src=owner)
        new.update(zip(names, unflatten(flat, like), strict=True))
    return new
