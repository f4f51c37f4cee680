"""Choose what every operator does on the tensor-parallel axis: an exact mixed-integer programme (HiGHS).

One binary per operator and strategy; one variable per value and pair of placements (produced, wanted), so that a
conversion is paid once however many consumers share it. The same operator of every repeated block shares its choice,
so the programme does not grow with depth. The objective, in order of weight: matrix work and the weights it reads are
divided over the axis, then communication (forward and backward), then memory traffic. No operator is named here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import fx

from autopart.cost.collectives import conversion_time_s, time_s
from autopart.cost.hardware import Hardware
from autopart.graph import operators, pattern_of, shape, size_bytes, source_of, tensor_inputs
from autopart.layout import R_GRAD_P, P, Placement, R, conversion

from .analyze import ACTIVE, DATA, FEATURE, INPUT, PARAMETER, WEIGHT, tuple_values
from .strategies import Strategy, strategies

_DIVIDE_FIRST = 1e3
"""How much heavier dividing all matrix work weighs than all communication together."""

_SCATTERS = frozenset({"slice", "all_gather", "reduce_scatter", "all_to_all"})
_AVOID_SCATTERS = 100.0
"""Without sequence parallelism values between operators are whole: sharding what lies between two all-reduces moves as
many bytes (an all-reduce is a reduce-scatter and an all-gather), so cutting and gathering whole values is left for
where nothing else works."""


@dataclass
class _Choice:
    """One decision: a parameter's stored placement, or an operator's strategy, shared by all members."""

    options: list
    members: list[fx.Node] = field(default_factory=list)
    first: int = 0

    @property
    def node(self) -> fx.Node:
        return self.members[0]


@dataclass(frozen=True)
class Sharding:
    """The chosen strategies and stored placements on one axis, with the objective's parts."""

    strategies: Mapping[fx.Node, Strategy]
    parameters: Mapping[str, Placement]
    communication_s: float
    gap: float


def choose_sharding(
    graph: fx.Graph, num_shards: int, hardware: Hardware, stored: Mapping[str, Placement] | None = None
) -> Sharding:
    """The cheapest sharding of an annotated graph over an axis of `num_shards` ranks.

    `stored`: where parameters already lie, if they do.
    """
    return _Programme(graph, num_shards, hardware, stored or {}).solve()


