"""Cache of prologue outputs that depend on no input, such as relative positions.

A prologue is the part of a stage that runs on the global batch, before the microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopart.ir.facts import facts
from autopart.ir.subgraphs import erase_unused, extract_subgraph, is_leaf_value

MOST_BYTES = 2**25
"""Maximum bytes of a value that is cached.

Larger values, for very long sequences, are computed in each call.
"""


class Constants:
    """Cache of prologue outputs that depend on no input. They are computed once, at construction.

    Args:
        prologue: the prologue of a stage on this rank. It is changed to return the cached values.
    """

    def __init__(self, prologue: fx.GraphModule):
        graph = prologue.graph
        constants = _input_independent(graph)
        cached = [node for node in constants if _is_small(node) and graph.output_node() in node.users]
        self.values: tuple[Tensor, ...] = ()
        self.storages: set[int] = set()
        if not cached:
            return
        with torch.inference_mode(False), torch.no_grad():
            self.values = extract_subgraph(prologue, cached)()
        self.storages = {value.untyped_storage().data_ptr() for value in self.values}
        for index, (node, value) in enumerate(zip(cached, self.values, strict=True)):
            setattr(prologue, f"held_{index}", value)
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.create_node("get_attr", f"held_{index}"))
        erase_unused(graph, constants)
        prologue.recompile()

    def copy_cached(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return `values`, with copies of values that share memory with the cache.

        The user may write to the returned values.
        """
        return tuple(value.clone() if self._shares_memory(value) else value for value in values)

    def _shares_memory(self, value: Any) -> bool:
        is_plain = isinstance(value, Tensor) and value.layout == torch.strided
        return is_plain and value.untyped_storage().data_ptr() in self.storages


def _input_independent(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on no input, buffer or random number."""
    constants = set[fx.Node]()
    for node in graph.nodes:
        if not is_leaf_value(node) and constants.issuperset(node.all_input_nodes):
            constants.add(node)
    return constants


def _is_small(node: fx.Node) -> bool:
    value = facts(node).get("val")
    return isinstance(value, Tensor) and value.nbytes <= MOST_BYTES
