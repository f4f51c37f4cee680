"""Rewrites of normalizations as operators that return only the normalized tensor."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopart.ir.graph import short_name
from autopart.passes.pass_pipeline import on_calls
from autopart.passes.rewriting import emit, replace_parts

aten = torch.ops.aten


@on_calls("aten::native_layer_norm", "aten::native_group_norm")
def plain_norms(graph: fx.Graph, node: fx.Node) -> None:
    """Replace `native_layer_norm` by `layer_norm`, and group norm likewise, if mean and rstd are unused."""
    if any(_index(user) != 0 for user in node.users):
        return
    with graph.inserting_before(node):
        replace_parts(node, {0: _plain(graph, node, short_name(node))})


def _index(user: fx.Node) -> int | None:
    return user.args[1] if user.target is operator.getitem else None


def _plain(graph: fx.Graph, node: fx.Node, name: str) -> fx.Node:
    if name == "native_layer_norm":
        x, dims, weight, bias, eps = node.args
        return emit(graph, node, aten.layer_norm.default, x, dims, weight, bias, eps)
    x, weight, bias, _, _, _, groups, eps = node.args
    return emit(graph, node, aten.group_norm.default, x, groups, weight, bias, eps)
