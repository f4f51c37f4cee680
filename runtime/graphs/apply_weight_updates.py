"""Apply updates that a model makes to trained parameters before it uses them, on shards of these.

The updates are defined in `autopart/ir/run/weight_updates.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopart.ir.program import Program
from autopart.ir.run.weight_updates import RowNorms
from autopart.ir.sharding import local_shard_of
from autopart.runtime.shards.shard_state import splits_at, splits_of

ByRank = dict[int, Tensor]


@torch.no_grad()
def update_weights(
    program: Program,
    parameters: Mapping[int, Mapping[str, Tensor]],
    inputs: Sequence[Any],
    summed: Callable[[str, ByRank], ByRank],
) -> None:
    """Update the shards of parameters that the model changes before a forward on the global `inputs`.

    Args:
        parameters: {rank: {name: its shard}}.
        summed: function that sums {rank: value} along an axis. Every rank of the axis that stores the parameter calls
            it.
    """
    for name, update in program.weight_updates.items():
        parts = {rank: local[name] for rank, local in parameters.items() if name in local}
        if isinstance(update, RowNorms):
            new = _with_row_norms(program, name, update, parts, inputs, summed)
        else:
            new = {rank: update.graph(shard.detach()) for rank, shard in parts.items()}
        for rank, shard in parts.items():
            shard.copy_(new[rank])


def _with_row_norms(
    program: Program, name: str, update: RowNorms, parts: ByRank, inputs: Sequence[Any],
    summed: Callable[[str, ByRank], ByRank],
) -> ByRank:  # fmt: skip
    stored, mesh = program.parameters[name], program.mesh
    powers = {rank: update.powers(shard) for rank, shard in parts.items()}
    for axis, cut in splits_of(stored, mesh):
        if cut.dim == 1:
            powers = summed(axis, powers)
    new, chosen = {}, update.chosen(inputs)
    for rank, shard in parts.items():
        row_splits = [(cut, index) for cut, index in splits_at(stored, mesh, mesh.coordinates(rank)) if cut.dim == 0]
        rows = local_shard_of(torch.arange(stored.shape[0], device=shard.device), row_splits)
        new[rank] = update.scaled(shard, powers[rank], torch.isin(rows, chosen))
    return new
