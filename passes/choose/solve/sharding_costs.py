"""What the options of a sharding cost on one axis: the objective of the solve in `shard`, term by term.

In order of weight: matrix work and the weights it reads that the axis does not divide; then the seconds that a step
takes one rank apart from matrix work: the communication of every microbatch, forward and backward, memory traffic, and
the sums of gradients once a step. What a weight costs over the data axis, where it is summed or stored in parts,
depends on its layout here, and is a part of that price: one problem chooses for both axes.
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
from autopart.ir.decisions import Strategy, goes_around
from autopart.ir.facts import ACTIVE, PARAMETER, WEIGHT, facts, times
from autopart.ir.graph import operators, shape, size_bytes, source_of, tensor_inputs, tuple_values
from autopart.ir.layout import MIN_DIMS, R_GRAD_P, SENT, Layout, Placement, R, conversion, inside, is_direct, parts_of
from autopart.ir.run.buckets import BUCKET_BYTES
from autopart.ir.trace import Trace
from autopart.ops.stage_masks import is_attention
from autopart.passes.choose.storage.parameter_storage import Storage

_DIVIDE_FIRST = 1e2
"""How much heavier dividing all matrix work weighs than all communication together."""

_SCATTERS = frozenset({"slice", "all_gather", "reduce_scatter", "all_to_all"})
_AVOID_SCATTERS = 1.5
"""Where values between operators are to be whole: sharding what lies between two all-reduces moves as many bytes (an
all-reduce is a reduce-scatter and an all-gather) and saves memory traffic, a few per cent of their time. Cutting and
gathering is left for where it is cheaper by more than that: k and v of few heads."""

_TELLS = 0.01
"""A difference of predicted times, as a share, that says nothing."""


@dataclass(frozen=True)
class Step:
    """What of a training step prices depend on. `row_shards`: the parts in which the rows of the batch are cut, over
    ranks and microbatches. `storage`: how what lies on the axis priced is stored over others. `stride`: how far apart
    in rank numbers neighbours on the axis priced are. `summed`: bytes that are summed of a parameter's gradient for
    each that is read of it: in mixed precision not as many. `axis`: the one priced. `balance`: the rows that the
    fullest rank gets for its experts, over the mean."""

    microbatches: int = 1
    row_shards: int = 1
    storage: Storage = field(default_factory=Storage)
    stride: int = 1
    summed: float = 1.0
    axis: str = ""
    balance: float = 1.0


@dataclass(frozen=True)
class Price:
    """The parts of what a sharding costs.

    `work`, `weights`: the share of all matrix work and of its weights that a rank has (1 / n where n ranks divide them
    all). The seconds are those of a step on one rank.
    """

    work: float = 0.0
    weights: float = 0.0
    communication_s: float = 0.0
    memory_traffic_s: float = 0.0
    gradient_sync_s: float = 0.0

    def __add__(self, other: Price) -> Price:
        return Price(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: Price) -> Price:
        return self + other * -1

    def __mul__(self, times: float) -> Price:
        return Price(*(times * a for a in vars(self).values()))

    @property
    def undivided(self) -> float:
        return self.work + self.weights

    @property
    def seconds(self) -> float:
        return self.communication_s + self.memory_traffic_s + self.gradient_sync_s

    def is_less(self, other: Price) -> bool:
        """Whether less matrix work is on every rank, or as much and a step takes less time by what a prediction can
        tell."""
        if abs(self.undivided - other.undivided) > 1e-9:
            return self.undivided < other.undivided
        return self.seconds < other.seconds * (1 - _TELLS)


def is_latency_bound(graph: fx.Graph, num_shards: int, hardware: Hardware, step: Step) -> bool:
    """Whether the all-reduce of a typical value waits longer than it sends: a toy, whose cheapest plan is not that of
    the model it stands for (its logits are gathered, say)."""
    values = [n for n in operators(graph) if facts(n)["role"] == ACTIVE and facts(n)["needs_grad"]]
    sizes = np.repeat([size_bytes(n) / _row_shards(n, step) for n in values], [times(n) for n in values])
    typical = float(np.median(sizes)) if len(sizes) else 0.0
    latency_s = time_s("all_reduce", num_shards, 0, hardware, step.stride)
    return time_s("all_reduce", num_shards, typical, hardware, step.stride) < 2 * latency_s


def _row_shards(node: fx.Node, step: Step) -> int:
    """In how many parts a value is cut that has rows of the batch."""
    return step.row_shards if _has_rows(facts(node)["atoms"]) else 1


def _has_rows(atoms: Any) -> bool:
    """Whether there is an atom of the batch in what may be nested: dims of one value or of several."""
    return atoms.kind == BATCH if isinstance(atoms, Atom) else any(map(_has_rows, atoms))


class _Moved(NamedTuple):
    """What of a value the price of a conversion depends on. `size_bytes`: as `Prices.bytes`; `others`: how other axes
    leave it, with their ranks."""

    shape: tuple[int, ...]
    size_bytes: float
    needs_grad: bool
    role: str
    is_chosen_weight: bool
    others: tuple[tuple[Placement, int], ...]


class Prices:
    """Prices on an axis of `num_shards` ranks for the operators and weights of a graph.

    Args:
        nodes: all operators and parameters that are chosen.
        whole: whether values between operators are to be whole where that costs little more. Latency of collectives on
            them is left out then: toy sizes would choose otherwise than the sizes that a model is split for.
        weights_chosen: whether it is chosen where weights lie.
        before: what every operator does on axes that were solved for before, with their ranks.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], num_shards: int, hardware: Hardware, step: Step, whole: bool,
        weights_chosen: bool, before: Mapping[fx.Node, Sequence[tuple[Strategy, int]]],
    ):  # fmt: skip
        self.num_shards, self.hardware, self.step = num_shards, hardware, step
        self.whole, self.weights_chosen, self.before = whole, weights_chosen, before
        at_once = replace(hardware, link_latency_s=0.0, node_link_latency_s=0.0)
        self.links = at_once if whole else hardware
        self._values: dict[fx.Node, _Moved] = {}
        self._seconds: dict[tuple[Placement, Placement, _Moved], float] = {}
        active = [n for n in nodes if n.op == "call_function" and facts(n)["role"] == ACTIVE]
        sizes = [self.bytes(n) for n in active]
        times_s = {size: time_s("all_reduce", num_shards, size, hardware, step.stride) for size in set(sizes)}
        reduced_s = sum([times_s[size] * times(n) for n, size in zip(active, sizes, strict=True)])
        self.scale = max(1e-12, step.microbatches * reduced_s)
        self.flops = sum(_flops(n) * times(n) for n in nodes) or 1
        self.table = sum(_weight_bytes(n) * times(n) for n in nodes) or 1

    def with_all_latency(self) -> Prices:
        """The same, but as if values may be cut wherever that is best."""
        other = copy(self)
        other.whole, other.links, other._seconds = False, self.hardware, {}
        return other

    def weigh(self, price: Price) -> float:
        """The one number that is minimised."""
        return _DIVIDE_FIRST * self.scale * price.undivided + price.seconds

    def bytes(self, node: fx.Node) -> float:
        """Bytes of a value for one microbatch of one rank of the axes that rows or other axes cut it over."""
        parts = math.prod(ranks for place, ranks in self._others(node) if place.is_divided)
        return size_bytes(node) / _row_shards(node, self.step) / parts

    def _others(self, node: fx.Node) -> list[tuple[Placement, int]]:
        """How axes that were solved for before leave a value, with their ranks."""
        source, index = source_of(node)
        return [(strategy.outputs[index], ranks) for strategy, ranks in self.before.get(source, ())]

    def option(self, node: fx.Node, option: Strategy | Placement) -> Price:
        """The price of an option, conversions left out."""
        if not isinstance(option, Strategy):
            over = self._stored_over(node, option)
            partial = option == R_GRAD_P and not (over and self.step.axis in parts_of(over))
            summed_s = gradient_sync_s(
                size_bytes(node) * self.step.summed, self.num_shards, self.hardware, self.step.stride
            )
            return self.in_parts(node, option) + Price(gradient_sync_s=summed_s if partial else 0.0)
        work, weights = self._undivided(node, option)
        return Price(work, weights, self._inner_s(node, option), self._traffic_s(node, option))

    def in_parts(self, node: fx.Node, place: Placement) -> Price:
        """Of a parameter laid out like this on the axis, what it costs over those that may store it in parts. Where
        that was asked for and cannot be, all of it is left on every rank."""
        storage = self.step.storage
        if node.op != "get_attr" or not (over := storage.over(self._layout(node, place))):
            return Price()
        size = size_bytes(node) / (self.num_shards if place.is_shard else 1)
        cut = self._stored_over(node, place)
        price = stored_parts(size, cut, facts(node)["needs_grad"], storage, self.step, self.links)
        is_left = bool(storage.zero) and not cut and len(shape(node)) >= MIN_DIMS
        left = size * (1 - 1 / storage.mesh.size(over[0])) / self.table if is_left else 0.0
        return price + Price(weights=left)

    def _stored_over(self, node: fx.Node, place: Placement) -> str:
        """The axes joined over which a parameter laid out like this on the axis is stored in parts; "" where none."""
        if node.op != "get_attr":
            return ""
        part = self.step.storage.place(node.target, shape(node), self._layout(node, place))
        return part[0] if part is not None else ""

    def _layout(self, node: fx.Node, place: Placement) -> Layout:
        """The layout of a parameter that is placed so on the axis, beside what was solved for before."""
        return {**self.step.storage.beside.get(str(node.target), {}), self.step.axis: place}

    def conversion_s(self, place: Placement, target: Placement, used: fx.Node) -> float:
        """Seconds a step of bringing a value from one placement to another; infinite where that cannot be."""
        return self.step.microbatches * self._conversion_s(place, target, self._moved(used))

    def _time_s(self, kind: str, size: float) -> float:
        return time_s(kind, self.num_shards, size, self.links, self.step.stride)

    def _undivided(self, node: fx.Node, option: Strategy) -> tuple[float, float]:
        """The shares of all matrix work and of its weights that this option leaves on every rank."""
        # Shards of unequal sizes count as equal: a few per cent of work are not worth another collective.
        work = _flops(node) * (1 / self.num_shards if option.factor else 1) / self.flops
        weights = 0.0
        if _weight_bytes(node):
            for source, place in zip(tensor_inputs(node), option.inputs, strict=True):
                if facts(source)["role"] in (PARAMETER, WEIGHT):
                    weights += size_bytes(source) * (1 / self.num_shards if place.is_shard else 1)
        return work, weights / self.table

    def _traffic_s(self, node: fx.Node, option: Strategy) -> float:
        """Seconds of writing the outputs to memory."""
        if facts(node)["role"] == WEIGHT:
            return 0.0
        fullest = self.step.balance
        shares = [(fullest if p.is_routed else 1) / self.num_shards if p.is_divided else 1 for p in option.outputs]
        share = math.prod(facts(node).get("shares", {}).values())
        parts = [math.prod(n for s, n in self.before.get(node, ()) if s.outputs[i].is_divided)
                 for i in range(len(option.outputs))]  # fmt: skip
        sizes = [v.numel() * v.element_size() * share / n for v, n in zip(tuple_values(node), parts, strict=True)]
        written = sum(size * share for size, share in zip(sizes, shares, strict=True)) / _row_shards(node, self.step)
        return self.step.microbatches * written / self.hardware.memory_bytes_per_s

    def _inner_s(self, node: fx.Node, option: Strategy) -> float:
        """Seconds of the collectives inside an operator: the maximum, the sum and the label's entry of a loss, and the
        way of rows to their experts and back."""
        pattern = facts(node)["pattern"]
        if pattern is not None and pattern.routes and SENT in (option.inputs[0], option.outputs[0]):
            return self._routing_s(node, node.args[0] if pattern.routes == "back" else node)
        if is_attention(node) and goes_around(node, option):
            return self._ring_s(node)
        if pattern is None or not option.factor or option.factor != pattern.lookup or pattern.linear:
            return 0.0
        first = tuple_values(node)[0]
        size = first.numel() * first.element_size() / _row_shards(node, self.step)
        return self.step.microbatches * 3 * self._time_s("all_reduce", size)

    def _ring_s(self, node: fx.Node) -> float:
        """Seconds in which keys and values go around, and in the backward go around again with their gradients."""
        sides = tensor_inputs(node)[1:3]
        ways = 3 if any(facts(side)["needs_grad"] for side in sides) else 1
        size = sum(map(self.bytes, sides)) / self.num_shards
        return self.step.microbatches * ways * (self.num_shards - 1) * self._time_s("send", size)

    def _routing_s(self, node: fx.Node, rows: fx.Node) -> float:
        """Seconds of bringing rows from their tokens' ranks to their experts' or back, and their gradients the other
        way. How many they are is told once, which counts with the way back."""
        ways = 2 if facts(node)["needs_grad"] else 1
        moved_s = self._time_s("all_to_all", self.bytes(rows) * self.step.balance)
        counts_s = self._time_s("all_to_all", 0) if rows is not node else 0.0
        return self.step.microbatches * (ways * moved_s + counts_s)

    def _conversion_s(self, place: Placement, target: Placement, value: _Moved) -> float:
        """The same of one microbatch. Most values of a model are like another one, so it is kept."""
        key = place, target, value
        if key not in self._seconds:
            self._seconds[key] = self._new_conversion_s(place, target, value)
        return self._seconds[key]

    def _new_conversion_s(self, place: Placement, target: Placement, value: _Moved) -> float:
        if (place.is_routed or target.is_routed) and place != target:
            return float("inf")  # rows come to experts and back by the operators for it alone
        if place == target or (not value.needs_grad and place.is_replicated and target.is_replicated):
            return 0.0
        if target.is_shard and (value.is_chosen_weight or (place.is_shard and value.role == PARAMETER)):
            return float("inf")  # a weight is stored as it is used: cutting a whole one would save no memory
        place, target = inside(place, value.others), inside(target, value.others)
        if not is_direct(place, target, value.shape, self.num_shards):
            whole = R_GRAD_P if value.needs_grad else R
            return self._conversion_s(place, whole, value) + self._conversion_s(whole, target, value)
        size, links = value.size_bytes, self.links if value.role == ACTIVE else self.hardware
        seconds = conversion_time_s(place, target, self.num_shards, size, value.needs_grad, links, self.step.stride)
        step = conversion(place, target)
        scatters = step is not None and bool({step.forward, step.backward} & _SCATTERS)
        if not self.whole or value.role != ACTIVE or not scatters:
            return seconds
        return max(seconds, self._time_s("all_gather", size)) * _AVOID_SCATTERS + seconds / 100  # of two, the cheaper

    def _moved(self, used: fx.Node) -> _Moved:
        if used not in self._values:
            known, others = facts(used), tuple(self._others(used))
            self._values[used] = _Moved(shape(used), self.bytes(used), known["needs_grad"], known["role"],
                                        self._is_chosen_weight(used), others)  # fmt: skip
        return self._values[used]

    def _is_chosen_weight(self, used: fx.Node) -> bool:
        """Whether it is a weight, or a view of one, whose placement is chosen here."""
        return self.weights_chosen and facts(used)["role"] in (PARAMETER, WEIGHT)


