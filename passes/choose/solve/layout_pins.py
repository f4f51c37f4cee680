"""Layout pins: find the nodes that they match, and the strategies and placements that they allow.

A layout pin is a user's choice for a parameter, operator or module on one mesh axis, such as `S(0)`.

Each pin is first checked alone. If pins conflict, the error names a smallest set of conflicting pins. To find this
set, each pin is dropped in turn, and stays dropped while the other pins still conflict. If several pins are left,
single pins and pairs of pins are tried. The error also names the weight, operator or dim on which the pins conflict.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import fx

from autopart.common.names import near_names
from autopart.errors import LayoutError, OptionError
from autopart.ir.atoms import BATCH, DATA_DIM, Atom
from autopart.ir.decisions import Strategy
from autopart.ir.facts import WEIGHT, facts
from autopart.ir.graph import (
    describe,
    on_parameters,
    parameters_of,
    parents,
    pattern_of,
    short_name,
    tensor_inputs,
    tuple_values,
)
from autopart.ir.layout import Layout, Placement, R, cannot_store, shard
from autopart.ir.mesh import Context, Cuts, Mesh
from autopart.ir.pattern import is_innermost
from autopart.ir.trace import Trace
from autopart.passes.choose.solve.expert_axes import (
    Mixture,
    Stacks,
    can_shard_experts_again,
    can_shard_tokens_again,
    has_dispatched_tokens,
    mixtures,
    mixtures_on_axis,
    shards_experts_equally,
)
from autopart.passes.choose.solve.nested_shards import InnerSharding, sequence_divides, shard_inside
from autopart.passes.choose.solve.pairwise_solver import NoSolution
from autopart.passes.facts.strategies import (
    can_shard_sequence,
    output_atoms,
    possible,
    strategies_on_axis,
    strategies_on_weight_dims,
)
from autopart.plans.pins import LayoutPin, Pin, Pins

T = TypeVar("T")


@dataclass(frozen=True)
class AxisConstraints:
    """Constraints on the mesh axis that is solved now: layout pins, and layouts on axes already solved.

    The planner solves one axis after another. A dim is sharded over one axis only. Exceptions are the dim of
    experts, and a sequence dim whose length is divisible by the product of the sizes of several axes.
    A layout pin is a user's choice, such as `S(0)` for a weight.

    Args:
        axis: name of this axis.
        cuts: what this axis shards: features, sequence positions or experts.
        parameters: {parameter: its pins}, including pins that shard the parameter over another axis.
        operators: {operator: its pins}.
        variants: {repeated block: its pins}. Equal blocks get one layout only if their pins are equal too. The key of
            a block is `BlockPosition.block`.
        factors: {operator: {letter of its sharding rule: sharding over each solved axis that shards the letter's
            dims}}. A rule is a text such as `b s k, n k -> b s n`.
        dims: {parameter: {dim: number of its shards over solved axes}}.
        ranks: size of this axis.
        context: the option `context=`, which restricts the attention strategies on this axis.
        stacks: mixtures of experts whose experts this axis may shard (`expert_axes.py`), even if other axes shard
            them.
        before: {operator: its (strategy, size of the axis) on each solved axis}.
    """

    axis: str = ""
    cuts: Cuts = "features"
    parameters: Mapping[str, tuple[LayoutPin, ...]] = field(default_factory=dict)
    operators: Mapping[fx.Node, tuple[LayoutPin, ...]] = field(default_factory=dict)
    variants: Mapping[tuple[int, int] | None, frozenset[tuple[Hashable, str, str]]] = field(default_factory=dict)
    factors: Mapping[fx.Node, Mapping[str, Sequence[InnerSharding]]] = field(default_factory=dict)
    dims: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    ranks: int = 1
    context: Context = "auto"
    stacks: Stacks = field(default_factory=dict)
    before: Mapping[fx.Node, tuple[tuple[Strategy, int], ...]] = field(default_factory=dict)

    def strategies_on_axis(self, node: fx.Node, num_shards: int) -> tuple[Strategy, ...]:
        """Return all strategies of an operator on an axis of `num_shards` ranks. Pins are ignored."""
        return strategies_on_axis(node, num_shards, self.cuts, node in self.stacks)

    def strategies_on_weight_dims(self, node: fx.Node, num_shards: int) -> tuple[Strategy, ...]:
        """Return the strategies of an operator that shard only dims of weights. Pins are ignored."""
        return strategies_on_weight_dims(node, num_shards, self.cuts, node in self.stacks)

    def strategies(self, node: fx.Node, options: Iterable[Strategy]) -> list[Strategy]:
        """Return the strategies in `options` that fit the user's pins and the axes that are already solved.

        Mesh axes are solved in turn. Layouts on an axis that is already solved are fixed.
        """
        pins, taken = self.operators.get(node, ()), self.factors.get(node, {})
        free = [o if o.factor not in taken else self._adapt_to_inner_axes(node, o, taken[o.factor]) for o in options]
        left = [option for option in free if option is not None]
        if self.is_dispatched(node):  # inner axes shard the experts that a rank of this axis has
            lookup = facts(node)["pattern"].lookup
            left = [option for option in left if not option.factor or option.factor != lookup]
        return [option for option in left if all(_runs_as(option, pin) for pin in pins)]

    def _adapt_to_inner_axes(self, node: fx.Node, option: Strategy, taken: Sequence[InnerSharding]) -> Strategy | None:
        """Adapt a strategy to inner (already solved) mesh axes that shard the same dim.

        If each shard on this axis is a union of shards of the inner axes, the strategy is returned unchanged.
        Otherwise, if this axis shards the sequence, it splits each shard of the inner axes further. Returns None if
        neither is possible.
        """
        if self._contains_inner_shards(node, option, taken):
            return option
        return shard_inside(node, option, taken, self.ranks) if self.cuts == "positions" else None

    def _contains_inner_shards(self, node: fx.Node, option: Strategy, taken: Sequence[InnerSharding]) -> bool:
        """Return True if a shard on this axis can be a union of shards on the axes that were solved earlier.

        The sharded dim must be the experts or the sequence, and all these axes must shard it in the same way. The
        product of the axis sizes must divide the size of the dim.
        """
        pattern = facts(node)["pattern"]
        assert pattern is not None, "an operator without a rule is not sharded"
        if node in self.stacks and any(shards_experts_equally(node, option, one.strategy) for one in taken):
            return can_shard_experts_again(node, self.stacks[node], option, taken, self.ranks)
        if option.is_dispatched or self.cuts != "positions":
            return False
        if option.factor == pattern.lookup or option.factor in pattern.joined:
            return False
        if any(one.strategy.is_dispatched for one in taken):  # each rank of this axis dispatches its local tokens
            return can_shard_tokens_again(node, option, taken, self.ranks)
        places = [[place.in_order for place in o.places] for o in (option, *(t.strategy for t in taken))]
        alike = all(a == b for other in places[1:] for a, b in zip(places[0], other, strict=True)
                    if a.is_shard or b.is_shard)  # fmt: skip
        parts = math.prod(one.ranks for one in taken) * self.ranks
        return alike and is_innermost(pattern, option.factor) and sequence_divides(node, option.factor, parts)

    def is_dispatched(self, node: fx.Node) -> bool:
        """Return True if an axis that was solved earlier dispatches the operator's tokens to experts."""
        outputs = (one.strategy.outputs for taken in self.factors.get(node, {}).values() for one in taken)
        return any(place.is_dispatched for places in outputs for place in places)

    def placements(self, name: str, options: Sequence[Placement]) -> list[Placement]:
        """Return the placements of a parameter that the user's pins and the axes solved earlier allow."""
        pins, taken = self.parameters.get(name, ()), self.dims.get(name, {})
        asked = [Placement.parse(pin.text) for pin in pins if pin.axis == self.axis]
        free = [place for place in dict.fromkeys([*options, *asked])
                if not (place.is_shard and place.dim in taken and not self.can_shard_again(name, place))]  # fmt: skip
        return [place for place in free if all(self._agrees_with(name, place, pin) for pin in pins)]

    def can_shard_again(self, name: str, place: Placement) -> bool:
        """Return True if this axis may also shard the experts of a weight that already solved axes shard."""
        parts = self.dims.get(name, {}).get(0, 1) * self.ranks
        return name in self.stacks and place == shard(0) and can_shard_sequence(self.stacks[name], parts)

    def with_solved_axes(
        self, before: Mapping[str, Mapping[fx.Node, Strategy]], stored: Mapping[str, Layout], mesh: Mesh
    ) -> AxisConstraints:  # fmt: skip
        """Return a copy of the constraints, extended by the results for the axes that are solved.

        Args:
            before: {solved axis: {operator: strategy}}.
            stored: {parameter: its layout on the solved axes}.
        """
        factors: dict[fx.Node, dict[str, list[InnerSharding]]] = defaultdict(dict)
        done: dict[fx.Node, tuple[tuple[Strategy, int], ...]] = {}
        for axis, chosen in before.items():
            for node, strategy in chosen.items():
                done[node] = (*done.get(node, ()), (strategy, mesh.size(axis)))
                if factor := strategy.factor:
                    factors[node].setdefault(factor, []).append(InnerSharding(strategy, mesh.size(axis)))
        dims: dict[str, dict[int, int]] = defaultdict(dict)
        for name, places in stored.items():
            for axis, place in places.items():
                if place.is_shard:
                    dims[name][place.dim] = dims[name].get(place.dim, 1) * mesh.size(axis)
        return replace(self, factors=factors, dims=dims, ranks=mesh.size(self.axis), before=done)

    def _agrees_with(self, name: str, place: Placement, pin: LayoutPin) -> bool:
        if pin.axis != self.axis:
            other = Placement.parse(pin.text)
            return (
                not place.is_shard or place.dim != other.dim or (place == other and self.can_shard_again(name, place))
            )
        return place.is_replicated if pin.is_replicated else str(place) == pin.text


