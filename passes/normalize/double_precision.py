"""Conversion of a traced graph to float64, for verification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import draws_random_numbers, is_floating, is_tensor, operator_name, value
from autopart.passes.rewriting import emit, fake_call, fake_mode

_DOUBLE = {
    torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128, torch.complex32: torch.complex128,
}  # fmt: skip
"""{lower precision: the double precision that replaces it}."""
_WITHOUT_DOUBLE = {"aten::_grouped_mm"}
"""Operators without a float64 kernel. A later pass replaces them by operators that have one."""
_EXACT = {f"aten::{name}" for name in (
    "_to_copy", "to", "alias", "clone", "detach", "copy", "view", "reshape", "expand", "squeeze", "unsqueeze", "t",
    "transpose", "permute", "select", "slice", "flatten", "unbind", "split", "chunk", "stack", "cat", "index", "gather",
    "scatter", "index_select", "where", "masked_fill", "sum", "cumsum", "add", "sub", "rsub", "mul", "neg", "abs",
    "max", "min", "amax", "amin", "maximum", "minimum", "clamp", "one_hot", "sort", "topk", "histc", "lift_fresh_copy",
)}  # fmt: skip
"""Operators whose float32 results are exact if their inputs are counts or indices."""


def in_double(graph: fx.Graph) -> set[torch.dtype]:
    """Convert a graph to float64, whatever precision it was traced in.

    Inputs, weights and buffers become float64. Casts to a lower precision (in losses and norms that work in float32,
    or by autocast) become casts to float64. Values that depend on no input (`zeros`, position ids, constants, random
    numbers) are created in their traced precision. Such a value is cast to float64 if an operator combines it with an
    upcast value that was traced in the same precision.

    Some float32 values, such as an accuracy, depend on activations only through indices and booleans. These
    values become float64 if an operator rounds them, because a partition can round in another order.

    Returns the lower precisions that were replaced. Float32 of weights and inputs is not included.
    """
    traced = {node: value(node).dtype for node in graph.nodes if is_floating(node)}
    lifted: set[torch.dtype] = set()
    changed: set[fx.Node] = set()
    counts = _rounded_counts(graph, traced)
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr"):
            if traced.get(node) in _DOUBLE and not facts(node).get("constant"):
                _lift_value(node)
                changed.add(node)
        elif node.op == "call_function":
            arguments_before = node.args, node.kwargs
            if node.target is torch.ops.aten.view.dtype or draws_random_numbers(node):  # reinterprets bits
                _keep_operands(node, traced)
            elif any(is_floating(n) and value(n).dtype in _DOUBLE.values() for n in node.all_input_nodes):
                lifted |= _lift_casts(node) | _lift_written(node, traced)
                _lift_others(node, traced)
            elif node in counts:
                lifted |= _lift_counts(node, traced)
            if arguments_before != (node.args, node.kwargs) or not changed.isdisjoint(node.all_input_nodes):
                node.meta["val"] = _lifted_result(node)
                changed.add(node)
    return lifted | {traced[node] for node in changed if traced.get(node) in (torch.float16, torch.bfloat16)}


def _rounded_counts(graph: fx.Graph, traced: Mapping[fx.Node, torch.dtype]) -> set[fx.Node]:
    """Return the float32 values that depend on weights or inputs only through indices and booleans.

    The set is empty if no operator rounds such a value.
    """
    reached, upcast, counts = set[fx.Node](), set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            if node in traced and not facts(node).get("constant"):
                reached.add(node)
                upcast.add(node)
        elif node.op == "call_function" and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            if not upcast.isdisjoint(node.all_input_nodes) and (node in traced or not is_tensor(node)):
                upcast.add(node)
            elif traced.get(node) == torch.float32:
                counts.add(node)
    return counts if any(operator_name(node) not in _EXACT for node in counts) else set()


def _lift_counts(node: fx.Node, traced: dict[fx.Node, torch.dtype]) -> set[torch.dtype]:
    """Rewrite a call on float32 numbers, integers or booleans to compute in float64.

    Returns the precisions that were replaced.
    """
    if asked := _lift_casts(node):
        return asked
    operands = [n for n in node.all_input_nodes if is_floating(n)]
    for operand in operands or node.all_input_nodes[:1]:
        if operand not in traced or value(operand).dtype in _DOUBLE:
            _read_as(node, operand, torch.float64, traced)
    return {torch.float32}


def _lifted_result(node: fx.Node) -> Any:
    """Return the fake result of a call whose operands have been upcast to float64."""
    with torch.no_grad():  # torch cannot differentiate a write to a slice of a complex tensor
        if operator_name(node) in _WITHOUT_DOUBLE:
            with fake_mode([node]):
                return value(node).to(_DOUBLE[value(node).dtype])
        return fake_call(node.target, node.args, node.kwargs, node.all_input_nodes)


def _lift_value(node: fx.Node) -> None:
    tensor = value(node)
    with fake_mode([node]), torch.no_grad():
        lifted = tensor.detach().to(_DOUBLE[tensor.dtype])
    node.meta["val"] = lifted.requires_grad_(tensor.requires_grad)


def _lift_casts(node: fx.Node) -> set[torch.dtype]:
    """Replace the dtype arguments of a call (such as the target of a cast) by float64.

    Return the replaced dtypes.
    """
    asked: set[torch.dtype] = set()

    def lift(argument: Any) -> Any:
        if isinstance(argument, torch.dtype) and argument in _DOUBLE:
            asked.add(argument)
            return _DOUBLE[argument]
        return argument

    args, kwargs = (fx.node.map_aggregate(part, lift) for part in (node.args, node.kwargs))
    if asked:
        node.args, node.kwargs = args, kwargs
    return asked


def _lift_written(node: fx.Node, traced: dict[fx.Node, torch.dtype]) -> set[torch.dtype]:
    """Upcast the tensor that a `copy` writes to, if the written value was upcast and the tensor was not.

    Returns a set with the tensor's dtype before the upcast; empty if nothing changed.
    """
    if operator_name(node) != "aten::copy":
        return set()
    written, source, *rest = node.args
    before, dtype = value(written).dtype, value(source).dtype
    if _DOUBLE.get(before) != dtype:
        return set()
    with node.graph.inserting_before(node):
        wide = emit(node.graph, node, torch.ops.aten.to.dtype, written, dtype)
    node.args, traced[wide] = (wide, source, *rest), dtype
    return {before}


def _keep_operands(node: fx.Node, traced: dict[fx.Node, torch.dtype]) -> None:
    for operand in node.all_input_nodes:
        if operand in traced and value(operand).dtype != traced[operand]:
            _read_as(node, operand, traced[operand], traced)


def _lift_others(node: fx.Node, traced: dict[fx.Node, torch.dtype]) -> None:
    """Cast the operands of a call that are not float64 yet, if all operands were traced in one precision.

    Such operands depend on no input (`zeros`, position ids).
    """
    operands = [n for n in node.all_input_nodes if is_floating(n)]
    if len({_real(traced[n]) for n in operands}) > 1:
        return
    for operand in operands:
        if value(operand).dtype in _DOUBLE:
            _read_as(node, operand, _DOUBLE[value(operand).dtype], traced)


def _read_as(node: fx.Node, operand: fx.Node, dtype: torch.dtype, traced: dict[fx.Node, torch.dtype]) -> None:
    with node.graph.inserting_before(node):
        cast = emit(node.graph, operand, torch.ops.aten.to.dtype, operand, dtype)
    traced[cast] = traced.get(operand, torch.float32)
    node.replace_input_with(operand, cast)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
