"""Which rows of the global batch a rank and a microbatch get, and how the outputs of all microbatches become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopart.ir.layout import Layout, P, Placement, R, Sections, section_sizes, shard_sizes
from autopart.ir.program import MICROBATCH_AXIS, Program, StageInput
from autopart.ir.sharding import Cut

Arguments = dict[str, Any]


@dataclass(frozen=True)
class OwnRows:
    """A rank's own rows in the place of a value for the global batch. A prologue may hand them on, and no more."""

    rows: Tensor


def stage_arguments(
    program: Program, inputs: Sequence[StageInput], values: Sequence[Any], coordinates: Mapping[str, int]
) -> list[Arguments]:
    """The keyword arguments of one stage graph on one rank, per microbatch.

    `values` are what the stage's prologue returned for the global batch. A value with a batch dim is cut into
    contiguous blocks of rows, first over ranks, then over microbatches.
    """
    per_microbatch: list[Arguments] = [{} for _ in range(program.microbatches)]
    for stage_input, value in zip(inputs, values, strict=True):
        dim = stage_input.batch_dim
        if dim is None or not isinstance(value, (Tensor, OwnRows)):
            rows = [value] * program.microbatches
        else:
            sections, num_blocks = stage_input.sections, program.row_ranks
            index = program.mesh.row_index(coordinates) % num_blocks
            mine = value.rows if isinstance(value, OwnRows) else _block(value, dim, sections, num_blocks, index)
            if len(sections) > 1:
                sections = tuple(size // num_blocks for size in sections)
            rows = [_block(mine, dim, sections, program.microbatches, index) for index in range(program.microbatches)]
        for arguments, block in zip(per_microbatch, rows, strict=True):
            arguments[stage_input.name] = block
    return per_microbatch


def _block(value: Tensor, dim: int, sections: Sections, num_blocks: int, index: int) -> Tensor:
    if sections:
        return Cut(dim, value.size(dim), sections, num_blocks).take(value, index)
    sizes = shard_sizes(value.size(dim), num_blocks)
    block = value.narrow(dim, sum(sizes[:index]), sizes[index])
    return block if dim == 0 else block.contiguous()


def merge_microbatches(program: Program, outputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """One tensor per output of the last stage's graph, from the outputs of each microbatch (outer sequence).

    The rows of a microbatch's output are those of all `dp` ranks, one block each; the batch is cut over `dp` first, so
    block by block they are put behind the same rank's rows of earlier microbatches. Where every rank gives its own
    rows, it is given its own rows of the outputs too.
    """
    placements = _placements(program)
    num_blocks = program.row_ranks if program.row_inputs is None else 1
    columns = zip(placements, zip(*outputs, strict=True), strict=True)
    return [_merge(values, placement, num_blocks) for placement, values in columns]


def merge_output(values: Sequence[Tensor], layout: Layout, program: Program) -> Tensor:
    """One tensor from each microbatch's, laid out over the microbatches as `layout` says; as `merge_microbatches`."""
    return _merge(values, layout.get(MICROBATCH_AXIS, R), program.row_ranks)


def merged_shapes(program: Program) -> list[tuple[int, ...]]:
    """The shapes of what `merge_microbatches` returns, from those of one microbatch."""
    shapes = []
    for placement, boundary in zip(_placements(program), program.stages[-1].sends, strict=True):
        shape = list(boundary.shape)
        if placement.is_shard:
            shape[placement.dim] *= program.microbatches
        shapes.append(tuple(shape))
    return shapes


def _placements(program: Program) -> list[Placement]:
    """How each output of the last stage's graph is laid out over the microbatches."""
    layouts = {output.position: output.layout for output in program.outputs}
    return [layouts.get(position, {}).get(MICROBATCH_AXIS, R) for position in range(len(program.stages[-1].sends))]


def _merge(values: Sequence[Tensor], placement: Placement, num_blocks: int) -> Tensor:
    if len(values) == 1 or placement.is_replicated:
        return values[0]
    if placement == P:
        return torch.stack(list(values)).sum(0)
    dim, num_microbatches = placement.dim, len(values)
    whole = values[0].size(dim) * num_microbatches
    sizes = [size // num_microbatches for size in section_sizes(whole, placement.sections)]
    sections = zip(*(value.split(sizes, dim) for value in values), strict=True)
    blocks = [block for parts in sections for block in zip(*(p.chunk(num_blocks, dim) for p in parts), strict=True)]
    return torch.cat([rows for block in blocks for rows in block], dim)
