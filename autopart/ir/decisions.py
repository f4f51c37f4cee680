"""All choices of a plan for one graph, keyed by graph node and mesh axis.

A plan has the same choices, keyed by the names of operators and parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import shape, tensor_inputs, tuple_values
from autopart.ir.layout import Layout, Placement, R
from autopart.ir.mesh import Mesh
from autopart.ir.program import MICROBATCH_AXIS
from autopart.ir.run.recompute_spec import Recompute
from autopart.ir.run.sync_option import ALL_REDUCE, SyncOption


@dataclass(frozen=True)
class Strategy:
    """Placements of the tensor inputs and outputs of one operator on one mesh axis.

    `factor`: the sharded factor, a letter of the operator's sharding rule such as `k` in `b k, n k -> b n`. It is empty
    if the strategy shards no factor.
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
        """True if the operator dispatches tokens to experts, works on dispatched tokens, or combines them."""
        return any(p.is_dispatched for p in self.places)


def is_ring_strategy(node: fx.Node, strategy: Strategy) -> bool:
    """Return True for ring attention: a strategy that shards queries, keys and values along the sequence.

    No rank then has all keys, so keys and values rotate around a ring of ranks.
    """
    pattern = facts(node)["pattern"]
    if pattern is None or pattern.context != "ring":
        return False
    query, key, value = strategy.inputs[:3]
    return query.is_shard and query.dim == len(shape(node.args[0])) - 2 and query == key == value


@dataclass(frozen=True)
class Decisions:
    """All choices for a graph: operator strategies per mesh axis, parameter layouts, stages and options.

    Attributes:
        strategies: {axis: {operator: its strategy}}. It has the axes of the mesh that shard something. If there are
            several microbatches, it also has `MICROBATCH_AXIS`, an axis that splits the batch into microbatches. All
            data-parallel axes map to one shared dict. If the data-parallel axes are missing although the mesh has them,
            every data-parallel rank computes all samples.
        stored: {parameter: its stored layout}. A parameter without an entry is replicated.
        stage_of: {operator: index of its pipeline stage}.
        zero: ZeRO stage, 0 to 3.
        prefetch: number of blocks whose parameters are gathered ahead of their use (ZeRO-3).
        scatter_sends: True to send values that are replicated on the feature axes to the next stage as shards
            (`autopart.ir.run.scatter_gather_sends`).
        dp_sync: method that synchronizes gradients or models over data-parallel ranks.
        balance: planned load of the busiest expert-parallel rank, as a multiple of the mean load. It determines buffer
            sizes.
        tail: operators that run once per step, after the last stage, on all microbatches together (`Program.tail`).
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
    tail: frozenset[fx.Node] = frozenset()

    def place(self, name: str, axis: str) -> Placement:
        """Return the placement of a stored parameter on an axis."""
        return self.stored.get(name, {}).get(axis, R)

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Axes that shard the batch: the data-parallel axes, then `MICROBATCH_AXIS`."""
        return tuple(axis for axis in (*self.mesh.along("rows"), MICROBATCH_AXIS) if axis in self.strategies)

    @property
    def rows(self) -> Mapping[fx.Node, Strategy]:
        """{operator: its strategy on the data-parallel axes}; empty if the batch is not sharded."""
        return self.strategies[self.row_axes[0]] if self.row_axes else {}

    @property
    def features(self) -> dict[str, Mapping[fx.Node, Strategy]]:
        """{axis: {operator: its strategy}} for the axes on which the solver chooses layouts (tp, cp, ep)."""
        return {axis: self.strategies[axis] for axis in self.mesh.chosen}

    @property
    def copied(self) -> bool:
        """True if every data-parallel rank computes all samples, because the ranks do not divide the batch."""
        axes = self.mesh.along("rows")
        return bool(axes) and not any(axis in self.strategies for axis in axes)

    @property
    def routes(self) -> bool:
        """True if tokens are dispatched to the ranks of their experts."""
        return bool(self.routing)

    @property
    def routing(self) -> tuple[str, ...]:
        """Axes over which tokens are dispatched to the ranks of their experts, outermost first."""
        return tuple(
            axis for axis, chosen in self.features.items()
            if any(place.is_dispatched for strategy in chosen.values() for place in strategy.outputs)
        )  # fmt: skip

    @property
    def batch_shards(self) -> int:
        """Number of shards of the batch: data-parallel ranks times microbatches."""
        return self.microbatches * (1 if self.copied else self.mesh.data_parallel_size)


def data_strategies(
    mesh: Mesh, microbatches: int, rows: Mapping[fx.Node, Strategy], copied: bool = False,
    tail: Iterable[fx.Node] = (),
) -> dict[str, Mapping[fx.Node, Strategy]]:  # fmt: skip
    """Return the entries of `Decisions.strategies` for the data-parallel axes and `MICROBATCH_AXIS`.

    Args:
        rows: {operator: its strategy on the data-parallel axes}.
        copied: True if every data-parallel rank computes all samples. The data-parallel axes then get no entry.
        tail: operators that run once per step on all microbatches together. They are replicated on `MICROBATCH_AXIS`.
    """
    axes = dict.fromkeys(() if copied else mesh.along("rows"), rows)
    if microbatches == 1:
        return axes
    return {**axes, MICROBATCH_AXIS: {**rows, **{node: replicated(node) for node in tail}} if tail else rows}


def replicated(node: fx.Node) -> Strategy:
    """Return the strategy that replicates all inputs and outputs of an operator."""
    return Strategy((R,) * len(tensor_inputs(node)), (R,) * len(tuple_values(node)))


def with_placements(stored: Mapping[str, Layout], axis: str, placements: Mapping[str, Placement]) -> dict[str, Layout]:
    """Add the placements on one more axis to the layouts of all parameters.

    Args:
        stored: {parameter: its layout so far}.
        placements: {parameter: its placement on `axis`}.
    """
    return {name: {**stored.get(name, {}), **({axis: placements[name]} if name in placements else {})}
            for name in {**stored, **placements}}  # fmt: skip
