"""Common subexpression elimination of stage graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import draws_random_numbers

aten = torch.ops.aten


def merge_equal_calls(graph: fx.Graph) -> None:
    """Merge calls with equal operator and arguments, such as the masked bias of all blocks of a T5.

    Then backward needs only one saved value, and runs once, on the sum of the gradients. Views are not merged: they
    cost nothing, and autograd would add their expanded gradients before it reduces the expanded dims. Calls in
    different recomputed regions are not merged either, because a merged result would have to be saved.
    """
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if getattr(node.target, "namespace", "") != "aten" or node.target.is_view or draws_random_numbers(node):
            continue
        found = first.setdefault((node.target, repr(node.args), repr(node.kwargs), facts(node).get("region")), node)
        if found is not node:
            node.replace_all_uses_with(found)
            graph.erase_node(node)
