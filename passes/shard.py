"""Choose what every operator does on the tensor-parallel axis: an exact solve (`pairs`: elimination, then HiGHS).

One variable per operator, whose options are its strategies. A conversion is paid once per value and target placement,
however many consumers share it. The same operator of every repeated block shares its choice, so the problem does not
grow with depth. The objective: first, matrix work and the weights it reads are divided over the axis; then seconds, of
communication (forward and backward, latency included) and of memory traffic. No operator is named here: Megatron's
tensor parallelism comes out; and where nothing may lie whole between matrix products, its sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from torch import fx

from autopart.cost.collectives import conversion_time_s, time_s
from autopart.cost.hardware import Hardware
from autopart.graph import operators, pattern_of, shape, size_bytes, source_of, tensor_inputs
from autopart.layout import R_GRAD_P, P, Placement, R, conversion, is_direct

from .analyze import ACTIVE, DATA, INPUT, PARAMETER, WEIGHT, tuple_values
from .pairs import NoSolution, Pairs
from .pins import FREE, Pinned
from .strategies import ALL_TENSOR_KINDS, TENSOR_KINDS, Strategy, strategies

_DIVIDE_FIRST = 1e3
"""How much heavier dividing all matrix work weighs than all communication together."""

SequenceParallel = bool | Literal["auto"]
"""Whether values are cut along dims that no weight has: wherever they can be, or never ("auto" means that for now)."""

_SCATTERS = frozenset({"slice", "all_gather", "reduce_scatter", "all_to_all"})
_AVOID_SCATTERS = 1.5
"""Without sequence parallelism values between operators are whole: sharding what lies between two all-reduces moves as
many bytes (an all-reduce is a reduce-scatter and an all-gather) and saves memory traffic, a few per cent of their time.
Cutting and gathering is left for where it is cheaper by more than that: k and v of few heads."""


@dataclass
class _Choice:
    """One decision: a parameter's stored placement, or an operator's strategy, shared by all members."""

    options: list
    members: list[fx.Node] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    @property
    def node(self) -> fx.Node:
        return self.members[0]


@dataclass
class _Uses:
    """One consumer of a value, and the inputs at which it takes it."""

    choice: _Choice
    inputs: set[int] = field(default_factory=set)

    def wanted(self) -> list[frozenset[Placement]]:
        """By option: the placements in which it takes the value."""
        return [frozenset(option.inputs[i] for i in self.inputs) for option in self.choice.options]


@dataclass
class _Value:
    """Output `index` of a choice, `node` being one that reads it, with its consumers."""

    node: fx.Node
    producer: _Choice
    index: int
    uses: dict[int, _Uses] = field(default_factory=dict)


@dataclass(frozen=True)
class Sharding:
    """The chosen strategies and stored placements on one axis; the objective, and what of it conversions cost."""

    strategies: Mapping[fx.Node, Strategy]
    parameters: Mapping[str, Placement]
    cost: float
    communication_s: float
    gap: float


def choose_sharding(
    graph: fx.Graph,
    num_shards: int,
    hardware: Hardware,
    stored: Mapping[str, Placement] | None = None,
    fixed: Mapping[fx.Node, Strategy] | None = None,
    pinned: Pinned = FREE,
    sequence_parallel: SequenceParallel = "auto",
) -> Sharding:
    """The cheapest sharding of an annotated graph over an axis of `num_shards` ranks.

    `stored`: where parameters already lie, if they do. `fixed`: operators whose strategy is decided. `pinned`: what
    the user's pins leave. Raises NoSolution where that is nothing.
    """
    return Programme(graph, num_shards, hardware, stored or {}, fixed or {}, pinned, sequence_parallel).solve()


class Programme:
    """Every choice there is, what it costs, and what the values that go from one to another cost."""

    def __init__(
        self,
        graph: fx.Graph,
        num_shards: int,
        hardware: Hardware,
        stored: Mapping[str, Placement],
        fixed: Mapping[fx.Node, Strategy],
        pinned: Pinned = FREE,
        sequence_parallel: SequenceParallel = "auto",
    ):
        self.stored, self.fixed, self.pinned = stored, fixed, pinned
        self.num_shards, self.sequence_parallel = num_shards, sequence_parallel is True
        # Where values stay whole, latency would make toy sizes choose otherwise than the sizes a model is split for.
        self.hardware = hardware if self.sequence_parallel else replace(hardware, link_latency_s=0.0)
        self.choices: dict[object, _Choice] = {}
        self.choice_of: dict[fx.Node, _Choice] = {}
        self._collect(graph)
        self._price_choices()
        self.values = self._find_values()

    def _collect(self, graph: fx.Graph) -> None:
        """Group operators that are the same in every repeated block, then parameters."""
        for node in operators(graph):
            if node.meta["role"] not in (ACTIVE, WEIGHT):
                continue
            sources = tensor_inputs(node)
            free = [s.meta["role"] in (INPUT, DATA) for s in sources]
            options = [self.fixed[node]] if node in self.fixed else [
                s for s in self._options(node)
                if not any(f and p == P for f, p in zip(free, s.inputs, strict=True))
            ]  # fmt: skip
            self._join((node.meta["group"], tuple(options), tuple(map(size_bytes, sources))), node, options)
        wanted: dict[fx.Node, dict[Placement, None]] = {}
        for node, choice in list(self.choice_of.items()):
            for i, source in enumerate(tensor_inputs(node)):
                if source.meta["role"] == PARAMETER:
                    wanted.setdefault(source, {}).update({s.inputs[i]: None for s in choice.options})
        for node in graph.find_nodes(op="placeholder"):
            if node.meta["role"] == ACTIVE:
                self._join(node, node, [R])
        for node, placements in wanted.items():
            places = [R, *([R_GRAD_P] if node.meta["needs_grad"] else []), *(p for p in placements if p.is_shard)]
            pinned = self.pinned.placements(node.target, places)
            places = [self.stored[node.target]] if node.target in self.stored else pinned
            self._join((pattern_of(node.target), tuple(places), shape(node)), node, places)

    def _options(self, node: fx.Node) -> list[Strategy]:
        """What an operator may do; under sequence parallelism not whole what can be cut along a dim of no weight."""
        plain = strategies(node, self.num_shards, TENSOR_KINDS)
        if not self.sequence_parallel or node.meta["role"] != ACTIVE:
            return self.pinned.strategies(node, plain)
        found = strategies(node, self.num_shards, ALL_TENSOR_KINDS)
        left = self.pinned.strategies(node, found)
        cut = [s for s in left if s.is_sharded or any(p == P for p in s.outputs)]
        return cut if cut and len(found) > len(plain) else left

    def _join(self, key: object, node: fx.Node, options: list) -> None:
        if not options:
            raise NoSolution
        choice = self.choices.setdefault((key, self.pinned.variant(node)), _Choice(options))
        choice.members.append(node)
        self.choice_of[node] = choice

    def _price_choices(self) -> None:
        scale = self.scale = self._communication_scale()
        flops = sum(len(c.members) * self._flops(c.node) for c in self.choices.values()) or 1
        table = sum(len(c.members) * self._weight_bytes(c.node) for c in self.choices.values()) or 1
        for choice in self.choices.values():
            for i, option in enumerate(choice.options):
                divided = _DIVIDE_FIRST * scale * self._undivided(choice.node, option, flops, table)
                cost = len(choice.members) * (divided + self._own_time_s(choice.node, option))
                if option == R_GRAD_P:
                    cost = self._sync_time_s(choice)
                choice.costs.append(cost + 1e-9 * scale * i)

    def _communication_scale(self) -> float:
        return max(1e-12, sum(
            len(c.members) * time_s("all_reduce", self.num_shards, size_bytes(c.node), self.hardware)
            for c in self.choices.values() if c.node.op == "call_function" and c.node.meta["role"] == ACTIVE
        ))  # fmt: skip

    def _flops(self, node: fx.Node) -> int:
        pattern = node.meta.get("pattern")
        return pattern.flops if pattern is not None else 0

    def _weight_bytes(self, node: fx.Node) -> int:
        """Bytes of the parameters that a matrix product or a table look-up reads."""
        pattern = node.meta.get("pattern")
        if pattern is None or not (pattern.flops or pattern.lookup):
            return 0
        return sum(size_bytes(n) for n in tensor_inputs(node) if n.meta["role"] in (PARAMETER, WEIGHT))

    def _undivided(self, node: fx.Node, option: object, flops: int, table: int) -> float:
        """The share of all matrix work and weights that this option leaves on every rank."""
        if not isinstance(option, Strategy):
            return 0.0
        # Shards of unequal sizes count as equal: a few per cent of work are not worth another collective.
        work = self._flops(node) * (1 / self.num_shards if option.factor else 1) / flops
        weights = 0.0
        if self._weight_bytes(node):
            for source, place in zip(tensor_inputs(node), option.inputs, strict=True):
                if source.meta["role"] in (PARAMETER, WEIGHT):
                    weights += size_bytes(source) * (1 / self.num_shards if place.is_shard else 1)
        return work + weights / table

    def _own_time_s(self, node: fx.Node, option: object) -> float:
        """Seconds on one rank apart from matrix work: memory traffic and inner collectives."""
        if not isinstance(option, Strategy):
            return 0.0
        sizes = [v.numel() * v.element_size() for v in tuple_values(node)]
        shares = [1 / self.num_shards if p.is_shard else 1 for p in option.outputs]
        traffic = 0.0 if node.meta["role"] == WEIGHT else sum(s * f for s, f in zip(sizes, shares, strict=True))
        pattern = node.meta["pattern"]
        inner = 0.0
        if pattern is not None and option.factor and option.factor == pattern.lookup and not pattern.linear:
            inner = 3 * time_s("all_reduce", self.num_shards, sizes[0], self.hardware)
        return traffic / self.hardware.memory_bytes_per_s + inner

    def _sync_time_s(self, choice: _Choice) -> float:
        """Seconds of summing the gradients of the same parameter of all repeated blocks: in one bucket, and once a step
        where a collective in the backward is there for every microbatch (counted as two)."""
        return time_s("all_reduce", self.num_shards, sum(map(size_bytes, choice.members)), self.hardware) / 2

    def _find_values(self) -> list[_Value]:
        """Every value that goes from one choice to others."""
        found: dict[tuple[int, int], _Value] = {}
        for node, choice in self.choice_of.items():
            if node.op != "call_function":
                continue
            for i, used in enumerate(tensor_inputs(node)):
                source, index = source_of(used)
                if source in self.choice_of:
                    producer = self.choice_of[source]
                    value = found.setdefault((id(producer), index), _Value(used, producer, index))
                    value.uses.setdefault(id(choice), _Uses(choice)).inputs.add(i)
        return list(found.values())

    def conversion_costs(self, value: _Value, targets: Sequence[Placement]) -> np.ndarray:
        """Seconds of bringing a value from every option of its producer to every target."""
        options = value.producer.options
        places = [option if isinstance(option, Placement) else option.outputs[value.index] for option in options]
        grad, times = value.node.meta["needs_grad"], len(value.producer.members)
        return np.array([[times * self._conversion_s(a, b, value.node, grad) for b in targets] for a in places])

    def _conversion_s(self, place: Placement, target: Placement, used: fx.Node, grad: bool) -> float:
        if place == target or (not grad and place.is_replicated and target.is_replicated):
            return 0.0
        if target.is_shard and (self._is_chosen_weight(used) or (place.is_shard and used.meta["role"] == PARAMETER)):
            return float("inf")  # a weight is stored as it is used: cutting a whole one would save no memory
        if not is_direct(place, target, shape(used), self.num_shards):
            whole = R_GRAD_P if grad else R
            return self._conversion_s(place, whole, used, grad) + self._conversion_s(whole, target, used, grad)
        seconds = conversion_time_s(place, target, self.num_shards, size_bytes(used), grad, self.hardware)
        step = conversion(place, target)
        scatters = step is not None and bool({step.forward, step.backward} & _SCATTERS)
        if self.sequence_parallel or used.meta["role"] != ACTIVE or not scatters:
            return seconds
        gather = time_s("all_gather", self.num_shards, size_bytes(used), self.hardware)
        return max(seconds, gather) * _AVOID_SCATTERS

    def _is_chosen_weight(self, used: fx.Node) -> bool:
        """Whether it is a weight, or a view of one, whose placement is chosen here."""
        return not self.stored and used.meta["role"] in (PARAMETER, WEIGHT)

    def solve(self) -> Sharding:
        pairs = Pairs()
        variables = {id(choice): pairs.variable(choice.costs) for choice in self.choices.values()}
        for value in self.values:
            self._add_value(pairs, variables, value)
        found = pairs.solve()
        chosen: dict[fx.Node, Strategy] = {}
        stored: dict[str, Placement] = {}
        for choice in self.choices.values():
            option = choice.options[found.chosen[variables[id(choice)]]]
            for node in choice.members:
                if node.op == "call_function":
                    chosen[node] = option
                elif node.op == "get_attr":  # else an input that needs a gradient, which lies whole
                    stored[node.target] = option
        own = sum(choice.costs[found.chosen[variables[id(choice)]]] for choice in self.choices.values())
        return Sharding(chosen, stored, found.cost, found.cost - own, found.gap)

    def _add_value(self, pairs: Pairs, variables: Mapping[int, int], value: _Value) -> None:
        """What it costs to bring a value to all placements in which it is wanted, each once.

        With several consumers that is a choice of its own: the set of placements in which the value is made.
        """
        uses = list(value.uses.values())
        targets = sorted({place for use in uses for wanted in use.wanted() for place in wanted})
        costs = self.conversion_costs(value, targets)
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
            sets = {made | wanted for made in sets for wanted in set(use.wanted())}
        made = sorted(sets, key=lambda places: (len(places), sorted(places)))
        node = pairs.variable(np.zeros(len(made)))
        pairs.add(producer, node, np.array([cost_of(places) for places in made]).T)
        for use in uses:
            missing = [[0.0 if wanted <= places else np.inf for places in made] for wanted in use.wanted()]
            pairs.add(variables[id(use.choice)], node, np.array(missing))
