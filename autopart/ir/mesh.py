"""The device mesh as data: named axes with their sizes, and the coordinates of each rank."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, cast

from autopart.errors import MeshError, OptionError
from autopart.ir.layout import Layout, mesh_axes_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Cuts = Literal["stages", "rows", "features", "positions", "experts"]


Context = Literal["auto", "gather", "ulysses", "ring"]
"""Attention strategy on an axis that shards the sequence (`passes/choose/solve/context_strategies.py`)."""


@dataclass(frozen=True)
class Axis:
    """Mesh axis. `cuts` (what it splits) and `stores` (ZeRO) determine its kind of parallelism.

    `cuts` is one of:

    - `"stages"`: the axis splits the operators of the model into pipeline stages.
    - `"rows"`: it splits the batch. The solver chooses nothing, because sharding rules determine all layouts.
    - `"features"`: it splits dims of weights (tensor parallelism), and the sequence between operators with weights.
    - `"positions"`: it splits the sequence and other dims that are not dims of weights. Weights stay replicated.
    - `"experts"`: it splits the batch, and the weights of experts. Other weights stay replicated.

    On `"features"`, `"positions"` and `"experts"` the solver chooses the cheapest placement of every operator. If a
    parameter is replicated and its operators are sharded, its gradient is a partial sum, which is reduced once a step.

    `stores` is True if ZeRO can shard parameters over the axis, in addition to the split by `cuts`.
    """

    name: str
    cuts: Cuts
    stores: bool = False

    @property
    def is_chosen(self) -> bool:
        """True if the solver chooses layouts on this axis."""
        return self.cuts in ("positions", "experts", "features")


AXES = (
    Axis("pp", "stages"),
    Axis("dpr", "rows"),
    Axis("dp", "rows", stores=True),
    Axis("cp", "positions", stores=True),
    Axis("ep", "experts", stores=True),
    Axis("tp", "features"),
)
"""All mesh axes, outermost first: pipeline, replicated data, data, context, expert, tensor.

