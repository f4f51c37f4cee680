"""Mixtures of experts that sort tokens by expert, rewritten to work in token order.

Sorting mixes the batch, so a rank or microbatch cannot sort only its own tokens. The operators between the sort and its
inverse work on each token independently, so they can run in token order.
"""

from __future__ import annotations

import operator
from collections.abc import Set

import torch
from torch import fx

from autopart.ir.graph import argument, shape, short_name, tensor_inputs
from autopart.ir.pattern import Pattern
from autopart.ops.operators import autopart_ops
from autopart.passes.pass_pipeline import on_calls
from autopart.passes.rewriting import emit, getitem, repeat_each, replace
from autopart.passes.rules import pattern_for

aten = torch.ops.aten


@on_calls("aten::sort")
def unsorted_experts(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite a sort by expert, grouped products and the inverse sort as `expert_linear` in token order."""
    if len(shape(node.args[0])) == 1:
        for sorted_back, rows in _Sorted(graph, node).rewritten().items():
            replace(sorted_back, rows)


class _Sorted:
    """Values between a sort by expert and the inverse sort, and the equivalent values in token order.

    Attributes:
        own: {value in sorted order: equivalent value in token order}.
        order: index tensors that sort the tokens.
        undoes: index tensors that undo the sort.
        shared: {index tensor that is `order // k`: k}, for tokens with k experts each.
        offsets: tensors with the number of tokens per expert, or with the cumulative sums of these numbers.
    """

    def __init__(self, graph: fx.Graph, sort: fx.Node):
        self.graph, self.sort, self.experts = graph, sort, sort.args[0]
        self.num_rows = shape(self.experts)[0]
        self.own: dict[fx.Node, fx.Node] = {}
        self.order: set[fx.Node] = set()
        self.undoes: set[fx.Node] = set()
        self.shared: dict[fx.Node, int] = {}
        self.offsets: set[fx.Node] = set()

    def rewritten(self) -> dict[fx.Node, fx.Node]:
        """Return {value after the inverse sort: its replacement}.

        The dict is empty if the graph does not have the pattern.
        """
        back: dict[fx.Node, fx.Node] = {}
        before = set(self.graph.nodes)
        for node in list(self.graph.nodes):
            if node is self.sort or not self._touches(node):
                continue
            with self.graph.inserting_before(node):
                ok = node.op == "call_function" and (self._order(node) or self._counts(node) or self._row(node, back))
            if not ok:
                back = {}
                break
        new_nodes = [node for node in self.graph.nodes if node not in before]
        if not back:
            for node in reversed(new_nodes):
                self.graph.erase_node(node)
        return back

    def _touches(self, node: fx.Node) -> bool:
        marked = (self.own, self.order, self.undoes, self.shared, self.offsets)
        return any(n is self.sort or any(n in group for group in marked) for n in node.all_input_nodes)

    def _order(self, node: fx.Node) -> bool:
        """Record `node` if it is a result of the sort, or an index tensor computed from the sort's indices.

        Returns False for any other node.
        """
        name, first = short_name(node), node.args[0]
        if first is self.sort and node.args[1] == 0:
            self.own[node] = self.experts
        elif first is self.sort:
            self.order.add(node)
        elif name == "floor_divide" and first in self.order and isinstance(node.args[1], int):
            self.shared[node] = node.args[1]
        elif name == "argsort" and first in self.order:
            self.undoes.add(node)
        elif name == "index_put" and list(node.args[1]) == [n for n in node.args[1] if n in self.order]:
            if not self._is_count_up(node.args[2]) or shape(node) != (self.num_rows,):
                return False
            self.undoes.add(node)
        else:
            return False
        return True

    def _is_count_up(self, node: fx.Node) -> bool:
        return node.target is aten.arange.default and argument(node, "end") == self.num_rows

    def _counts(self, node: fx.Node) -> bool:
        """Record `node` if it counts the tokens of each expert, or sums up the counts to offsets.

        Counts and offsets do not depend on the order of tokens. Returns False for any other node.
        """
        name, first = short_name(node), node.args[0]
        counts = name in ("histc", "bincount") and self._is_experts(first)
        if not counts and not (name in ("cumsum", "to", "_to_copy") and first in self.offsets):
            return False
        self.offsets.add(node)
        return True

    def _is_experts(self, node: fx.Node) -> bool:
        source = self.own.get(node)
        while source is not None and source is not self.experts and short_name(source) in ("to", "_to_copy"):
            source = source.args[0]
        return source is self.experts

    def _row(self, node: fx.Node, back: dict[fx.Node, fx.Node]) -> bool:
        """Rewrite `node` if it sorts tokens or computes on sorted tokens.

        If the node undoes the sort, {node: its replacement} is added to `back`. Returns False for any other node.
        """
        name = short_name(node)
        if name == "index" and len(node.args[1]) == 1:
            source, place = node.args[0], node.args[1][0]
            if place in self.undoes and source in self.own:
                back[node] = self.own[source]
                return True
            times = 1 if place in self.order else self.shared.get(place)
            if times is not None:
                return self._repeated(node, source, times)
        if name in ("_grouped_mm", "grouped_mm_fallback"):
            x, weight, offsets = node.args[:3]
            if x not in self.own or offsets not in self.offsets or any(a is not None for a in node.args[3:]):
                return False
            product = autopart_ops.expert_linear.default
            self.own[node] = emit(self.graph, node, product, self.own[x], weight, self.experts)
            return True
        return self._alone(node)

    def _repeated(self, node: fx.Node, source: fx.Node, times: int) -> bool:
        """Rewrite `x[order // k]`, which repeats every token `k` times in sorted order.

        Return False for any other node.
        """
        if source in self.own or shape(source)[0] * times != self.num_rows:
            return False
        self.own[node] = repeat_each(self.graph, node, source, 0, times) if times > 1 else source
        return True

    def _alone(self, node: fx.Node) -> bool:
        """Rewrite an operator that works on each token independently, to work in token order.

        Return False if the operator mixes tokens.
        """
        if node.target is operator.getitem:
            if node.args[0] not in self.own:
                return False
            self.own[node] = getitem(self.graph, self.own[node.args[0]], node.args[1])
            return True
        pattern, sources = pattern_for(node), tensor_inputs(node)
        if pattern is None or any(n not in self.own and self._is_marked(n) for n in sources):
            return False
        is_sorted = {i for i, source in enumerate(sources) if source in self.own}
        if inputs_with_rows(pattern, is_sorted) != is_sorted:
            return False
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.own.get(n, n))
        self.own[node] = emit(self.graph, node, node.target, *args, **kwargs)
        return True

    def _is_marked(self, node: fx.Node) -> bool:
        return any(node in group for group in (self.order, self.undoes, self.shared, self.offsets))


def inputs_with_rows(pattern: Pattern, known: Set[int]) -> set[int]:
    """Return the indices of the inputs that have one row per token; empty if the call is not token-wise.

    A call is token-wise if tokens are the first dim of all its results and of the returned inputs, and no other dim is
    tokens.

    Args:
        pattern: the sharding rule, fitted to the call.
        known: indices of some inputs that have one row per token.
    """
    row = pattern.inputs[min(known)][:1]
    if not row or len(row[0]) != 1 or row[0][0] in pattern.whole or any(dims[:1] != row for dims in pattern.outputs):
        return set()
    places = [[i for i, dim in enumerate(dims) if row[0][0] in dim] for dims in (*pattern.inputs, *pattern.outputs)]
    if any(at not in ([], [0]) for at in places):
        return set()
    return {i for i, _ in enumerate(pattern.inputs) if places[i]}
