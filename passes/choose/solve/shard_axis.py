"""Exact choice of every operator's strategy on one mesh axis, by elimination and HiGHS.

Each operator is one variable, whose options are its strategies. A conversion of a value costs once per target
placement, however many consumers share it. Corresponding operators of repeated blocks share one choice, so the problem
does not grow with depth. The objective (`sharding_costs`) prefers two things over all else: sharded matrix FLOPs, and
sharded weights of matrix products. After them it minimizes the seconds of a step. This file has no special case for
any operator. The result is Megatron's tensor parallelism, with its sequence parallelism if that is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from torch import fx

from autopart.cost.hardware.profile import Hardware
from autopart.ir.decisions import Strategy
from autopart.ir.facts import ACTIVE, PARAMETER, facts, num_represented
from autopart.ir.graph import on_parameters, source_of, tensor_inputs
from autopart.ir.layout import R_GRAD_P, P, Placement, R
from autopart.passes.choose.solve.context_strategies import context_options
from autopart.passes.choose.solve.layout_pins import FREE, AxisConstraints
from autopart.passes.choose.solve.pairwise_solver import NoSolution, PairwiseProblem
from autopart.passes.choose.solve.sharding_costs import CostedStep, ShardingCost, ShardingCosts, is_latency_bound
from autopart.passes.facts.find_blocks import BlockPosition
from autopart.passes.facts.strategies import possible

SequenceParallel = bool | Literal["auto"]
"""Option: sharding of activations along dims that no weight has (the sequence).

True: wherever possible. False: never. "auto": if it is faster.
"""

ValuePlacement = Literal["whole", "cut", "free"]
"""Placement of activations between matrix products.

