"""Decisions for a graph: all choices, keyed by node and axis. A plan has these choices keyed by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import shape
from autopart.ir.layout import Layout, Placement, R
from autopart.ir.mesh import Mesh
from autopart.ir.program import MICROBATCH_AXIS
from autopart.ir.run.recompute_spec import Recompute
from autopart.ir.run.sync_option import ALL_REDUCE, SyncOption


@dataclass(frozen=True)
class Strategy:
    """Placements of the tensor inputs and outputs of one operator on one mesh axis.

    `factor`: the factor of the operator's sharding rule that is sharded, if any.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: str = ""

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"

    @property
    def places(self) -> tuple[Placement, ...]:
        """Placements of all inputs, then of all outputs."""
        return (*self.inputs, *self.outputs)

    @property
    def is_sharded(self) -> bool:
        return any(p.is_partitioned for p in self.places)

    @property
    def is_dispatched(self) -> bool:
        """True if the operator dispatches rows to their experts, processes dispatched rows, or combines them."""
        return any(p.is_dispatched for p in self.places)


def is_ring_strategy(node: fx.Node, strategy: Strategy) -> bool:
    """Return True for ring attention: queries, keys and values are all sharded along the sequence.

    No rank has all keys, so keys and values rotate around a ring.
    """
    pattern = facts(node)["pattern"]
    if pattern is None or pattern.context != "ring":
        return False
    query, key, value = strategy.inputs[:3]
    return query.is_shard and query.dim == len(shape(node.args[0])) - 2 and query == key == value


@dataclass(frozen=True)
class Decisions:
    """All choices for a graph: strategy of each operator on each axis, parameter storage, stages.

    Attributes:
        strategies: {axis: {operator: its strategy}}, for each axis that shards something, and for microbatches. All
            data axes share one inner mapping. If a data axis is missing, each of its ranks computes all samples.
        stored: {parameter: its layout}, if it is not replicated.
        stage_of: {operator: its stage}.
        zero, prefetch: as in `Program`.
        scatter_sends: send values that are replicated on the feature axes to the next stage as shards
            (`autopart.ir.run.scatter_gather_sends`).
        dp_sync: method of data-parallel communication.
        balance: planned load of the busiest expert rank, as a multiple of the mean load. It determines buffer sizes.
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
    dp_sync: SyncOption = ALL_REDUCE
    balance: float = 1.0

    def place(self, name: str, axis: str) -> Placement:
        """Return the placement of a stored parameter on an axis."""
        return self.stored.get(name, {}).get(axis, R)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Axes on which the batch is sharded: the data axes, then the microbatches."""
        return tuple(axis for axis in (*self.mesh.along("rows"), MICROBATCH_AXIS) if axis in self.strategies)

    @property
    def rows(self) -> Mapping[fx.Node, Strategy]:
        """{operator: its strategy on the data axes}, empty if the batch is not sharded."""
        return self.strategies[self.row_axes[0]] if self.row_axes else {}

    @property
    def features(self) -> dict[str, Mapping[fx.Node, Strategy]]:
        """{axis: {operator: its strategy}} of the axes on which the solver chooses layouts."""
        return {axis: self.strategies[axis] for axis in self.mesh.chosen}

    @property
    def copied(self) -> bool:
        """True if every data rank computes all samples, because the batch does not divide over the data axes."""
        axes = self.mesh.along("rows")
        return bool(axes) and not any(axis in self.strategies for axis in axes)

    @property
    def routes(self) -> bool:
        """True if rows are dispatched to the ranks of their experts."""
        return bool(self.routing)

    @property
    def routing(self) -> tuple[str, ...]:
        """Axes over which rows are dispatched to the ranks of their experts, outermost first."""
        return tuple(
            axis for axis, chosen in self.features.items()
            if any(place.is_dispatched for strategy in chosen.values() for place in strategy.outputs)
        )  # fmt: skip

    @property
    def batch_shards(self) -> int:
        """Number of shards into which the batch is split, over data ranks and microbatches."""
        return self.microbatches * (1 if self.copied else self.mesh.data_parallel_size)


def data_strategies(
    mesh: Mesh, microbatches: int, rows: Mapping[fx.Node, Strategy], copied: bool = False
) -> dict[str, Mapping[fx.Node, Strategy]]:
    """Return the entries of `Decisions.strategies` for the data axes and the microbatches.

    Args:
        rows: {operator: its strategy on the data axes}.
        copied: every data rank computes all samples, so the data axes have no entry.
    """
    axes = () if copied else mesh.along("rows")
    return dict.fromkeys((*axes, *[MICROBATCH_AXIS] * (microbatches > 1)), rows)


def with_placements(stored: Mapping[str, Layout], axis: str, places: Mapping[str, Placement]) -> dict[str, Layout]:
    """Add placements of parameters on one more axis to their layouts, and return the layouts."""
    return {name: {**stored.get(name, {}), **({axis: places[name]} if name in places else {})}
            for name in {**stored, **places}}  # fmt: skip
