"""Look-ups of rows in embedding tables, and the error for an index that is outside of its table."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopart.compat.torch_internals import tree_map
from autopart.errors import InputError
from autopart.ir.graph import describe, draws_random_numbers, operator_name, shape, tensor_inputs
from autopart.ir.subgraphs import ancestors_of

_VIEWS = ("view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "expand", "clone", "contiguous", "to",
          "_to_copy", "detach", "alias", "flatten", "unflatten", "t")  # fmt: skip
_SAME_ELEMENTS = frozenset([*(f"aten::{name}" for name in _VIEWS), "autopart::slice", "autopart::all_gather"])
"""Operators whose results, on all ranks together, have the elements of their first operand and no others."""


@dataclass(frozen=True)
class Lookup:
    """One look-up of rows in an embedding table.
    Attributes:
        table: name of the parameter or buffer that is the table; "" for any other table.
        num_rows: rows of the full table.
        index: node that computes the indices of the looked-up rows.
        where: the operator and its source line.
    """

    table: str
    num_rows: int
    index: fx.Node
    where: str

    @staticmethod
    def all_of(graph: fx.Graph) -> Iterator[Lookup]:
        """Yield the embedding look-ups of a traced graph or of a stage graph."""
        for node in graph.nodes:
            name = operator_name(node) if node.op == "call_function" else ""
            if name in ("aten::embedding", "autopart::embedding_shard"):
                rows = node.args[4] if name == "autopart::embedding_shard" else shape(node.args[0])[0]
                table = node.args[0]
                while table.op == "call_function" and (operands := tensor_inputs(table)):
                    table = operands[0]
                name = str(table.target) if table.op == "get_attr" else ""
                yield Lookup(name, int(rows), unviewed(node.args[1]), describe(node))

    def error(self, indices: Tensor, inputs: Collection[str], is_input: bool) -> InputError | None:
        """Return an error if an index is outside of the table, else None.

        Args:
            inputs: names of the inputs from which the indices are computed.
            is_input: True if the indices are the values of one input.
        """
        if not indices.numel():
            return None
        low, high = (int(bound) for bound in torch.stack(torch.aminmax(indices.detach())).tolist())
        if low >= 0 and high < self.num_rows:
            return None
        bad, table = low if low < 0 else high, f"'{self.table}'" if self.table else "a table"
        names, rows = " and ".join(f"'{name}'" for name in inputs), f"{self.num_rows} rows"
        if is_input:
            return InputError(
                f"the input {names} has the value {bad}, but {table} has {rows}",
                why=f"the model looks up one row for each value: values must be from 0 to {self.num_rows - 1}",
                where=self.where, hint="ids of the tokenizer of this model, or a table with more rows",
            )  # fmt: skip
        origin = f" for {names}" if names else ""
        return InputError(
            f"the model looks up row {bad} of {table}{origin}, which has {rows}",
            why="the inputs are longer than the table of positions" if bad > 0 else "a position is negative",
            where=self.where, hint="shorter inputs, or a model with more positions",
        )  # fmt: skip


def unviewed(node: fx.Node) -> fx.Node:
    """Follow views and copies back to the node that computed the elements, and return that node."""
    while node.op == "call_function" and operator_name(node) in _SAME_ELEMENTS:
        node = node.args[0]
    return node


def index_nodes(index: fx.Node) -> set[fx.Node] | None:
    """Return the node `index` and all nodes that it depends on.

    Returns None if one of them draws random numbers or is not an operator of torch.
    """
    nodes = ancestors_of([index])
    for node in nodes:
        if node.op == "call_function" and (
            draws_random_numbers(node) or not operator_name(node).startswith(("aten::", "getitem"))
        ):
            return None
    return nodes


def computed(index: fx.Node, nodes: Collection[fx.Node], values: Mapping[fx.Node, Any]) -> Any:
    """Compute the value of the node `index` on the CPU.

    Args:
        nodes: the nodes that compute it (`index_nodes`).
        values: values of the placeholders and `get_attr` nodes among them.
    """
    known, target = dict(values), torch.device("cpu")
    with torch.no_grad():
        for node in index.graph.nodes:
            if node in nodes and node not in known:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
                args, kwargs = tree_map(lambda one: target if isinstance(one, torch.device) else one, (args, kwargs))
                known[node] = node.target(*args, **kwargs)
    return known[index]
