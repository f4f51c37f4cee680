"""Queries on a traced graph: properties of nodes, their names in plans, and their source lines."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import networkx as nx
import torch
from torch import fx

from autopart.common.names import parents as parents
from autopart.common.names import pattern_of as pattern_of
from autopart.ir.facts import ACTIVE, PARAMETER, WEIGHT, facts

DTYPE_NAMES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.complex128: "c128", torch.complex64: "c64",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
}  # fmt: skip
CAST = "cast"
"""Name that plans give every cast between dtypes."""


def operator_name(node: fx.Node) -> str:
    """Return `aten::linear` for `torch.ops.aten.linear.default`, or the name of a plain function."""
    return name_of_target(node.target)


def name_of_target(target: Any) -> str:
    """Return the `operator_name` of nodes that call the function `target`."""
    schema = getattr(target, "_schema", None)
    return schema.name if schema is not None else getattr(target, "__name__", str(target))


def short_name(node: fx.Node) -> str:
    """Return the operator's name as plans and reports print it, without its namespace: `linear`."""
    return operator_name(node).rsplit("::", 1)[-1]


def display_name(node: fx.Node) -> str:
    """Return the operator's name for messages.

    If a pass decomposed an operator of the model into this node, return the name of the original operator.
    """
    return facts(node).get("written_for") or short_name(node)


def value(node: fx.Node) -> Any:
    """Return the fake tensor, or tuple of fake tensors, that the node computes."""
    return node.meta.get("val")


def tuple_values(node: fx.Node) -> Sequence:
    """Return the outputs of a node as a sequence of fake tensors, of length 1 for a single output."""
    outputs = value(node)
    return outputs if isinstance(outputs, (tuple, list)) else [outputs]


def is_tensor(node: fx.Node) -> bool:
    return isinstance(value(node), torch.Tensor)


def shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(value(node).shape)


def is_floating(node: fx.Node) -> bool:
    return is_tensor(node) and (value(node).is_floating_point() or value(node).is_complex())


def changes_precision(node: fx.Node) -> bool:
    """Return True if the node casts a floating-point tensor to another dtype."""
    return operator_name(node) in ("aten::to", "aten::_to_copy") and is_floating(node) and is_floating(node.args[0])


def is_sparse(node: fx.Node) -> bool:
    """Return True if a node computes a sparse tensor."""
    return is_tensor(node) and value(node).layout is not torch.strided


def size_bytes(node: fx.Node) -> int:
    if not is_tensor(node):
        return 0
    return int(value(node).numel() * value(node).element_size() * math.prod(facts(node).get("shares", {}).values()))


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the tensor arguments of a node in order. A node that is passed twice appears twice."""
    nodes: list[fx.Node] = []
    _add_nodes((*node.args, *node.kwargs.values()), nodes)
    return nodes


def _add_nodes(arguments: Iterable[Any], nodes: list[fx.Node]) -> None:
    for argument in arguments:
        if isinstance(argument, fx.Node):
            nodes.append(argument)
        elif isinstance(argument, (list, tuple)):
            _add_nodes(argument, nodes)
        elif isinstance(argument, dict):
            _add_nodes(argument.values(), nodes)
        elif isinstance(argument, slice):
            _add_nodes((argument.start, argument.stop, argument.step), nodes)


def source_of(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the node that computes a value, and the index of the value in its outputs. Skips `getitem`."""
    index = 0
    while node.target is operator.getitem:
        node, index = node.args
    return node, index


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost module that runs the node, "" for the model itself."""
    stack = facts(node).get("nn_module_stack")
    return list(stack.values())[-1][0] if stack else ""


def name_of(node: fx.Node) -> str:
    """Return the name of a parameter or the key of an operator, "" for any other node."""
    return node.target if node.op == "get_attr" else facts(node).get("key", "")


def source_line(node: fx.Node) -> str:
    """Return the source line that created the node, without lines of `torch.nn`: `model.py:312`."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', facts(node).get("stack_trace") or "")
    lines = [(file, line) for file, line in lines if "/torch/nn/modules/" not in file] or lines
    return f"{lines[-1][0].rsplit('/', 1)[-1]}:{lines[-1][1]}" if lines else ""


def source_text(node: fx.Node) -> str:
    """Return `/home/me/model.py:27: y = x[mask]`: the full path and text of the source line."""
    frames = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n\s*(.*)', facts(node).get("stack_trace") or "")
    path = module_path(node)
    return f"{frames[-1][0]}:{frames[-1][1]}: {frames[-1][2]}" + (f" ({path})" if path else "") if frames else ""


def describe(node: fx.Node) -> str:
    """Return `linear at model.py:27 (layers.0.attn.q)`, the description of a node in errors and reports."""
    line, path = source_line(node), module_path(node)
    return display_name(node) + (f" at {line}" if line else "") + (f" ({path})" if path else "")


