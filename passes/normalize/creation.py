"""New tensors that take no values from others."""

from __future__ import annotations

import torch
from torch import fx

from autopart.ir.graph import argument, shape, short_name, value

from .new_calls import emit, replace

aten = torch.ops.aten

_FILLED = {
    "new_empty": 0,
    "empty": 0,
    "empty_like": 0,
    "empty_permuted": 0,
    "new_zeros": 0,
    "new_ones": 1,
    "new_full": None,
}


def plain_numbers(graph: fx.Graph) -> None:
    """`where(condition, x, scalar_tensor(0))` takes the number itself: then it is known to be 0."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.where.self:
            continue
        condition, *choices = node.args
        numbers = [choice.args[0] if _is_number(choice) else None for choice in choices]
        for i, form in ((0, aten.where.ScalarSelf), (1, aten.where.ScalarOther)):
            if numbers[i] is None or numbers[1 - i] is not None:
                continue
            with graph.inserting_before(node):
                choices[i] = numbers[i]
                plain = emit(graph, node, form, condition, *choices)
            if value(plain).dtype == value(node).dtype and shape(plain) == shape(node):
                replace(node, plain)


def _is_number(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is aten.scalar_tensor.default


def plain_creation(graph: fx.Graph) -> None:
    """`x.new_zeros(shape)` and the like become `full`, which depends on no other value; what is not set yet is zero."""
    for node in list(graph.nodes):
        name = short_name(node) if node.op == "call_function" else ""
        if name not in _FILLED:
            continue
        fill = argument(node, "fill_value") if _FILLED[name] is None else _FILLED[name]
        if isinstance(fill, fx.Node):
            continue
        made = value(node)
        with graph.inserting_before(node):
            full = emit(graph, node, aten.full.default, list(shape(node)), fill, dtype=made.dtype, device=made.device)
            replace(node, full)
