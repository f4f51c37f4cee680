"""The device mesh as data: named axes and their sizes, and where each rank sits in it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, cast

from autopart.errors import MeshError, OptionError
from autopart.ir.layout import Layout, parts_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Cuts = Literal["stages", "rows", "features", "positions", "experts"]


Context = Literal["auto", "gather", "ulysses", "ring"]
"""What attention does on an axis that cuts positions (`passes/choose/solve/context_strategies.py`)."""


@dataclass(frozen=True)
class Axis:
    """What an axis of a mesh cuts, as data: all that tells one kind of parallelism from another.

    `cuts`: `"stages"`, the operators of the model into the stages of a pipeline; `"rows"`, the batch, as its rows pass
    through the rules of the operators (nothing is chosen). Of the others a solve finds what is cheapest for every
    operator: `"features"` cuts the dims that come from weights, and positions between them; `"positions"` the other
    dims of values, weights are whole (a sequence, and heads where no weight is read); `"experts"` rows of the batch,
    and of the weights those of experts alone. What gradients need follows from the layouts that come of it: where a
    parameter is whole and values are cut, they end as partial sums, and are summed once a step.
    `stores`: parameters may be stored in parts over it too, whatever it cuts (ZeRO).
    """

    name: str
    cuts: Cuts
    stores: bool = False

    @property
    def is_chosen(self) -> bool:
        """Whether layouts are chosen on it, as is cheapest for every operator."""
        return self.cuts in ("positions", "experts", "features")


AXES = (
    Axis("pp", "stages"),
    Axis("dpr", "rows"),
    Axis("dp", "rows", stores=True),
    Axis("cp", "positions", stores=True),
    Axis("ep", "experts", stores=True),
    Axis("tp", "features"),
)
"""Every axis autopart knows, outermost first: pipeline, data with whole replicas, data, context, expert, tensor.

