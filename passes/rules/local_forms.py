"""Local forms: functions that write an operator's call into one rank's program.

An operator has a local form if the traced call would give a wrong result on the rank's local operands. For example, the
local form of an embedding with a sharded table subtracts the rank's first row from the indices.
"""

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
from autopart.ir.layout import Placement, flattened_shards, local_shape, mesh_axes_of, section_sizes
from autopart.ir.pattern import Pattern
from autopart.ir.selection import positions_upper_bound
from autopart.ops.operators import autopart_ops

aten = torch.ops.aten


@dataclass(frozen=True)
class LocalCall:
    """A traced call that a local form writes into the program of one rank.

    Args:
        node: the traced call.
        args: local arguments.
        strategies: {axis: strategy of the call}.
        sizes: {axis: number of ranks}.
        emit: `emit(target, *args)` adds a node to the graph of the program.
        seed: returns the node of the microbatch's random seed.
        balance: planned load of the busiest expert-parallel rank, as a multiple of the mean load.
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
        """Emit the call as in the trace, but on local operands.

        Args:
            changed: {argument position: value that replaces the argument}.
        """
        args = [(changed or {}).get(i, argument) for i, argument in enumerate(self.args)]
        return self.emit(self.node.target, *args, **self.kwargs)

    def axes_sharding(self, factor: str) -> list[str]:
        return [axis for axis, s in self.strategies.items() if s.factor == factor and self.sizes[axis] > 1]

    def num_parts(self, factor: str) -> int:
        return math.prod(self.sizes[axis] for axis in self.axes_sharding(factor))

    def output_layout(self) -> dict[str, Placement]:
        return {axis: s.outputs[0] for axis, s in self.strategies.items()}

    def num_ranks(self, axes: str) -> int:
        """Return the number of ranks of an axis, or of several axes flattened to one (`dp_cp`)."""
        return math.prod(self.sizes[axis] for axis in mesh_axes_of(axes))

    def index(self, axes: str) -> fx.Node:
        """Emit this rank's index on an axis, or on several axes flattened to one (`dp_cp`)."""
        outermost, *inside = mesh_axes_of(axes)
        index = self.emit(autopart_ops.axis_index.default, outermost)
        for axis in inside:
            outer_index = self.emit(operator.mul, index, self.sizes[axis])
            index = self.emit(operator.add, outer_index, self.emit(autopart_ops.axis_index.default, axis))
        return index

    def first_row(self, axes: str, rows: int) -> fx.Node:
        """Emit the index of this rank's first row in a sharded table of `rows` rows.

        Args:
            axes: the axis, or flattened axes, over which the table is sharded.
        """
        return self.emit(operator.mul, self.index(axes), -(-rows // self.num_ranks(axes)))


LocalForm = Callable[[LocalCall], fx.Node | None]
"""Function that writes a call into the program of one rank.

It returns None if the traced call gives the correct result on local operands.
"""


def local_value(node: fx.Node) -> Any:
    """Return the output, on one rank, of a node that a local form emitted, as a meta tensor.

    None if the shape is unknown. Plans and printed graphs show the shape and bytes of this tensor.
    """
    first = value(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if not isinstance(first, torch.Tensor):
        return None
    if node.target is aten.where.default:
        return positions_upper_bound(first)
    if getattr(node.target, "namespace", "") == "aten":
        are_known = all(value(used) is not None for used in node.args if isinstance(used, fx.Node))
        return node.target(*fx.map_arg(node.args, value)) if are_known else None
    if operator_name(node) == "autopart::ring_attention":
        return first.new_empty(*first.shape[:-1], value(node.args[3]).shape[-1])
    if operator_name(node) == "autopart::exchange_counts":
        return torch.empty(2, node.args[3], dtype=torch.int64, device=first.device)
    if operator_name(node) in ("autopart::all_reduce", "autopart::all_reduce_max"):
        return torch.empty_like(first)
    return first.new_empty(first.shape[:-1]) if operator_name(node) == "autopart::pick_class" else None


def takes_shape(pattern: Pattern | None) -> bool:
    return pattern is not None and pattern.local is shape_argument


def shape_argument(call: LocalCall) -> fx.Node:
    """Emit a view whose second argument is the local output shape."""
    layout, full = call.output_layout(), shape(call.node)
    local = local_shape(full, layout, call.sizes)
    sizes, atoms_by_dim = call.node.args[1], facts(call.node)["atoms"]
    is_open = [size == -1 and bool(selections_in(atoms)) for size, atoms in zip(sizes, atoms_by_dim, strict=True)]
    local = [-1 if open_ else size for open_, size in zip(is_open, local, strict=True)]
    for placement in layout.values():
        if placement.is_dispatched:
            local[placement.dim] = -1  # a data-dependent number of rows: those of the local experts
    for axes, placement in flattened_shards(layout).items():
        if any(size % call.num_ranks(axes) for size in section_sizes(full[placement.dim], placement.sections)):
            local[placement.dim] = -1  # uneven shards
    return call.as_traced({1: local})


def group_argument(call: LocalCall) -> fx.Node | None:
    """Emit a call with this rank's number of groups (factor `g`). Return None if groups are not sharded."""
    num_shards = call.num_parts("g")
    if num_shards == 1:
        return None
    names = [declared.name for declared in call.node.target._schema.arguments]
    position = next(i for i, name in enumerate(names) if name in ("groups", "num_groups"))
    count: Any = call.args[position] // num_shards
    if call.args[position] % num_shards:  # shards are uneven; on every rank the weight has one row per group
        count = call.emit(aten.sym_size.int, call.args[1], 0)
    return call.as_traced({position: count})
