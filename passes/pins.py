"""What layout pins mean for one traced model: which options they leave to parameters and operators.

Each pin is checked alone first. Pins that cannot hold together are reported as a smallest set: each is dropped in turn,
and stays dropped while the others still cannot hold.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import fx

from autopart.errors import LayoutError, OptionError
from autopart.graph import describe, operators, parents, pattern_of, tensor_inputs
from autopart.layout import Placement, cannot_store
from autopart.mesh import Mesh
from autopart.pins import LayoutPin, Pin, Pins
from autopart.trace import Trace

from .analyze import ACTIVE, WEIGHT
from .pairs import NoSolution
from .strategies import TENSOR_KINDS, Strategy, strategies

T = TypeVar("T")


@dataclass(frozen=True)
class Pinned:
    """Layout pins by what they hold for on the tensor axis. `variants`: the pins in every repeated block (by
    `Place.block`), so that only blocks with the same pins share their choices."""

    parameters: Mapping[str, tuple[LayoutPin, ...]] = field(default_factory=dict)
    operators: Mapping[fx.Node, tuple[LayoutPin, ...]] = field(default_factory=dict)
    variants: Mapping[tuple[int, int] | None, frozenset[tuple[Hashable, str]]] = field(default_factory=dict)

    def strategies(self, node: fx.Node, options: Iterable[Strategy]) -> list[Strategy]:
        """The options that the pins of an operator leave."""
        pins = self.operators.get(node, ())
        return [option for option in options if all(_runs_as(option, pin) for pin in pins)]

    def placements(self, name: str, options: Sequence[Placement]) -> list[Placement]:
        """The options that the pins of a parameter leave, and what they ask for themselves."""
        pins = self.parameters.get(name, ())
        asked = [Placement.parse(pin.text) for pin in pins]
        return [place for place in dict.fromkeys([*options, *asked]) if all(_lies_as(place, pin) for pin in pins)]


FREE = Pinned()


def _runs_as(option: Strategy, pin: LayoutPin) -> bool:
    if pin.is_replicated:
        return all(place.is_replicated for place in (*option.inputs, *option.outputs))
    return str(option) == pin.text if "->" in pin.text else str(option.outputs[0]) == pin.text


def _lies_as(place: Placement, pin: LayoutPin) -> bool:
    return place.is_replicated if pin.is_replicated else str(place) == pin.text


def smallest_conflict(pins: Sequence[T], hold: Callable[[Sequence[T]], bool]) -> list[T]:
    """A set of pins that cannot hold together, none of which can be left out. `hold`: whether some can.

    >>> smallest_conflict([1, 2, 3, 4], lambda left: not {2, 4} <= set(left))
    [2, 4]
    """
    left = list(pins)
    for pin in pins:
        fewer = [other for other in left if other is not pin]
        if not hold(fewer):
            left = fewer
    return left


def cannot_hold(found: Sequence[Pin]) -> str:
    """What an error says of a smallest set of pins."""
    texts = "; ".join(map(str, found))
    return f"these pins cannot hold together: {texts}" if len(found) > 1 else f"this pin cannot hold: {texts}"


# Layouts


def pinned_layouts(trace: Trace, mesh: Mesh, pins: Pins) -> Pinned:
    """The layout pins, found in the model. Raises for one that no plan can follow."""
    parameters: dict[str, tuple[LayoutPin, ...]] = defaultdict(tuple)
    nodes: dict[fx.Node, tuple[LayoutPin, ...]] = defaultdict(tuple)
    model = _Names(trace)
    for pin in pins.layouts:
        names, found = model.matched(pin, pins)
        for name in names:
            _check_parameter(trace, mesh, pin, name, pins)
        for node in found:
            _check_operator(node, mesh, pin, pins)
        if _check_axis(pin, mesh, pins):
            parameters.update({name: (*parameters[name], pin) for name in names})
            nodes.update({node: (*nodes[node], pin) for node in found})
    return Pinned(parameters, nodes, _variants(trace, parameters, nodes))


def pinned_over_dp(trace: Trace, mesh: Mesh, pins: Pins) -> dict[str, list[LayoutPin]]:
    """The parameters that pins place on `dp`, whole or cut."""
    model, found = _Names(trace), defaultdict(list)
    for pin in pins.layouts:
        if pin.axis == "dp" and mesh.size("dp") > 1:
            for name in model.matched(pin, pins)[0]:
                found[name].append(pin)
    return found


def _variants(
    trace: Trace, parameters: Mapping[str, tuple[LayoutPin, ...]], nodes: Mapping[fx.Node, tuple[LayoutPin, ...]]
) -> dict[tuple[int, int] | None, frozenset[tuple[Hashable, str]]]:
    found: dict[tuple[int, int] | None, set[tuple[Hashable, str]]] = defaultdict(set)
    stored = [(node, parameters.get(node.target, ())) for node in trace.graph.find_nodes(op="get_attr")]
    for node, pins in [*stored, *nodes.items()]:
        place = node.meta.get("place")
        if place is not None and place.block is not None:
            found[place.block] |= {(place.like, pin.text) for pin in pins}
    return {block: frozenset(pins) for block, pins in found.items() if pins}


class _Names:
    """What pins can name in a model: parameters, operators and modules."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.nodes = [node for node in operators(trace.graph) if node.meta["role"] in (ACTIVE, WEIGHT)]
        self.parameters = {name: name for name in trace.parameters}
        self.parameters |= {alias: name for name, others in trace.aliases.items() for alias in others}

    def matched(self, pin: LayoutPin, pins: Pins) -> tuple[list[str], list[fx.Node]]:
        """The parameters and the operators that a pin is for."""
        if pin.of_operator:
            found = [node for node in self.nodes if pin.matches(node.meta["key"])]
            if not found:
                raise no_match(str(pin), [node.meta["group"] for node in self.nodes], pin.name, pins.where(pin))
            return [], found
        named = [name for alias, name in self.parameters.items() if pin.matches(alias)]
        inside = [name for alias, name in self.parameters.items() if any(map(pin.matches, parents(alias)))]
        found = [node for node in self.nodes if any(map(pin.matches, parents(node.meta["key"])))]
        if not (named or inside or found):
            raise no_match(str(pin), [*self.parameters, *self._modules()], pin.name, pins.where(pin))
        if pin.is_replicated:
            return list(dict.fromkeys([*named, *inside])), found
        if not named:
            raise LayoutError(
                f"cannot pin the module {pin}", why="only R says the same of all its weights and operators",
                where=pins.where(pin), hint=self._finer(inside, found),
            )  # fmt: skip
        return named, []

    def _modules(self) -> list[str]:
        return [path for node in self.nodes for path in parents(node.meta["key"])]

    def _finer(self, names: list[str], nodes: list[fx.Node]) -> str:
        found = [pattern_of(name) for name in names] + [node.meta["group"] for node in nodes]
        return "pin " + ", ".join(repr(name) for name in list(dict.fromkeys(found))[:4])


