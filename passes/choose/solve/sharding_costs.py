"""Costs of sharding options on one axis: the terms of the objective that `ShardingProblem` minimizes.

Two terms have by far the largest factors: the matrix FLOPs that the axis does not shard, and the weights of matrix
products that it does not shard. The other terms are seconds of a step on one rank, without matrix products:
communication of every microbatch in forward and backward, memory traffic, and gradient reduction once a step. The
layout of a weight on this axis also determines its cost over the data axis (gradient reduction, or ZeRO storage). The
objective includes that cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any, NamedTuple

import numpy as np
from torch import fx

from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.collective_costs import conversion_time_s, time_s
from autopart.ir.atoms import BATCH, Atom
from autopart.ir.decisions import Strategy, is_ring_strategy
from autopart.ir.facts import ACTIVE, PARAMETER, WEIGHT, facts, weighted
from autopart.ir.graph import operators, shape, size_bytes, source_of, tensor_inputs, tuple_values
from autopart.ir.layout import (
    DISPATCHED,
    MIN_DIMS,
    R_GRAD_P,
    Layout,
    Placement,
    R,
    conversion,
    is_direct,
    mesh_axes_of,
    relative_placement,
)
from autopart.ir.run.buckets import BUCKET_BYTES
from autopart.ir.trace import Trace
from autopart.passes.choose.storage.parameter_storage import Storage

_DIVIDE_FIRST = 1e2
"""Factor in the objective for matrix FLOPs that the axis does not shard.

A factor of 1 would make these FLOPs as important as all communication. With this factor, sharding FLOPs comes first.
"""

_SCATTERS = frozenset({"slice", "all_gather", "reduce_scatter", "all_to_all"})
_AVOID_SCATTERS = 1.5
"""Factor on the cost of reduce-scatter and all-gather, if replicated values are preferred.