FREE = AxisConstraints()

_LEAVE = "leave it out, or another name or layout", "leave one of them out"


def _runs_as(option: Strategy, pin: LayoutPin) -> bool:
    if pin.is_replicated:
        return all(place.is_replicated for place in option.places)
    return str(option) == pin.text if "->" in pin.text else str(option.outputs[0]) == pin.text


def smallest_conflict(pins: Sequence[T], hold: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a minimal set of conflicting layout pins: without any one of them, the rest is possible.

    If one pin alone or two pins conflict, the set has one or two pins.

    Args:
        hold: function that returns True if a plan can follow all the pins in its argument.

    >>> smallest_conflict([1, 2, 3, 4], lambda left: not {2, 4} <= set(left))
    [2, 4]
    """
    left = list(pins)
    for pin in pins:
        fewer = [other for other in left if other is not pin]
        if not hold(fewer):
            left = fewer
    fewest = (few for size in range(1, min(len(left), 3)) for few in itertools.combinations(pins, size))
    return next((list(few) for few in fewest if not hold(few)), left)


def pins_cannot_hold(pins: Sequence[Pin]) -> str:
    texts = "; ".join(map(str, pins))
    return f"these pins conflict: {texts}" if len(pins) > 1 else f"this pin is impossible: {texts}"


# Layouts


def pinned_layouts(trace: Trace, mesh: Mesh, pins: Pins, axis: str) -> AxisConstraints:
    """Translate the user's layout pins to constraints on one axis.

    Raises LayoutError or OptionError for a pin that no plan can follow.
    """
    parameters: dict[str, tuple[LayoutPin, ...]] = defaultdict(tuple)
    nodes: dict[fx.Node, tuple[LayoutPin, ...]] = defaultdict(tuple)
    model = _Names(trace)
    for pin in pins.layouts:
        names, matched = model.matched(pin, pins)
        for name in names:
            _check_parameter(trace, mesh, pin, name, pins)
        for node in matched:
            _check_operator(node, mesh, pin, pins)
        _check_axis(pin, mesh, pins)
        if pin.axis == axis or (mesh.size(pin.axis) > 1 and not pin.is_replicated):
            parameters.update({name: (*parameters[name], pin) for name in names})
        if pin.axis == axis:
            nodes.update({node: (*nodes[node], pin) for node in matched})
    cuts: Cuts = mesh.axis(axis).cuts if axis else "features"
    stacks = stacks_pinned(mixtures(trace), mesh, parameters, nodes, axis)
    variants = _variants(trace, parameters, nodes)
    return AxisConstraints(axis, cuts, parameters, nodes, variants, ranks=mesh.size(axis), stacks=stacks)


def stacks_pinned(
    all_mixtures: Sequence[Mixture], mesh: Mesh, parameters: Mapping[str, Sequence[LayoutPin]],
    operators: Mapping[fx.Node, Sequence[LayoutPin]], axis: str,
) -> Stacks:  # fmt: skip
    """Return {operator or weight: number of experts} for MoE layers that the pins let `axis` shard."""
    cut = {name for name, pins in parameters.items()
           if any(pin.axis == axis and Placement.parse(pin.text) == shard(0) for pin in pins)}  # fmt: skip
    routed = {node for node, pins in operators.items() if any(has_dispatched_tokens(pin.text) for pin in pins)}
    return mixtures_on_axis(all_mixtures, mesh.axis(axis).cuts if axis else "", cut, routed)


def data_axis_pins(trace: Trace, mesh: Mesh, pins: Pins) -> dict[str, list[LayoutPin]]:
    """Return {parameter: the user's pins on the data axis, over which ZeRO shards parameters}.

    A pin shards or replicates the parameter. It also applies to flattened axes (`dp_cp`) that contain the data axis.
    """
    model, by_name = _Names(trace), defaultdict(list)
    for pin in pins.layouts:
        if pin.axis == mesh.data_axis and mesh.storing_axis is not None:
            for name in model.matched(pin, pins)[0]:
                by_name[name].append(pin)
    return by_name


def _variants(
    trace: Trace, parameters: Mapping[str, tuple[LayoutPin, ...]], nodes: Mapping[fx.Node, tuple[LayoutPin, ...]]
) -> dict[tuple[int, int] | None, frozenset[tuple[Hashable, str, str]]]:
    by_block: dict[tuple[int, int] | None, set[tuple[Hashable, str, str]]] = defaultdict(set)
    stored = [(node, parameters.get(node.target, ())) for node in trace.graph.find_nodes(op="get_attr")]
    for node, pins in [*stored, *nodes.items()]:
        place = facts(node).get("place")
        if place is not None and place.block is not None:
            by_block[place.block] |= {(place.like, pin.axis, pin.text) for pin in pins}
    return {block: frozenset(pins) for block, pins in by_block.items() if pins}


class _Names:
    """All names in a model that a user's pin can match: parameters, operators and modules."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.nodes = on_parameters(trace.graph)
        self.parameters = {name: name for name in trace.parameters}
        self.parameters |= {alias: name for name, others in trace.aliases.items() for alias in others}

    def matched(self, pin: LayoutPin, pins: Pins) -> tuple[list[str], list[fx.Node]]:
        """Return the names of the parameters and operators that a user's pin matches.

        Raises OptionError if the pin matches nothing, and LayoutError for a pin that shards a module.
        """
        if pin.of_operator:
            nodes = [node for node in self.nodes if pin.matches(facts(node)["key"])]
            if not nodes:
                raise no_match(str(pin), [facts(node)["group"] for node in self.nodes], pin.name, pins.where(pin))
            return [], nodes
        named = [name for alias, name in self.parameters.items() if pin.matches(alias)]
        inside = [name for alias, name in self.parameters.items() if any(map(pin.matches, parents(alias)))]
        nodes = [node for node in self.nodes if any(map(pin.matches, parents(facts(node)["key"])))]
        if not (named or inside or nodes):
            raise no_match(str(pin), [*self.parameters, *self._modules()], pin.name, pins.where(pin))
        if pin.is_replicated:
            return list(dict.fromkeys([*named, *inside])), nodes
        if not named:
            raise LayoutError(
                f"cannot pin the module {pin}", why="only R fits all its weights and operators",
                where=pins.where(pin), hint=self._finer(inside, nodes),
            )  # fmt: skip
        return named, []

    def _modules(self) -> list[str]:
        return [path for node in self.nodes for path in parents(facts(node)["key"])]

    def _finer(self, names: list[str], nodes: list[fx.Node]) -> str:
        patterns = [pattern_of(name) for name in names] + [facts(node)["group"] for node in nodes]
        return "pin " + ", ".join(repr(name) for name in list(dict.fromkeys(patterns))[:4])


def no_match(asked: str, names: Iterable[str], near: str, where: str) -> OptionError:
    """Return the error for a user's pin that matches nothing. The error lists similar names."""
    return OptionError(f"the pin {asked} matches nothing in the model", where=where, hint=near_names(near, names))


def _check_axis(pin: LayoutPin, mesh: Mesh, pins: Pins) -> None:
    """Raise OptionError for a user's pin on an axis that the mesh lacks, or on the pipeline axis."""
    if pin.axis not in mesh.sizes and not (pin.axis == mesh.data_axis and mesh.storing_axis is not None):
        raise OptionError(
            f"the pin {pin} is for an axis that the mesh {mesh} lacks", where=pins.where(pin),
            hint=f"leave it out, or mesh='{mesh},{pin.axis}2'",
        )  # fmt: skip
    axis = mesh.axis(pin.axis)
    is_stored_so = (pin.is_replicated and axis.cuts != "stages") or (axis.stores and not pin.of_operator)
    if axis.name in mesh.chosen or is_stored_so:
        return
    why = f"the placements of an operator on {pin.axis} follow from the batch"
    if not axis.stores:
        why = (
            "stages are not layouts" if axis.cuts == "stages" else f"weights are replicated on every rank of {pin.axis}"
        )
    hint = "'stages': {'cut_before': [...]}" if axis.cuts == "stages" else "R, or a pin for tp"
    raise OptionError(f"the pin {pin} is impossible", why=why, where=pins.where(pin), hint=hint)


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
    if pin.axis not in mesh.chosen:
        return
    options = possible(
        node, strategies_on_axis(node, mesh.size(pin.axis), mesh.axis(pin.axis).cuts, has_dispatched_tokens(pin.text))
    )
    if any(_runs_as(option, pin) for option in options):
        return
    outputs = dict.fromkeys(str(option) if "->" in pin.text else str(option.outputs[0]) for option in options)
    raise LayoutError(
        f"cannot pin {pin}", why=_why_unsupported(node, pin, mesh), where=pins.where(pin),
        hint=" | ".join(list(outputs)[:8]),
    )  # fmt: skip


def _why_unsupported(node: fx.Node, pin: LayoutPin, mesh: Mesh) -> str:
    ranks, axis = mesh.size(pin.axis), f"{pin.axis}={mesh.size(pin.axis)}"
    place = R if "->" in pin.text else Placement.parse(pin.text)
    shape = tuple_values(node)[0].shape
    if place.is_shard and place.dim >= len(shape):
        return f"{describe(node)}: its output has shape {list(shape)}, no dim {place.dim}"
    if place.is_shard:
        atoms = output_atoms(node)[place.dim] or (Atom(1, DATA_DIM),)
        output_dim = f"{describe(node)}: dim {place.dim} of its output"
        if atoms[0].kind == BATCH:
            return f"{output_dim} is the batch, which dp shards"
        if len(atoms) == 1 and atoms[0].size % ranks:
            return f"{output_dim} has size {atoms[0].size}, which {axis} does not divide"
        if atoms[0].size % ranks:
            return (
                f"{output_dim} is {' x '.join(str(a.size) for a in atoms)}, and {axis} does not divide {atoms[0].size}"
            )
    return f"{describe(node)} has no such strategy on {axis}"


def solve_pinned(
    trace: Trace, mesh: Mesh, pinned: AxisConstraints, pins: Pins, solve: Callable[[AxisConstraints], T]
) -> T:
    """Return `solve(pinned)`, the solution of one axis under the user's pins.

    If there is no solution, raises LayoutError with a minimal set of conflicting pins.
    """

    def has_solution(pinned: AxisConstraints) -> bool:
        try:
            solve(pinned)
        except NoSolution:
            return False
        return True

    try:
        return solve(pinned)
    except NoSolution:
        raise _layout_conflict(trace, mesh, pinned.axis, pins, has_solution) from None


def _layout_conflict(
    trace: Trace, mesh: Mesh, axis: str, pins: Pins, hold: Callable[[AxisConstraints], bool]
) -> LayoutError:  # fmt: skip
    """Return the error for layout pins of the user that conflict.

    `hold`: function that returns True if the problem has a solution under the constraints in its argument.
    """

    def together(some: Sequence[LayoutPin]) -> bool:
        return hold(pinned_layouts(trace, mesh, Pins(tuple(some), text=pins.text), axis))

    conflict = smallest_conflict(pins.layouts, together)
    where = ", ".join(dict.fromkeys(filter(None, map(pins.where, conflict))))
    pinned, ranks = pinned_layouts(trace, mesh, Pins(tuple(conflict)), axis), mesh.size(axis)
    if len(conflict) == 1:
        for node in pinned.operators if pinned.cuts == "features" else ():
            if not pinned.strategies(node, pinned.strategies_on_weight_dims(node, ranks)):
                why = f"{describe(node)} can have this layout only with sequence parallelism"
                return LayoutError(
                    pins_cannot_hold(conflict), why=why, where=where, hint="sequence_parallel='auto' or True"
                )
    why = _conflict_reason(trace, pinned, ranks)
    return LayoutError(pins_cannot_hold(conflict), why=why, where=where, hint=_LEAVE[len(conflict) > 1])


def _conflict_reason(trace: Trace, pinned: AxisConstraints, ranks: int) -> str:
    """Return a text that names the first weight or operator on which the user's pins conflict."""
    for name, pins in pinned.parameters.items():
        if len({pin.text for pin in pins if pin.axis == pinned.axis}) > 1:
            return f"{_all_names_text(trace, name)} can have only one layout"
        if len({pin.axis for pin in pins}) > 1:
            return f"{_all_names_text(trace, name)}: only one axis can shard a dim"
    taken: dict[str, list[str]] = defaultdict(list)
    for node in pinned.operators:
        options = pinned.strategies(node, pinned.strategies_on_axis(node, ranks))
        if not options:
            return f"{describe(node)} can have only one layout"
        for weight, how in _on_weights(trace, node, options):
            taken[weight].append(how)
    for weight, uses in taken.items():
        if weight in pinned.parameters or len(uses) > 1:
            return f"{', '.join(uses[:2])}, but a weight is used as it is stored, or gathered"
    return "the operators between them have no layouts that fit all of them"


def _on_weights(trace: Trace, node: fx.Node, options: Sequence[Strategy]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for each weight of an operator. The text lists its placements in `options`."""
    for i, used in enumerate(tensor_inputs(node)):
        for weight in parameters_of(used):
            is_view = facts(node)["role"] == WEIGHT
            places = " or ".join(dict.fromkeys(str(o.outputs[0] if is_view else o.inputs[i]) for o in options))
            seen = "" if used.op == "get_attr" else f", through {short_name(used)},"
            does = "gives" if is_view else "takes"
            yield weight, f"{describe(node)} then {does} {_all_names_text(trace, weight)}{seen} as {places}"


def _all_names_text(trace: Trace, name: str) -> str:
    others = trace.aliases.get(name, ())
    return f"{name} (tied: one weight with {', '.join(others)})" if others else name