ZeRO cuts parameters over `dp`, `cp` and `ep` as one (`Mesh.storing`): with `dpr` beside them they are cut inside a
group of ranks and replicated over the groups (hybrid sharding, HSDP: Zhao et al. 2023, arXiv:2304.11277, section
3.2.2)."""


@dataclass(frozen=True)
class Mesh:
    """Axis sizes, e.g. `Mesh({"pp": 2, "dp": 1, "tp": 2})`; axes of size 1 may be left out.

    Ranks are counted with `pp` outermost and `tp` innermost, whatever the order the sizes are given in.
    `axes`: what each axis that there may be cuts, outermost first.
    """

    sizes: Mapping[str, int]
    axes: tuple[Axis, ...] = field(default=AXES, repr=False)

    @staticmethod
    def parse(mesh: Mesh | DeviceMesh | Mapping[str, int] | str | int, axes: tuple[Axis, ...] = AXES) -> Mesh:
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
            sizes = _from_device_mesh(cast("DeviceMesh", mesh), axes)
        else:
            raise MeshError(
                f"mesh={mesh!r} is not a mesh", why=f"it is a {type(mesh).__name__}", hint="mesh={'dp': 2, 'tp': 2}"
            )
        _check(sizes, axes)
        return Mesh({axis.name: sizes[axis.name] for axis in axes if axis.name in sizes}, axes)

    def size(self, axis: str) -> int:
        """How many ranks an axis has, or several joined as one."""
        return math.prod(self.sizes.get(part, 1) for part in parts_of(axis))

    def axis(self, name: str) -> Axis:
        """What the axis of this name cuts."""
        return next(axis for axis in self.axes if axis.name == name)

    def stride(self, axis: str) -> int:
        """How far apart in rank numbers neighbours on an axis are.

        >>> [Mesh.parse("pp2,dp3,tp4").stride(axis) for axis in ("tp", "dp", "pp")]
        [1, 4, 12]
        """
        names, last = [known.name for known in self.axes], parts_of(axis)[-1]
        return math.prod(self.size(inner) for inner in names[names.index(last) + 1 :])

    def index(self, coordinates: Mapping[str, int], axis: str) -> int:
        """Where the rank at these coordinates is on an axis, or on several joined as one.

        >>> Mesh.parse("dp2,cp3").index({"dp": 1, "cp": 2}, "dp_cp")
        5
        """
        index = 0
        for part in parts_of(axis):
            index = index * self.size(part) + coordinates.get(part, 0)
        return index

    def along(self, cuts: Cuts) -> tuple[str, ...]:
        """The axes of several ranks that cut this, outermost first.

        >>> Mesh.parse("dp2,tp4").along("rows"), Mesh.parse("dp2,tp1").along("features")
        (('dp',), ())
        """
        return tuple(axis.name for axis in self.axes if axis.cuts == cuts and self.size(axis.name) > 1)

    @property
    def chosen(self) -> tuple[str, ...]:
        """The axes of several ranks on which layouts are chosen, outermost first."""
        return tuple(axis.name for axis in self.axes if axis.is_chosen and self.size(axis.name) > 1)

    @property
    def solving_order(self) -> tuple[str, ...]:
        """The same, as they are solved for one after another: the innermost first, with the fastest links."""
        return self.chosen[::-1]

    @property
    def row_ranks(self) -> int:
        """Over how many ranks the rows of a batch are cut."""
        return math.prod(map(self.size, self.along("rows")))

    @property
    def batch_parts(self) -> int:
        """Into how many parts of equal size the rows of a microbatch have to divide: over the ranks that cut rows, and
        inside them over those that have experts."""
        return self.row_ranks * self.expert_ranks

    @property
    def expert_ranks(self) -> int:
        """Over how many ranks experts are cut."""
        return math.prod(map(self.size, self.along("experts")))

    @property
    def feature_ranks(self) -> int:
        """Over how many ranks the features of weights are cut."""
        return math.prod(map(self.size, self.along("features")))

    def row_index(self, coordinates: Mapping[str, int]) -> int:
        """Which of the blocks of rows the rank at these coordinates has, of `row_ranks`.

        >>> Mesh.parse("dp4,tp2").row_index({"dp": 3, "tp": 1})
        3
        """
        index = 0
        for axis in self.along("rows"):
            index = index * self.size(axis) + coordinates[axis]
        return index

    @property
    def data_axis(self) -> str:
        """The first axis over which parameters may be stored in parts, though it have one rank: `dp`."""
        return next(axis.name for axis in self.axes if axis.stores)

    def storing(self, cutting: Collection[str] = ()) -> tuple[str, ...]:
        """The axes joined over which a parameter may be stored in parts, those of most ranks first.

        They are the storing axes on which ranks hold it alike, but for the last ones where its dims do not divide. The
        name begins with the first of them, though that have one rank: so it is never that of an axis on which layouts
        are chosen.

        Args:
            cutting: the axes that cut the parameter already, as `ep` does experts.

        >>> mesh = Mesh.parse("dp2,cp2,ep2")
        >>> mesh.storing(), mesh.storing(["ep"]), Mesh.parse("ep2").storing(["ep"])
        (('dp_cp_ep', 'dp_cp', 'dp'), ('dp_cp', 'dp'), ())
        """
        several = [axis.name for axis in self.axes if axis.stores and self.size(axis.name) > 1]
        names = [self.data_axis, *(name for name in several if name not in (self.data_axis, *cutting))]
        joined = (self.joined(names[:end]) for end in range(len(names), 0, -1))
        return tuple(axis for axis in joined if self.size(axis) > 1)

    def joined(self, names: Collection[str]) -> str:
        """Storing axes joined in one: the first, and those of several ranks.

        >>> Mesh.parse("ep2").joined(["dp", "cp", "ep"])
        'dp_ep'
        """
        others = [axis for axis in names if axis != self.data_axis and self.size(axis) > 1]
        return "_".join((self.data_axis, *others))

    @property
    def storing_axis(self) -> str | None:
        """The axes joined that store most parameters; None where they have one rank."""
        return next(iter(self.storing()), None)

    def stores(self, axis: str) -> bool:
        """Whether this is what parameters are stored in parts over: `data_axis`, or axes joined to it."""
        return parts_of(axis)[0] == self.data_axis

    def stored_over(self, layout: Layout) -> str | None:
        """The axes joined over which a parameter of this layout is stored in parts; None: over none."""
        return next((axis for axis, place in layout.items() if self.stores(axis) and place.is_shard), None)

    @property
    def tensor_axis(self) -> str:
        """The innermost axis that cuts features, though it have one rank: `tp`."""
        return self.innermost("features")

    def innermost(self, cuts: Cuts) -> str:
        """The innermost axis that cuts this, though it have one rank: formulas are written in its size.

        >>> Mesh.parse("dp2").innermost("positions")
        'cp'
        """
        return next(axis.name for axis in reversed(self.axes) if axis.cuts == cuts)

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
            f"the DeviceMesh orders its dims {names}",
            why="ranks are counted with pp outermost, then dp, cp, ep, and tp innermost",
            hint="give the dims in that order",
        )
    return dict(zip(names, mesh.shape, strict=True))


def _check(sizes: Mapping[str, int], axes: tuple[Axis, ...]) -> None:
    known = {axis.name: axis for axis in axes}
    for name, size in sizes.items():
        if name not in known:
            raise MeshError(
                f"unknown mesh axis '{name}'", why=f"the axes are {', '.join(known)}", hint="mesh={'dp': 2, 'tp': 2}"
            )
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise MeshError(f"mesh axis '{name}' has size {size!r}", why="a size must be an integer from 1")


def check_balance(mesh: Mesh, balance: float, axes: Collection[str]) -> None:
    """Raises OptionError where no rank can have so many times the mean of the rows. `axes`: those that cut experts."""
    ranks = math.prod(map(mesh.size, axes))
    if balance > ranks:
        raise OptionError(f"balance={balance:g} cannot be on {mesh}",
                          why=f"a rank that has all rows has {ranks} times the mean of {ranks}",
                          hint=f"balance={ranks}, or less")  # fmt: skip
