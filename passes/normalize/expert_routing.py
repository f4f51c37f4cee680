"""Mixtures of experts: insert the dispatch of tokens to experts and the combine of their outputs.

Between dispatch (`to_experts`) and combine (`from_experts`) every operator works on each token independently. So a rank
needs only the tokens of its local experts (expert parallelism: Lepikhin et al. 2020, arXiv:2006.16668; without a
capacity limit: Gale et al. 2022, arXiv:2211.15841).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopart.ir.graph import operator_name, shape, short_name, tensor_inputs, value
from autopart.ops.operators import autopart_ops
from autopart.passes.normalize.sorted_experts import inputs_with_rows
from autopart.passes.pass_pipeline import UNTOUCHED, on_calls
from autopart.passes.rewriting import emit, getitem, replace
from autopart.passes.rules import pattern_for

aten = torch.ops.aten
_PRODUCT = autopart_ops.expert_linear.default


@on_calls("aten::bmm")
def looked_up_products(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite a `bmm` of tokens with one matrix per token (`stack[expert_index]`) as `expert_linear`."""
    first, second = node.args
    is_left = _is_looked_up(first) and shape(second)[2] == 1
    if not is_left and not (_is_looked_up(second) and shape(first)[1] == 1):
        return
    looked_up, rows = (first, second) if is_left else (second, first)
    weight, (experts,) = looked_up.args
    with graph.inserting_before(node):
        one = 2 if is_left else 1
        wide = short_name(rows) == "unsqueeze" and shape(rows.args[0]) == (shape(rows)[0], shape(rows)[3 - one])
        x = rows.args[0] if wide else emit(graph, node, aten.squeeze.dims, rows, [one])
        weight = emit(graph, node, aten.transpose.int, weight, 1, 2) if is_left else weight
        product = emit(graph, node, _PRODUCT, x, weight, experts)
        for user in [user for user in node.users if short_name(user) == "squeeze" and shape(user) == shape(product)]:
            replace(user, product)
        replace(node, emit(graph, node, aten.unsqueeze.default, product, one))


def _is_looked_up(node: Any) -> bool:
    """Return True for `stack[index]` that looks up one matrix per token in a stack of expert matrices."""
    if not isinstance(node, fx.Node) or short_name(node) != "index" or len(shape(node.args[0])) != 3:
        return False
    indices = node.args[1]
    return len(indices) == 1 and len(shape(indices[0])) == 1 and value(indices[0]).dtype == torch.int64


def rows_to_experts(graph: fx.Graph) -> Any:
    """Insert a dispatch (`to_experts`) before the experts, and a combine (`from_experts`) after them.

    Operators that work on each token independently stay between dispatch and combine.
    """
    calls = list(graph.find_nodes(op="call_function", target=_PRODUCT))
    groups = dict.fromkeys(node.args[2] for node in calls if operator_name(node.args[2]) != "autopart::to_experts")
    for experts in groups:
        _Region(graph, experts, [node for node in calls if node.args[2] is experts]).write()
    return None if groups else UNTOUCHED