def no_match(asked: str, names: Iterable[str], near: str, where: str) -> OptionError:
    """The error of a pin for which the model has nothing, with the names that come near."""
    return OptionError(f"the pin {asked} matches nothing in the model", where=where, hint=near_names(near, names))


def near_names(name: str, names: Iterable[str]) -> str:
    """The patterns of names that come near one that is not there."""
    patterns = list(dict.fromkeys(map(pattern_of, names)))
    return ", ".join(difflib.get_close_matches(pattern_of(name), patterns, 4, 0.5) or patterns[:6])


def _check_axis(pin: LayoutPin, mesh: Mesh, pins: Pins) -> bool:
    """Whether the pin leaves something to solve for: layouts are chosen on tp alone."""
    if pin.axis not in mesh.sizes:
        raise OptionError(
            f"the pin {pin} is for an axis that the mesh {mesh} lacks", where=pins.where(pin),
            hint=f"leave it out, or mesh='{mesh},{pin.axis}2'",
        )  # fmt: skip
    if pin.axis == "tp":
        return mesh.size("tp") > 1
    if (pin.is_replicated and pin.axis != "pp") or (pin.axis == "dp" and not pin.of_operator):
        return False
    why = "what an operator does over dp follows from the rows of the batch"
    if pin.axis != "dp":
        why = "stages are no layouts" if pin.axis == "pp" else f"weights are whole on every rank of {pin.axis}"
    hint = "'stages': {'cut_before': [...]}" if pin.axis == "pp" else "R, or a pin for tp"
    raise OptionError(f"the pin {pin} cannot be", why=why, where=pins.where(pin), hint=hint)


