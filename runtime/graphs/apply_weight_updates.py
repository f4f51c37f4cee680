"""Trained parameters that a model changes before it reads them (`autopart/ir/run/weight_updates.py`), changed where
ranks store them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopart.ir.program import Program
from autopart.ir.run.weight_updates import RowNorms
from autopart.ir.sharding import part_of
from autopart.runtime.shards.shard_state import cuts_at, stored_cuts

ByRank = dict[int, Tensor]


@torch.no_grad()
def update_weights(
    program: Program,
    parameters: Mapping[int, Mapping[str, Tensor]],
    inputs: Sequence[Any],
    summed: Callable[[str, ByRank], ByRank],
) -> None:
    """Change what these ranks store of the parameters that change before a forward on the global `inputs`.

    `parameters`: {rank: {name: its part}}; `summed`: from an axis and what each of the ranks has to its sum along that
    axis, which every rank of it calls that holds the parameter.
    """
    for name, update in program.weight_updates.items():
        parts = {rank: local[name] for rank, local in parameters.items() if name in local}
        if isinstance(update, RowNorms):
            new = _with_row_norms(program, name, update, parts, inputs, summed)
        else:
            new = {rank: update.graph(part.detach()) for rank, part in parts.items()}
        for rank, part in parts.items():
            part.copy_(new[rank])


def _with_row_norms(
    program: Program, name: str, update: RowNorms, parts: ByRank, inputs: Sequence[Any],
    summed: Callable[[str, ByRank], ByRank],
) -> ByRank:  # fmt: skip
    stored, mesh = program.parameters[name], program.mesh
    powers = {rank: update.powers(part) for rank, part in parts.items()}
    for axis, cut in stored_cuts(stored, mesh):
        if cut.dim == 1:
            powers = summed(axis, powers)
    new, chosen = {}, update.chosen(inputs)
    for rank, part in parts.items():
        of_rows = [(cut, index) for cut, index in cuts_at(stored, mesh, mesh.coordinates(rank)) if cut.dim == 0]
        rows = part_of(torch.arange(stored.shape[0], device=part.device), of_rows)
        new[rank] = update.scaled(part, powers[rank], torch.isin(rows, chosen))
    return new
