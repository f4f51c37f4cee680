"""Rewrites of mean losses as a sum divided by a count, so that a rank's loss can be a partial sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopart.ir.graph import argument, is_floating, operator_name, shape, short_name, value
from autopart.passes.pass_pipeline import on_calls
from autopart.passes.rewriting import emit, replace
from autopart.passes.rules.tables import RULES

aten = torch.ops.aten
NONE, MEAN = 0, 1


@on_calls("aten::cross_entropy_loss")
def losses_of_all_positions(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite `cross_entropy(logits[:, :-1], labels)` as a loss over all tokens.

    The last token gets the ignored label. So the logits need no slice, which would copy them, and stay sharded along
    the sequence.
    """
    cut, views = _views_of_slice(node.args[0])
    if cut is None or argument(node, "reduction") == NONE or is_floating(node.args[1]):
        return
    is_flat = bool(views) and short_name(views[0]) == "reshape"
    sliced = views[0].args[0] if is_flat else node.args[0]
    with graph.inserting_before(node):
        logits, labels = cut.args[0], node.args[1]
        for view in reversed(views[1:] if is_flat else views):
            logits = emit(graph, view, view.target, logits, *view.args[1:], **view.kwargs)
        before, after = shape(logits), shape(sliced)
        at = next(dim for dim, size in enumerate(before) if size != after[dim])
        classes = len(after) - 1 if is_flat else 1
        if at == classes:
            return
        if is_flat:
            logits = emit(graph, node, aten.reshape.default, logits, [-1, after[-1]])
            labels = emit(graph, node, aten.reshape.default, labels, list(after[:-1]))
        behind = len(shape(labels)) - 1 - (at if at < classes else at - 1)
        pads = [*[0, 0] * behind, 0, before[at] - after[at]]
        labels = emit(graph, node, aten.constant_pad_nd.default, labels, pads, argument(node, "ignore_index"))
        if is_flat:
            labels = emit(graph, node, aten.reshape.default, labels, [-1])
        node.args = (logits, labels, *node.args[2:])


def _views_of_slice(node: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """Return (slice that drops the last token's logits, views between the slice and the loss, last first).

    A view is a reshape to [tokens, classes], or a transpose. Returns None in place of the slice if `node` does not
    come from such a slice.
    """
    views: list[fx.Node] = []
    while isinstance(node, fx.Node) and node.op == "call_function":
        name = short_name(node)
        if name == "slice":
            leaves_out = shape(node) != shape(node.args[0])
            is_head = not argument(node, "start") and argument(node, "step") == 1
            return (node if is_head and leaves_out else None), views
        is_flat = name == "reshape" and not views and shape(node)[1:] == shape(node.args[0])[-1:]
        if not is_flat and name not in ("to", "_to_copy", "transpose"):
            break
        views.append(node)
        node = node.args[0]
    return None, views


@on_calls(*(name for name, rule in RULES.items() if rule.has_reduction))
def explicit_reductions(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite the mean of a loss as a sum divided by the number of labels that are not ignored.

    The number depends only on inputs, so every rank computes it for the global batch. The loss is then the mean over
    all tokens of the global batch, even if microbatches and ranks have different numbers of labels.
    """
    reduction = argument(node, "reduction")
    labels = operator_name(node) in ("aten::cross_entropy_loss", "aten::nll_loss_nd")
    if reduction == NONE or (labels and (argument(node, "weight") is not None or is_floating(node.args[1]))):
        return
    names = [declared.name for declared in node.target._schema.arguments]
    position = names.index("reduction")
    args = [argument(node, name) for name in names[: max(len(node.args), position + 1)]]
    args[position] = NONE
    with graph.inserting_before(node):
        each = emit(graph, node, node.target, *args)
        total = emit(graph, node, aten.sum.default, each)
        if reduction == MEAN:
            count: Any = value(each).numel()
            if labels:
                counted = emit(graph, node, aten.ne.Scalar, args[1], argument(node, "ignore_index"))
                count = emit(graph, node, aten.sum.default, counted)
            total = emit(graph, node, aten.div.Tensor, total, count)
        replace(node, total)


@on_calls("aten::mean")
def whole_means(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite `mean()` over all elements as a sum divided by the number of elements."""
    if node.target is aten.mean.default:
        with graph.inserting_before(node):
            total = emit(graph, node, aten.sum.default, node.args[0])
            replace(node, emit(graph, node, aten.div.Tensor, total, value(node.args[0]).numel()))
