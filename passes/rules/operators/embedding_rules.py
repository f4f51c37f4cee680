"""Local forms of operators that look something up in a table whose rows are sharded: words, classes, experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from autopart.ir.graph import shape, value
from autopart.ir.layout import ROUTED, SENT, Layout, local_shape, parts_of, shard
from autopart.ops.operators import autopart_ops
from autopart.passes.rules.local_forms import LocalCall

aten = torch.ops.aten


def _axis_sharding(call: LocalCall, factor: str) -> str:
    axes = call.axes_sharding(factor)
    assert len(axes) <= 1, "a table is cut over one axis"
    return axes[0] if axes else ""


def axes_routing(call: LocalCall) -> str:
    """The axis on whose ranks the rows of a call are by their experts, several joined in one; "" where there is
    none."""
    return "_".join(axis for axis, strategy in call.strategies.items() if strategy.is_routed)


def _axes_cutting(call: LocalCall, factor: str) -> str:
    """The axes over which the experts that rows choose from are cut, joined in one: on whose ranks rows are by their
    experts, and inside them those on which rows of other ranks' experts give zeros."""
    routed, cut = parts_of(axes_routing(call)), call.axes_sharding(factor)
    return "_".join(axis for axis in call.strategies if axis in routed or axis in cut)


def embedding(call: LocalCall) -> fx.Node | None:
    """Vocabulary-parallel look-up (Megatron-LM, Shoeybi et al. 2019, section 3): rows of other ranks give zeros."""
    rows = shape(call.node.args[0])[0]
    routed, axis = axes_routing(call), _axes_cutting(call, "v")
    if routed and routed == axis:
        table, experts = call.args[:2]
        local_experts = call.emit(aten.sub.Tensor, experts, call.first_row(routed, rows))
        return call.emit(aten.embedding.default, table, local_experts)
    if not axis:
        return None
    padding = call.node.args[2] if len(call.node.args) > 2 else -1
    return call.emit(autopart_ops.embedding_shard.default, *call.args[:2], call.first_row(axis, rows), padding, rows)


def cross_entropy(call: LocalCall) -> fx.Node | None:
    """Cross entropy of logits whose classes are sharded (Shoeybi et al. 2019): three small all-reduces of one number
    per token (maximum, sum of exponentials, logit of the label); the logits are never gathered."""
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
    """Every rank has some experts: rows of the others are not there, or give zeros."""
    axes = _axes_cutting(call, "e")
    if not axes:
        return None
    return call.emit(call.node.target, *call.args[:3], call.first_row(axes, shape(call.node.args[1])[0]))


def to_experts(call: LocalCall) -> fx.Node | None:
    """On every rank the rows that go to its experts."""
    way = _way(call, call.output_layout())
    x, expert, times, num_experts = call.args[:4]
    if way.kept:
        layout = {axis: shard(0) if place == SENT else place for axis, place in call.output_layout().items()}
        rows = local_shape(shape(call.node), layout, call.sizes, call.balance)[0]
        if not way.sent:
            return call.emit(call.node.target, x, expert, times, num_experts, *_experts_of(call, way.kept), rows)
        x, expert, times = *_kept(call, way, x, rows), 1
    return _move(call, way, autopart_ops.dispatch.default, x, expert, times) if way.sent else None


def from_experts(call: LocalCall) -> fx.Node | None:
    """Of every rank's rows what its experts add to each token."""
    way = _way(call, {axis: strategy.inputs[0] for axis, strategy in call.strategies.items()})
    x, expert, times, num_experts = call.args[:4]
    if not way.sent:
        experts = _experts_of(call, way.kept) if way.kept else None
        return call.emit(call.node.target, x, expert, times, num_experts, *experts) if experts else None
    if not way.kept:
        return _move(call, way, autopart_ops.combine.default, x, expert, times)
    rows = local_shape(shape(call.node.args[1]), {axis: s.inputs[1] for axis, s in call.strategies.items()} | {
        axis: ROUTED for axis in parts_of(way.kept)}, call.sizes, call.balance)[0]  # fmt: skip
    numbers = _kept(call, way, expert, rows)[1]
    back = _move(call, way, autopart_ops.combine.default, x, numbers, 1)
    back.meta["val"] = value(x).new_empty(rows, *value(x).shape[1:])
    owner, index = _owner(call, way.kept, expert), call.index(way.kept)
    return call.emit(call.node.target, back, owner, times, call.num_ranks(way.kept), index, 1)