A reduce-scatter and an all-gather move as many bytes as one all-reduce. Sharding the values between them saves only
memory traffic, a few per cent of their time. With this factor, values are sharded only if that saves more, as for k and
v with few heads.
"""

_ACCURACY = 0.01
"""Accuracy of a predicted time: two times count as equal if they differ by less than this share."""


@dataclass(frozen=True)
class CostedStep:
    """Properties of a training step on which costs depend.

    Args:
        batch_shards: number of shards of the batch, over ranks and microbatches.
        storage: policy for storing parameters sharded over other axes (ZeRO).
        stride: difference of the global ranks of neighbours on `axis`.
        summed: mixed precision: bytes of an element in the reduce dtype divided by bytes in the compute dtype.
        axis: the axis whose options are costed.
        balance: number of tokens on the rank whose experts get the most tokens, relative to the mean.
    """

    microbatches: int = 1
    batch_shards: int = 1
    storage: Storage = field(default_factory=Storage)
    stride: int = 1
    summed: float = 1.0
    axis: str = ""
    balance: float = 1.0


@dataclass(frozen=True)
class ShardingCost:
    """Cost of a sharding, by term.

    `work` is the share of all matrix FLOPs that one rank runs: 1 / n if n ranks shard all of them. `weights` is the
    share of the weights of matrix products that one rank stores. The other terms are seconds of a step on one rank.
    """

    work: float = 0.0
    weights: float = 0.0
    communication_s: float = 0.0
    memory_traffic_s: float = 0.0
    gradient_sync_s: float = 0.0

    def __add__(self, other: ShardingCost) -> ShardingCost:
        return ShardingCost(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: ShardingCost) -> ShardingCost:
        return self + other * -1

    def __mul__(self, times: float) -> ShardingCost:
        return ShardingCost(*(times * a for a in vars(self).values()))

    @property
    def undivided(self) -> float:
        return self.work + self.weights

    @property
    def seconds(self) -> float:
        return self.communication_s + self.memory_traffic_s + self.gradient_sync_s

    def is_less(self, other: ShardingCost) -> bool:
        """Return True if this cost is lower than `other` by more than the prediction error.

        Matrix FLOPs and weights on one rank are compared first, then the seconds of a step.
        """
        if abs(self.undivided - other.undivided) > 1e-9:
            return self.undivided < other.undivided
        return self.seconds < other.seconds * (1 - _ACCURACY)


def is_latency_bound(graph: fx.Graph, num_shards: int, hardware: Hardware, step: CostedStep) -> bool:
    """Return True if latency takes most of the time of an all-reduce of a typical value.

    The model is then assumed to be a small test model. Its cheapest plan would not suit the full-size model, because
    it gathers the logits, for example.
    """
    values = [n for n in operators(graph) if facts(n)["role"] == ACTIVE and facts(n)["needs_grad"]]
    sizes = np.repeat(
        [size_bytes(n) / _row_shards(n, step) for n in values], [weight for _, weight in weighted(values)]
    )
    typical = float(np.median(sizes)) if len(sizes) else 0.0
    latency_s = time_s("all_reduce", num_shards, 0, hardware, step.stride)
    return time_s("all_reduce", num_shards, typical, hardware, step.stride) < 2 * latency_s


def _row_shards(node: fx.Node, step: CostedStep) -> int:
    return step.batch_shards if _has_rows(facts(node)["atoms"]) else 1


def _has_rows(atoms: Any) -> bool:
    """Return True if any dim (`Atom`) in these nested tuples is the batch dim."""
    return atoms.kind == BATCH if isinstance(atoms, Atom) else any(map(_has_rows, atoms))


class _ConvertedValue(NamedTuple):
    """Properties of a value that determine the cost of converting it between placements.

    `size_bytes`: bytes of one microbatch of the value on one rank, if the axis that is solved now does not shard it.
    `others`: (placement, axis size) on each axis that is already solved.
    """

    shape: tuple[int, ...]
    size_bytes: float
    needs_grad: bool
    role: str
    is_chosen_weight: bool
    others: tuple[tuple[Placement, int], ...]


class ShardingCosts:
    """Cost model of one axis: costs of operators, weights and conversions on `num_shards` ranks.

    Args:
        nodes: all operators and parameters whose sharding is chosen.
        whole: True to prefer replicated values between operators if they cost little more. The latency of their
            collectives is then ignored, because it would dominate at the small sizes of a test model.
        weights_chosen: True if the solver also chooses the placements of weights.
        before: {operator: its (strategy, axis size) on each axis that is already solved}.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], num_shards: int, hardware: Hardware, step: CostedStep, whole: bool,
        weights_chosen: bool, before: Mapping[fx.Node, Sequence[tuple[Strategy, int]]],
    ):  # fmt: skip
        self.num_shards, self.hardware, self.step = num_shards, hardware, step
        self.whole, self.weights_chosen, self.before = whole, weights_chosen, before
        at_once = replace(hardware, link_latency_s=0.0, node_link_latency_s=0.0)
        self.links = at_once if whole else hardware
        self._values: dict[fx.Node, _ConvertedValue] = {}
        self._seconds: dict[tuple[Placement, Placement, _ConvertedValue], float] = {}
        active = [n for n in nodes if n.op == "call_function" and facts(n)["role"] == ACTIVE]
        sizes = [self.bytes(n) for n in active]
        times_s = {size: time_s("all_reduce", num_shards, size, hardware, step.stride) for size in set(sizes)}
        reduced_s = sum([times_s[size] * weight for (_, weight), size in zip(weighted(active), sizes, strict=True)])
        self.scale = max(1e-12, step.microbatches * reduced_s)
        self.flops = sum(_flops(n) * weight for n, weight in weighted(nodes)) or 1
        self.table = sum(_weight_bytes(n) * weight for n, weight in weighted(nodes)) or 1

    def with_full_latency(self) -> ShardingCosts:
        """Return a copy of the cost model that counts all latency and does not prefer replicated values."""
        other = copy(self)
        other.whole, other.links, other._seconds = False, self.hardware, {}
        return other

    def weigh(self, price: ShardingCost) -> float:
        """Return a cost as the single number that the solver minimizes."""
        return _DIVIDE_FIRST * self.scale * price.undivided + price.seconds

    def bytes(self, node: fx.Node) -> float:
        """Return the bytes of one microbatch of a value on one rank, if this axis does not shard it."""
        parts = math.prod(ranks for place, ranks in self._others(node) if place.is_partitioned)
        return size_bytes(node) / _row_shards(node, self.step) / parts

    def _others(self, node: fx.Node) -> list[tuple[Placement, int]]:
        """Return a value's (placement, axis size) on each axis that is already solved."""
        source, index = source_of(node)
        return [(strategy.outputs[index], ranks) for strategy, ranks in self.before.get(source, ())]

    def option(self, node: fx.Node, option: Strategy | Placement) -> ShardingCost:
        """Return the cost of an operator's strategy, or of a parameter's placement.

        Conversions of the operator's inputs are not included.
        """
        if not isinstance(option, Strategy):
            over = self._stored_over(node, option)
            partial = option == R_GRAD_P and not (over and self.step.axis in mesh_axes_of(over))
            summed_s = gradient_sync_s(
                size_bytes(node) * self.step.summed, self.num_shards, self.hardware, self.step.stride
            )
            return self.storage_cost(node, option) + ShardingCost(gradient_sync_s=summed_s if partial else 0.0)
        work, weights = self._undivided(node, option)
        return ShardingCost(work, weights, self._inner_s(node, option), self._traffic_s(node, option))

    def storage_cost(self, node: fx.Node, place: Placement) -> ShardingCost:
        """Return the cost over the data axes of a parameter with placement `place` on this axis.

        It is the cost of ZeRO, or of the all-reduce of the gradient. If ZeRO is requested but the data ranks divide no
        dim of the parameter, its bytes, which stay on every rank, are added to `weights`.
        """
        storage = self.step.storage
        if node.op != "get_attr" or not (over := storage.over(self._layout(node, place))):
            return ShardingCost()
        size = size_bytes(node) / (self.num_shards if place.is_shard else 1)
        cut = self._stored_over(node, place)
        price = sharded_storage_cost(size, cut, facts(node)["needs_grad"], storage, self.step, self.links)
        is_left = bool(storage.zero) and not cut and len(shape(node)) >= MIN_DIMS
        left = size * (1 - 1 / storage.mesh.size(over[0])) / self.table if is_left else 0.0
        return price + ShardingCost(weights=left)

    def _stored_over(self, node: fx.Node, place: Placement) -> str:
        """Return the flattened axes over which ZeRO shards a parameter with placement `place` on this axis.

        The result is a name such as `dp_cp`, or "".
        """
        if node.op != "get_attr":
            return ""
        part = self.step.storage.place(node.target, shape(node), self._layout(node, place))
        return part[0] if part is not None else ""

    def _layout(self, node: fx.Node, place: Placement) -> Layout:
        return {**self.step.storage.beside.get(str(node.target), {}), self.step.axis: place}

    def conversion_s(self, place: Placement, target: Placement, used: fx.Node) -> float:
        """Return the seconds per step to convert a value between placements; infinite if impossible."""
        return self.step.microbatches * self._conversion_s(place, target, self._converted_value(used))

    def _time_s(self, kind: str, size: float) -> float:
        return time_s(kind, self.num_shards, size, self.links, self.step.stride)

    def _undivided(self, node: fx.Node, option: Strategy) -> tuple[float, float]:
        """Return this operator's FLOPs and weights on one rank, as shares of the model's totals.

        Returns (share of all matrix FLOPs, share of the bytes of all weights).
        """
        # Unequal shards count as equal: a few per cent of work are not worth another collective.
        work = _flops(node) * (1 / self.num_shards if option.factor else 1) / self.flops
        weights = 0.0
        if _weight_bytes(node):
            for source, place in zip(tensor_inputs(node), option.inputs, strict=True):
                if facts(source)["role"] in (PARAMETER, WEIGHT):
                    weights += size_bytes(source) * (1 / self.num_shards if place.is_shard else 1)
        return work, weights / self.table

    def _traffic_s(self, node: fx.Node, option: Strategy) -> float:
        """Return the seconds per step in which a rank writes the operator's outputs to memory."""
        if facts(node)["role"] == WEIGHT:
            return 0.0
        fullest = self.step.balance
        shares = [
            (fullest if p.is_dispatched else 1) / self.num_shards if p.is_partitioned else 1 for p in option.outputs
        ]
        share = math.prod(facts(node).get("shares", {}).values())
        parts = [math.prod(n for s, n in self.before.get(node, ()) if s.outputs[i].is_partitioned)
                 for i in range(len(option.outputs))]  # fmt: skip
        sizes = [v.numel() * v.element_size() * share / n for v, n in zip(tuple_values(node), parts, strict=True)]
        written = sum(size * share for size, share in zip(sizes, shares, strict=True)) / _row_shards(node, self.step)
        return self.step.microbatches * written / self.hardware.memory_bytes_per_s

    def _inner_s(self, node: fx.Node, option: Strategy) -> float:
        """Return the seconds per step of the collectives that an operator itself runs.

        Such operators are a loss with sharded classes, ring attention, and MoE dispatch and combine.
        """
        pattern = facts(node)["pattern"]
        if pattern is not None and pattern.routes and DISPATCHED in (option.inputs[0], option.outputs[0]):
            return self._routing_s(node, node.args[0] if pattern.routes == "back" else node)
        if is_ring_strategy(node, option):
            return self._ring_s(node)
        if pattern is None or not option.factor or option.factor != pattern.lookup:
            return 0.0
        first = tuple_values(node)[0]
        size = first.numel() * first.element_size() / _row_shards(node, self.step)
        return self.step.microbatches * pattern.all_reduces * self._time_s("all_reduce", size)

    def _ring_s(self, node: fx.Node) -> float:
        """Return the seconds per step that ring attention needs to send keys, values and their gradients."""
        sides = tensor_inputs(node)[1:3]
        ways = 3 if any(facts(side)["needs_grad"] for side in sides) else 1
        size = sum(map(self.bytes, sides)) / self.num_shards
        return self.step.microbatches * ways * (self.num_shards - 1) * self._time_s("send", size)

    def _routing_s(self, node: fx.Node, rows: fx.Node) -> float:
        """Return the seconds per step of MoE dispatch or combine, including its backward.

        A dispatch and its combine exchange token counts once. The cost of the combine includes this exchange.
        """
        ways = 2 if facts(node)["needs_grad"] else 1
        moved_s = self._time_s("all_to_all", self.bytes(rows) * self.step.balance)
        counts_s = self._time_s("all_to_all", 0) if rows is not node else 0.0
        return self.step.microbatches * (ways * moved_s + counts_s)

    def _conversion_s(self, place: Placement, target: Placement, value: _ConvertedValue) -> float:
        key = place, target, value
        if key not in self._seconds:
            self._seconds[key] = self._new_conversion_s(place, target, value)
        return self._seconds[key]

    def _new_conversion_s(self, place: Placement, target: Placement, value: _ConvertedValue) -> float:
        if (place.is_dispatched or target.is_dispatched) and place != target:
            return float("inf")  # only dispatch and combine move tokens to experts and back
        if place == target or (not value.needs_grad and place.is_replicated and target.is_replicated):
            return 0.0
        if target.is_shard and (value.is_chosen_weight or (place.is_shard and value.role == PARAMETER)):
            return float("inf")  # not allowed: a weight that is stored replicated and then sharded saves no memory
        place, target = relative_placement(place, value.others), relative_placement(target, value.others)
        if not is_direct(place, target, value.shape, self.num_shards):
            whole = R_GRAD_P if value.needs_grad else R
            return self._conversion_s(place, whole, value) + self._conversion_s(whole, target, value)
        size, links = value.size_bytes, self.links if value.role == ACTIVE else self.hardware
        seconds = conversion_time_s(place, target, self.num_shards, size, value.needs_grad, links, self.step.stride)
        step = conversion(place, target)
        scatters = step is not None and bool({step.forward, step.backward} & _SCATTERS)
        if not self.whole or value.role != ACTIVE or not scatters:
            return seconds
        return (
            max(seconds, self._time_s("all_gather", size)) * _AVOID_SCATTERS + seconds / 100
        )  # the small term prefers the cheaper of two conversions with equal maximum

    def _converted_value(self, used: fx.Node) -> _ConvertedValue:
        if used not in self._values:
            about, others = facts(used), tuple(self._others(used))
            self._values[used] = _ConvertedValue(shape(used), self.bytes(used), about["needs_grad"], about["role"],
                                        self._is_chosen_weight(used), others)  # fmt: skip
        return self._values[used]

    def _is_chosen_weight(self, used: fx.Node) -> bool:
        return self.weights_chosen and facts(used)["role"] in (PARAMETER, WEIGHT)