ZeRO shards parameters over `dp`, `cp` and `ep` flattened into one (`Mesh.storing`). With `dpr`, parameters are sharded
within a group of ranks and replicated over the groups (hybrid sharding, HSDP: Zhao et al. 2023, arXiv:2304.11277,
section 3.2.2)."""


@dataclass(frozen=True)
class Mesh:
    """Device mesh as {axis: number of ranks}, e.g. `Mesh({"pp": 2, "dp": 1, "tp": 2})`.

    Axes of size 1 can be left out. Ranks are numbered with `pp` outermost and `tp` innermost; the order of `sizes`
    does not matter. `axes`: all possible axes, outermost first.
    """

    sizes: Mapping[str, int]
    axes: tuple[Axis, ...] = field(default=AXES, repr=False)

    @staticmethod
    def parse(mesh: Mesh | DeviceMesh | Mapping[str, int] | str | int, axes: tuple[Axis, ...] = AXES) -> Mesh:
        """Convert a dict, a text such as "dp2,tp2", or a DeviceMesh with named dims to a mesh.

        Raises MeshError for anything else.

        >>> Mesh.parse("dp2,tp4").num_ranks
        8
        """
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, int) and not isinstance(mesh, bool):
            raise MeshError(
                f"mesh={mesh!r} gives a number of devices but no axes",
                why="only plan and parallelize choose the axes; this function needs their names",
                hint=f"mesh='tp{mesh}', mesh={{'dp': {mesh}}}, or the mesh of autopart.plan(model, {mesh}, ...)",
            )
        if isinstance(mesh, str):
            sizes = _parse_text(mesh)
        elif isinstance(mesh, Mapping):
            sizes = dict(mesh)
        elif hasattr(mesh, "mesh_dim_names"):
            sizes = _from_device_mesh(cast("DeviceMesh", mesh), axes)
        else:
            raise MeshError(
                f"mesh={mesh!r} is not a mesh", why=f"it is a {type(mesh).__name__}", hint="mesh={'dp': 2, 'tp': 2}"
            )
        _check(sizes, axes)
        return Mesh({axis.name: sizes[axis.name] for axis in axes if axis.name in sizes}, axes)

    def size(self, axis: str) -> int:
        """Return the number of ranks of a mesh axis, or of a flattened axis such as `dp_cp`."""
        return math.prod(self.sizes.get(part, 1) for part in mesh_axes_of(axis))

    def axis(self, name: str) -> Axis:
        """Return the axis of this name."""
        return next(axis for axis in self.axes if axis.name == name)

    def stride(self, axis: str) -> int:
        """Return the difference in rank number between neighbours on an axis.

        >>> [Mesh.parse("pp2,dp3,tp4").stride(axis) for axis in ("tp", "dp", "pp")]
        [1, 4, 12]
        """
        names, last = [mesh_axis.name for mesh_axis in self.axes], mesh_axes_of(axis)[-1]
        return math.prod(self.size(inner) for inner in names[names.index(last) + 1 :])

    def index(self, coordinates: Mapping[str, int], axis: str) -> int:
        """Return the index, along a mesh axis or a flattened axis, of the rank at these coordinates.

        >>> Mesh.parse("dp2,cp3").index({"dp": 1, "cp": 2}, "dp_cp")
        5
        """
        index = 0
        for part in mesh_axes_of(axis):
            index = index * self.size(part) + coordinates.get(part, 0)
        return index

    def along(self, cuts: Cuts) -> tuple[str, ...]:
        """Return the axes with several ranks whose `Axis.cuts` equals `cuts`, outermost first.

        >>> Mesh.parse("dp2,tp4").along("rows"), Mesh.parse("dp2,tp1").along("features")
        (('dp',), ())
        """
        return tuple(axis.name for axis in self.axes if axis.cuts == cuts and self.size(axis.name) > 1)

    @property
    def chosen(self) -> tuple[str, ...]:
        """Axes of size above 1 on which the solver chooses layouts, outermost first."""
        return tuple(axis.name for axis in self.axes if axis.is_chosen and self.size(axis.name) > 1)

    @property
    def solving_order(self) -> tuple[str, ...]:
        """Axes in the order in which the solver handles them: the innermost, with the fastest links, is first."""
        return self.chosen[::-1]

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks over which the batch is sharded."""
        return math.prod(map(self.size, self.along("rows")))

    @property
    def batch_divisor(self) -> int:
        """Number that must divide the samples of a microbatch: data-parallel size times expert-parallel size."""
        return self.data_parallel_size * self.expert_parallel_size

    @property
    def expert_parallel_size(self) -> int:
        """Number of ranks over which experts are sharded."""
        return math.prod(map(self.size, self.along("experts")))

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks over which features of weights are sharded."""
        return math.prod(map(self.size, self.along("features")))

    def row_index(self, coordinates: Mapping[str, int]) -> int:
        """Return the index of the batch shard that the rank at these coordinates computes.

        >>> Mesh.parse("dp4,tp2").row_index({"dp": 3, "tp": 1})
        3
        """
        index = 0
        for axis in self.along("rows"):
            index = index * self.size(axis) + coordinates[axis]
        return index

    @property
    def data_axis(self) -> str:
        """Name of the outermost axis over which ZeRO can shard parameters, `dp`. It can have size 1."""
        return next(axis.name for axis in self.axes if axis.stores)

    def storing(self, cutting: Collection[str] = ()) -> tuple[str, ...]:
        """Return the flattened axes over which ZeRO can shard a parameter, largest first.

        The first one combines all axes that ZeRO can use: `dp_cp_ep`. The next ones combine fewer axes, for parameters
        whose dims are not divisible by the size of the first one. Every name begins with `dp`, even if `dp` has size 1.
        So no flattened axis has the name of a single axis such as `ep`, on which layouts are chosen.

        Args:
            cutting: axes that shard the parameter already and cannot be used, such as `ep` for the weights of experts.

        >>> mesh = Mesh.parse("dp2,cp2,ep2")
        >>> mesh.storing(), mesh.storing(["ep"]), Mesh.parse("ep2").storing(["ep"])
        (('dp_cp_ep', 'dp_cp', 'dp'), ('dp_cp', 'dp'), ())
        """
        several = [axis.name for axis in self.axes if axis.stores and self.size(axis.name) > 1]
        names = [self.data_axis, *(name for name in several if name not in (self.data_axis, *cutting))]
        joined = (self.joined(names[:end]) for end in range(len(names), 0, -1))
        return tuple(axis for axis in joined if self.size(axis) > 1)

    def joined(self, names: Collection[str]) -> str:
        """Return the name of the axis that flattens several axes, for ZeRO storage.

        Axes of size 1 are left out, except `dp`, with which every name begins.

        >>> Mesh.parse("ep2").joined(["dp", "cp", "ep"])
        'dp_ep'
        """
        other_axes = [axis for axis in names if axis != self.data_axis and self.size(axis) > 1]
        return "_".join((self.data_axis, *other_axes))

    @property
    def storing_axis(self) -> str | None:
        """The largest flattened axis over which ZeRO can shard a parameter; None if its size would be 1."""
        return next(iter(self.storing()), None)

    def stores(self, axis: str) -> bool:
        """Return True if ZeRO can shard parameters over an axis: `dp`, or a flattened axis such as `dp_cp`."""
        return mesh_axes_of(axis)[0] == self.data_axis

    def stored_over(self, layout: Layout) -> str | None:
        """Return the axis over which ZeRO shards a parameter with this layout; None if ZeRO does not shard it."""
        return next((axis for axis, place in layout.items() if self.stores(axis) and place.is_shard), None)

    @property
    def tensor_axis(self) -> str:
        """Name of the innermost axis that shards features of weights, `tp`. It can have size 1."""
        return self.innermost("features")

    def innermost(self, cuts: Cuts) -> str:
        """Return the innermost axis whose `Axis.cuts` equals `cuts`. It can have size 1.

        Cost formulas are functions of the size of this axis.

        >>> Mesh.parse("dp2").innermost("positions")
        'cp'
        """
        return next(axis.name for axis in reversed(self.axes) if axis.cuts == cuts)

    @cached_property
    def num_ranks(self) -> int:
        return math.prod(self.sizes.values())

    def ranks(self) -> Iterator[dict[str, int]]:
        """Yield the coordinates {axis: index} of every rank, in the order of rank numbers."""
        for rank in range(self.num_ranks):
            yield self.coordinates(rank)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of `rank`: `{"pp": 1, "tp": 0}`."""
        coordinates = {}
        names = [axis.name for axis in self.axes if axis.name in self.sizes]
        for name in reversed(names):
            rank, coordinates[name] = divmod(rank, self.sizes[name])
        return {name: coordinates[name] for name in names}

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


