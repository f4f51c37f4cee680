"""Storage of parameters: sharded over the data axes (ZeRO) or replicated.

All programs of a model, one per input shape and mode, store a parameter in the same way.

With `zero` of 1 to 3, a rank of `dp` stores one shard of a weight and of its optimizer state (ZeRO: Rajbhandari et al.
2020, arXiv:1910.02054, section 5; stage 3 is FSDP: Zhao et al. 2023, arXiv:2304.11277). That is an ordinary placement,
`S(d)` on `dp`. An operator that uses the weight converts it to `R(grad P)`: an all-gather in forward, a reduce-scatter
of the gradient in backward. The ZeRO stages differ in how long the runtime keeps the unsharded weight and gradient
(`Program.zero`). Each dim is sharded by one axis at most, so that a shard is one contiguous range of the dim.

`Axis.stores` marks the axes over which parameters may be stored sharded. All such axes over which a weight is otherwise
replicated are flattened to one axis, like `dp_shard_cp` in torchtitan. For example, `S(0)` on `dp_cp` shards over the
ranks of both axes, and one collective gathers it. An expert's weight that `ep` shards is stored over `dp_cp`. An
expert's weight that `ep` and `cp` shard (`expert_axes.py`) is stored over `dp`. Other weights are stored over
`dp_cp_ep`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopart.ir.decisions import Decisions
from autopart.ir.layout import MIN_DIMS, R_GRAD_P, Layout, Placement, R, cannot_store_sharded, mesh_axes_of, shard
from autopart.ir.mesh import Mesh
from autopart.ir.program import StoredTensor
from autopart.ir.run.sync_option import SyncMethod
from autopart.ir.trace import Trace
from autopart.plans.pins import LayoutPin


@dataclass(frozen=True)
class Storage:
    """Policy that decides over which mesh axes a parameter is stored sharded (ZeRO).

    Args:
        zero: ZeRO stage.
        pinned: {parameter: the user's pins on the data axis}.
        beside: {parameter: its layout on the axes that are already solved}.
    """

    mesh: Mesh = field(default_factory=lambda: Mesh({}))
    zero: int = 0
    pinned: Mapping[str, Sequence[LayoutPin]] = field(default_factory=dict)
    beside: Mapping[str, Layout] = field(default_factory=dict)

    def place(self, name: str, sizes: Sequence[int], others: Layout) -> tuple[str, Placement] | None:
        """Return where ZeRO shards a parameter: flattened axes such as `dp_cp`, and the placement on them.

        None if the parameter is stored replicated.

        Args:
            others: layout of the parameter on the other axes.
        """
        if name in self.pinned:
            place = Placement.parse(self.pinned[name][0].text)
            axis, _ = self.storing_axes_for(place, sizes, others)
            return (axis, place) if axis else None
        if not self.zero or len(sizes) < self.min_dims:
            return None
        places = ((axis, first_divisible_shard(sizes, self.mesh.size(axis), others)) for axis in self.over(others))
        return next(((axis, place) for axis, place in places if place is not None), None)

    def over(self, others: Layout) -> tuple[str, ...]:
        """Return the flattened axes, such as `dp_cp`, that can shard a stored parameter; most ranks first.

        Args:
            others: layout of the parameter on the other axes.
        """
        return self.mesh.storing([axis for axis, place in others.items() if place.is_shard])

    def storing_axes_for(self, place: Placement, sizes: Sequence[int], others: Layout) -> tuple[str, str]:
        """Return (flattened axes over which a parameter can be stored with this placement, "").

        If no axes are possible, returns ("", reason). Without `zero`, only the data axis is possible.
        """
        if not place.is_shard:
            return "", ""
        why = ""
        for axis in (axis for axis in self.over(others) if self.zero or axis == self.mesh.data_axis):
            why = cannot_store_sharded(place, sizes, axis, self.mesh.size(axis), others)
            if not why:
                return axis, ""
        return "", why

    @property
    def min_dims(self) -> int:
        """The minimum number of dims of a parameter that ZeRO shards.

        It is 1 for ZeRO 1 and 2: they gather once a step, so they shard vectors too.
        """
        return MIN_DIMS if self.zero == 3 else 1


def first_divisible_shard(sizes: Sequence[int], ranks: int, others: Layout) -> Placement | None:
    """Return the placement that shards the first dim that `ranks` divides and no other axis shards.

    None if there is no such dim.
    """
    taken = {place.dim for place in others.values() if place.is_shard}
    fits = (dim for dim, size in enumerate(sizes) if size and size % ranks == 0 and dim not in taken)
    return next(map(shard, fits), None)


def storable_placements(sizes: Sequence[int], axis: str, ranks: int, others: Layout) -> str:
    """Return text for errors that lists how `axis` could store a parameter: `S(0), S(1) or R`."""
    fits = [
        f"S({dim})" for dim in range(len(sizes)) if not cannot_store_sharded(shard(dim), sizes, axis, ranks, others)
    ]
    return f"{', '.join(fits)} or R" if fits else "R"


def stored_tensors(
    trace: Trace, decisions: Decisions, readers: Mapping[str, set[int]], axes: Sequence[str]
) -> dict[str, StoredTensor]:
    """Return {parameter: how it is stored}. All programs of one plan share it.

    The gradient of a parameter is a partial sum on the batch axes over which the parameter is replicated, and on axes
    with the placement `R(grad P)`.

    Args:
        readers: {parameter: the stages that use it}.
        axes: mesh axes with more than one rank, without the pipeline axis.
    """
    stored, features = {}, decisions.mesh.chosen
    for name, parameter in trace.parameters.items():
        joined = {axis: place for axis, place in decisions.stored.get(name, {}).items() if axis not in axes}
        inside = {part for axis in joined for part in mesh_axes_of(axis)}
        layout = {**joined, **{axis: decisions.place(name, axis) for axis in axes if axis not in inside}}
        partial = [axis for axis, place in layout.items() if place == R_GRAD_P or (axis not in features and place == R)]
        shown = {axis: R if place == R_GRAD_P else place for axis, place in layout.items()
                 if axis in features or place != R}  # fmt: skip
        stored[name] = StoredTensor(
            name, tuple(parameter.shape), shown, tuple(sorted(readers.get(name, {0}))),
            tuple(partial) if parameter.requires_grad else (), trace.aliases.get(name, ()),
            trace.precision.computed(parameter.dtype) if trace.precision is not None else None,
            method_for(name, decisions, layout, partial) if parameter.requires_grad else None,
        )  # fmt: skip
    return stored


def method_for(name: str, decisions: Decisions, layout: Layout, summed: Sequence[str]) -> SyncMethod | None:
    """Return the `dp_sync` method that reduces a parameter's gradient; None for an exact reduction.

    A method, such as `powersgd` or `gossip`, needs the unsharded gradient. With `zero=1`, the gradient is unsharded
    until the end of a step, so a method can be used.

    Args:
        summed: axes on which the gradient is a partial sum.
    """
    sync, over = decisions.dp_sync, decisions.mesh.stored_over(layout)
    method = sync.method_of(name)
    scattered = mesh_axes_of(over) if over is not None and decisions.zero == 1 else ()
    return method if method is not None and sync.axis(decisions.mesh) in (*summed, *scattered) else None
