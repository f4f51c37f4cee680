"""Rules of reductions, and of operators that need one dim whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from autopart.ir.graph import argument, shape, tensor_inputs
from autopart.ir.pattern import Pattern
from autopart.passes.rules.factors import UNARY_LINEAR, names, names_and_place, output_shapes, pattern
from autopart.passes.rules.local_forms import LocalCall

aten = torch.ops.aten


def reduction(node: fx.Node) -> Pattern:
    """`sum`: reduced factors are summed over, so sharding one leaves a partial sum."""
    return _reduce(node, whole=False)


def mean(node: fx.Node) -> Pattern:
    """As `sum`, each rank's mean being its share of the whole one."""
    return replace(_reduce(node, whole=False), local=_share_of_mean)


def _share_of_mean(call: LocalCall) -> fx.Node | None:
    """Each rank's mean over its part, over the number of parts; of unequal parts, each rank's sum over the size of the
    whole."""
    source, output = shape(call.node.args[0]), shape(call.node)
    cuts = {axis: s for axis, s in call.strategies.items() if s.factor and s.outputs[0].kind == "P"}
    if any(p.is_shard and source[p.dim] % call.sizes[axis] for axis, s in cuts.items() for p in s.inputs):
        total = aten.sum.default if len(call.args) == 1 else aten.sum.dim_IntList
        share = math.prod(output) / math.prod(source)
        return call.emit(aten.mul.Tensor, call.emit(total, *call.args, **call.kwargs), share)
    parts = math.prod(call.sizes[axis] for axis in cuts)
    return None if parts == 1 else call.emit(aten.mul.Tensor, call.as_traced(), 1.0 / parts)


def whole_reduction(node: fx.Node) -> Pattern:
    """`amax`, `argmax`, `std`, ...: the reduced dims stay whole."""
    return _reduce(node, whole=True)


def _reduce(node: fx.Node, whole: bool) -> Pattern:
    before, after = shape(node.args[0]), output_shapes(node)
    dims = names(len(before))
    chosen = argument(node, "dim")
    everything = chosen is None or chosen == []
    chosen = range(len(before)) if everything else [chosen] if isinstance(chosen, int) else chosen
    gone = {d % len(before) for d in chosen} if before else set()
    keep = len(after[0]) == len(before)
    output = [() if i in gone else d for i, d in enumerate(dims) if keep or i not in gone]
    stay = [dims[i][0] for i in gone] if whole else []
    return pattern(node, [dims], [output] * len(after), stay, linear=() if whole else UNARY_LINEAR)


def extreme(node: fx.Node) -> Pattern | None:
    """`max` and `min` of one tensor; of two they are pointwise."""
    return _reduce(node, whole=True) if len(tensor_inputs(node)) == 1 else None


def topk(node: fx.Node) -> Pattern | None:
    """The best of one dim, which stays whole: values and places."""
    if not shape(node.args[0]):
        return None
    dims, at = names_and_place(node)
    output = [("best",) if i == at else d for i, d in enumerate(dims)]
    return pattern(node, [dims], [output, output], [dims[at][0], "best"])


def half_spectrum(node: fx.Node) -> Pattern:
    """Fourier transforms from or to real numbers: all transformed dims stay whole, the last one changes its size."""
    dims = names(len(shape(node.args[0])))
    over = [d % len(dims) for d in argument(node, "dim")]
    output = [(f"frequency{i}",) if i in over else d for i, d in enumerate(dims)]
    whole = [name for i in over for name in (dims[i][0], f"frequency{i}")]
    return pattern(node, [dims], [output], whole, linear=UNARY_LINEAR)


def along_dim(name: str, linear: bool = False) -> Callable[[fx.Node], Pattern]:
    """An operator that keeps its input's shape and needs the dims of its argument `name` whole (`softmax`, `flip`)."""

    def rule(node: fx.Node) -> Pattern:
        dims = names(len(shape(node.args[0])))
        chosen = argument(node, name)
        chosen = [chosen] if isinstance(chosen, int) else chosen or range(len(dims))  # none named: the flattened tensor
        stay = [dims[d][0] for d in chosen] if dims else []
        return pattern(node, [dims], [dims] * len(output_shapes(node)), stay, linear=UNARY_LINEAR if linear else ())

    return rule