class _Way(NamedTuple):
    """How rows come to the ranks of their experts: over `sent` each is sent to the rank of its expert, over `kept` a
    rank keeps those of its experts of what all have. Axes, joined in one; "" for none."""

    sent: str
    kept: str


def _way(call: LocalCall, rows: Layout) -> _Way:
    axes = [axis for axis in call.strategies if axis in rows]
    return _Way(*("_".join(axis for axis in axes if rows[axis] == place) for place in (SENT, ROUTED)))


def _kept(call: LocalCall, way: _Way, x: fx.Node, rows: int) -> tuple[fx.Node, fx.Node]:
    """The rows that a rank keeps before they are sent, and the numbers of their experts: found once for all values."""
    expert, times = call.args[1:3]
    owner, select = _owner(call, way.kept, expert), autopart_ops.to_experts.default

    def kept(of: fx.Node, times: int) -> fx.Node:
        selected = call.emit(select, of, owner, times, call.num_ranks(way.kept), call.index(way.kept), 1, rows)
        selected.meta["val"] = value(of).new_empty(rows, *value(of).shape[1:])
        return selected

    known = (user for user in owner.users if user.target is select and user.args[0] is expert)
    numbers = next(known, None) or kept(expert, 1)
    return (numbers if x is expert else kept(x, times)), numbers


def _owner(call: LocalCall, axes: str, expert: fx.Node) -> fx.Node:
    """Where along some axes the rank is that has each row's expert."""
    all_axes, num_experts = axes_routing(call), call.node.args[3]
    if axes == all_axes:
        return _once(call, aten.floor_divide.Scalar, expert, -(-num_experts // call.num_ranks(axes)))
    block = _owner(call, all_axes, expert)
    inside, index = call.num_ranks(all_axes), None
    for axis in parts_of(all_axes):
        inside //= call.sizes[axis]
        if axis in parts_of(axes):
            one = _once(call, aten.floor_divide.Scalar, block, inside) if inside > 1 else block
            one = _once(call, aten.remainder.Scalar, one, call.sizes[axis])
            wide = index if index is None else _once(call, aten.mul.Scalar, index, call.sizes[axis])
            index = one if wide is None else _once(call, aten.add.Tensor, wide, one)
    assert index is not None
    return index


def _once(call: LocalCall, target: Callable[..., Any], *args: Any) -> fx.Node:
    """A call that is written once, however many ask for it."""
    known = (user for user in args[0].users if user.target is target and user.args == args)
    return next(known, None) or call.emit(target, *args)


def _move(
    call: LocalCall, way: _Way, operator: Callable[..., Any], x: fx.Node, expert: fx.Node, times: int
) -> fx.Node:  # fmt: skip
    """Send rows to the ranks of their experts, or back; the ranks tell each other once how many there are."""
    axes, num_experts = way.sent, call.args[3]
    if way.kept:
        expert, num_experts = _owner(call, axes, expert), call.num_ranks(axes)
    exchange = autopart_ops.exchange_counts.default
    counts = _once(call, exchange, expert, axes, num_experts, call.num_ranks(axes))
    return call.emit(operator, x, axes, expert, counts, times, num_experts)


def _experts_of(call: LocalCall, axes: str) -> tuple[fx.Node, int]:
    """The first expert of a rank, and how many it has; the last ranks may have fewer."""
    experts = call.node.args[3]
    return call.first_row(axes, experts), -(-experts // call.num_ranks(axes))
