"""Apply to shards the parameter updates that a forward makes (`max_norm` of `nn.Embedding`).

`autopart/ir/run/weight_updates.py` defines the updates.
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
    sum_along: Callable[[str, ByRank], ByRank],
) -> None:
    """Apply, before a forward, the updates that the model's forward makes to parameters (`max_norm`).

    Args:
        parameters: {rank: {name of a parameter: local shard}}, changed in place.
        inputs: inputs of the call, for the global batch.
        sum_along: function (axis, {rank: value}) that returns, for each rank, the sum of the values along a mesh axis.
            All ranks of the axis call it.
    """
    for name, update in program.weight_updates.items():
        shards = {rank: local[name] for rank, local in parameters.items() if name in local}
        if isinstance(update, RowNorms):
            new = _with_row_norms(program, name, update, shards, inputs, sum_along)
        else:
            new = {rank: update.graph(shard.detach()) for rank, shard in shards.items()}
        for rank, shard in shards.items():
            shard.copy_(new[rank])


def _with_row_norms(
    program: Program, name: str, update: RowNorms, shards: ByRank, inputs: Sequence[Any],
    sum_along: Callable[[str, ByRank], ByRank],
) -> ByRank:  # fmt: skip
    stored, mesh = program.parameters[name], program.mesh
    powers = {rank: update.powers(shard) for rank, shard in shards.items()}
    for axis, cut in splits_of(stored, mesh):
        if cut.dim == 1:
            powers = sum_along(axis, powers)
    new, chosen = {}, update.chosen(inputs)
    for rank, shard in shards.items():
        row_splits = [(cut, index) for cut, index in splits_at(stored, mesh, mesh.coordinates(rank)) if cut.dim == 0]
        rows = local_shard_of(torch.arange(stored.shape[0], device=shard.device), row_splits)
        new[rank] = update.scaled(shard, powers[rank], torch.isin(rows, chosen))
    return new