"whole": replicated. "cut": sharded along a dim that no weight has, wherever possible. "free": the cheapest.
"""

_TRIED: Mapping[SequenceParallel, tuple[ValuePlacement, ...]] = {
    True: ("cut", "free"), False: ("whole",), "auto": ("whole", "free")
}  # fmt: skip

ONE_BATCH = CostedStep()

_FREE_BLOCKS = 2
"""Number of first, and of last, repeated blocks that choose separate layouts for `sharing_costs`."""


@dataclass
class Choice:
    """One decision of the solver: the stored placement of a parameter, or the strategy of an operator.

    Corresponding operators (or parameters) of repeated blocks share one decision.

    Args:
        options: the placements or strategies to choose from.
        members: the parameters or operators that share the decision.
        costs: cost of each option.
    """

    options: list
    members: list[fx.Node] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    @property
    def node(self) -> fx.Node:
        return self.members[0]

    @property
    def times(self) -> int:
        """The number of operators or parameters of the full model that share this choice."""
        return num_represented(self.members)


@dataclass
class _Consumer:
    """A consumer of a value, and the indices of its inputs at which it uses the value."""

    choice: Choice
    inputs: set[int] = field(default_factory=set)

    def wanted(self) -> list[frozenset[Placement]]:
        """Return, for each option of the consumer, the placements in which it needs the value."""
        return [frozenset(option.inputs[i] for i in self.inputs) for option in self.choice.options]


@dataclass
class _SharedValue:
    """An output of corresponding operators in repeated blocks, and the choices that consume it.

    Args:
        node: the output of one of these operators: the operator's node, or its `getitem` node.
        producer: the choice that the operators share.
        index: index of the output among the operator's outputs.
        uses: {id of a consumer's choice: the consumer}.
        members: the operators.
    """

    node: fx.Node
    producer: Choice
    index: int
    uses: dict[int, _Consumer] = field(default_factory=dict)
    members: list[fx.Node] = field(default_factory=list)

    @property
    def times(self) -> int:
        """The number of values of the full model that this object represents."""
        return num_represented(self.members)

    def is_of(self, node: fx.Node) -> bool:
        source, index = source_of(node)
        return source in self.members and index == self.index

    def places(self) -> list[Placement]:
        """Return the placement of the value for each option of the producer."""
        options = self.producer.options
        return [option if isinstance(option, Placement) else option.outputs[self.index] for option in options]


class ForbiddenConversion(NamedTuple):
    """A conversion of a value from one placement to another that a solution must not contain."""

    value: _SharedValue
    source: Placement
    target: Placement


@dataclass(frozen=True)
class Sharding:
    """Solution on one axis: the strategies of operators and the stored placements of parameters.

    Args:
        options: `{id of a choice: index of its option}`.
        cost: value of the objective.
        bound: proven lower bound of the objective.
    """

    strategies: Mapping[fx.Node, Strategy]
    parameters: Mapping[str, Placement]
    options: Mapping[int, int]
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """The distance between the lower bound and the cost, relative to the cost."""
        return (self.cost - self.bound) / self.cost if self.cost else 0.0


def cheapest(
    graph: fx.Graph,
    num_shards: int,
    hardware: Hardware,
    sequence_parallel: SequenceParallel,
    step: CostedStep,
    pinned: AxisConstraints,
) -> tuple[ShardingProblem, Sharding]:
    """Return the problem of an axis of `num_shards` ranks, and its cheapest solution.

    Raises NoSolution if the pins leave no solution.

    Args:
        graph: annotated graph.
        sequence_parallel: False keeps values replicated between matrix products. True shards all values that can be
            sharded; if no solution does that, each value gets its cheapest placement. "auto" solves with replicated
            values and with cheapest placements, and returns the faster solution. For a model so small that latency
            dominates (`is_latency_bound`), "auto" keeps values replicated.
        pinned: constraints by the user's pins and by the axes that are already solved.
    """
    best: tuple[ShardingCost, ShardingProblem, Sharding] | None = None
    for between in _TRIED[sequence_parallel]:
        if best is not None and (sequence_parallel is True or is_latency_bound(graph, num_shards, hardware, step)):
            break
        try:
            problem = ShardingProblem(graph, num_shards, hardware, {}, {}, pinned, between, step)
            sharding = problem.solve()
        except NoSolution:
            continue
        price = problem.price(sharding.options, problem.real_prices)
        if best is None or price.is_less(best[0]):
            best = price, problem, sharding
    if best is None:
        raise NoSolution
    return best[1:]


def fit_around(
    graph: fx.Graph, num_shards: int, hardware: Hardware, stored: Mapping[str, Placement],
    fixed: Mapping[fx.Node, Strategy], pinned: AxisConstraints = FREE,
) -> Mapping[fx.Node, Strategy]:  # fmt: skip
    """Return {operator: its cheapest strategy}, given fixed strategies and parameter placements.

    If all fixed strategies keep values replicated between matrix products, the chosen strategies do so too.

    Args:
        stored: {parameter: its placement}.
        fixed: {operator: its strategy}, which must not change.
        pinned: constraints by other axes.
    """
    is_whole = all(s in pinned.strategies_on_weight_dims(node, num_shards) for node, s in fixed.items())
    between: ValuePlacement = "whole" if is_whole else "free"
    return ShardingProblem(graph, num_shards, hardware, stored, fixed, pinned, between).solve().strategies


@dataclass(eq=False)
class ShardingProblem:
    """Optimization problem of one axis: all choices, their costs, and the costs of conversions.

    Args:
        stored: {parameter: its placement}, for parameters that are not chosen.
        fixed: {operator: its strategy}, for operators that are not chosen.
        between: placement of values between matrix products (`ValuePlacement`).
        is_shared: True if repeated blocks share their choices.
    """

    graph: fx.Graph
    num_shards: int
    hardware: Hardware
    stored: Mapping[str, Placement]
    fixed: Mapping[fx.Node, Strategy]
    pinned: AxisConstraints = FREE
    between: ValuePlacement = "whole"
    step: CostedStep = ONE_BATCH
    is_shared: bool = True

    def __post_init__(self) -> None:
        self.choices: dict[object, Choice] = {}
        self.choice_of: dict[fx.Node, Choice] = {}
        self._collect()
        self.values = self._find_values()
        self.prices = ShardingCosts(
            list(self.choice_of), self.num_shards, self.hardware, self.step, self.between == "whole",
            not self.stored and self.pinned.cuts != "positions", self.pinned.before,
        )  # fmt: skip
        self.real_prices = self.prices.with_full_latency()
        for choice in self.choices.values():
            number = choice.times
            ties = 1e-9 * self.prices.scale * number
            prices = [self.prices.option(choice.node, o) for o in choice.options]
            choice.costs = [number * self.prices.weigh(p) + i * ties for i, p in enumerate(prices)]

    def pinned_by(self, pinned: AxisConstraints) -> ShardingProblem:
        """Return a copy of this problem with other pins of the user. Constraints by solved axes stay."""
        known = {name: getattr(self.pinned, name) for name in ("factors", "dims", "ranks", "context", "before")}
        return replace(self, pinned=replace(pinned, **known))

    def sharing_costs(self, shared: Sharding) -> float:
        """Return the relative amount by which the cost would fall if repeated blocks did not share layouts.

        Only the first and the last blocks get other layouts.

        `shared`: the solution in which all repeated blocks have equal layouts.
        """
        saved = 1 - replace(self, is_shared=False).solve().cost / shared.cost if shared.cost else 0.0
        return max(0.0, round(saved, 6))  # a smaller saving is noise: among equally good solutions HiGHS returns any

    def _collect(self) -> None:
        """Create the choices: for corresponding operators in repeated blocks, then for parameters."""
        for node in on_parameters(self.graph):
            options = [self.fixed[node]] if node in self.fixed else possible(node, self._options(node))
            self._join(facts(node)["place"], node, options)
        wanted: dict[fx.Node, dict[Placement, None]] = {}
        for node, choice in list(self.choice_of.items()):
            for i, source in enumerate(tensor_inputs(node)):
                if facts(source)["role"] == PARAMETER:
                    wanted.setdefault(source, {}).update({s.inputs[i]: None for s in choice.options})
        for node in self.graph.find_nodes(op="placeholder"):
            if facts(node)["role"] == ACTIVE:
                self._join(BlockPosition(node), node, [R])
        for node, placements in wanted.items():
            may_cut = self.pinned.cuts != "positions" or node.target in self.pinned.stacks
            cut = [p for p in placements if p.is_shard and may_cut]
            places = [R, *([R_GRAD_P] if facts(node)["needs_grad"] else []), *cut]
            pinned = self.pinned.placements(node.target, places)
            places = [self.stored[node.target]] if node.target in self.stored else pinned
            self._join(facts(node)["place"], node, places)

    def _options(self, node: fx.Node) -> list[Strategy]:
        """Return the strategies that the solver may choose for an operator.

        If `self.between` is "cut", values are sharded between matrix products. An operator that can shard a dim without
        a weight, such as the sequence, then has no replicated strategies.
        """
        plain = self.pinned.strategies_on_weight_dims(node, self.num_shards)
        if self.between == "whole" or facts(node)["role"] != ACTIVE:
            return self.pinned.strategies(node, plain)
        all_ways = self.pinned.strategies_on_axis(node, self.num_shards)
        left = self.pinned.strategies(node, all_ways)
        if self.pinned.cuts == "positions":
            left = context_options(node, left, self.pinned.context, self.pinned.axis)
        may_be_whole = (
            facts(node)["moves"] and self.pinned.cuts != "features"
        )  # such as heads that are repeated after a gather
        if self.between == "free" or may_be_whole:
            return left
        cut = [s for s in left if s.is_sharded or any(p == P for p in s.outputs)]
        return cut if cut and len(all_ways) > len(plain) else left

    def _join(self, place: BlockPosition, node: fx.Node, options: list) -> None:
        if not options:
            raise NoSolution
        block = None if self.is_shared else place.end(_FREE_BLOCKS)
        key = place.like, tuple(options), self.pinned.variants.get(place.block), block
        choice = self.choices.setdefault(key, Choice(options))
        choice.members.append(node)
        self.choice_of[node] = choice

    def _find_values(self) -> list[_SharedValue]:
        """Return the values that operators produce and consume, grouped by the choice of their producer."""
        reads: dict[tuple[fx.Node, int], list[tuple[fx.Node, Choice, int]]] = {}
        for node, choice in self.choice_of.items():
            if node.op != "call_function":
                continue
            for i, used in enumerate(tensor_inputs(node)):
                source, index = source_of(used)
                if source in self.choice_of:
                    reads.setdefault((source, index), []).append((used, choice, i))
        by_key: dict[object, _SharedValue] = {}
        for (source, index), readers in reads.items():
            producer = self.choice_of[source]
            key = id(producer), index, frozenset((id(choice), i) for _, choice, i in readers)
            value = by_key.setdefault(key, _SharedValue(readers[0][0], producer, index))
            value.members.append(source)
            for _, choice, i in readers:
                value.uses.setdefault(id(choice), _Consumer(choice)).inputs.add(i)
        return list(by_key.values())

    def conversion_costs(self, value: _SharedValue, targets: Sequence[Placement]) -> np.ndarray:
        """Return the conversion costs of a value, an array of shape [options of its producer, targets].

        If another axis has dispatched tokens to experts, the number of tokens on a rank depends on the data. Such
        tokens can be neither sharded nor gathered over this axis.
        """
        number, node = value.times, value.node
        is_dispatched = self.pinned.is_dispatched(source_of(node)[0])

        def cost(place: Placement, target: Placement) -> float:
            if is_dispatched and place != target and (place.is_shard or target.is_shard):
                return float("inf")
            return number * self.prices.conversion_s(place, target, node)

        return np.array([[cost(place, target) for target in targets] for place in value.places()])

    def solve(self, forced: Mapping[int, int] | None = None, forbidden: ForbiddenConversion | None = None) -> Sharding:
        """Return the exact optimum. Raises NoSolution.

        Args:
            forced: `{id of a choice: index of the option that it must have}`.
            forbidden: a conversion that the solution must avoid.
        """
        pairs = PairwiseProblem()
        variables: dict[int, int] = {}
        for choice in self.choices.values():
            costs = np.array(choice.costs)
            if forced and id(choice) in forced:
                costs[np.arange(len(costs)) != forced[id(choice)]] = np.inf
            variables[id(choice)] = pairs.variable(costs)
        for value in self.values:
            self._add_value(pairs, variables, value, forbidden)
        solution = pairs.solve()
        options = {key: solution.chosen[variable] for key, variable in variables.items()}
        chosen: dict[fx.Node, Strategy] = {}
        stored: dict[str, Placement] = {}
        for choice in self.choices.values():
            option = choice.options[options[id(choice)]]
            for node in choice.members:
                if node.op == "call_function":
                    chosen[node] = option
                elif node.op == "get_attr":  # the rest: inputs with a gradient, replicated
                    stored[node.target] = option
        bound = solution.cost - solution.gap * abs(solution.cost)
        return Sharding(chosen, stored, options, solution.cost, bound)

    def price(self, options: Mapping[int, int], prices: ShardingCosts) -> ShardingCost:
        """Return the cost of a solution, split into terms such as FLOPs and communication.

        Args:
            options: `{id of a choice: index of its option}`.
            prices: `self.prices` (minimized by the solver) or `self.real_prices` (including all latency).
        """
        total = ShardingCost()
        for choice in self.choices.values():
            option = choice.options[options[id(choice)]]
            total += prices.option(choice.node, option) * choice.times
        for value in self.values:
            place = value.places()[options[id(value.producer)]]
            for target in {p for use in value.uses.values() for p in use.wanted()[options[id(use.choice)]]}:
                seconds = prices.conversion_s(place, target, value.node)
                total += ShardingCost(communication_s=seconds * value.times)
        return total

    def _add_value(
        self,
        pairs: PairwiseProblem,
        variables: Mapping[int, int],
        value: _SharedValue,
        forbidden: ForbiddenConversion | None,
    ) -> None:
        """Add the conversion costs of a value to `pairs`.

        Consumers that need one placement share one conversion. If there are several consumers, an extra variable
        chooses the set of placements in which the value exists.
        """
        uses = list(value.uses.values())
        targets = sorted({place for use in uses for wanted in use.wanted() for place in wanted})
        costs = self.conversion_costs(value, targets)
        if forbidden is not None and forbidden.value is value and forbidden.target in targets:
            left_so = [place == forbidden.source for place in value.places()]
            costs[left_so, targets.index(forbidden.target)] = np.inf
        position = {place: i for i, place in enumerate(targets)}
        producer = variables[id(value.producer)]

        def cost_of(places: frozenset[Placement]) -> np.ndarray:
            return costs[:, sorted(position[place] for place in places)].sum(1)

        if len(uses) == 1:
            columns = np.array([cost_of(wanted) for wanted in uses[0].wanted()])
            pairs.add(producer, variables[id(uses[0].choice)], columns.T)
            return
        sets = {frozenset[Placement]()}
        for use in uses:
            sets = {places | wanted for places in sets for wanted in set(use.wanted())}
        options = sorted(sets, key=lambda places: (len(places), sorted(places)))
        node = pairs.variable(np.zeros(len(options)))
        pairs.add(producer, node, np.array([cost_of(places) for places in options]).T)
        for use in uses:
            missing = [[0.0 if wanted <= places else np.inf for places in options] for wanted in use.wanted()]
            pairs.add(variables[id(use.choice)], node, np.array(missing))