def gradient_sync_s(size: float, num_ranks: int, hardware: Hardware, stride: int = 1) -> float:
    """Return the seconds that the all-reduce of a gradient of `size` bytes adds to a step.

    Gradients in one bucket share their latency, so the time is a little shorter than for a separate collective.
    """
    return 0.99 * size / BUCKET_BYTES * time_s("all_reduce", num_ranks, BUCKET_BYTES, hardware, stride)


def reduce_bytes_ratio(trace: Trace) -> float:
    """Return the bytes of the reduce dtype divided by the bytes of the compute dtype (mixed precision)."""
    precision = trace.precision
    return 1.0 if precision is None else precision.reduce.itemsize / precision.compute.itemsize


def sharded_storage_cost(
    size: float, over: str, trained: bool, storage: Storage, step: CostedStep, hardware: Hardware
) -> ShardingCost:  # fmt: skip
    """Return the communication cost of one parameter over the data axes, sharded (ZeRO) or replicated.

    ZeRO 3 gathers a parameter and reduce-scatters its gradient in every microbatch. ZeRO 2 reduce-scatters in every
    microbatch but gathers once a step. ZeRO 1 does both once a step. The gradient of a replicated parameter is
    all-reduced once a step.

    Args:
        size: bytes of the parameter on one rank, before it is sharded over `over`.
        over: flattened axes over which it is stored sharded; "" if it is replicated.
        trained: True if the parameter has a gradient.
    """
    mesh, axis = storage.mesh, over or storage.mesh.data_axis
    ranks, stride = mesh.size(axis), mesh.stride(axis)
    if ranks == 1:
        return ShardingCost()
    if not over:
        return ShardingCost(
            gradient_sync_s=gradient_sync_s(size * step.summed, ranks, hardware, stride) if trained else 0.0
        )
    gathers = 1 if storage.zero in (1, 2) else step.microbatches * (2 if trained else 1)
    scatters = (1 if storage.zero == 1 else step.microbatches) if trained else 0
    moved = gathers * time_s("all_gather", ranks, size, hardware, stride)
    moved += scatters * time_s("reduce_scatter", ranks, size * step.summed, hardware, stride)
    return ShardingCost(communication_s=moved)


def _flops(node: fx.Node) -> int:
    pattern = facts(node).get("pattern")
    return pattern.flops if pattern is not None else 0


def _weight_bytes(node: fx.Node) -> int:
    """Return the bytes of the weights of a matrix product or an embedding look-up; 0 for other operators."""
    pattern = facts(node).get("pattern")
    if pattern is None or not (pattern.flops or pattern.lookup):
        return 0
    return sum(size_bytes(n) for n in tensor_inputs(node) if facts(n)["role"] in (PARAMETER, WEIGHT))
