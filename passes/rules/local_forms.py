"""How a call is written for one rank where it is not the traced call on local operands: what the local forms share."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopart.ir.atoms import selections_in
from autopart.ir.decisions import Strategy
from autopart.ir.facts import facts
from autopart.ir.graph import operator_name, shape, value
from autopart.ir.layout import Placement, cut_together, local_shape, parts_of, section_sizes
from autopart.ir.pattern import Pattern
from autopart.ir.selection import most_positions
from autopart.ops.operators import autopart_ops

aten = torch.ops.aten


@dataclass(frozen=True)
class LocalCall:
    """A call to be written for one rank: the traced node, its local operands, its strategy on every axis and the axes'
    sizes.

    `emit(target, *args)` adds a node to the graph being written; `seed()` is the microbatch's random seed.
    `balance`: as of `Decisions`.
    """

    node: fx.Node
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    strategies: Mapping[str, Strategy]
    sizes: Mapping[str, int]
    emit: Callable[..., fx.Node]
    seed: Callable[[], fx.Node]
    balance: float = 1.0

    def as_traced(self, changed: Mapping[int, Any] | None = None) -> fx.Node:
        """The traced call on local operands, with some arguments changed, by position."""
        args = [(changed or {}).get(i, argument) for i, argument in enumerate(self.args)]
        return self.emit(self.node.target, *args, **self.kwargs)

    def axes_sharding(self, factor: str) -> list[str]:
        return [axis for axis, s in self.strategies.items() if s.factor == factor and self.sizes[axis] > 1]

    def num_parts(self, factor: str) -> int:
        return math.prod(self.sizes[axis] for axis in self.axes_sharding(factor))

    def output_layout(self) -> dict[str, Placement]:
        return {axis: s.outputs[0] for axis, s in self.strategies.items()}

    def num_ranks(self, axes: str) -> int:
        """How many ranks an axis has, or several joined in one."""
        return math.prod(self.sizes[axis] for axis in parts_of(axes))

    def index(self, axes: str) -> fx.Node:
        """Where this rank is on an axis, or on several joined in one."""
        outermost, *inside = parts_of(axes)
        index = self.emit(autopart_ops.axis_index.default, outermost)
        for axis in inside:
            others = self.emit(operator.mul, index, self.sizes[axis])
            index = self.emit(operator.add, others, self.emit(autopart_ops.axis_index.default, axis))
        return index

    def first_row(self, axes: str, rows: int) -> fx.Node:
        """The number of the first row that this rank holds of a table of `rows` rows, which is cut over an axis, or
        over several joined in one."""
        return self.emit(operator.mul, self.index(axes), -(-rows // self.num_ranks(axes)))


LocalForm = Callable[[LocalCall], fx.Node | None]
"""Writes a call for one rank; None where the traced call on local operands will do."""


def local_value(node: fx.Node) -> Any:
    """What a node of a local form gives, without data: for the bytes and shapes that plans and prints show."""
    first = value(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if not isinstance(first, torch.Tensor):
        return None
    if node.target is aten.where.default:
        return most_positions(first)
    if getattr(node.target, "namespace", "") == "aten":
        known = all(value(used) is not None for used in node.args if isinstance(used, fx.Node))
        return node.target(*fx.map_arg(node.args, value)) if known else None
    if operator_name(node) == "autopart::ring_attention":
        return first.new_empty(*first.shape[:-1], value(node.args[3]).shape[-1])
    if operator_name(node) == "autopart::exchange_counts":
        return torch.empty(2, node.args[3], dtype=torch.int64, device=first.device)
    if operator_name(node) in ("autopart::all_reduce", "autopart::all_reduce_max"):
        return torch.empty_like(first)
    return first.new_empty(first.shape[:-1]) if operator_name(node) == "autopart::pick_class" else None


def takes_shape(pattern: Pattern | None) -> bool:
    """Whether a call's second argument names its output's shape (a view)."""
    return pattern is not None and pattern.local is shape_argument


def shape_argument(call: LocalCall) -> fx.Node:
    """The second argument names the output's shape: the local one."""
    layout, full = call.output_layout(), shape(call.node)
    local = local_shape(full, layout, call.sizes)
    sizes, made_of = call.node.args[1], facts(call.node)["atoms"]
    is_open = [size == -1 and bool(selections_in(atoms)) for size, atoms in zip(sizes, made_of, strict=True)]
    local = [-1 if of else size for of, size in zip(is_open, local, strict=True)]
    for place in layout.values():
        if place.is_routed:
            local[place.dim] = -1  # as many rows as a rank's experts have
    for axes, place in cut_together(layout).items():
        if any(size % call.num_ranks(axes) for size in section_sizes(full[place.dim], place.sections)):
            local[place.dim] = -1  # shards of unequal sizes
    return call.as_traced({1: local})


def group_argument(call: LocalCall) -> fx.Node | None:
    """An argument counts groups, factor `g`: those that the rank has."""
    parts = call.num_parts("g")
    if parts == 1:
        return None
    names = [declared.name for declared in call.node.target._schema.arguments]
    position = next(i for i, name in enumerate(names) if name in ("groups", "num_groups"))
    count: Any = call.args[position] // parts
    if call.args[position] % parts:  # shards of unequal sizes: every rank reads it off its weight, a row a group
        count = call.emit(aten.sym_size.int, call.args[1], 0)
    return call.as_traced({position: count})
