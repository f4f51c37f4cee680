"""What is computed alike is computed once: for all rows, and for all who read it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import draws_random_numbers, shape
from autopart.passes.pass_pipeline import on_calls
from autopart.passes.rewriting import emit, replace

aten = torch.ops.aten


@on_calls("aten::where")
def narrow_choices(graph: fx.Graph, node: fx.Node) -> None:
    """`where` of values that were expanded alike, such as a causal mask over the rows of a batch, is expanded after it
    and not before: a bias that it hides stays one for all rows."""
    narrow = fx.map_arg(node.args, lambda read: _before_expand(read, len(shape(node))))
    read = [one for one in narrow if isinstance(one, fx.Node)]
    sizes = tuple(torch.broadcast_shapes(*map(shape, read)))
    if len(sizes) == len(shape(node)) and sizes != shape(node):
        with graph.inserting_before(node):
            chosen = emit(graph, node, node.target, *narrow)
            replace(node, emit(graph, node, aten.expand.default, chosen, list(shape(node))))


def _before_expand(node: fx.Node, num_dims: int) -> fx.Node:
    """What was expanded to a value, if it has so many dims."""
    if node.op != "call_function" or node.target is not aten.expand.default:
        return node
    source = node.args[0]
    return source if len(shape(source)) == num_dims else node


def alike_once(graph: fx.Graph) -> None:
    """Calls of an operator on the same values become one, such as the masked bias that all blocks of a T5 add to their
    scores: one value is kept for the backward, and its gradients are summed before its own backward. Views are left:
    they cost nothing, and a gradient is summed over what they expand before it meets others.

    What is computed again in the backward stays apart from what is computed elsewhere: it is not to be kept."""
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if getattr(node.target, "namespace", "") != "aten" or node.target.is_view or draws_random_numbers(node):
            continue
        found = first.setdefault((node.target, repr(node.args), repr(node.kwargs), facts(node).get("region")), node)
        if found is not node:
            node.replace_all_uses_with(found)
            graph.erase_node(node)
