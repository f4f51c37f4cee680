"""Check of the example's indices into embedding tables, such as positions and token ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autopart.ir.facts import facts
from autopart.ir.run.lookups import Lookup, computed, index_nodes
from autopart.ir.trace import Trace
from autopart.tracing.python.size_conditions import SizeCondition


def check_lookups(traced: Trace) -> tuple[SizeCondition, ...]:
    """Raise InputError if an index of the traced call is outside of its table.

    Returns the conditions that input-independent indices, such as positions, impose on the sizes of a call.
    """
    conditions = []
    inputs = dict(zip(traced.graph.find_nodes(op="placeholder"), traced.call.tensors, strict=False))
    for lookup in Lookup.all_of(traced.graph):
        nodes = index_nodes(lookup.index)
        values = None if nodes is None else {
            node: _known(node, traced, inputs) for node in nodes if node.op != "call_function"
        }  # fmt: skip
        if nodes is None or values is None or any(value is None for value in values.values()):
            continue
        indices = computed(lookup.index, nodes, values)
        names = [facts(node)["input_name"].removeprefix("call.") for node in values if node.op == "placeholder"]
        if error := lookup.error(indices, names, lookup.index.op == "placeholder"):
            raise error
        if not names and indices.numel():
            conditions.append(SizeCondition("le", int(indices.max()) + 1, lookup.num_rows, True, True))
    return tuple(conditions)


def _known(node: fx.Node, traced: Trace, inputs: dict[fx.Node, Tensor]) -> Any:
    """Return the tensor of an input, buffer or constant, on the CPU.

    Returns None for a parameter, for a buffer that the model writes, and for a tensor that is sparse or on meta.
    """
    tensor = inputs.get(node)
    if node.op == "get_attr" and node.target not in (*traced.parameters, *traced.buffer_updates):
        tensor = {**traced.buffers, **traced.constants}.get(str(node.target))
    if tensor is None or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    return tensor.detach().to("cpu")
