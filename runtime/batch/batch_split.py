"""Split the global batch over ranks and microbatches, and merge the outputs of all microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopart.ir.layout import Layout, P, Placement, R, Sections, section_sizes, shard_sizes
from autopart.ir.program import MICROBATCH_AXIS, Program, StageInput
from autopart.ir.sharding import DimSharding

Arguments = dict[str, Any]


@dataclass(frozen=True)
class LocalSamples:
    """A rank's local samples of an input, for `local_batch=True`.

    A stage's prologue (the graph that computes masks and positions from the global batch) gets this object instead of
    the global tensor, and returns it unchanged.
    """

    rows: Tensor


def stage_arguments(
    program: Program, inputs: Sequence[StageInput], values: Sequence[Any], coordinates: Mapping[str, int],
    num_runs: int,
) -> list[Arguments]:  # fmt: skip
    """Return the keyword arguments of one stage graph on one rank: one mapping for each run of the graph.

    A value with a batch dim is split into contiguous blocks of samples, first over ranks, then over microbatches.

    Args:
        values: outputs of the stage's prologue (the graph that computes masks and positions) for the global batch.
        num_runs: runs of the stage graph per call: the number of microbatches, or 1 (`Program.runs_of`).
    """
    per_microbatch: list[Arguments] = [{} for _ in range(num_runs)]
    for stage_input, value in zip(inputs, values, strict=True):
        dim = stage_input.batch_dim
        if dim is None or not isinstance(value, (Tensor, LocalSamples)):
            rows = [value] * num_runs
        else:
            sections, num_blocks = stage_input.sections, program.data_parallel_size
            index = program.mesh.row_index(coordinates) % num_blocks
            local = value.rows if isinstance(value, LocalSamples) else _block(value, dim, sections, num_blocks, index)
            if len(sections) > 1:
                sections = tuple(size // num_blocks for size in sections)
            rows = [_block(local, dim, sections, num_runs, index) for index in range(num_runs)]
        for arguments, block in zip(per_microbatch, rows, strict=True):
            arguments[stage_input.name] = block
    return per_microbatch


def _block(value: Tensor, dim: int, sections: Sections, num_blocks: int, index: int) -> Tensor:
    if sections:
        return DimSharding(dim, value.size(dim), sections, num_blocks).take(value, index)
    sizes = shard_sizes(value.size(dim), num_blocks)
    block = value.narrow(dim, sum(sizes[:index]), sizes[index])
    return block if dim == 0 else block.contiguous()


def merge_microbatches(program: Program, outputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Merge the outputs of all microbatches: one tensor per output of the last stage's graph.

    Every microbatch has samples of every data rank (group of ranks with equal samples). The merged tensor is sorted by
    data rank, then by microbatch. With `local_batch=True` the outputs have only this rank's samples.

    Args:
        outputs: for each microbatch, the outputs of the last stage's graph.
    """
    placements = _microbatch_placements(program)
    num_blocks = program.data_parallel_size if program.row_inputs is None else 1
    columns = zip(placements, zip(*outputs, strict=True), strict=True)
    return [_merge(values, placement, num_blocks) for placement, values in columns]


def merge_for_tail(program: Program, sent: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Merge all microbatches of the values that the last pipeline stage sends to the tail on this rank.

    The tail is the part of a model that runs once for all microbatches, such as a contrastive loss.

    Args:
        sent: for each microbatch, the values that the stage sends.
    """
    columns = zip(*sent, strict=True)
    return [_merge(values, placement, 1) for placement, values in zip(_tail_placements(program), columns, strict=True)]


def split_for_stage(program: Program, gradients: Sequence[Tensor | None], microbatch: int) -> list[Tensor | None]:
    """Return one microbatch's part of the gradients of merged values: the inverse of `merge_for_tail`.

    Args:
        gradients: gradients of the merged values, which the backward of the tail has computed.
    """
    return [
        None if gradient is None else _gradient_of(gradient, placement, program.microbatches, microbatch)
        for placement, gradient in zip(_tail_placements(program), gradients, strict=True)
    ]


def _gradient_of(gradient: Tensor, placement: Placement, num_microbatches: int, microbatch: int) -> Tensor | None:
    if placement.is_shard:
        return _block(gradient, placement.dim, placement.sections, num_microbatches, microbatch)
    # The merged value is a sum over microbatches (each gets the full gradient), or the first one's value.
    return gradient if placement == P or microbatch == 0 else None


def _tail_placements(program: Program) -> list[Placement]:
    """Return, for each value that the tail receives, a placement that describes how to merge microbatches.

    S means concatenate, P add, R take the first. The tail is the part of a model that runs once for all microbatches.
    Sections (ranges of a dim that are split one by one) have the sizes of this rank's samples.
    """
    last, ranks = program.stages[program.num_stages - 1], program.data_parallel_size
    placements = [boundary.layout.get(MICROBATCH_AXIS, R) for boundary in last.sends]
    return [
        replace(placement, sections=tuple(size // ranks for size in placement.sections))
        if len(placement.sections) > 1
        else placement
        for placement in placements
    ]


def merge_output(values: Sequence[Tensor], layout: Layout, program: Program) -> Tensor:
    """Merge the values of one output over microbatches.

    Shards are concatenated, and partial sums added. If all values are equal, the first is returned.
    """
    return _merge(values, layout.get(MICROBATCH_AXIS, R), program.data_parallel_size)


def merged_shapes(program: Program) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors that `merge_microbatches` returns."""
    shapes = []
    for placement, boundary in zip(_microbatch_placements(program), program.stages[-1].sends, strict=True):
        shape = list(boundary.shape)
        if placement.is_shard:
            shape[placement.dim] *= program.microbatches
        shapes.append(tuple(shape))
    return shapes


def _microbatch_placements(program: Program) -> list[Placement]:
    """Return, for each output, how to merge microbatches: S (concatenate), P (add), R (take the first)."""
    layouts = {output.position: output.layout for output in program.outputs}
    return [layouts.get(position, {}).get(MICROBATCH_AXIS, R) for position in range(len(program.stages[-1].sends))]


def _merge(values: Sequence[Tensor], placement: Placement, num_blocks: int) -> Tensor:
    if len(values) == 1 or placement.is_replicated:
        return values[0]
    if placement == P:
        return torch.stack(list(values)).sum(0)
    dim, num_microbatches = placement.dim, len(values)
    total_size = values[0].size(dim) * num_microbatches
    sizes = [size // num_microbatches for size in section_sizes(total_size, placement.sections)]
    sections = zip(*(value.split(sizes, dim) for value in values), strict=True)
    blocks = [block for chunks in sections for block in zip(*(p.chunk(num_blocks, dim) for p in chunks), strict=True)]
    return torch.cat([rows for block in blocks for rows in block], dim)
