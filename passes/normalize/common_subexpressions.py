"""Common subexpression elimination of stage graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import draws_random_numbers

aten = torch.ops.aten


def merge_equal_calls(graph: fx.Graph) -> None:
    """Merge equal calls, such as the masked bias that all blocks of a T5 add to their scores.

    One value is saved for the backward, and its gradients are summed before its own backward. Views are not merged:
    they cost nothing, and merging would add expanded gradients before their dims are reduced. Calls in different
    recomputed regions are not merged either: their results must not be saved.
    """
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if getattr(node.target, "namespace", "") != "aten" or node.target.is_view or draws_random_numbers(node):
            continue
        found = first.setdefault((node.target, repr(node.args), repr(node.kwargs), facts(node).get("region")), node)
        if found is not node:
            node.replace_all_uses_with(found)
            graph.erase_node(node)
