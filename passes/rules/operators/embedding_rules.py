"""Local forms of operators with a table that is sharded along its rows: vocabulary, classes, experts.

For a mixture of experts, "row" means a copy of a token for one of the token's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from autopart.ir.graph import shape, value
from autopart.ir.layout import DISPATCHED, ON_EXPERT_RANK, Layout, local_shape, mesh_axes_of, shard
from autopart.ops.operators import autopart_ops
from autopart.passes.rules.local_forms import LocalCall

aten = torch.ops.aten


def _axis_sharding(call: LocalCall, factor: str) -> str:
    axes = call.axes_sharding(factor)
    assert len(axes) <= 1, "a table is sharded over one axis"
    return axes[0] if axes else ""


def dispatch_axes_of(call: LocalCall) -> str:
    """Return the flattened axes (such as `dp_ep`) over which a MoE call dispatches tokens, or ""."""
    return "_".join(axis for axis, strategy in call.strategies.items() if strategy.is_dispatched)


def _sharding_axes(call: LocalCall, factor: str) -> str:
    """Return the flattened axes over which the experts (or the rows of a table) are sharded, or "".

    Over some of these axes, tokens are dispatched to the ranks of their experts. Over all other axes, every rank has
    all tokens, and computes zeros for tokens whose expert is on another rank.
    """
    dispatch_axes, sharding_axes = mesh_axes_of(dispatch_axes_of(call)), call.axes_sharding(factor)
    return "_".join(axis for axis in call.strategies if axis in dispatch_axes or axis in sharding_axes)


def embedding(call: LocalCall) -> fx.Node | None:
    """Emit a vocabulary-parallel look-up (Megatron-LM, Shoeybi et al. 2019, section 3).

    The result is zero for indices of table rows on other ranks. Returns None if the table is not sharded along its
    rows.
    """
    rows = shape(call.node.args[0])[0]
    routed, axis = dispatch_axes_of(call), _sharding_axes(call, "v")
    if routed and routed == axis:
        table, experts = call.args[:2]
        local_experts = call.emit(aten.sub.Tensor, experts, call.first_row(routed, rows))
        return call.emit(aten.embedding.default, table, local_experts)
    if not axis:
        return None
    padding = call.node.args[2] if len(call.node.args) > 2 else -1
    return call.emit(autopart_ops.embedding_shard.default, *call.args[:2], call.first_row(axis, rows), padding, rows)


def cross_entropy(call: LocalCall) -> fx.Node | None:
    """Emit vocabulary-parallel cross entropy (Megatron-LM, Shoeybi et al. 2019).

    It needs three all-reduces of one number per token (maximum, sum of exponentials, logit of the label) and never
    gathers the logits. Returns None if classes are not sharded.
    """
    axis, emit = _axis_sharding(call, "c"), call.emit
    if not axis:
        return None
    logits, target = call.args[:2]
    ignored = call.args[4] if len(call.args) > 4 else -100
    smoothing = call.args[5] if len(call.args) > 5 else 0.0
    classes = shape(call.node.args[0])[1]
    if len(shape(call.node.args[0])) > 2:
        logits = emit(aten.movedim.int, logits, 1, -1)
    peak = emit(
        autopart_ops.all_reduce_max.default, emit(aten.amax.default, emit(aten.detach.default, logits), [-1]), axis
    )
    shifted = emit(aten.sub.Tensor, logits, emit(aten.unsqueeze.default, peak, -1))
    total = emit(aten.sum.dim_IntList, emit(aten.exp.default, shifted), [-1])
    log_total = emit(aten.log.default, emit(autopart_ops.all_reduce.default, total, axis))
    picked = emit(autopart_ops.pick_class.default, shifted, target, call.first_row(axis, classes), classes, ignored)
    loss = emit(aten.sub.Tensor, log_total, emit(autopart_ops.all_reduce.default, picked, axis))
    if smoothing:
        spread = emit(autopart_ops.all_reduce.default, emit(aten.sum.dim_IntList, shifted, [-1]), axis)
        even = emit(aten.sub.Tensor, log_total, emit(aten.div.Tensor, spread, classes))
        loss = emit(aten.add.Tensor, emit(aten.mul.Tensor, loss, 1 - smoothing), emit(aten.mul.Tensor, even, smoothing))
    return emit(aten.masked_fill.Scalar, loss, emit(aten.eq.Scalar, target, ignored), 0.0)


def expert_linear(call: LocalCall) -> fx.Node | None:
    """Emit the grouped product of tokens with the local experts. Return None if experts are not sharded.

    If rows are not dispatched, the result is zero for rows whose expert is on another rank.
    """
    axes = _sharding_axes(call, "e")
    if not axes:
        return None
    return call.emit(call.node.target, *call.args[:3], call.first_row(axes, shape(call.node.args[1])[0]))


def to_experts(call: LocalCall) -> fx.Node | None:
    """Emit the MoE dispatch: each rank gets its experts' tokens. Return None if experts are not sharded."""
    axes = _dispatch_axes(call, call.output_layout())
    x, expert, times, num_experts = call.args[:4]
    if axes.selected:
        layout = {
            axis: shard(0) if placement == DISPATCHED else placement for axis, placement in call.output_layout().items()
        }
        rows = local_shape(shape(call.node), layout, call.sizes, call.balance)[0]
        if not axes.all_to_all:
            return call.emit(call.node.target, x, expert, times, num_experts, *_experts_of(call, axes.selected), rows)
        x, expert, times = *_select_rows(call, axes, x, rows), 1
    return _all_to_all(call, axes, autopart_ops.dispatch.default, x, expert, times) if axes.all_to_all else None


