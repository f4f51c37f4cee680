"""How parameters are stored: which are cut over `dp` too, and what every rank holds.

With `zero=3` (ZeRO stage 3: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3; FSDP: Zhao et al. 2023,
arXiv:2304.11277) a rank holds one part in `dp` of a weight. That is a layout as any other, `S(d)` on `dp`: where the
weight is read it is converted to `R(grad P)`, which gathers it and scatters the sum of its gradient. A dim is cut by
one axis alone, so that a part is one block of the weight. Which axis that is says the mesh (`Axis.stores`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopart.errors import LayoutError, OptionError
from autopart.ir.graph import pattern_of
from autopart.ir.layout import R_GRAD_P, Layout, Placement, R, cannot_store_parts, shard
from autopart.ir.mesh import Mesh
from autopart.ir.program import StoredTensor
from autopart.passes.choose.notes import layout_notes
from autopart.passes.choose.pins import cannot_hold, pinned_parts, smallest_conflict
from autopart.passes.facts.decisions import Decisions, with_places
from autopart.passes.pipeline import driven
from autopart.plans.pins import LayoutPin, Pins
from autopart.tracing.trace import Trace

MIN_DIMS = 2
"""Vectors (norms, biases) stay whole: a thousandth of a model, for as many collectives as its matrices."""


@dataclass(frozen=True)
class Storage:
    """How parameters are stored over an axis of `ranks`, `stride` apart in rank numbers, by their layout on others."""

    axis: str = ""
    ranks: int = 1
    stride: int = 1
    zero: int = 0
    pinned: Mapping[str, Sequence[LayoutPin]] = field(default_factory=dict)

    @staticmethod
    def of(trace: Trace, mesh: Mesh, zero: int, pins: Pins) -> Storage:
        axis = mesh.storing_axis
        if axis is None:
            return Storage(zero=zero)
        return Storage(axis, mesh.size(axis), mesh.stride(axis), zero, pinned_parts(trace, mesh, pins))

    def place(self, name: str, sizes: Sequence[int], others: Layout) -> Placement | None:
        """How a parameter of a layout on other axes is cut over this one; None: whole on every rank."""
        if self.ranks == 1:
            return None
        if name in self.pinned:
            place = Placement.parse(self.pinned[name][0].text)
            return place if place.is_shard else None
        return _cut(sizes, self.ranks, others) if self.zero == 3 else None


@driven(notes=layout_notes)
def choose_parts(trace: Trace, mesh: Mesh, zero: int, stored: Mapping[str, Layout], pins: Pins) -> Mapping[str, Layout]:
    """`stored` with how parameters are cut over the storing axis too: what is pinned so, and with `zero=3` every matrix
    that divides.

    Args:
        stored: {parameter: its layout}; only the axes that cut features count.
    Raises OptionError or LayoutError where that is nothing, or cannot be.
    """
    storage, name = Storage.of(trace, mesh, zero, pins), mesh.data_axis
    stored = {key: {axis: place for axis, place in layout.items() if axis != name} for key, layout in stored.items()}
    if zero and storage.ranks == 1:
        why, hint = f"the mesh {mesh} has no axis {name}", f"mesh='{Mesh.parse({**mesh.sizes, name: 2}, mesh.axes)}'"
        raise OptionError(f"zero={zero} needs an axis to cut parameters over", why=why, hint=f"{hint}, or leave it out")
    chosen: dict[str, Placement] = {}
    for name, parameter in trace.parameters.items():
        sizes, others = tuple(parameter.shape), stored.get(name, {})
        if name in storage.pinned:
            _check(name, sizes, storage, others, pins)
        place = storage.place(name, sizes, others)
        if place is not None:
            chosen[name] = place
    if zero and not chosen:
        raise LayoutError(
            f"zero={zero} finds nothing to cut over {storage.axis}={storage.ranks}",
            why="no parameter with two dims or more has one that divides over it and that tp does not cut",
            hint=f"another size of {storage.axis}, or zero=0",
        )  # fmt: skip
    return with_places(stored, storage.axis, chosen)


def _cut(sizes: Sequence[int], ranks: int, others: Layout) -> Placement | None:
    """The first dim that divides and that no other axis cuts; None where there is none."""
    if len(sizes) < MIN_DIMS:
        return None
    taken = {place.dim for place in others.values() if place.is_shard}
    fits = (dim for dim, size in enumerate(sizes) if size and size % ranks == 0 and dim not in taken)
    return next(map(shard, fits), None)


def _check(name: str, sizes: Sequence[int], storage: Storage, others: Layout, pins: Pins) -> None:
    """Raises LayoutError where a parameter cannot be stored as its pins say."""
    found = storage.pinned[name]
    if not _agree(found):
        clash = smallest_conflict(found, _agree)
        raise LayoutError(
            cannot_hold(clash), why=f"{name} can have only one layout",
            where=", ".join(filter(None, map(pins.where, clash))), hint="leave one of them out",
        )  # fmt: skip
    why = cannot_store_parts(Placement.parse(found[0].text), sizes, storage.axis, storage.ranks, others)
    if why:
        raise LayoutError(
            f"cannot pin {found[0]}", why=f"{name}: {why}", where=pins.where(found[0]),
            hint=fitting_parts(sizes, storage.axis, storage.ranks, others),
        )  # fmt: skip


def _agree(pins: Sequence[LayoutPin]) -> bool:
    places = [Placement.parse(pin.text) for pin in pins]
    return len({place if place.is_shard else R for place in places}) <= 1


def fitting_parts(sizes: Sequence[int], axis: str, ranks: int, others: Layout) -> str:
    """`S(0), S(1) or R`: how a parameter can be cut over the storing axis, for errors."""
    fits = [f"S({dim})" for dim in range(len(sizes)) if not cannot_store_parts(shard(dim), sizes, axis, ranks, others)]
    return f"{', '.join(fits)} or R" if fits else "R"


def storage_notes(trace: Trace, decisions: Decisions, zero: int) -> tuple[str, ...]:
    """A line for every matrix that stays whole on `dp` although it was asked to be cut; repeated blocks share one."""
    axis = decisions.mesh.storing_axis
    if axis is None or zero != 3:
        return ()
    ranks, kept = decisions.mesh.size(axis), []
    for name, parameter in trace.parameters.items():
        layout = decisions.stored.get(name, {})
        if parameter.dim() >= MIN_DIMS and axis not in layout and _cut(tuple(parameter.shape), ranks, layout) is None:
            sizes, why = list(parameter.shape), "no dim divides that tp does not cut"
            kept.append(f"{pattern_of(name)}: {sizes} stays whole on {axis}={ranks}: {why}")
    return tuple(dict.fromkeys(kept))


def stored_tensors(
    trace: Trace, decisions: Decisions, readers: Mapping[str, set[int]], axes: Sequence[str]
) -> dict[str, StoredTensor]:
    """How every parameter of the model is stored: the same for all programs of one plan.

    Its gradient ends as a partial sum on the axes that cut rows, where it is whole, and where it lies as `R(grad P)`.

    Args:
        readers: the stages that read each parameter.
        axes: those of the mesh that have more than one rank, but for the stages.
    """
    stored, features = {}, decisions.mesh.along("features")
    for name, parameter in trace.parameters.items():
        layout = {axis: decisions.place(name, axis) for axis in axes}
        partial = [axis for axis, place in layout.items() if place == R_GRAD_P or (axis not in features and place == R)]
        shown = {axis: R if place == R_GRAD_P else place for axis, place in layout.items()
                 if axis in features or place != R}  # fmt: skip
        stored[name] = StoredTensor(
            name, tuple(parameter.shape), shown, tuple(sorted(readers.get(name, {0}))),
            tuple(partial) if parameter.requires_grad else (), trace.aliases.get(name, ()),
        )  # fmt: skip
    return stored
