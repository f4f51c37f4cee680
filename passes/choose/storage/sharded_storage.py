"""Choice of the parameters that are stored sharded (ZeRO)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from autopart.errors import LayoutError, OptionError
from autopart.ir.decisions import Decisions
from autopart.ir.graph import pattern_of
from autopart.ir.layout import Layout, Placement, R, shard
from autopart.ir.mesh import Mesh
from autopart.ir.trace import Trace
from autopart.passes.choose.explain.node_notes import layout_notes
from autopart.passes.choose.problem import Problem
from autopart.passes.choose.solve.layout_pins import pins_cannot_hold, smallest_conflict
from autopart.passes.choose.storage.parameter_storage import (
    MIN_DIMS,
    Storage,
    first_divisible_shard,
    storable_placements,
)
from autopart.passes.pass_pipeline import driven
from autopart.plans.pins import LayoutPin


@driven(notes=layout_notes)
def choose_sharded_storage(problem: Problem, stored: Mapping[str, Layout]) -> Mapping[str, Layout]:
    """Return the layouts `stored` of the parameters, extended by their ZeRO shards.

    Pinned parameters follow the user's pins. ZeRO 1 and 2 shard all parameters that are divisible. ZeRO 3 shards only
    parameters of two dims or more.

    Args:
        stored: {parameter: its layout}. Placements on the axes that store shards (`Axis.stores`) are ignored.

    Raises OptionError if the mesh has no axis that can store shards, and LayoutError if a pin cannot be followed.
    """
    mesh, storage, zero = problem.mesh, problem.storage, problem.zero
    over = mesh.storing_axis
    stored = {key: {axis: place for axis, place in layout.items() if not mesh.stores(axis)}
              for key, layout in stored.items()}  # fmt: skip
    if over is None:
        if zero:
            _no_axis(mesh, zero)
        return stored
    chosen: dict[str, Layout] = {}
    for name, parameter in problem.trace.parameters.items():
        sizes, others = tuple(parameter.shape), stored.get(name, {})
        if name in storage.pinned:
            _check(name, sizes, storage, others, problem)
        entry = storage.place(name, sizes, others)
        if entry is not None:
            chosen[name] = dict([entry])
    if zero and not chosen:
        which = "no parameter with two or more dims has a dim" if storage.min_dims > 1 else "no parameter has a dim"
        raise LayoutError(
            f"zero={zero} finds no parameter to shard over {over}={mesh.size(over)}",
            why=f"{which} that is divisible by {mesh.size(over)} and that tp does not shard",
            hint=f"another size of {over}, or zero=0",
        )
    return {name: {**stored.get(name, {}), **chosen.get(name, {})} for name in {**stored, **chosen}}


def _no_axis(mesh: Mesh, zero: int) -> NoReturn:
    name = mesh.data_axis
    raise OptionError(
        f"zero={zero} needs an axis to shard parameters over",
        why=f"the mesh {mesh} has no axis {' or '.join(axis.name for axis in mesh.axes if axis.stores)}",
        hint=f"mesh='{Mesh.parse({**mesh.sizes, name: 2}, mesh.axes)}', or leave zero= out",
    )


def _check(name: str, sizes: Sequence[int], storage: Storage, others: Layout, problem: Problem) -> None:
    """Raise LayoutError if a parameter cannot be stored as the user's pins request."""
    name_pins, pins = storage.pinned[name], problem.pins
    if not _agree(name_pins):
        clash = smallest_conflict(name_pins, _agree)
        raise LayoutError(
            pins_cannot_hold(clash), why=f"{name} can have only one layout",
            where=", ".join(filter(None, map(pins.where, clash))), hint="leave one of them out",
        )  # fmt: skip
    place = Placement.parse(name_pins[0].text)
    _, why = storage.storing_axes_for(place, sizes, others)
    if why:
        mesh, axis = storage.mesh, storage.mesh.data_axis
        hint = storable_placements(sizes, axis, mesh.size(axis), others)
        if place == shard(0) and any(name in problem.pinned[other].stacks for other in problem.expert_axes):
            over = ", ".join(other.name for other in mesh.axes if other.is_chosen)
            why += f"; over {axis} a weight is stored sharded and used unsharded"
            hint += f"; experts themselves are sharded over {over}"
        raise LayoutError(
            f"cannot pin {name_pins[0]}", why=f"{name}: {why}", where=pins.where(name_pins[0]), hint=hint
        )  # fmt: skip


def _agree(pins: Sequence[LayoutPin]) -> bool:
    places = [Placement.parse(pin.text) for pin in pins]
    return len({place if place.is_shard else R for place in places}) <= 1


def storage_notes(trace: Trace, decisions: Decisions, zero: int) -> tuple[str, ...]:
    """Return a note for each matrix that ZeRO does not shard, or shards over fewer ranks than possible.

    Repeated blocks share a note.
    """
    mesh, notes = decisions.mesh, []
    for name, parameter in trace.parameters.items() if zero else ():
        layout = decisions.stored.get(name, {})
        axis = mesh.stored_over(layout)
        over = mesh.storing([a for a, place in layout.items() if place.is_shard and a != axis])
        if parameter.dim() < MIN_DIMS or not over or axis == over[0]:
            continue
        others = {a: place for a, place in layout.items() if a != axis}
        if first_divisible_shard(tuple(parameter.shape), mesh.size(over[0]), others) is None:  # else a pin is the cause
            most, why = f"{over[0]}={mesh.size(over[0])}", "no dim that tp leaves unsharded divides"
            how = f"is sharded over {axis}={mesh.size(axis)} and not {most}" if axis else f"stays replicated on {most}"
            notes.append(f"{pattern_of(name)}: {list(parameter.shape)} {how}: {why}")
    return tuple(dict.fromkeys(notes))
