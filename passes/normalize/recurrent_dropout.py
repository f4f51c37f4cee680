"""Recurrent layers with dropout between them, split into single layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import argument, draws_random_numbers, value
from autopart.passes.normalize.random_ops import drop, noise_like
from autopart.passes.pass_pipeline import on_calls
from autopart.passes.rewriting import emit, getitem, name_replacement_calls, replace_parts

aten = torch.ops.aten


@on_calls("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu")
def explicit_recurrent_dropout(graph: fx.Graph, node: fx.Node) -> None:
    """Split a call of several recurrent layers into one call per layer, with dropout between layers."""
    if not draws_random_numbers(node) or argument(node, "batch_first") is None:  # None: packed sequences
        return
    before = node.prev
    with graph.inserting_before(node):
        results = _layers(graph, node)
        name_replacement_calls(node, before, "recurrent_dropout")
    replace_parts(node, results)


def _layers(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """Emit one call per layer. Return the last layer's output, then the final states of all layers."""
    number, weights = argument(node, "num_layers"), argument(node, "params")
    states = argument(node, "hx")
    states = list(states) if isinstance(states, (list, tuple)) else [states]
    directions = 2 if argument(node, "bidirectional") else 1
    of_each = len(weights) // number
    x = argument(node, "input")
    finals: list[list[fx.Node]] = []
    for layer in range(number):
        if layer:
            x = _dropped(graph, node, x)
        layer_states = [
            emit(graph, node, aten.slice.Tensor, s, 0, layer * directions, (layer + 1) * directions) for s in states
        ]
        result = _layer(graph, node, x, layer_states, list(weights[layer * of_each : (layer + 1) * of_each]))
        x = getitem(graph, result, 0)
        finals.append([getitem(graph, result, 1 + i) for i in range(len(states))])
    joined = [emit(graph, node, aten.cat.default, list(parts)) for parts in zip(*finals, strict=True)]
    return [x, *joined]


def _layer(graph: fx.Graph, node: fx.Node, x: fx.Node, states: list[fx.Node], weights: list[Any]) -> fx.Node:
    by_name: dict[str, Any] = {"input": x, "params": weights, "num_layers": 1, "dropout": 0.0}
    by_name["hx"] = states if len(states) > 1 else states[0]
    names = [declared.name for declared in node.target._schema.arguments]
    return emit(graph, node, node.target, *(by_name.get(name, argument(node, name)) for name in names))


def _dropped(graph: fx.Graph, node: fx.Node, x: fx.Node) -> fx.Node:
    """Insert dropout between two layers. Its mask has the shape [sequence, batch, features]."""
    batch_first = argument(node, "batch_first")
    order = value(x).transpose(0, 1) if batch_first else value(x)
    p = argument(node, "dropout")
    noise = noise_like(graph, node, order.new_empty(order.shape), p)
    facts(noise)["inexact_on_gpu"] = "cuDNN draws the dropout masks of recurrent layers itself, in its own order"
    if batch_first:
        noise = emit(graph, node, aten.transpose.int, noise, 0, 1)
    return drop(graph, node, x, noise, p)
