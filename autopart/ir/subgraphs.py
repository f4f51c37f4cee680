"""Subgraphs that compute given nodes of a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import fx

from autopart.ir.graph import draws_random_numbers


def ancestors_of(values: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes `values` and all nodes on which they depend.

    The function visits only these nodes, so it is fast for attention masks, which depend on few nodes.
    """
    nodes, todo = set[fx.Node](), list(values)
    while todo:
        node = todo.pop()
        if node not in nodes:
            nodes.add(node)
            todo += node.all_input_nodes
    return nodes


def is_leaf_value(node: fx.Node) -> bool:
    return node.op != "call_function" or draws_random_numbers(node)


def extract_subgraph(module: fx.GraphModule, values: Sequence[fx.Node]) -> fx.GraphModule:
    """Extract the subgraph that computes these values.

    Equal nodes, such as the masks of all layers, are merged.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    node_by_call: dict[Any, fx.Node] = {}
    needed = ancestors_of(values)
    for node in module.graph.nodes:
        if node in needed:
            copy = graph.node_copy(node, copies.__getitem__)
            copies[node] = node_by_call.setdefault((copy.op, copy.target, repr(copy.args), repr(copy.kwargs)), copy)
            if copies[node] is not copy:
                graph.erase_node(copy)
    graph.output(tuple(copies[value] for value in values))
    return fx.GraphModule(module, graph)


def erase_unused(graph: fx.Graph, nodes: Collection[fx.Node]) -> None:
    """Erase those of `nodes` that have no users, or lose their last user when other nodes are erased."""
    for node in reversed(graph.nodes):
        if node in nodes and not node.users:
            graph.erase_node(node)
