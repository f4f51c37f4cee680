"""How one operator is written for one rank: its call with local shapes, and the few operators that must know the rank.

`write_local` is the only place where an operator's name decides what is emitted; everything else follows its rule.
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopart.errors import LayoutError
from autopart.ir.decisions import Strategy
from autopart.ir.facts import facts
from autopart.ir.graph import argument, describe, operator_name, shape, value
from autopart.ir.layout import Placement, local_shape
from autopart.ir.operators import autopart_ops
from autopart.ir.program import MICROBATCH_AXIS
from autopart.passes.rules.tables import COUNT_ARGUMENT, SHAPE_ARGUMENT

aten = torch.ops.aten


@dataclass(frozen=True)
class LocalCall:
    """One operator to be written for one rank: the traced node, its strategy on every axis and the axes' sizes.

    `emit(target, *args)` adds a node to the graph being written; `seed()` is the microbatch's random seed.
    """

    node: fx.Node
    strategies: Mapping[str, Strategy]
    sizes: Mapping[str, int]
    emit: Callable[..., fx.Node]
    seed: Callable[[], fx.Node]

    def axes_sharding(self, factor: str) -> list[str]:
        return [axis for axis, s in self.strategies.items() if s.factor == factor and self.sizes[axis] > 1]

    def output_layout(self) -> dict[str, Placement]:
        return {axis: s.outputs[0] for axis, s in self.strategies.items()}


def local_value(target: Any, args: Sequence[Any]) -> Any:
    """What a call of a special operator gives, without data: for the bytes and shapes that plans and prints show."""
    first = value(args[0]) if isinstance(args[0], fx.Node) else None
    if not isinstance(first, torch.Tensor):
        return None
    if getattr(target, "namespace", "") == "aten":
        found = fx.map_arg(tuple(args), value)
        return None if any(isinstance(a, fx.Node) and value(a) is None for a in args) else target(*found)
    name = operator_name_of(target)
    if name in ("autopart::all_reduce", "autopart::all_reduce_max"):
        return torch.empty_like(first)
    if name == "autopart::pick_class":
        return first.new_empty(first.shape[:-1])
    return None


def operator_name_of(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return schema.name if schema is not None else ""


def write_local(call: LocalCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
    """Emit the operator on local operands."""
    special = _SPECIAL.get(operator_name(call.node))
    if special is not None:
        result = special(call, args, kwargs)
        if result is not None:
            return result
    return call.emit(call.node.target, *args, **kwargs)


def _with_local_shape(call: LocalCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
    position = SHAPE_ARGUMENT[operator_name(call.node)]
    layout, full = call.output_layout(), shape(call.node)
    local = local_shape(full, layout, call.sizes)
    for axis, place in layout.items():
        if place.is_shard and full[place.dim] % call.sizes[axis] and not place.sections:
            local[place.dim] = -1  # shards of unequal sizes
    return call.emit(call.node.target, *args[:position], local, *args[position + 1 :], **kwargs)


def _mean(call: LocalCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
    """A mean over a sharded dim is a partial sum: each rank's mean over its part, over the number of parts; of unequal
    parts, each rank's sum over the size of the whole."""
    whole, made = shape(call.node.args[0]), shape(call.node)
    cuts = {axis: s for axis, s in call.strategies.items() if s.factor and s.outputs[0].kind == "P"}
    if any(p.is_shard and whole[p.dim] % call.sizes[axis] for axis, s in cuts.items() for p in s.inputs):
        reduce = aten.sum.default if len(args) == 1 else aten.sum.dim_IntList
        share = math.prod(made) / math.prod(whole)
        return call.emit(aten.mul.Tensor, call.emit(reduce, *args, **kwargs), share)
    parts = math.prod(call.sizes[axis] for axis in cuts)
    mean = call.emit(call.node.target, *args, **kwargs)
    return mean if parts == 1 else call.emit(aten.mul.Tensor, mean, 1.0 / parts)


