"""Let a float64 copy of a model compute in float64 throughout."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopart.ir.graph import is_floating, value

from .new_calls import emit, fake_call

_LOWER = (torch.float32, torch.float16, torch.bfloat16)


def in_double(graph: fx.Graph) -> set[torch.dtype]:
    """Let a float64 model compute in float64 throughout: casts of floating values to a lower precision (losses and
    norms that work in float32) keep float64. Returns the precisions that were lifted."""
    lifted: set[torch.dtype] = set()
    traced = {node: value(node).dtype for node in graph.nodes if is_floating(node)}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if any(is_floating(n) and value(n).dtype == torch.float64 for n in node.all_input_nodes):
            args = fx.node.map_aggregate(node.args, _doubled)
            kwargs = fx.node.map_aggregate(node.kwargs, _doubled)
            fx.node.map_aggregate((node.args, node.kwargs), lambda a: lifted.add(a) if _is_lower(a) else None)
            node.args, node.kwargs = args, kwargs
            _lift_others(node, traced)
        if lifted:
            node.meta["val"] = fake_call(node.target, node.args, node.kwargs, node.all_input_nodes)
    return lifted


def _doubled(argument: Any) -> Any:
    return torch.float64 if _is_lower(argument) else argument


def _is_lower(argument: Any) -> bool:
    return isinstance(argument, torch.dtype) and argument in _LOWER


def _lift_others(node: fx.Node, traced: dict[fx.Node, torch.dtype]) -> None:
    """Operands of one precision stay of one: what was made in float32 from nothing (`zeros`, `eye`, positions) is cast
    where it meets a lifted value."""
    operands = [n for n in node.all_input_nodes if is_floating(n)]
    if len({traced[n] for n in operands}) > 1:
        return
    for operand in operands:
        if value(operand).dtype in _LOWER:
            with node.graph.inserting_before(node):
                lifted = emit(node.graph, operand, torch.ops.aten.to.dtype, operand, torch.float64)
            traced[lifted] = traced[operand]
            node.replace_input_with(operand, lifted)