def _from_device_mesh(mesh: DeviceMesh, axes: tuple[Axis, ...]) -> dict[str, int]:
    if not mesh.mesh_dim_names:
        raise MeshError(
            "the DeviceMesh has no named dims",
            why="autopart finds its axes by name",
            hint="init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))",
        )
    names, order = tuple(mesh.mesh_dim_names), [axis.name for axis in axes]
    if list(names) != sorted(names, key=lambda n: order.index(n) if n in order else len(order)):
        raise MeshError(
            f"the DeviceMesh has its dims in the order {names}",
            why="ranks are numbered with pp outermost, then dp, cp, ep, and tp innermost",
            hint="pass the dims in this order",
        )
    return dict(zip(names, mesh.shape, strict=True))


def _check(sizes: Mapping[str, int], axes: tuple[Axis, ...]) -> None:
    axis_by_name = {axis.name: axis for axis in axes}
    for name, size in sizes.items():
        if name not in axis_by_name:
            raise MeshError(
                f"unknown mesh axis '{name}'",
                why=f"the axes are {', '.join(axis_by_name)}",
                hint="mesh={'dp': 2, 'tp': 2}",
            )
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise MeshError(f"mesh axis '{name}' has size {size!r}", why="a size is an integer from 1")


def check_balance(mesh: Mesh, balance: float, axes: Collection[str]) -> None:
    """Raise OptionError if `balance` exceeds the load at which one rank gets all tokens.

    Args:
        balance: tokens of the busiest expert-parallel rank, as a multiple of the mean.
        axes: the axes that shard experts.
    """
    ranks = math.prod(map(mesh.size, axes))
    if balance > ranks:
        raise OptionError(
            f"balance={balance:g} is too large for {mesh}",
            why=f"the most loaded of {ranks} ranks can have at most {ranks} times the mean number of tokens",
            hint=f"balance={ranks}, or less",
        )