def operators(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes that compute something: no placeholders, parameters, `getitem` nodes or output."""
    return (n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem)


def reads(graph: fx.Graph) -> nx.DiGraph:
    """Return a directed graph with an edge from each node to each of its inputs, for `networkx` searches."""
    return nx.DiGraph((node, used) for node in graph.nodes for used in node.all_input_nodes)


def draws_random_numbers(node: fx.Node) -> bool:
    """Return True if a call draws random numbers.

    Dropout, attention and recurrent layers with a dropout probability of 0 draw none.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return dropout_probability(node) != 0 and False not in (argument(node, "train"), argument(node, "training"))


HOST_FUNCTION = "host_function"
"""Namespace of operators that run a Python function of the user's code, such as one that uses numpy."""


def is_host_draw(node: fx.Node) -> bool:
    """Return True if a call runs a host function (numpy or Python code) that depends only on inputs.

    Such a function can draw random numbers.
    """
    return getattr(node.target, "namespace", "") == HOST_FUNCTION and draws_random_numbers(node)


RNG_EXACT_UNSUPPORTED = "rng='exact' cannot reproduce the random numbers of a single device"


def writes(node: fx.Node) -> bool:
    """Return True if a call writes to a tensor in place."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    if schema is None or schema.is_mutable:
        return schema is not None
    if schema.name not in (
        "aten::batch_norm",
        "aten::instance_norm",
    ):  # these operators write, although their schemas do not declare it
        return False
    arguments = dict(zip([argument.name for argument in schema.arguments], node.args, strict=False)) | node.kwargs
    return arguments["running_mean"] is not None and bool(arguments.get("training", arguments.get("use_input_stats")))


def inexact(node: fx.Node, device: torch.device) -> str:
    """Return the reason why `rng="exact"` cannot reproduce this random operator; "" if it can."""
    on_gpu = facts(node).get("inexact_on_gpu", "") if device.type == "cuda" else ""
    return facts(node).get("inexact", on_gpu)


def argument(node: fx.Node, name: str) -> Any:
    """Return an argument of a call by its schema name. If it is not passed, return its default or None."""
    for position, declared in enumerate(node.target._schema.arguments):
        if declared.name == name:
            default = declared.default_value if declared.has_default_value() else None
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
    return None


def dropout_probability(node: fx.Node) -> float | None:
    """Return the dropout probability of a call (dropout, attention, LSTM, ...); None without dropout."""
    names = {declared.name for declared in node.target._schema.arguments}
    for name in ("dropout", "dropout_p", *(("p",) if "dropout" in operator_name(node) else ())):
        if name in names:
            return argument(node, name)
    return None


def active_operators(graph: fx.Graph) -> list[fx.Node]:
    """Return the operators that are assigned to pipeline stages, in graph order.

    Their role is `ACTIVE` (`passes/facts/analyze.py`). Operators that depend only on inputs run instead in the
    prologue, a graph that runs once per call on the full batch, and operators that depend only on parameters run in
    every stage that needs them.
    """
    return [node for node in operators(graph) if facts(node)["role"] == ACTIVE]


def on_parameters(graph: fx.Graph) -> list[fx.Node]:
    """Return the operators that depend on parameters, in graph order. The solver chooses their layouts."""
    return [node for node in operators(graph) if facts(node)["role"] in (ACTIVE, WEIGHT)]


def reads_weights(node: fx.Node) -> bool:
    """Return True if an argument of the call is a parameter or a view of one."""
    return any(facts(source)["role"] in (PARAMETER, WEIGHT) for source in tensor_inputs(node))


def parameters_of(used: fx.Node) -> list[str]:
    """Return the names of the parameters from which a weight is computed, such as a transposed weight.

    Returns [] if the value also depends on inputs.
    """
    if facts(used)["role"] == PARAMETER:
        return [str(used.target)]
    inputs = used.all_input_nodes if facts(used)["role"] == WEIGHT else []
    return [name for node in inputs for name in parameters_of(node)]


def assign_keys(graph: fx.Graph) -> None:
    """Write the facts `key` and `group`, the names of operators in plans, for every operator.

    The key `model.layers.3.mlp/mul#1` means the second `mul` that the module `model.layers.3.mlp` runs. It does not
    change if code outside of the module changes. The group `model.layers.*.mlp/mul#1` is common to all repeated blocks.

    If a pass replaced an operator of the model, the key has the name of the original operator (fact `named`). Every
    cast to another dtype is named `cast`, so that added or removed casts do not change the numbers (`#1`) of other
    operators.
    """
    counts: Counter[str] = Counter()
    for node in operators(graph):
        name = CAST if changes_precision(node) else facts(node).get("named") or short_name(node)
        base = f"{module_path(node)}/{name}"
        facts(node)["key"] = f"{base}#{counts[base]}" if counts[base] else base
        counts[base] += 1
        path, name = facts(node)["key"].rsplit("/", 1)
        facts(node)["group"] = f"{pattern_of(path)}/{name}"


def format_value(node: fx.Node, layout_text: str = "") -> str:
    """Return `f32[8,128]{dp:S(0) tp:P}`: dtype, shape and layout of the value of a node."""
    return kind_of(value(node)) + layout_text if is_tensor(node) else ""


def kind_of(val: Any) -> str:
    """Return the dtype and shape of a tensor as text, such as `f64[4,6]`.

    A tuple of tensors gives `(f64[4,6], f64[4])`, and any other value "".
    """
    if isinstance(val, (tuple, list)):
        return f"({', '.join(map(kind_of, val))})"
    if not isinstance(val, torch.Tensor):
        return ""
    return f"{DTYPE_NAMES.get(val.dtype, val.dtype)}[{','.join(map(str, val.shape))}]"