def _check_parameter(trace: Trace, mesh: Mesh, pin: LayoutPin, name: str, pins: Pins) -> None:
    sizes = tuple(trace.parameters[name].shape)
    why = cannot_store(Placement.parse(pin.text), sizes, pin.axis, mesh.size(pin.axis))
    if why:
        hint = ", ".join(f"S({dim})" for dim, size in enumerate(sizes) if size % mesh.size(pin.axis) == 0)
        raise LayoutError(
            f"cannot pin {pin}", why=f"{name}: {why}", where=pins.where(pin),
            hint=f"{hint} or R" if hint else "R",
        )  # fmt: skip


def _check_operator(node: fx.Node, mesh: Mesh, pin: LayoutPin, pins: Pins) -> None:
    if pin.axis != "tp" or mesh.size("tp") < 2:
        return
    options = strategies(node, mesh.size("tp"), TENSOR_KINDS)
    if any(_runs_as(option, pin) for option in options):
        return
    outputs = dict.fromkeys(str(option) if "->" in pin.text else str(option.outputs[0]) for option in options)
    raise LayoutError(
        f"cannot pin {pin}", why=f"{describe(node)} has no such way to run on tp={mesh.size('tp')}",
        where=pins.where(pin), hint=" | ".join(list(outputs)[:8]),
    )  # fmt: skip


def solve_pinned(trace: Trace, mesh: Mesh, pins: Pins, solve: Callable[[Pinned], T]) -> T:
    """What `solve` finds for the pins. Raises LayoutError with a smallest set of pins for which it finds nothing."""

    def has_solution(pinned: Pinned) -> bool:
        try:
            solve(pinned)
        except NoSolution:
            return False
        return True

    try:
        return solve(pinned_layouts(trace, mesh, pins))
    except NoSolution:
        raise layout_conflict(trace, mesh, pins, has_solution) from None


def layout_conflict(trace: Trace, mesh: Mesh, pins: Pins, hold: Callable[[Pinned], bool]) -> LayoutError:
    """The error for layout pins that cannot all hold. `hold`: whether what pins leave has a solution."""

    def together(some: Sequence[LayoutPin]) -> bool:
        return hold(pinned_layouts(trace, mesh, Pins(tuple(some), text=pins.text)))

    found = smallest_conflict(pins.layouts, together)
    where = ", ".join(dict.fromkeys(filter(None, map(pins.where, found))))
    return LayoutError(
        cannot_hold(found), where=where, hint="leave one of them out",
        why=_why_not_together(pinned_layouts(trace, mesh, Pins(tuple(found))), mesh.size("tp")),
    )  # fmt: skip


def _why_not_together(pinned: Pinned, tp: int) -> str:
    """The first thing in the model that several pins of a smallest conflict meet at."""
    for name, pins in pinned.parameters.items():
        if len({pin.text for pin in pins}) > 1:
            return f"{name} lies in one way"
    for node in pinned.operators:
        options = pinned.strategies(node, strategies(node, tp, TENSOR_KINDS))
        if not options:
            return f"{describe(node)} runs in one way"
        for used in (n for n in node.all_input_nodes if n.op == "get_attr" and n.target in pinned.parameters):
            at = [i for i, n in enumerate(tensor_inputs(node)) if n is used]
            taken = dict.fromkeys(str(option.inputs[i]) for option in options for i in at)
            return (
                f"{describe(node)} then takes {used.target} as {' or '.join(taken)}, and a weight is used as it is "
                "stored, or whole"
            )
    return "no choice for the operators between them fits all"
