"""Rewrites of tensor creation, so that new tensors depend on no other tensor."""

from __future__ import annotations

import torch
from torch import fx

from autopart.ir.graph import argument, operator_name, shape, value
from autopart.ir.selection import is_data_dependent
from autopart.passes.pass_pipeline import on_calls
from autopart.passes.rewriting import emit, replace

aten = torch.ops.aten

_FILLED = {
    "aten::new_empty": 0,
    "aten::empty": 0,
    "aten::empty_like": 0,
    "aten::empty_permuted": 0,
    "aten::new_zeros": 0,
    "aten::new_ones": 1,
    "aten::new_full": None,
}


@on_calls("aten::where")
def plain_numbers(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite `where(condition, x, scalar_tensor(0))` as `where(condition, x, 0)`, with a Python number."""
    if node.target is not aten.where.self:
        return
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


@on_calls(*_FILLED)
def plain_creation(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite `x.new_zeros(shape)` and similar calls as `full`, which does not depend on `x`.

    A tensor without initial values (`new_empty`) is filled with zeros.
    """
    fill = _FILLED[operator_name(node)]
    fill = argument(node, "fill_value") if fill is None else fill
    if isinstance(fill, fx.Node) or is_data_dependent(node):
        return
    result = value(node)
    with graph.inserting_before(node):
        full = emit(graph, node, aten.full.default, list(shape(node)), fill, dtype=result.dtype, device=result.device)
        replace(node, full)
