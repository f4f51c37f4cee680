"""Assignment of pipeline stages to ranks: "loop" or "V", as the schedule requires."""

from __future__ import annotations

import itertools

from autopart.ir.layout import mesh_axes_of
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program, StoredTensor
from autopart.ir.run.schedules import V_SHAPED


def stage_style_of(schedule: str | None) -> str:
    """Return the assignment of stages to ranks under a schedule, "loop" or "V".

    `"V"`: rank r of p has stages r and 2p-1-r. `"loop"`: rank r has stages r, r+p, r+2p, ...
    """
    return "V" if schedule in V_SHAPED else "loop"


def stage_coordinate(stage: int, num_stages: int, pp: int, stage_style: str) -> int:
    """Return the `pp` coordinate that runs `stage`.

    Stage `num_stages` is the tail, the part of a model that runs once for all microbatches. It runs on the ranks of the
    last pipeline stage.

    >>> [stage_coordinate(s, 4, 2, "loop") for s in range(4)], [stage_coordinate(s, 4, 2, "V") for s in range(4)]
    ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    stage = min(stage, num_stages - 1)
    if stage_style == "V":
        assert num_stages == 2 * pp, f"a V of {pp} ranks has {2 * pp} stages, not {num_stages}"
        return min(stage, num_stages - 1 - stage)
    return stage % pp


def stages_at(program: Program, pp_coordinate: int, stage_style: str) -> list[int]:
    """Return the stages that run at a `pp` coordinate, first stage first."""
    num_stages, pp = program.num_stages, program.mesh.size("pp")
    stages = range(len(program.stages))
    return [s for s in stages if stage_coordinate(s, num_stages, pp, stage_style) == pp_coordinate]


def stage_ranks(program: Program, stage: int, stage_style: str) -> list[int]:
    """Return all ranks that run `stage`, in rank order."""
    mesh = program.mesh
    coordinate = stage_coordinate(stage, program.num_stages, mesh.size("pp"), stage_style)
    return [rank for rank in range(mesh.num_ranks) if mesh.coordinates(rank).get("pp", 0) == coordinate]


def owners(program: Program, stored: StoredTensor, stage_style: str) -> list[int]:
    """Return the distinct `pp` coordinates of the stages that use a tensor, first stage first."""
    num_stages, pp = program.num_stages, program.mesh.size("pp")
    coordinates = [stage_coordinate(stage, num_stages, pp, stage_style) for stage in stored.stages]
    return list(dict.fromkeys(coordinates))


def groups_along(mesh: Mesh, ranks: list[int], axis: str) -> list[list[int]]:
    """Group ranks that differ only in their coordinate on `axis`, which can be a flattened axis.

    The ranks of a group are sorted along the axis.

    >>> groups_along(Mesh({"dp": 2, "tp": 2}), [0, 1, 2, 3], "dp")
    [[0, 2], [1, 3]]
    """

    parts = mesh_axes_of(axis)

    def others(rank: int) -> tuple[tuple[str, int], ...]:
        return tuple((name, index) for name, index in mesh.coordinates(rank).items() if name not in parts)

    ordered = sorted(ranks, key=lambda rank: (others(rank), rank))
    return [list(group) for _, group in itertools.groupby(ordered, others)]
