"""Updates of trained parameters by a forward, in place, before the forward uses the parameters.

Examples are clamping, scaling, `abs`, and rescaling of embedding rows (`max_norm=`). Such an update is removed from the
graph, and applied to each rank's shards before the graph runs (`runtime/graphs/apply_weight_updates.py`). The graph
then uses the updated parameter. As in the model, the gradient is with respect to the updated value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from autopart.errors import Refusal, TraceError
from autopart.ir.graph import describe, draws_random_numbers, operator_name, shape
from autopart.ir.run.weight_updates import ByElement, RowNorms, WeightUpdate
from autopart.ir.subgraphs import ancestors_of

if TYPE_CHECKING:
    from autopart.ir.trace import Trace

_ELEMENTWISE = frozenset(f"aten::{name}" for name in ("alias", "clone", "copy", "detach", "to", "_to_copy", "fill"))
"""Pointwise operators in addition to those with torch's tag."""
_ALIASES = "aten::detach", "aten::alias"
_RENORM = "aten::embedding_renorm"


def with_weight_updates(traced: Trace, name: str) -> Trace:
    """Return a trace in which updates of trained parameters are separate from the graph.

    Raises TraceError for an update that cannot be applied before the graph runs.

    Args:
        name: name of the model, for errors.
    """
    changed = {n: new for n, new in traced.buffer_updates.items() if n in traced.parameters}
    updates = {parameter: _taken_out(traced.graph, parameter, new, name) for parameter, new in changed.items()}
    output = traced.graph.output_node()
    buffers = {n: new for n, new in traced.buffer_updates.items() if n not in changed}
    output.args = (output.args[0], buffers)
    return replace(traced, weight_updates=updates)


def _taken_out(graph: fx.Graph, parameter: str, new: fx.Node, name: str) -> WeightUpdate:
    """Remove the computation of a parameter's new value from the graph, and return it as a WeightUpdate."""
    new = new.all_input_nodes[0] if operator_name(new) == "aten::detach" else new
    (weight,) = (node for node in graph.find_nodes(op="get_attr") if node.target == parameter and node.users)
    if (scaled := _row_norms(graph, weight, new)) is not None:
        return scaled
    steps, read = ancestors_of([new]), ancestors_of([graph.output_node()])
    elsewhere = [n for n in steps if n is not weight and not (n.op == "call_function" and _is_elementwise(n, weight))]
    before = [user for node in steps - {new} for user in node.users if user in read - steps]
    if elsewhere or before:
        why = (
            "the new value of an element depends on more than its old value"
            if elsewhere
            else "forward() reads the old value too"
        )
        raise TraceError(
            f"{name} writes to its trained parameter '{parameter}' in its forward", refusal=Refusal.WRITE, why=why,
            where=describe(new),
            hint="change it outside forward(), after optimizer.step(); in forward(), only by clamp_, mul_ and other "
            "elementwise operations before its first use",
        )  # fmt: skip
    change = _part_of(graph, [weight], new)
    new.replace_all_uses_with(weight)
    return ByElement(change)


def _row_norms(graph: fx.Graph, weight: fx.Node, new: fx.Node) -> RowNorms | None:
    """Return the update of an embedding table that only `max_norm=` changes; None for any other update.

    A look-up rescales those of its rows whose norm is above `max_norm`. Rescaling a row again does not change it. So
    the rows of all look-ups can be rescaled together, before the graph runs.
    """
    lookups, node, steps = list[fx.Node](), new, {weight}
    while node is not weight:
        if operator_name(node) == _RENORM:
            lookups.append(node)
        elif operator_name(node) not in _ALIASES:
            return None
        steps.add(node)
        node = node.all_input_nodes[0]
    norms = {tuple(float(bound) for bound in lookup.args[2:]) for lookup in lookups}
    ids = [lookup.args[1] for lookup in lookups]
    if len(norms) != 1 or not all(map(_of_inputs_alone, ids)) or not all(_reads_looked_up(n) for n in steps - {new}):
        return None
    ((max_norm, norm_type),) = norms
    if not 0 < norm_type < math.inf:
        return None
    looked_up = _part_of(graph, graph.find_nodes(op="placeholder"), tuple(ids))
    for step in steps - {weight}:
        step.replace_all_uses_with(weight)
    return RowNorms(looked_up, max_norm, norm_type)


def _part_of(graph: fx.Graph, given: Iterable[fx.Node], output: Any) -> fx.GraphModule:
    """Return the subgraph that computes `output` (a node or a tuple of nodes) from the nodes in `given`."""
    part = fx.Graph()
    values = {node: part.placeholder(node.name) for node in given}
    made = ancestors_of(output if isinstance(output, tuple) else [output])
    for node in graph.nodes:
        if node in made and node not in values:
            values[node] = part.node_copy(node, values.__getitem__)
    part.output(fx.map_arg(output, values.__getitem__))
    return fx.GraphModule(nn.Module(), part)


def _of_inputs_alone(ids: fx.Node) -> bool:
    made = ancestors_of([ids])
    return all(n.op == "placeholder" or (n.op == "call_function" and not draws_random_numbers(n)) for n in made)


def _reads_looked_up(step: fx.Node) -> bool:
    """Return True if look-ups in the table after one rescaling (`step`) read only rows that it rescaled."""
    ids = step.args[1] if operator_name(step) == _RENORM else None

    def is_right(user: fx.Node) -> bool:
        reads = operator_name(user) == "aten::embedding" and user.args[1] is ids is not None
        return reads or operator_name(user) in (*_ALIASES, _RENORM)

    return all(map(is_right, step.users))


def _is_elementwise(node: fx.Node, weight: fx.Node) -> bool:
    tagged = torch.Tag.pointwise in getattr(node.target, "tags", ()) or operator_name(node) in _ELEMENTWISE
    return tagged and not draws_random_numbers(node) and shape(node) == shape(weight)