class _Programme:
    """The mixed-integer programme, built row by row."""

    def __init__(self, graph: fx.Graph, num_shards: int, hardware: Hardware, stored: Mapping[str, Placement]):
        # Latency is left out: it would make toy sizes choose otherwise than the sizes a model is split for.
        self.num_shards, self.hardware = num_shards, replace(hardware, link_latency_s=0.0)
        self.choices: dict[object, _Choice] = {}
        self.choice_of: dict[fx.Node, _Choice] = {}
        self.costs: list[float] = []
        self.integral: list[bool] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self._collect(graph, stored)
        self._add_choices()
        self._add_conversions()

    def _collect(self, graph: fx.Graph, stored: Mapping[str, Placement]) -> None:
        """Group operators that are the same in every repeated block, then parameters."""
        kinds = frozenset({FEATURE})
        for node in operators(graph):
            if node.meta["role"] not in (ACTIVE, WEIGHT):
                continue
            sources = tensor_inputs(node)
            free = [s.meta["role"] in (INPUT, DATA) for s in sources]
            options = [
                s for s in strategies(node, self.num_shards, kinds)
                if not any(f and p == P for f, p in zip(free, s.inputs, strict=True))
            ]  # fmt: skip
            self._join((node.meta["group"], tuple(options), tuple(map(size_bytes, sources))), node, options)
        wanted: dict[fx.Node, dict[Placement, None]] = {}
        for node, choice in list(self.choice_of.items()):
            for i, source in enumerate(tensor_inputs(node)):
                if source.meta["role"] == PARAMETER:
                    wanted.setdefault(source, {}).update({s.inputs[i]: None for s in choice.options})
        for node, placements in wanted.items():
            places = [R, *([R_GRAD_P] if node.meta["needs_grad"] else []), *(p for p in placements if p.is_shard)]
            places = [stored[node.target]] if node.target in stored else places
            self._join((pattern_of(node.target), tuple(places), shape(node)), node, places)

    def _join(self, key: object, node: fx.Node, options: list) -> None:
        choice = self.choices.setdefault(key, _Choice(options))
        choice.members.append(node)
        self.choice_of[node] = choice

    def _variable(self, cost: float, integral: bool) -> int:
        self.costs.append(cost)
        self.integral.append(integral)
        return len(self.costs) - 1

    def _add_choices(self) -> None:
        scale = self.scale = self._communication_scale()
        flops = sum(len(c.members) * self._flops(c.node) for c in self.choices.values()) or 1
        table = sum(len(c.members) * self._weight_bytes(c.node) for c in self.choices.values()) or 1
        for choice in self.choices.values():
            choice.first = len(self.costs)
            for i, option in enumerate(choice.options):
                divided = _DIVIDE_FIRST * scale * self._undivided(choice.node, option, flops, table)
                cost = len(choice.members) * (divided + self._own_time_s(choice.node, option))
                self._variable(cost + 1e-9 * scale * i, True)
            self.rows.append(({choice.first + i: 1.0 for i in range(len(choice.options))}, 1.0, 1.0))

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
        work = self._flops(node) * (1 / self.num_shards if option.factor else 1) / flops
        weights = 0.0
        if self._weight_bytes(node):
            for source, place in zip(tensor_inputs(node), option.inputs, strict=True):
                if source.meta["role"] in (PARAMETER, WEIGHT):
                    weights += size_bytes(source) * (1 / self.num_shards if place.is_shard else 1)
        return work + weights / table

    def _own_time_s(self, node: fx.Node, option: object) -> float:
        """Seconds on one rank apart from matrix work: memory traffic, inner collectives, gradient synchronisation."""
        if isinstance(option, Placement):
            return time_s("all_reduce", self.num_shards, size_bytes(node), self.hardware) if option == R_GRAD_P else 0
        assert isinstance(option, Strategy)
        sizes = [v.numel() * v.element_size() for v in tuple_values(node)]
        shares = [1 / self.num_shards if p.is_shard else 1 for p in option.outputs]
        traffic = 0.0 if node.meta["role"] == WEIGHT else sum(s * f for s, f in zip(sizes, shares, strict=True))
        pattern = node.meta["pattern"]
        inner = 0.0
        if pattern is not None and option.factor and option.factor == pattern.lookup and not pattern.linear:
            inner = 3 * time_s("all_reduce", self.num_shards, sizes[0], self.hardware)
        return traffic / self.hardware.memory_bytes_per_s + inner

    def _add_conversions(self) -> None:
        """For every value: which placements are produced and wanted, and what going between them costs."""
        consumers: dict[tuple[int, int], dict[tuple[int, int], _Choice]] = defaultdict(dict)
        values: dict[tuple[int, int], fx.Node] = {}
        for node, choice in self.choice_of.items():
            if node.op != "call_function":
                continue
            for i, used in enumerate(tensor_inputs(node)):
                source, index = source_of(used)
                if source in self.choice_of:
                    key = (self.choice_of[source].first, index)
                    values.setdefault(key, used)
                    consumers[key][choice.first, i] = choice
        for key, uses in consumers.items():
            self._add_value(values[key], key[1], uses)

    def _add_value(self, used: fx.Node, index: int, uses: dict[tuple[int, int], _Choice]) -> None:
        producer = self.choice_of[source_of(used)[0]]
        produced: dict[Placement, list[int]] = {}
        for k, option in enumerate(producer.options):
            place = option if isinstance(option, Placement) else option.outputs[index]
            produced.setdefault(place, []).append(producer.first + k)
        wanted = {s.inputs[i] for (_, i), choice in uses.items() for s in choice.options}
        grad = used.meta["needs_grad"]
        ways: dict[Placement, list[int]] = defaultdict(list)
        for target in sorted(wanted):
            for place, binaries in produced.items():
                seconds = self._conversion_s(place, target, used, grad)
                if seconds == float("inf"):
                    continue
                y = self._variable(seconds * len(producer.members), False)
                ways[target].append(y)
                self.rows.append(({y: 1.0, **{b: -1.0 for b in binaries}}, -np.inf, 0.0))
        for (first, i), choice in uses.items():
            for target in {s.inputs[i] for s in choice.options}:
                row = {y: 1.0 for y in ways[target]}
                for k, s in enumerate(choice.options):
                    if s.inputs[i] == target:
                        row[first + k] = row.get(first + k, 0.0) - 1.0
                self.rows.append((row, 0.0, np.inf))

    def _conversion_s(self, place: Placement, target: Placement, used: fx.Node, grad: bool) -> float:
        if place == target or (not grad and place.is_replicated and target.is_replicated):
            return 0.0
        if used.meta["role"] == PARAMETER and place.is_shard and target.is_shard:
            return float("inf")  # a weight is stored as it is used, or whole
        uneven = any(p.is_shard and not p.sections and shape(used)[p.dim] % self.num_shards for p in (place, target))
        if uneven and place.is_shard and target.is_shard and place != target:
            return float("inf")
        seconds = conversion_time_s(place, target, self.num_shards, size_bytes(used), grad, self.hardware)
        step = conversion(place, target)
        if step is None or used.meta["role"] != ACTIVE or not {step.forward, step.backward} & _SCATTERS:
            return seconds
        gather = time_s("all_gather", self.num_shards, size_bytes(used), self.hardware)
        return max(seconds, gather) * _AVOID_SCATTERS

    def solve(self) -> Sharding:
        scale = 1e-4 * self.scale  # HiGHS stops at an absolute gap of 1e-6
        cells = [(r, c, v) for r, (row, _, _) in enumerate(self.rows) for c, v in row.items()]
        rows, columns, values = zip(*cells, strict=True)
        matrix = sparse.csr_array((values, (rows, columns)), shape=(len(self.rows), len(self.costs)))
        lower, upper = [row[1] for row in self.rows], [row[2] for row in self.rows]
        result = milp(
            np.array(self.costs) / scale, integrality=np.array(self.integral, dtype=int), bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, lower, upper), options={"mip_rel_gap": 0.0, "presolve": True},
        )  # fmt: skip
        assert result.x is not None, f"the sharding programme has no solution: {result.message}"
        chosen: dict[fx.Node, Strategy] = {}
        stored: dict[str, Placement] = {}
        for choice in self.choices.values():
            best = int(np.argmax(result.x[choice.first : choice.first + len(choice.options)]))
            for node in choice.members:
                if node.op == "call_function":
                    chosen[node] = choice.options[best]
                else:
                    stored[node.target] = choice.options[best]
        moved = sum(c * x for c, x, whole in zip(self.costs, result.x, self.integral, strict=True) if not whole)
        return Sharding(chosen, stored, float(moved), float(result.mip_gap or 0.0))
