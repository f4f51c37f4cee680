"""Parts of a graph: what some of its values are made of."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import fx

from autopart.ir.graph import draws_random_numbers


def made_for(values: Iterable[fx.Node]) -> set[fx.Node]:
    """What these values are made of, they themselves included. (Masks are made of few: the graph is not looked at.)"""
    nodes, todo = set[fx.Node](), list(values)
    while todo:
        node = todo.pop()
        if node not in nodes:
            nodes.add(node)
            todo += node.all_input_nodes
    return nodes


def is_given(node: fx.Node) -> bool:
    return node.op != "call_function" or draws_random_numbers(node)


def part_of(module: fx.GraphModule, values: Sequence[fx.Node]) -> fx.GraphModule:
    """The part of a graph that makes these values, of the inputs that it needs. What layers make alike is made once."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    alike: dict[Any, fx.Node] = {}
    needed = made_for(values)
    for node in module.graph.nodes:
        if node in needed:
            copied = graph.node_copy(node, copies.__getitem__)
            copies[node] = alike.setdefault((copied.op, copied.target, repr(copied.args), repr(copied.kwargs)), copied)
            if copies[node] is not copied:
                graph.erase_node(copied)
    graph.output(tuple(copies[one] for one in values))
    return fx.GraphModule(module, graph)


def erase_unread(graph: fx.Graph, nodes: Collection[fx.Node]) -> None:
    """Take those of the nodes away that nothing reads, and then those that they alone read."""
    for node in reversed(graph.nodes):
        if node in nodes and not node.users:
            graph.erase_node(node)
