"""Which parameters are stored in parts over the axis of the mesh that may store them so, and which are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopart.errors import LayoutError, OptionError
from autopart.ir.decisions import Decisions, with_places
from autopart.ir.graph import pattern_of
from autopart.ir.layout import Layout, Placement, R, cannot_store_parts
from autopart.ir.mesh import Mesh
from autopart.passes.choose.notes import layout_notes
from autopart.passes.choose.pins import cannot_hold, smallest_conflict
from autopart.passes.choose.problem import Problem
from autopart.passes.choose.storage import MIN_DIMS, Storage, fitting_cut, fitting_parts
from autopart.passes.pipeline import driven
from autopart.plans.pins import LayoutPin, Pins
from autopart.tracing.trace import Trace


@driven(notes=layout_notes)
def choose_parts(problem: Problem, stored: Mapping[str, Layout]) -> Mapping[str, Layout]:
    """`stored` with how parameters are cut over the storing axis too: what is pinned so, and with `zero` all
    that divides: with 3 matrices alone.

    Args:
        stored: {parameter: its layout}; only the axes that cut features count.
    Raises OptionError or LayoutError where that is nothing, or cannot be.
    """
    mesh, storage, zero = problem.mesh, problem.storage, problem.zero
    name = mesh.data_axis
    stored = {key: {axis: place for axis, place in layout.items() if axis != name} for key, layout in stored.items()}
    if zero and storage.ranks == 1:
        why, hint = f"the mesh {mesh} has no axis {name}", f"mesh='{Mesh.parse({**mesh.sizes, name: 2}, mesh.axes)}'"
        raise OptionError(f"zero={zero} needs an axis to cut parameters over", why=why, hint=f"{hint}, or leave it out")
    chosen: dict[str, Placement] = {}
    for name, parameter in problem.trace.parameters.items():
        sizes, others = tuple(parameter.shape), stored.get(name, {})
        if name in storage.pinned:
            _check(name, sizes, storage, others, problem.pins)
        place = storage.place(name, sizes, others)
        if place is not None:
            chosen[name] = place
    if zero and not chosen:
        which = "no parameter with two dims or more has one" if storage.min_dims > 1 else "no parameter has a dim"
        raise LayoutError(
            f"zero={zero} finds nothing to cut over {storage.axis}={storage.ranks}",
            why=f"{which} that divides over it and that tp does not cut",
            hint=f"another size of {storage.axis}, or zero=0",
        )  # fmt: skip
    return with_places(stored, storage.axis, chosen)


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


def storage_notes(trace: Trace, decisions: Decisions, zero: int) -> tuple[str, ...]:
    """A line for every matrix that stays whole on `dp` although it was asked to be cut; repeated blocks share one."""
    axis = decisions.mesh.storing_axis
    if axis is None or not zero:
        return ()
    ranks, kept = decisions.mesh.size(axis), []
    for name, parameter in trace.parameters.items():
        layout = decisions.stored.get(name, {})
        if (
            parameter.dim() >= MIN_DIMS
            and axis not in layout
            and fitting_cut(tuple(parameter.shape), ranks, layout) is None
        ):
            sizes, why = list(parameter.shape), "no dim divides that tp does not cut"
            kept.append(f"{pattern_of(name)}: {sizes} stays whole on {axis}={ranks}: {why}")
    return tuple(dict.fromkeys(kept))