class _Region:
    """Operators between dispatch and combine: products with experts' matrices, and token-wise operators."""

    def __init__(self, graph: fx.Graph, experts: fx.Node, products: list[fx.Node]):
        self.graph, self.experts, self.products = graph, experts, products
        self.num_experts = shape(products[0].args[1])[0]
        self.own: dict[fx.Node, fx.Node] = {}
        self.sent: dict[tuple[fx.Node, int], fx.Node] = {}
        self.back: dict[tuple[fx.Node, int], fx.Node] = {}

    def write(self) -> None:
        nodes = list(self.graph.nodes)
        for node in nodes[nodes.index(self.products[0]) :]:
            if node in self.products or any(used in self.own for used in node.all_input_nodes):
                with self.graph.inserting_before(node):
                    if not self._by_row(node):
                        self._leave(node)

    def _send(self, node: fx.Node, value: fx.Node) -> fx.Node:
        source, times = _repeated(value)
        if (source, times) not in self.sent:
            at_experts = autopart_ops.to_experts.default
            sent = emit(self.graph, node, at_experts, source, self.experts, times, self.num_experts)
            self.sent[source, times] = sent
        return self.sent[source, times]

    def _by_row(self, node: fx.Node) -> bool:
        """Rewrite an operator to work on dispatched tokens. Return False if it mixes tokens."""
        if node.target is operator.getitem:
            self.own[node] = getitem(self.graph, self.own[node.args[0]], node.args[1])
            return True
        pattern, sources = pattern_for(node) if node.op == "call_function" else None, tensor_inputs(node)
        if pattern is None:
            return False
        at_row = {0, 2} if node in self.products else {i for i, used in enumerate(sources) if used in self.own}
        with_rows = inputs_with_rows(pattern, at_row)
        if not at_row <= with_rows:
            return False
        mine = {sources[i]: self._of_rows(node, sources[i]) for i in sorted(with_rows)}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: mine.get(used, used))
        self.own[node] = emit(self.graph, node, node.target, *args, **kwargs)
        return True

    def _of_rows(self, node: fx.Node, used: fx.Node) -> fx.Node:
        """Return the dispatched rows of operand `used`: one row for each dispatched token.

        - If an operator on dispatched tokens has already computed the operand, return its result.
        - If the operand is `bias[expert_index]`, dispatch the expert indices, and look up the biases by these indices.
        - Otherwise dispatch the rows of the operand.

        Args:
            node: the operator that uses the operand. New nodes are inserted in the graph before it.
            used: operand in the model, with one row for each expert of each token.
        """
        if used in self.own:
            return self.own[used]
        if short_name(used) == "index" and list(used.args[1]) == [self.experts] and len(shape(used.args[0])) == 2:
            return emit(self.graph, node, aten.embedding.default, used.args[0], self._send(node, self.experts))
        return self._send(node, used)

    def _leave(self, node: fx.Node) -> None:
        """Combine the dispatched inputs of an operator that cannot work on dispatched tokens.

        If the operator is part of a sum over the experts of each token, the combine also computes the sum.
        """
        for used in [used for used in node.all_input_nodes if used in self.own]:
            times = _summed(node, used)
            if times:
                (total,) = node.users
                replace(total, self._return(node, used, times))
            else:
                node.replace_input_with(used, self._return(node, used, 1))

    def _return(self, node: fx.Node, used: fx.Node, times: int) -> fx.Node:
        if (used, times) not in self.back:
            back = autopart_ops.from_experts.default
            returned = emit(self.graph, node, back, self.own[used], self.experts, times, self.num_experts)
            self.back[used, times] = returned
        return self.back[used, times]


def _repeated(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the value before its rows were repeated (`repeat_interleave`), and the number of repetitions.

    For any other node, returns the node itself and 1.
    """
    if short_name(node) == "reshape" and short_name(node.args[0]) == "expand":
        wide = node.args[0]
        if short_name(wide.args[0]) == "unsqueeze" and wide.args[0].args[1] == 1:
            source, (tokens, times, *rest) = wide.args[0].args[0], shape(wide)
            if shape(source) == (tokens, *rest) and shape(node) == (tokens * times, *rest):
                return source, times
    return node, 1


def _summed(node: fx.Node, used: fx.Node) -> int:
    """Return the number of experts per token if the only user of view `node` sums over them, else 0."""
    if short_name(node) != "reshape" or len(node.users) != 1 or len(shape(node)) != len(shape(used)) + 1:
        return 0
    total, (tokens, times, *rest) = next(iter(node.users)), shape(node)
    if short_name(total) != "sum" or (tokens * times, *rest) != shape(used) or total.target is aten.sum.default:
        return 0
    dims, *keep = total.args[1:]
    return times if list(dims) == [1] and not any(keep) and not total.kwargs else 0
