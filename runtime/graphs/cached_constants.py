"""What a stage's prologue makes of no input, such as distances between positions, is the same in every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopart.ir.facts import facts
from autopart.ir.subgraphs import erase_unread, is_given, part_of

MOST_BYTES = 2**25
"""Of a value that is held between calls; one that is larger, of very long rows, is made in each."""


class Constants:
    """Of what a bound prologue hands to its stage: what is made once, and held. The prologue is written on."""

    def __init__(self, prologue: fx.GraphModule):
        graph = prologue.graph
        made = _of_nothing(graph)
        read = [node for node in made if _is_small(node) and graph.output_node() in node.users]
        self.values: tuple[Tensor, ...] = ()
        self.storages: set[int] = set()
        if not read:
            return
        with torch.inference_mode(False), torch.no_grad():
            self.values = part_of(prologue, read)()
        self.storages = {value.untyped_storage().data_ptr() for value in self.values}
        for index, (node, value) in enumerate(zip(read, self.values, strict=True)):
            setattr(prologue, f"held_{index}", value)
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.create_node("get_attr", f"held_{index}"))
        erase_unread(graph, made)
        prologue.recompile()

    def apart(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """What a graph returns, copied where it is in the memory of what is held: users may write on it."""
        return tuple(value.clone() if self._holds(value) else value for value in values)

    def _holds(self, value: Any) -> bool:
        is_plain = isinstance(value, Tensor) and value.layout == torch.strided
        return is_plain and value.untyped_storage().data_ptr() in self.storages


def _of_nothing(graph: fx.Graph) -> set[fx.Node]:
    """What is made of no input, buffer or draw."""
    made = set[fx.Node]()
    for node in graph.nodes:
        if not is_given(node) and made.issuperset(node.all_input_nodes):
            made.add(node)
    return made


def _is_small(node: fx.Node) -> bool:
    value = facts(node).get("val")
    return isinstance(value, Tensor) and value.nbytes <= MOST_BYTES
