"""Cache of prologue outputs, such as relative positions, that depend only on input sizes.

A prologue is the part of a stage that runs on the global batch, before the microbatches. Input sizes are the sequence
length and the batch size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopart.ir.facts import facts
from autopart.ir.subgraphs import erase_unused, extract_subgraph, is_leaf_value
from autopart.tracing.call_cache import Recent

MOST_BYTES = 2**25
"""Maximum bytes of a value that is cached.

Larger values, for very long sequences, are computed in each call.
"""


_MAX_SIZES = 4
"""Maximum number of sequence lengths and batch sizes for which the values are cached."""


class Constants:
    """Cache of prologue outputs that depend only on input sizes. They are computed once per size.

    Args:
        prologue: the prologue of a stage on this rank. It is changed to return the cached values.
        sizes: names of the prologue's inputs that are integers: batch sizes and sequence lengths.
    """

    def __init__(self, prologue: fx.GraphModule, sizes: Collection[str] = ()):
        graph = prologue.graph
        constants = _input_independent(graph, sizes)
        cached = [node for node in constants if _is_small(node) and graph.output_node() in node.users]
        self.prologue = prologue
        self.compute = extract_subgraph(prologue, cached) if cached else None
        self.reads = [] if self.compute is None else [
            str(node.target) for node in self.compute.graph.find_nodes(op="placeholder")
        ]  # fmt: skip
        self.values: tuple[Tensor, ...] = ()
        """The cached values for the sizes of the current call."""
        self.storages: set[int] = set()
        self.by_size: Recent[tuple[Tensor, ...]] = Recent(_MAX_SIZES)
        for index, node in enumerate(cached):
            setattr(prologue, f"held_{index}", None)
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.create_node("get_attr", f"held_{index}"))
        erase_unused(graph, constants)
        prologue.recompile()
        if not self.reads:
            self.use({})

    def use(self, sizes: Mapping[str, int]) -> None:
        """Make the prologue return the cached values for these sizes. Compute them on first use."""
        if self.compute is None:
            return
        read = {name: sizes[name] for name in self.reads}
        self.values = self.by_size.get(tuple(read.values()), lambda: self._computed(read))
        self.storages = {value.untyped_storage().data_ptr() for value in self.values}
        for index, value in enumerate(self.values):
            setattr(self.prologue, f"held_{index}", value)

    def _computed(self, sizes: Mapping[str, int]) -> tuple[Tensor, ...]:
        assert self.compute is not None
        with torch.inference_mode(False), torch.no_grad():
            values: tuple[Tensor, ...] = self.compute(**sizes)
        return values

    def copy_cached(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return `values`, with copies of those that share memory with the cache.

        The user may write to the returned values, which must not change the cache.
        """
        return tuple(value.clone() if self._shares_memory(value) else value for value in values)

    def _shares_memory(self, value: Any) -> bool:
        is_plain = isinstance(value, Tensor) and value.layout == torch.strided
        return is_plain and value.untyped_storage().data_ptr() in self.storages


def _input_independent(graph: fx.Graph, sizes: Collection[str]) -> set[fx.Node]:
    """Return the nodes that do not depend on inputs other than `sizes`, buffers or random numbers."""
    size_inputs = {node for node in graph.find_nodes(op="placeholder") if node.target in sizes}
    known = set(size_inputs)
    for node in graph.nodes:
        if not is_leaf_value(node) and known.issuperset(node.all_input_nodes):
            known.add(node)
    return known - size_inputs


def _is_small(node: fx.Node) -> bool:
    value = facts(node).get("val")
    return isinstance(value, Tensor) and value.nbytes <= MOST_BYTES
