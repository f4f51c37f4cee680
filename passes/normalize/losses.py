"""Losses and whole means as sums over constants, so that they can be partial sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopart.ir.graph import is_floating, operator_name, value
from autopart.passes.pipeline import on_calls
from autopart.passes.rules.tables import LOSS_REDUCTIONS

from .new_calls import emit, replace

aten = torch.ops.aten
NONE, MEAN = 0, 1


@on_calls(*LOSS_REDUCTIONS)
def explicit_reductions(graph: fx.Graph, node: fx.Node) -> None:
    """The mean of a loss becomes a sum over the count of all labels that are not ignored.

    The count depends on the inputs alone, so it is known for the whole batch on every rank: the loss stays the mean
    over ALL tokens, however they fall over microbatches and ranks.
    """
    position = LOSS_REDUCTIONS[operator_name(node)]
    args, kwargs = list(node.args), dict(node.kwargs)
    names = [argument.name for argument in node.target._schema.arguments]
    reduction = args[position] if len(args) > position else kwargs.pop("reduction", MEAN)
    labels = operator_name(node) in ("aten::cross_entropy_loss", "aten::nll_loss_nd")
    weight = args[2] if len(args) > 2 else kwargs.get("weight")
    if reduction == NONE or (labels and (weight is not None or is_floating(node.args[1]))):
        return
    defaults = [argument.default_value for argument in node.target._schema.arguments]
    args += [kwargs.pop(names[i], defaults[i]) for i in range(len(args), position)]
    args = [*args[:position], NONE, *args[position + 1 :]]
    with graph.inserting_before(node):
        each = emit(graph, node, node.target, *args, **kwargs)
        total = emit(graph, node, aten.sum.default, each)
        if reduction == MEAN:
            count: Any = value(each).numel()
            if labels:
                ignored = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
                count = emit(graph, node, aten.sum.default, emit(graph, node, aten.ne.Scalar, args[1], ignored))
            total = emit(graph, node, aten.div.Tensor, total, count)
        replace(node, total)


@on_calls("aten::mean")
def whole_means(graph: fx.Graph, node: fx.Node) -> None:
    """`mean()` over everything becomes a sum over a constant, so that it can be a partial sum of unequal parts."""
    if node.target is aten.mean.default:
        with graph.inserting_before(node):
            total = emit(graph, node, aten.sum.default, node.args[0])
            replace(node, emit(graph, node, aten.div.Tensor, total, value(node.args[0]).numel()))
