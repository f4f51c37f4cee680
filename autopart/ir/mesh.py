"""The device mesh as data: named axes and their sizes, and where each rank sits in it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

from autopart.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp", "cp", "ep", "tp")
"""Every axis autopart knows, outermost first: pipeline, data, context, expert, tensor."""

BUILT_AXES = ("pp", "dp", "tp")
_UNBUILT = {"cp": "context parallelism", "ep": "expert parallelism"}


@dataclass(frozen=True)
class Mesh:
    """Axis sizes, e.g. `Mesh({"pp": 2, "dp": 1, "tp": 2})`; axes of size 1 may be left out.

    Ranks are counted with `pp` outermost and `tp` innermost, whatever the order the sizes are given in.
    """

    sizes: Mapping[str, int]

    @staticmethod
    def parse(mesh: Mesh | DeviceMesh | Mapping[str, int] | str | int) -> Mesh:
        """A mesh from `{"dp": 2, "tp": 2}`, `"dp2,tp2"` or a DeviceMesh with named dims. Raises MeshError for others.

        >>> Mesh.parse("dp2,tp4").num_ranks
        8
        """
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, int) and not isinstance(mesh, bool):
            raise MeshError(
                f"mesh={mesh!r} gives a number of devices but no axes",
                why="plan and parallelize search for them; here they must be named",
                hint=f"mesh='tp{mesh}', mesh={{'dp': {mesh}}}, or that of autopart.plan(model, {mesh}, ...)",
            )
        if isinstance(mesh, str):
            sizes = _parse_text(mesh)
        elif isinstance(mesh, Mapping):
            sizes = dict(mesh)
        elif hasattr(mesh, "mesh_dim_names"):
            sizes = _from_device_mesh(cast("DeviceMesh", mesh))
        else:
            raise MeshError(
                f"mesh={mesh!r} is not a mesh", why=f"it is a {type(mesh).__name__}", hint="mesh={'dp': 2, 'tp': 2}"
            )
        _check(sizes)
        return Mesh({axis: sizes[axis] for axis in AXES if axis in sizes})

    def size(self, axis: str) -> int:
        return self.sizes.get(axis, 1)

    def stride(self, axis: str) -> int:
        """How far apart in rank numbers neighbours on an axis are.

        >>> [Mesh.parse("pp2,dp3,tp4").stride(axis) for axis in ("tp", "dp", "pp")]
        [1, 4, 12]
        """
        return math.prod(self.size(inner) for inner in AXES[AXES.index(axis) + 1 :])

    @cached_property
    def num_ranks(self) -> int:
        return math.prod(self.sizes.values())

    def ranks(self) -> Iterator[dict[str, int]]:
        """The coordinates of every rank, in rank order."""
        for rank in range(self.num_ranks):
            yield self.coordinates(rank)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` sits: `{"pp": 1, "tp": 0}`."""
        coordinates = {}
        for axis in reversed(AXES):
            if axis in self.sizes:
                rank, coordinates[axis] = divmod(rank, self.sizes[axis])
        return {axis: coordinates[axis] for axis in AXES if axis in coordinates}

    def __str__(self) -> str:
        return ",".join(f"{axis}{size}" for axis, size in self.sizes.items()) or "one device"


def _parse_text(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z]+)\s*[=:]?\s*(\d+)\s*", part)
        if match is None:
            raise MeshError(
                f"mesh={text!r} cannot be read",
                why=f"'{part}' is not an axis name followed by a size",
                hint="mesh='dp2,tp2'",
            )
        if match[1] in sizes:
            raise MeshError(f"mesh={text!r} names axis '{match[1]}' twice", hint="mesh='dp2,tp2'")
        sizes[match[1]] = int(match[2])
    return sizes


def _from_device_mesh(mesh: DeviceMesh) -> dict[str, int]:
    if not mesh.mesh_dim_names:
        raise MeshError(
            "the DeviceMesh has no named dims",
            why="autopart finds its axes by name",
            hint="init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))",
        )
    names = tuple(mesh.mesh_dim_names)
    if list(names) != sorted(names, key=lambda n: AXES.index(n) if n in AXES else 99):
        raise MeshError(
            f"the DeviceMesh orders its dims {names}",
            why="ranks are counted with pp outermost, then dp, cp, ep, and tp innermost",
            hint="give the dims in that order",
        )
    return dict(zip(names, mesh.shape, strict=True))


def _check(sizes: Mapping[str, int]) -> None:
    for axis, size in sizes.items():
        if axis not in AXES:
            raise MeshError(
                f"unknown mesh axis '{axis}'", why=f"the axes are {', '.join(AXES)}", hint="mesh={'dp': 2, 'tp': 2}"
            )
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise MeshError(f"mesh axis '{axis}' has size {size!r}", why="a size is a whole number from 1")
        if axis in _UNBUILT and size > 1:
            raise MeshError(
                f"mesh axis '{axis}' has size {size}",
                why=f"{_UNBUILT[axis]} is not built yet",
                hint=f"use the axes {', '.join(BUILT_AXES)}",
            )
