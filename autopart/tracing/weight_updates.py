"""Trained parameters that a model changes in its forward, before it reads them: clamped, scaled, of one sign.

Such a change is taken out of the graph, and made before it runs: every rank changes what it stores of the parameter,
which is right where the change works element by element. The graph then reads the parameter itself, and its gradient is
that of the new value, as in the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

from autopart.errors import Refusal, TraceError
from autopart.ir.graph import describe, draws_random_numbers, operator_name, shape
from autopart.ir.masks import made_for

if TYPE_CHECKING:
    from autopart.tracing.trace import Trace

WeightUpdates = Mapping[str, fx.GraphModule]
"""{parameter: its new value, of any part of it}"""
_ELEMENTWISE = frozenset(f"aten::{name}" for name in ("alias", "clone", "copy", "detach", "to", "_to_copy", "fill"))
"""Beside what torch tags as pointwise."""


@torch.no_grad()
def update_weights(parameters: Mapping[str, Tensor], updates: WeightUpdates) -> None:
    """Change those of the parameters, or of parts of them, that are to be changed before a forward."""
    for name, change in updates.items():
        if name in parameters:
            parameters[name].copy_(change(parameters[name].detach()))


def with_weight_updates(traced: Trace, name: str) -> Trace:
    """The trace with trained parameters changed before its graph. `name`: of the model. Raises TraceError."""
    changed = {n: new for n, new in traced.buffer_updates.items() if n in traced.parameters}
    updates = {parameter: _taken_out(traced.graph, parameter, new, name) for parameter, new in changed.items()}
    output = traced.graph.output_node()
    buffers = {n: new for n, new in traced.buffer_updates.items() if n not in changed}
    output.args = (output.args[0], buffers)
    return replace(traced, weight_updates=updates)


def _taken_out(graph: fx.Graph, parameter: str, new: fx.Node, name: str) -> fx.GraphModule:
    """What makes the new value of a parameter, which the graph then reads in its place."""
    new = new.all_input_nodes[0] if operator_name(new) == "aten::detach" else new
    (weight,) = (node for node in graph.find_nodes(op="get_attr") if node.target == parameter)
    steps, read = made_for([new]), made_for([graph.output_node()])
    elsewhere = [n for n in steps if n is not weight and not (n.op == "call_function" and _is_elementwise(n, weight))]
    before = [user for node in steps - {new} for user in node.users if user in read - steps]
    if elsewhere or before:
        why = (
            "it reads more than the parameter's own elements, one by one" if elsewhere else "the old value is read too"
        )
        raise TraceError(
            f"{name} writes to its trained parameter '{parameter}' in its forward", refusal=Refusal.WRITE, why=why,
            where=describe(new),
            hint="do it outside forward(), after the optimizer's step; or clamp_, mul_ and the like before it is read",
        )  # fmt: skip
    subgraph, values = fx.Graph(), {}
    for node in graph.nodes:
        if node is weight:
            values[node] = subgraph.placeholder("weight")
        elif node in steps:
            values[node] = subgraph.node_copy(node, values.__getitem__)
    subgraph.output(values[new])
    new.replace_all_uses_with(weight)
    return fx.GraphModule(nn.Module(), subgraph)


def _is_elementwise(node: fx.Node, weight: fx.Node) -> bool:
    tagged = torch.Tag.pointwise in getattr(node.target, "tags", ()) or operator_name(node) in _ELEMENTWISE
    return tagged and not draws_random_numbers(node) and shape(node) == shape(weight)
