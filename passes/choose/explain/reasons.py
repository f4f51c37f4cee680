"""Explanations of a plan: the extra cost of each alternative, from the problem that the solver solved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from torch import fx

from autopart.common.names import near_names
from autopart.common.text import quantity
from autopart.cost.count.gradient_communication import exchanged_by_method
from autopart.cost.memory_kinds import OPTIMIZER_VALUES
from autopart.cost.predict.collective_costs import levels
from autopart.cost.predict.dp_sync_costs import break_even_bytes_per_s, exact_s, sync_s
from autopart.errors import LayoutError, OptionError
from autopart.ir.facts import facts
from autopart.ir.graph import describe, name_of, on_parameters, operator_name, parents, pattern_of, size_bytes
from autopart.ir.layout import DIRECTIONS, Placement, R
from autopart.ir.program import Program
from autopart.ir.run.sync_option import ALL_REDUCE, MethodParameters
from autopart.passes.choose.problem import Problem
from autopart.passes.choose.solve.expert_axes import Stacks, check_expert_axes, mixtures
from autopart.passes.choose.solve.layout_pins import data_axis_pins, pinned_layouts, solve_pinned
from autopart.passes.choose.solve.pairwise_solver import NoSolution
from autopart.passes.choose.solve.shard_axis import Choice, ForbiddenConversion, Sharding, ShardingProblem
from autopart.passes.choose.solve.sharding_costs import (
    CostedStep,
    ShardingCost,
    reduce_bytes_ratio,
    sharded_storage_cost,
)
from autopart.passes.choose.storage.parameter_storage import Storage
from autopart.plans.pins import Pins
from autopart.plans.why import Why

Solved = tuple[ShardingProblem, Sharding]

_DIGITS = 6


def certificate(solved: Mapping[str, Solved]) -> dict[str, float]:
    """Return the solver's proof of optimality: objective, lower bound, gap, and the terms of the cost.

    The solver solves one axis after another. The result is for the last axis, with the layouts on all other axes fixed.
    Repeated blocks share one layout. The entry `sharing_costs` is the relative amount by which the objective would fall
    if the first and the last block could have other layouts.
    """
    if not solved:  # all weights are replicated, so the solver had no choice
        return {"objective": 0.0, "lower_bound": 0.0, "gap": 0.0}
    problem, sharding = list(solved.values())[-1]
    price = problem.price(sharding.options, problem.real_prices)
    entries = {
        "objective": sharding.cost, "lower_bound": sharding.bound, "gap": sharding.gap,
        "sharing_costs": problem.sharing_costs(sharding), "work_share": price.work, "weight_share": price.weights,
        "communication_s": price.communication_s, "memory_traffic_s": price.memory_traffic_s,
        "gradient_sync_s": price.gradient_sync_s,
    }  # fmt: skip
    return {name: float(f"{number:.{_DIGITS}g}") for name, number in entries.items()}


class Reasons:
    """Implementation of `Plan.why` and `Plan.why_not`.

    The explanations need the traced model, so `why` does not work on a copied or loaded plan.
    """

    def __init__(self, problem: Problem, program: Program, solved: Mapping[str, Solved]):
        self.problem, self.program, self.solved = problem, program, solved
        self.trace, self.mesh, self.pins = problem.trace, problem.mesh, problem.pins

    def __reduce__(self) -> Any:
        return type(None), ()

    def why(self, name: str) -> Why:
        """Explain a choice of the plan by name.

        `name` is the name of a parameter, module, operator or collective, or `dp_sync`.
        """
        if name == "dp_sync":
            return self._why_dp_sync()
        for node in self._conversions():
            if node.name == name:
                return self._why_collective(node)
        nodes = self._named(name)
        subject = ", ".join(dict.fromkeys(pattern_of(name_of(n)) for n in nodes[:1]))
        where = describe(nodes[0]) if nodes[0].op == "call_function" else describe(next(iter(nodes[0].users)))
        in_parts = self._storage_texts(nodes[0])
        if not self.solved:
            reason = f"the mesh {self.mesh} has no axis {self.mesh.tensor_axis} to shard it over"
            return Why(subject, in_parts[0] or "replicated", in_parts[1] or reason, where=where)
        axis, solved = next(iter(self.solved.items()))
        problem, sharding = solved
        choice = problem.choice_of[nodes[0]]
        chosen = ", ".join(filter(None, (str(choice.options[sharding.options[id(choice)]]), in_parts[0])))
        others = self._others(choice, solved)
        names = set(map(name_of, nodes))
        moved = tuple(node.name for node in self._conversions() if facts(node).get("key", "") in names)
        if not others:
            left = " that the pins leave" * bool(self.pins)
            reason = f"there is no other option on {axis}={self.mesh.size(axis)}{left}"
            return Why(subject, chosen, _joined_texts(reason, in_parts[1]), collectives=moved, where=where)
        runner_up, price = next(iter(others.items()))
        texts = {other: _cost_text(price) for other, price in others.items()}
        reason = _joined_texts(_reason(price, runner_up), in_parts[1])
        return Why(subject, chosen, reason, runner_up, price.seconds, texts, moved, where)

    def _why_dp_sync(self) -> Why:
        sync, hardware = self.problem.dp_sync, self.problem.hardware
        axis = (*self.mesh.along("rows"), self.mesh.data_axis)[0]
        ranks, stride = self.mesh.size(axis), self.mesh.stride(axis)
        trained = [name for name, parameter in self.trace.parameters.items() if parameter.requires_grad]
        carried = exchanged_by_method(self.trace, self.program, trained)
        if not carried:
            none = f"the mesh {self.mesh} has no data-parallel ranks"
            reason = "gradients are reduced exactly" if ranks > 1 else none
            return Why("dp_sync", str(sync), reason)
        stages = self.mesh.size("pp")
        parts = [MethodParameters(one.method, *(size / stages for size in one[1:])) for one in carried]
        method_s = sum(sync_s(one, ranks, stride, hardware) for one in parts)
        is_scattered = any(stored.unsharded_to_sync(self.mesh) for stored in self.program.parameters.values())
        kind = "reduce_scatter" if is_scattered else "all_reduce"
        summed_s = sum(exact_s(one, ranks, stride, hardware, kind) for one in parts)
        thresholds_per_s = [break_even_bytes_per_s(one, self.mesh, axis, hardware, kind) for one in parts]
        where = "between nodes" if levels(ranks, hardware.devices_per_node, stride)[1] > 1 else "to the others"
        thresholds = [f"{one.method} is faster if a rank has less than {quantity(rate, 'B/s')} {where}"
                for one, rate in zip(parts, thresholds_per_s, strict=True) if rate is not None]  # fmt: skip
        reason = "; ".join([f"it was requested: {quantity(method_s, 's')} a step on {axis}={ranks}", *thresholds])
        other = f"{quantity(summed_s, 's')} a step, which overlaps with the backward except for the last bucket"
        return Why("dp_sync", str(sync), reason, str(ALL_REDUCE), summed_s - method_s, {str(ALL_REDUCE): other})

    def _storage_texts(self, node: fx.Node) -> tuple[str, str]:
        """Return two texts about a weight that ZeRO stores sharded: its placement, and an explanation.

        Both texts are empty if ZeRO does not shard the weight.
        """
        stored = self.program.parameters.get(str(node.target)) if node.op == "get_attr" else None
        axis = self.mesh.stored_over(stored.layout) if stored is not None else None
        if stored is None or axis is None:
            return "", ""
        ranks = f"{axis}={self.mesh.size(axis)}"
        return (
            f"{stored.layout[axis]} on {axis}",
            f"each rank of {ranks} stores one shard and gathers the rest before use",
        )

    def why_not(self, name: str, layout: Mapping[str, str]) -> Why:
        """Return the extra cost that `layout` would have for a parameter, module or operator.

        If the layout is impossible, the result gives the reason.
        """
        asked, data_axis = Pins.parse({name: layout}, self.mesh.axes), self.mesh.data_axis
        for pin in asked.layouts:
            if pin.axis != data_axis and self.mesh.axis(pin.axis).cuts != "features":
                why = f"only layouts on {self.mesh.tensor_axis} and on {data_axis} have costs"
                raise OptionError(f"cannot compute the cost of {pin}", why=why)
        if len(asked.layouts) > 1:
            raise OptionError(
                f"cannot compute the cost of {name} on two axes at once", hint="ask for the cost on one axis at a time"
            )
        axis = asked.layouts[0].axis
        if axis == data_axis:
            return self._why_not_stored_so(name, asked)
        wanted = f"{asked.layouts[0].text} on {axis}"
        pins = Pins((*self.pins.layouts, *asked.layouts))
        try:
            pinned, stacks = pinned_layouts(self.trace, self.mesh, pins, axis), self._stacks()
            check_expert_axes(self.mesh, mixtures(self.trace), {**stacks, axis: pinned.stacks})
            if axis not in self.solved:
                return Why(name, wanted, "the plan has this layout already")
            problem, chosen = self.solved[axis]
            requested = solve_pinned(self.trace, self.mesh, pinned, pins, lambda left: _solved(problem.pinned_by(left)))
        except LayoutError as error:
            return Why(name, f"not {wanted}", str(error).replace("\n  ", "; "))
        price = _extra_cost(requested, self.solved[axis])
        changed = dict.fromkeys(
            f"{pattern_of(weight)} {chosen.parameters[weight]} -> {place}"
            for weight, place in requested[1].parameters.items() if place != chosen.parameters[weight]
        )  # fmt: skip
        if requested[1].strategies == chosen.strategies and not changed:
            return Why(name, wanted, "the plan has this layout already")
        others = {wanted: "; ".join([_cost_text(price), *(["with " + ", ".join(changed)] if changed else [])])}
        is_folded = bool(pinned.stacks.keys() - stacks[axis].keys())
        reason = f"experts are sharded over {axis} only if a pin requests it" if is_folded else _reason(price, wanted)
        return Why(name, f"not {wanted}", reason, wanted, price.seconds, others)

    def _stacks(self) -> dict[str, Stacks]:
        """Return {axis: {operator or weight of experts that the axis may shard: number of experts}}.

        The outermost axis comes first.
        """
        return {axis: self.problem.pinned[axis].stacks for axis in self.mesh.chosen}

    def _why_not_stored_so(self, name: str, asked: Pins) -> Why:
        """Return the cost of storing parameters with another placement over the data axis (ZeRO)."""
        place, mesh, data_axis = Placement.parse(asked.layouts[0].text), self.mesh, self.mesh.data_axis
        wanted = f"{place} on {data_axis}"
        pinned_layouts(self.trace, mesh, asked, data_axis)  # raises for unknown names and axes
        storage, price, added = Storage(mesh, self.program.zero), ShardingCost(), 0.0
        layouts = {name: self.program.parameters[name].layout for name in data_axis_pins(self.trace, mesh, asked)}
        changed = {name: layout for name, layout in layouts.items()
                   if layout.get(mesh.stored_over(layout) or data_axis, R) != place}  # fmt: skip
        for weight, layout in changed.items():
            parameter, before = self.trace.parameters[weight], mesh.stored_over(layout)
            others = {axis: lies for axis, lies in layout.items() if axis != before}
            after, why = storage.storing_axes_for(place, tuple(parameter.shape), others)
            if why:
                return Why(name, f"not {wanted}", f"{weight}: {why}")
            cuts = [mesh.size(other) for other, lies in others.items() if lies.is_shard]
            read = self.program.parameters[weight].compute_dtype or parameter.dtype
            size, stored = (parameter.numel() * dtype.itemsize / math.prod(cuts) for dtype in (read, parameter.dtype))
            step = CostedStep(self.program.microbatches, summed=reduce_bytes_ratio(self.trace))
            for sign, axis in ((1, after), (-1, before or "")):
                trained = parameter.requires_grad
                parts_price = sharded_storage_cost(size, axis, trained, storage, step, self.problem.hardware)
                price += parts_price * sign
                added += sign * stored / mesh.size(axis) * (1 + (1 + OPTIMIZER_VALUES) * trained)
        if not changed:
            return Why(name, wanted, "the plan has this layout already")
        memory = f"{'+' if added > 0 else '-'}{quantity(abs(added), 'B')} of weights, gradients and optimizer state"
        text = f"{_cost_text(price)}, {memory} on every rank"
        return Why(name, f"not {wanted}", f"{wanted} would have {text}", wanted, price.seconds, {wanted: text})

    def _why_collective(self, node: fx.Node) -> Why:
        """Explain a collective: the converted value, its two placements, and the cost of a plan without it."""
        axis, key = node.args[1], facts(node).get("key", "")
        readers = ", ".join(dict.fromkeys(describe(n) for n in node.users if n.op == "call_function"))
        where = f"read by {readers}" if readers else ""
        source, target = (facts(n).get("layout", {}).get(axis) for n in (node.args[0], node))
        if source is None or target is None:
            return Why(node.name, f"on {axis}", f"every rank computes {key} from shards of its input", where=where)
        traced = next(n for n in self.trace.graph.nodes if n.name == facts(node)["origin"])
        subject = f"{node.name}: {describe(traced)} from {source} to {target} on {axis}"
        sent = f"{quantity(size_bytes(node.args[0]), 'B')} on every rank"
        reason = f"it is produced {_placement_text(source)} and used {_placement_text(target)}"
        other = self._without(traced, source, target, self.solved[axis][0]) if axis in self.solved else None
        if other is None:
            return Why(subject, sent, reason, where=where)
        problem, chosen = self.solved[axis]
        price = _extra_cost((problem, other), self.solved[axis])
        changed = [f"{facts(n)['group']} as {s}" for n, s in other.strategies.items() if s != chosen.strategies[n]]
        changed = list(dict.fromkeys(changed))
        instead = ", ".join(changed[:3]) + f" and {len(changed) - 3} more" * (len(changed) > 3)
        return Why(subject, sent, reason, instead, price.seconds, {instead: _cost_text(price)}, (), where)

    def _without(
        self, traced: fx.Node, source: Placement, target: Placement, problem: ShardingProblem
    ) -> Sharding | None:
        """Return the cheapest solution that never converts the value `traced` from `source` to `target`.

        None if every solution converts it.
        """
        value = next((value for value in problem.values if value.is_of(traced)), None)
        try:
            return problem.solve(forbidden=ForbiddenConversion(value, source, target)) if value is not None else None
        except NoSolution:
            return None

    def _conversions(self) -> Iterator[fx.Node]:
        for stage in self.program.stages:
            for node in stage.graph.graph.nodes:
                if operator_name(node).removeprefix("autopart::") in DIRECTIONS:
                    yield node

    def _named(self, name: str) -> list[fx.Node]:
        """Return the parameters (large ones first) and then the operators that a name matches.

        Raises OptionError if the name matches nothing.
        """
        aliases = {alias: name for name, others in self.trace.aliases.items() for alias in others}
        name = aliases.get(name, name)
        nodes = on_parameters(self.trace.graph)
        nodes += [n for n in self.trace.graph.find_nodes(op="get_attr") if n.target in self.trace.parameters]
        exact = [n for n in nodes if fnmatchcase(name_of(n), name) or facts(n).get("group") == name]
        matching = exact or [n for n in nodes if any(fnmatchcase(path, name) for path in parents(name_of(n)))]
        if not matching:
            names = [*map(name_of, nodes), *(node.name for node in self._conversions())]
            raise OptionError(f"the plan has nothing with the name '{name}'", hint=near_names(name, names))
        return sorted(matching, key=lambda n: (n.op != "get_attr", -size_bytes(n) if n.op == "get_attr" else 0))

    def _others(self, choice: Choice, solved: Solved) -> dict[str, ShardingCost]:
        """Return {rejected option of a choice: its extra cost}, cheapest first.

        For each option, the solver fixes this option and solves all other choices again.
        """
        problem, chosen = solved
        priced: list[tuple[float, str, ShardingCost]] = []
        for i, option in enumerate(choice.options):
            if i != chosen.options[id(choice)]:
                try:
                    other = problem.solve(forced={id(choice): i})
                except NoSolution:
                    continue
                priced.append((other.cost, str(option), _extra_cost((problem, other), solved)))
        return {option: price for _, option, price in sorted(priced, key=lambda entry: entry[:2])}


class DeferredReasons:
    """Reasons of a plan whose trace contains only some of the model's repeated blocks.

    The first call of `why` or `why_not` traces and plans the full model.
    """

    def __init__(self, find: Callable[[], Reasons]):
        self._find = find

    def __reduce__(self) -> Any:
        return type(None), ()

    @cached_property
    def of_full_model(self) -> Reasons:
        return self._find()

    def why(self, name: str) -> Why:
        return self.of_full_model.why(name)

    def why_not(self, name: str, layout: Mapping[str, str]) -> Why:
        return self.of_full_model.why_not(name, layout)


def _solved(problem: ShardingProblem) -> Solved:
    return problem, problem.solve()


def _extra_cost(other: Solved, chosen: Solved) -> ShardingCost:
    price, before = (problem.price(solution.options, problem.prices) for problem, solution in (other, chosen))
    return price - before


def _joined_texts(one: str, other: str) -> str:
    return "; ".join(filter(None, (one, other)))


def _placement_text(place: Placement) -> str:
    if place.is_shard:
        return f"sharded along dim {place.dim}"
    words = {"P": "as a partial sum on every rank", "R": "replicated"}
    return words.get(place.kind, "replicated, with a partial sum of its gradient on every rank")


def _terms(price: ShardingCost) -> list[tuple[float, str]]:
    """Return the terms of a cost difference as (amount, text), largest first, without negligible terms."""
    seconds = (
        (price.communication_s, "communication"), (price.memory_traffic_s, "memory traffic"),
        (price.gradient_sync_s, "gradient reduction"),
    )  # fmt: skip
    least = 1e-6 * max((abs(s) for s, _ in seconds), default=0.0)
    shares = ((price.work, "of the matrix work"), (price.weights, "of the weights"))
    terms = [(share, f"{share:+.2%} {what} on every rank") for share, what in shares if abs(share) > 1e-9]
    terms += [(s, f"{'+' if s > 0 else '-'}{quantity(abs(s), 's')} of {what}") for s, what in seconds if abs(s) > least]
    return terms


def _cost_text(price: ShardingCost) -> str:
    return ", ".join(text for _, text in _terms(price)) or "equal cost"


def _reason(price: ShardingCost, other: str) -> str:
    worse = [text for more, text in _terms(price) if more > 0]
    return f"{other} would have {worse[0]}" if worse else "it is the first of several equally cheap choices"
