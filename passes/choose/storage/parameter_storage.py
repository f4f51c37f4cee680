"""How parameters are stored: which are cut in parts that ranks would hold alike, and what every rank holds.

With `zero` of 1 to 3 (ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054, section 5; FSDP, which is 3: Zhao et al. 2023,
arXiv:2304.11277) a rank holds one part in `dp` of a weight, and so its optimizer has one part of its state. That is a
layout as any other, `S(d)` on `dp`: where the weight is read it is converted to `R(grad P)`, which gathers it and
scatters the sum of its gradient. The levels differ in how long the runtime lets the whole weight and the whole gradient
live (`Program.zero`). A dim is cut by one axis alone, so that a part is one block of the weight.

Which axes may store says the mesh (`Axis.stores`). Those on which ranks hold a weight alike are joined in one, as the
flattened `dp_shard_cp` of torchtitan is: `S(0)` on `dp_cp` cuts over the ranks of both, and one collective gathers it,
where one axis after the other would take a collective each. An expert's weight, which `ep` cuts, is stored over `dp_cp`
beside others of `dp_cp_ep`; one that `cp` cuts too (`folding.py`), over `dp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopart.ir.decisions import Decisions
from autopart.ir.layout import MIN_DIMS, R_GRAD_P, Layout, Placement, R, cannot_store_parts, parts_of, shard
from autopart.ir.mesh import Mesh
from autopart.ir.program import StoredTensor
from autopart.ir.trace import Trace
from autopart.passes.choose.storage.sync_methods import method_for
from autopart.plans.pins import LayoutPin


@dataclass(frozen=True)
class Storage:
    """How parameters are to be stored over the axes of a mesh that may store them in parts, by their layout on others.

    `pinned`: what pins say of a parameter. `beside`: {parameter: its layout on axes that were solved for before}.
    """

    mesh: Mesh = field(default_factory=lambda: Mesh({}))
    zero: int = 0
    pinned: Mapping[str, Sequence[LayoutPin]] = field(default_factory=dict)
    beside: Mapping[str, Layout] = field(default_factory=dict)

    def place(self, name: str, sizes: Sequence[int], others: Layout) -> tuple[str, Placement] | None:
        """The axes joined over which a parameter of a layout on other axes is cut, and how; None: whole on every
        rank."""
        if name in self.pinned:
            place = Placement.parse(self.pinned[name][0].text)
            axis, _ = self.over_which(place, sizes, others)
            return (axis, place) if axis else None
        if not self.zero or len(sizes) < self.min_dims:
            return None
        places = ((axis, fitting_cut(sizes, self.mesh.size(axis), others)) for axis in self.over(others))
        return next(((axis, place) for axis, place in places if place is not None), None)

    def over(self, others: Layout) -> tuple[str, ...]:
        """The axes joined over which a parameter of this layout may be cut, those of most ranks first."""
        return self.mesh.storing([axis for axis, place in others.items() if place.is_shard])

    def over_which(self, place: Placement, sizes: Sequence[int], others: Layout) -> tuple[str, str]:
        """The axes joined over which a parameter is cut that is to be placed so, "" where over none, and why that
        cannot be: without `zero` it is cut over the data axis alone."""
        if not place.is_shard:
            return "", ""
        why = ""
        for axis in (axis for axis in self.over(others) if self.zero or axis == self.mesh.data_axis):
            why = cannot_store_parts(place, sizes, axis, self.mesh.size(axis), others)
            if not why:
                return axis, ""
        return "", why

    @property
    def min_dims(self) -> int:
        """Of what is cut. Where the whole is gathered once a step, vectors go along with all else."""
        return MIN_DIMS if self.zero == 3 else 1


def fitting_cut(sizes: Sequence[int], ranks: int, others: Layout) -> Placement | None:
    """The first dim that divides and that no other axis cuts; None where there is none."""
    taken = {place.dim for place in others.values() if place.is_shard}
    fits = (dim for dim, size in enumerate(sizes) if size and size % ranks == 0 and dim not in taken)
    return next(map(shard, fits), None)


def fitting_parts(sizes: Sequence[int], axis: str, ranks: int, others: Layout) -> str:
    """`S(0), S(1) or R`: how a parameter can be cut over the storing axis, for errors."""
    fits = [f"S({dim})" for dim in range(len(sizes)) if not cannot_store_parts(shard(dim), sizes, axis, ranks, others)]
    return f"{', '.join(fits)} or R" if fits else "R"


def stored_tensors(
    trace: Trace, decisions: Decisions, readers: Mapping[str, set[int]], axes: Sequence[str]
) -> dict[str, StoredTensor]:
    """How every parameter of the model is stored: the same for all programs of one plan.

    Its gradient ends as a partial sum on the axes that cut rows, where it is whole, and where it lies as `R(grad P)`.

    Args:
        readers: the stages that read each parameter.
        axes: those of the mesh that have more than one rank, but for the stages.
    """
    stored, features = {}, decisions.mesh.chosen
    for name, parameter in trace.parameters.items():
        joined = {axis: place for axis, place in decisions.stored.get(name, {}).items() if axis not in axes}
        inside = {part for axis in joined for part in parts_of(axis)}
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