def _split(call: LocalCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
    parts = math.prod(call.sizes[axis] for axis in call.axes_sharding("joined"))
    return call.emit(call.node.target, args[0], [size // parts for size in args[1]], *args[2:], **kwargs)


def _with_local_count(call: LocalCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
    position, factor = COUNT_ARGUMENT[operator_name(call.node)]
    parts = math.prod(call.sizes[axis] for axis in call.axes_sharding(factor))
    if parts == 1:
        return call.emit(call.node.target, *args, **kwargs)
    count: Any = args[position] // parts
    if args[position] % parts:  # shards of unequal sizes: every rank reads it off its weight, a row a group
        count = call.emit(aten.sym_size.int, args[1], 0)
    return call.emit(call.node.target, *args[:position], count, *args[position + 1 :], **kwargs)


def _first_row(call: LocalCall, axis: str, rows: int) -> fx.Node:
    """The number of the first row this rank holds of a table of `rows` rows."""
    step = -(-rows // call.sizes[axis])
    return call.emit(operator.mul, call.emit(autopart_ops.axis_index.default, axis), step)


def _embedding(call: LocalCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node | None:
    """Vocabulary-parallel look-up (Megatron-LM, Shoeybi et al. 2019, section 3): rows of other ranks give zeros."""
    axes = call.axes_sharding("v")
    if not axes:
        return None
    assert len(axes) == 1, "a table is cut over one axis"
    rows = value(call.node.args[0]).shape[0]
    padding = call.node.args[2] if len(call.node.args) > 2 else -1
    start = _first_row(call, axes[0], rows)
    return call.emit(autopart_ops.embedding_shard.default, args[0], args[1], start, padding, rows)


def _cross_entropy(call: LocalCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node | None:
    """Cross entropy of logits whose classes are sharded (Shoeybi et al. 2019): three small all-reduces of one number
    per token (maximum, sum of exponentials, logit of the label); the logits are never gathered."""
    axes = call.axes_sharding("c")
    if not axes:
        return None
    assert len(axes) == 1, "classes are cut over one axis"
    axis, emit = axes[0], call.emit
    logits, target = args[0], args[1]
    ignored = args[4] if len(args) > 4 else -100
    smoothing = args[5] if len(args) > 5 else 0.0
    classes = shape(call.node.args[0])[1]
    if len(shape(call.node.args[0])) > 2:
        logits = emit(aten.movedim.int, logits, 1, -1)
    peak = emit(
        autopart_ops.all_reduce_max.default, emit(aten.amax.default, emit(aten.detach.default, logits), [-1]), axis
    )
    shifted = emit(aten.sub.Tensor, logits, emit(aten.unsqueeze.default, peak, -1))
    total = emit(aten.sum.dim_IntList, emit(aten.exp.default, shifted), [-1])
    log_total = emit(aten.log.default, emit(autopart_ops.all_reduce.default, total, axis))
    picked = emit(autopart_ops.pick_class.default, shifted, target, _first_row(call, axis, classes))
    loss = emit(aten.sub.Tensor, log_total, emit(autopart_ops.all_reduce.default, picked, axis))
    if smoothing:
        spread = emit(autopart_ops.all_reduce.default, emit(aten.sum.dim_IntList, shifted, [-1]), axis)
        even = emit(aten.sub.Tensor, log_total, emit(aten.div.Tensor, spread, classes))
        loss = emit(aten.add.Tensor, emit(aten.mul.Tensor, loss, 1 - smoothing), emit(aten.mul.Tensor, even, smoothing))
    return emit(aten.masked_fill.Scalar, loss, emit(aten.eq.Scalar, target, ignored), 0.0)


def _expert_linear(call: LocalCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node | None:
    """Expert parallelism of the tensor axis: every rank has some experts, and rows of the others give zeros."""
    axes = call.axes_sharding("e")
    if not axes:
        return None
    assert len(axes) == 1, "experts are cut over one axis"
    return call.emit(call.node.target, *args[:3], _first_row(call, axes[0], shape(call.node.args[1])[0]))


def _drop(call: LocalCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node | None:
    """Without its noise, dropout draws a mask where it is: shards of a value get independent ones, ranks that hold the
    same value the same one."""
    source, noise = args
    if noise is not None:
        return None
    sharded = [a for a, place in call.output_layout().items() if place.is_shard and a != MICROBATCH_AXIS]
    indices = [call.emit(autopart_ops.axis_index.default, axis) for axis in sharded]
    salt = zlib.crc32(facts(call.node)["key"].encode())
    probability = argument(call.node.args[1], "p")
    return call.emit(autopart_ops.dropout.default, source, probability, call.seed(), salt, indices)


def _as_strided(call: LocalCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
    """It reads its input's memory, which is brought into the order that it had in the trace."""
    traced = value(call.node.args[0])
    order = sorted(range(traced.dim()), key=lambda dim: (-traced.stride(dim), -traced.shape[dim]))
    reach = sum((size - 1) * stride for size, stride in zip(traced.shape, traced.stride(), strict=True)) + 1
    if reach != traced.numel() or traced.storage_offset():
        raise LayoutError(
            "as_strided reads memory that is not its input's own", where=describe(call.node),
            why="a rank has the values of its input in memory of their own", hint="unfold, or slices and stack",
        )  # fmt: skip
    ordered = call.emit(aten.permute.default, args[0], order)
    own = call.emit(aten.clone.default, ordered, memory_format=torch.contiguous_format)
    return call.emit(call.node.target, own, *args[1:], **kwargs)


_SPECIAL: dict[str, Callable[[LocalCall, Sequence[Any], Mapping[str, Any]], fx.Node | None]] = {
    **dict.fromkeys(SHAPE_ARGUMENT, _with_local_shape),
    **dict.fromkeys(COUNT_ARGUMENT, _with_local_count),
    "aten::as_strided": _as_strided,
    "aten::mean": _mean,
    "autopart::drop": _drop,
    "aten::split_with_sizes": _split,
    "aten::embedding": _embedding,
    "autopart::expert_linear": _expert_linear,
    "aten::cross_entropy_loss": _cross_entropy,
}
