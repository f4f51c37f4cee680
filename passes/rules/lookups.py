"""Local forms of operators that look something up in a table whose rows are sharded: words, classes, experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopart.ir.graph import shape
from autopart.ir.layout import SENT, local_shape, parts_of
from autopart.ir.operators import autopart_ops

from .local import LocalCall

aten = torch.ops.aten


def _axis_sharding(call: LocalCall, factor: str) -> str:
    axes = call.axes_sharding(factor)
    assert len(axes) <= 1, "a table is cut over one axis"
    return axes[0] if axes else ""


def axes_routing(call: LocalCall) -> str:
    """The axis on whose ranks the rows of a call are by their experts, several joined in one; "" where there is
    none."""
    places = {axis: (*s.inputs, *s.outputs) for axis, s in call.strategies.items()}
    return "_".join(axis for axis, found in places.items() if any(place.is_routed for place in found))


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
        own = call.emit(aten.sub.Tensor, experts, call.first_row(routed, rows))
        return call.emit(aten.embedding.default, table, own)
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
    picked = emit(autopart_ops.pick_class.default, shifted, target, call.first_row(axis, classes))
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
    axis = axes_routing(call)
    if not axis:
        return None
    if SENT in call.output_layout().values():
        return _move(call, axis, autopart_ops.dispatch.default)
    rows = local_shape(shape(call.node), call.output_layout(), call.sizes, call.balance)[0]
    return call.emit(call.node.target, *call.args[:4], *_experts_of(call, axis), rows)


def from_experts(call: LocalCall) -> fx.Node | None:
    """Of every rank's rows what its experts add to each token."""
    axis = axes_routing(call)
    if not axis:
        return None
    if any(strategy.inputs[0] == SENT for strategy in call.strategies.values()):
        return _move(call, axis, autopart_ops.combine.default)
    return call.emit(call.node.target, *call.args[:4], *_experts_of(call, axis))


def _move(call: LocalCall, axis: str, operator: Callable[..., Any]) -> fx.Node:
    """Send rows to the ranks of their experts, or back; the ranks tell each other once how many there are."""
    x, expert, times, num_experts = call.args[:4]
    exchange, told = autopart_ops.exchange_counts.default, (expert, axis, num_experts, call.num_ranks(axis))
    known = (user for user in expert.users if user.target is exchange and user.args == told)
    counts = next(known, None) or call.emit(exchange, *told)
    return call.emit(operator, x, axis, expert, counts, times, num_experts)


def _experts_of(call: LocalCall, axis: str) -> tuple[fx.Node, int]:
    """The first expert of a rank, and how many it has; the last ranks may have fewer."""
    experts = call.node.args[3]
    return call.first_row(axis, experts), -(-experts // call.num_ranks(axis))