def gradient_sync_s(size: float, num_ranks: int, hardware: Hardware, stride: int = 1) -> float:
    """Seconds of summing a gradient once a step, in a bucket with others: a little less than a collective."""
    return 0.99 * size / BUCKET_BYTES * time_s("all_reduce", num_ranks, BUCKET_BYTES, hardware, stride)


def summed_share(trace: Trace) -> float:
    """Bytes that are summed of a parameter's gradient for each that is read of the parameter."""
    precision = trace.precision
    return 1.0 if precision is None else precision.reduce.itemsize / precision.compute.itemsize


def stored_parts(
    size: float, over: str, trained: bool, storage: Storage, step: Step, hardware: Hardware
) -> Price:  # fmt: skip
    """Of so many bytes of a parameter that is stored in parts over these axes joined: gathering it and scattering the
    sum of its gradient, in every microbatch, or (ZeRO 1, and the gathers of 2) once; of one that is not (""), summing
    the gradient over the data axis once a step."""
    mesh, axis = storage.mesh, over or storage.mesh.data_axis
    ranks, stride = mesh.size(axis), mesh.stride(axis)
    if ranks == 1:
        return Price()
    if not over:
        return Price(gradient_sync_s=gradient_sync_s(size * step.summed, ranks, hardware, stride) if trained else 0.0)
    gathers = 1 if storage.zero in (1, 2) else step.microbatches * (2 if trained else 1)
    scatters = (1 if storage.zero == 1 else step.microbatches) if trained else 0
    moved = gathers * time_s("all_gather", ranks, size, hardware, stride)
    moved += scatters * time_s("reduce_scatter", ranks, size * step.summed, hardware, stride)
    return Price(communication_s=moved)


def _flops(node: fx.Node) -> int:
    pattern = facts(node).get("pattern")
    return pattern.flops if pattern is not None else 0


def _weight_bytes(node: fx.Node) -> int:
    """Bytes of the parameters that a matrix product or a table look-up reads."""
    pattern = facts(node).get("pattern")
    if pattern is None or not (pattern.flops or pattern.lookup):
        return 0
    return sum(size_bytes(n) for n in tensor_inputs(node) if facts(n)["role"] in (PARAMETER, WEIGHT))