def from_experts(call: LocalCall) -> fx.Node | None:
    """Emit the MoE combine: each token gets the sum of its experts' outputs.

    Return None if experts are not sharded.
    """
    axes = _dispatch_axes(call, {axis: strategy.inputs[0] for axis, strategy in call.strategies.items()})
    x, expert, times, num_experts = call.args[:4]
    if not axes.all_to_all:
        experts = _experts_of(call, axes.selected) if axes.selected else None
        return call.emit(call.node.target, x, expert, times, num_experts, *experts) if experts else None
    if not axes.selected:
        return _all_to_all(call, axes, autopart_ops.combine.default, x, expert, times)
    rows = local_shape(shape(call.node.args[1]), {axis: s.inputs[1] for axis, s in call.strategies.items()} | {
        axis: ON_EXPERT_RANK for axis in mesh_axes_of(axes.selected)}, call.sizes, call.balance)[0]  # fmt: skip
    numbers = _select_rows(call, axes, expert, rows)[1]
    combined = _all_to_all(call, axes, autopart_ops.combine.default, x, numbers, 1)
    combined.meta["val"] = value(x).new_empty(rows, *value(x).shape[1:])
    owner, index = _owner(call, axes.selected, expert), call.index(axes.selected)
    return call.emit(call.node.target, combined, owner, times, call.num_ranks(axes.selected), index, 1)


class _DispatchAxes(NamedTuple):
    """Flattened mesh axes over which experts are sharded, in two groups.

    Args:
        all_to_all: axes over which an all-to-all sends each row to the rank of its expert; "" without such an axis.
        selected: axes on which every rank has all rows and selects the rows of its experts; "" without such an axis.
    """

    all_to_all: str
    selected: str


def _dispatch_axes(call: LocalCall, rows: Layout) -> _DispatchAxes:
    axes = [axis for axis in call.strategies if axis in rows]
    return _DispatchAxes(
        *("_".join(axis for axis in axes if rows[axis] == placement) for placement in (DISPATCHED, ON_EXPERT_RANK))
    )


def _select_rows(call: LocalCall, axes: _DispatchAxes, x: fx.Node, rows: int) -> tuple[fx.Node, fx.Node]:
    """Emit the selection of the rows (copies of tokens) whose experts this rank has.

    The experts are sharded over `axes.selected`. Returns the selected rows of `x` and their expert indices. An
    all-to-all over `axes.all_to_all` follows. A dispatch and its combine share the node of the expert indices.

    Args:
        rows: upper bound of the number of selected rows.
    """
    expert, times = call.args[1:3]
    owner, select = _owner(call, axes.selected, expert), autopart_ops.to_experts.default

    def selection_of(of: fx.Node, times: int) -> fx.Node:
        selected = call.emit(
            select, of, owner, times, call.num_ranks(axes.selected), call.index(axes.selected), 1, rows
        )
        selected.meta["val"] = value(of).new_empty(rows, *value(of).shape[1:])
        return selected

    existing = (user for user in owner.users if user.target is select and user.args[0] is expert)
    numbers = next(existing, None) or selection_of(expert, 1)
    return (numbers if x is expert else selection_of(x, times)), numbers


def _owner(call: LocalCall, axes: str, expert: fx.Node) -> fx.Node:
    """Emit, for each row, the rank that has the row's expert, as an index along `axes`."""
    all_axes, num_experts = dispatch_axes_of(call), call.node.args[3]
    if axes == all_axes:
        return _once(call, aten.floor_divide.Scalar, expert, -(-num_experts // call.num_ranks(axes)))
    block = _owner(call, all_axes, expert)
    inside, index = call.num_ranks(all_axes), None
    for axis in mesh_axes_of(all_axes):
        inside //= call.sizes[axis]
        if axis in mesh_axes_of(axes):
            coordinate = _once(call, aten.floor_divide.Scalar, block, inside) if inside > 1 else block
            coordinate = _once(call, aten.remainder.Scalar, coordinate, call.sizes[axis])
            scaled = index if index is None else _once(call, aten.mul.Scalar, index, call.sizes[axis])
            index = coordinate if scaled is None else _once(call, aten.add.Tensor, scaled, coordinate)
    assert index is not None
    return index


def _once(call: LocalCall, target: Callable[..., Any], *args: Any) -> fx.Node:
    existing = (user for user in args[0].users if user.target is target and user.args == args)
    return next(existing, None) or call.emit(target, *args)


def _all_to_all(
    call: LocalCall, way: _DispatchAxes, operator: Callable[..., Any], x: fx.Node, expert: fx.Node, times: int
) -> fx.Node:  # fmt: skip
    """Emit the all-to-all that dispatches rows (copies of tokens) to experts, or combines them.

    Ranks first exchange the numbers of rows. A dispatch and its combine share the node of this exchange.

    Args:
        operator: `dispatch` or `combine`.
    """
    axes, num_experts = way.all_to_all, call.args[3]
    if way.selected:
        expert, num_experts = _owner(call, axes, expert), call.num_ranks(axes)
    exchange = autopart_ops.exchange_counts.default
    counts = _once(call, exchange, expert, axes, num_experts, call.num_ranks(axes))
    return call.emit(operator, x, axes, expert, counts, times, num_experts)


def _experts_of(call: LocalCall, axes: str) -> tuple[fx.Node, int]:
    """Return the index of this rank's first expert (as a node), and the number of experts of a rank.

    The last ranks may have fewer experts than this number.
    """
    experts = call.node.args[3]
    return call.first_row(axes, experts), -(-experts // call.num_ranks(axes))
