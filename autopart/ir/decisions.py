"""What was chosen for a graph, by node and axis: a plan has the same by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopart.ir.graph import shape
from autopart.ir.layout import Layout, Placement, R
from autopart.ir.mesh import Mesh
from autopart.ir.program import MICROBATCH_AXIS
from autopart.ir.run.dp_sync import ALL_REDUCE, DpSync
from autopart.ir.run.recompute_spec import Recompute


@dataclass(frozen=True)
class Strategy:
    """Placements of one operator's tensor inputs and outputs on one axis. `factor` is the sharded factor, if any."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: str = ""

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"

    @property
    def places(self) -> tuple[Placement, ...]:
        """Of all inputs, then of all outputs."""
        return (*self.inputs, *self.outputs)

    @property
    def is_sharded(self) -> bool:
        return any(p.is_divided for p in self.places)

    @property
    def is_routed(self) -> bool:
        """Whether rows come to the ranks of their experts, are there, or go back."""
        return any(p.is_routed for p in self.places)


def goes_around(node: fx.Node, strategy: Strategy) -> bool:
    """Whether queries, keys and values of attention are all cut along their positions: no rank has all keys, so that
    they go around."""
    query, key, value = strategy.inputs[:3]
    return query.is_shard and query.dim == len(shape(node.args[0])) - 2 and query == key == value


@dataclass(frozen=True)
class Decisions:
    """All that was chosen: what every operator does on each axis, how parameters are stored, the stage of operators.

    `strategies`: of every axis of the mesh that cuts something, and of the microbatches. Axes that cut rows have the
    same; one that is not here computes all rows on every rank. `stored`: {parameter: its layout, where it is not `R`}.
    `zero`, `prefetch`: how long what is gathered of them lives, and how early it is (`Program`). `scatter_sends`: what
    ranks of the feature axes hold alike is sent to the next stage in parts (`autopart.ir.run.scatter_gather_sends`).
    `dp_sync`: what data-parallel ranks send each other. `balance`: the rows that the fullest rank gets for its
    experts, over the mean, which sizes are written for.
    """

    mesh: Mesh
    microbatches: int
    strategies: Mapping[str, Mapping[fx.Node, Strategy]]
    stored: Mapping[str, Layout]
    stage_of: Mapping[fx.Node, int]
    num_stages: int
    recompute: Recompute = "none"
    zero: int = 0
    prefetch: int = 1
    scatter_sends: bool = False
    dp_sync: DpSync = ALL_REDUCE
    balance: float = 1.0

    def place(self, name: str, axis: str) -> Placement:
        """How a parameter is stored on an axis."""
        return self.stored.get(name, {}).get(axis, R)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes on which rows are cut, the microbatches last."""
        return tuple(axis for axis in (*self.mesh.along("rows"), MICROBATCH_AXIS) if axis in self.strategies)

    @property
    def rows(self) -> Mapping[fx.Node, Strategy]:
        """What every operator does with the rows; empty where they are not cut."""
        return self.strategies[self.row_axes[0]] if self.row_axes else {}

    @property
    def features(self) -> dict[str, Mapping[fx.Node, Strategy]]:
        """What every operator does, of the axes that cut features."""
        return {axis: self.strategies[axis] for axis in self.mesh.chosen}

    @property
    def copied(self) -> bool:
        """Whether the axes that cut rows compute all of them on every rank, for the rows do not divide over them."""
        axes = self.mesh.along("rows")
        return bool(axes) and not any(axis in self.strategies for axis in axes)

    @property
    def routes(self) -> bool:
        """Whether rows are on the ranks of their experts."""
        return bool(self.routing)

    @property
    def routing(self) -> tuple[str, ...]:
        """The axes on whose ranks rows are by their experts, outermost first."""
        return tuple(
            axis for axis, chosen in self.features.items()
            if any(place.is_routed for strategy in chosen.values() for place in strategy.outputs)
        )  # fmt: skip

    @property
    def row_shards(self) -> int:
        """The parts in which the rows are cut, over ranks and microbatches."""
        return self.microbatches * (1 if self.copied else self.mesh.row_ranks)


def over_rows(
    mesh: Mesh, microbatches: int, rows: Mapping[fx.Node, Strategy], copied: bool = False
) -> dict[str, Mapping[fx.Node, Strategy]]:
    """`Decisions.strategies` of the axes that cut rows."""
    axes = () if copied else mesh.along("rows")
    return dict.fromkeys((*axes, *[MICROBATCH_AXIS] * (microbatches > 1)), rows)


def with_places(stored: Mapping[str, Layout], axis: str, places: Mapping[str, Placement]) -> dict[str, Layout]:
    """Layouts of parameters with their placements on one more axis."""
    return {name: {**stored.get(name, {}), **({axis: places[name]} if name in places else {})}
            for name in {**stored, **places}}  # fmt: skip
