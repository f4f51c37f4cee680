"""Conversion of an exported program to one flat `torch.fx` graph of functional operators."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import OutputKind
from torch.fx.node import map_aggregate

from autopart.compat.torch_internals import AUTOCAST, has_values, is_higher_order, is_operator
from autopart.errors import Refusal, TraceError
from autopart.ir.facts import facts
from autopart.ir.graph import (
    describe,
    draws_random_numbers,
    is_floating,
    is_host_draw,
    operator_name,
    source_text,
    value,
    writes,
)
from autopart.ir.subgraphs import ancestors_of
from autopart.ir.trace import Call
from autopart.tracing.blocks.repeated_blocks import base_name
from autopart.tracing.call_signature import PREFIX
from autopart.tracing.python.size_conditions import plain_sizes

_REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
"""{higher-order operator that is inlined: number of its arguments before the body}.

The argument of `no_grad` is the grad mode. Those of autocast are device type, dtype, enabled and cache of casts.
"""
_FORMULAS = ("aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout")
_OURS = ("<eval_with_key>", "/torch/overrides.py", str(Path(__file__).parent.parent))
CONSTANT = "_constant_"
"""Prefix of the names of constants that torch.export lifts to inputs."""


def functional(program: Any) -> Any:
    """Return an exported program in which in-place writes are replaced by functional operators."""
    graph_module = program.graph_module
    if not any(writes(n) or _is_no_operator(n) or _written_out(n) for n in graph_module.graph.nodes):
        return program
    _one_name_each(program)
    norms = (n for n in graph_module.graph.nodes if operator_name(n) == "aten::instance_norm")
    hidden = next(filter(writes, norms), None)
    if hidden is not None:
        record_origin(hidden)
        raise TraceError(
            "F.instance_norm is called with running statistics that it would write",
            refusal=Refusal.WRITE,
            why="torch.export does not record these writes",
            where=source_text(hidden),
            hint="nn.InstanceNorm1d/2d/3d with track_running_stats=True",
        )
    graph_module.recompile()
    return program.run_decompositions({})


def inline_regions(module: Any) -> None:
    """Replace each `no_grad` and autocast region by the operators in its body.

    The effect of `no_grad` is in the bodies already: `EagerSemantics` traced it as `detach` calls. Autocast regions
    become calls that enter and exit autocast, which `run_decompositions` replaces by casts.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_higher_order(node.target):
            continue
        num_options = _REGIONS.get(node.target.name())
        if num_options is None:
            record_origin(node)
            raise TraceError(
                f"{node.target} contains operators that cannot be sharded or split into stages",
                refusal=Refusal.REGION,
                why="only no_grad and autocast regions are supported",
                where=source_text(node),
                hint="torch.where and plain operations in its place, or parallelize the modules inside",
            )
        options, (region, *operands) = node.args[:num_options], node.args[num_options:]
        body: Any = module.get_submodule(region.target)
        inline_regions(body)
        with graph.inserting_before(node):
            values = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
            outputs = _inlined(graph, body, values, options if num_options > 1 else None)
        for user in list(node.users):
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not region.users:
            graph.erase_node(region)


def drop_checks(graph: fx.Graph) -> None:
    """Remove the dtype checks that torch.export inserts before casts."""
    for node in list(graph.nodes):
        if operator_name(node) == "aten::_assert_tensor_metadata":
            graph.erase_node(node)


def _inlined(graph: fx.Graph, body: Any, values: dict[fx.Node, fx.Node], autocast: Any) -> Any:
    """Copy the calls of a region's body into the graph, and return the copies of its outputs."""
    enter, leave = AUTOCAST
    opened = graph.call_function(enter, autocast) if autocast is not None else None
    outputs = graph.graph_copy(body.graph, values)
    if opened is not None:
        graph.call_function(leave, (opened,))
    return outputs


def _one_name_each(program: Any) -> None:
    """Refer to each tied buffer or parameter by its first name only.

    With several names, torch cannot functionalize in-place writes to the tensor.
    """
    first: dict[int, fx.Node] = {}
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name not in names:
            continue
        name = names[node.name]
        stored = program.state_dict if name in program.state_dict else program.constants
        known = first.setdefault(id(stored[name]), node)
        if known is not node:
            node.replace_all_uses_with(known)
            another, stored[name] = stored[name], torch.empty_like(stored[name])
            if isinstance(another, nn.Parameter):
                stored[name] = nn.Parameter(stored[name], another.requires_grad)


def _written_out(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name in _FORMULAS and draws_random_numbers(node)


def _is_no_operator(node: fx.Node) -> bool:
    """Return True for a call that computes nothing: it enters or leaves a mode such as autocast or vmap."""
    known = is_operator(node.target) or node.target is operator.getitem
    return node.op == "call_function" and not known


def own_graph(
    module: fx.GraphModule, attributes: Mapping[str, str], parameters: Collection[str], call: Call
) -> fx.Graph:
    """Return a copy of the exported graph with parameters, buffers and constants as `get_attr` nodes.

    Args:
        attributes: {placeholder: name of its tensor in the model}. All other placeholders are inputs, and stay.
        parameters: the placeholders of parameters.
    """
    graph, inputs = fx.Graph(), iter(zip(call.names, call.tensors, strict=True))
    values: dict[fx.Node, Any] = {}
    known: dict[str, fx.Node] = {}

    def plain(argument: Any) -> Any:
        return values[argument] if isinstance(argument, fx.Node) else plain_sizes(argument)

    for node in module.graph.find_nodes(op="placeholder"):
        if node.name in attributes and node.name not in parameters and attributes[node.name] in known:
            values[node] = known[attributes[node.name]]  # a constant that is a parameter
        elif node.name in attributes:
            values[node] = known[attributes[node.name]] = graph.get_attr(attributes[node.name])
            values[node].meta = {**node.meta, "parameter": node.name in parameters}
            facts(values[node])["constant"] = attributes[node.name].startswith(CONSTANT)
        elif isinstance(node.meta.get("val"), torch.Tensor):
            values[node] = graph.node_copy(node)
            name, tensor = next(inputs)
            values[node].meta |= {"input_name": name, "input_grad": tensor.requires_grad}
    for node in module.graph.nodes:
        if node.op == "call_function":
            unknown = next((used for used in node.all_input_nodes if used not in values), None)
            if unknown is not None:
                kind = getattr(value(unknown), "class_fqn", "").rpartition(".")[2] or "an object"
                raise TraceError(
                    f"{operator_name(node)} is passed a {kind} object of the model",
                    refusal=Refusal.PART,
                    why="a program can pass only tensors to operators",
                    where=source_text(node),
                    hint="plain operations on tensors in its place",
                )
            args, kwargs = map_aggregate((node.args, node.kwargs), plain)
            values[node] = graph.create_node(node.op, node.target, args, kwargs, base_name(node))
            values[node].meta = dict(node.meta)
    graph.output(map_aggregate(module.graph.output_node().args[0], plain))
    for node in graph.nodes:
        record_origin(node)
    return graph


def record_origin(node: fx.Node) -> None:
    """Convert a node's module stack and stack trace to the user's module paths and source lines."""
    inside = list((facts(node).get("nn_module_stack") or {}).items())[1:]
    facts(node)["nn_module_stack"] = {
        key: (path.removeprefix(PREFIX) if path != PREFIX[:-1] else "", kind) for key, (path, kind) in inside
    }
    if facts(node).get("stack_trace"):
        facts(node)["stack_trace"] = own_frames(facts(node)["stack_trace"])


@lru_cache(maxsize=4096)
def own_frames(stack_trace: str) -> str:
    """Return a stack trace without the frames of torch and autopart."""
    frames = [f for f in re.split(r"(?m)^(?=  File )", stack_trace) if not any(part in f for part in _OURS)]
    users_frames = [f for f in frames if "/torch/" not in f]
    return "".join(users_frames if any(f.startswith("  File ") for f in users_frames) else frames)


def name_outputs(
    model: nn.Module, graph: fx.Graph, specs: Any, users_name: Callable[[str], str], call: Call,
    constants: Mapping[str, torch.Tensor],
) -> tuple[str, ...]:  # fmt: skip
    """Split the outputs of an exported program into the model's outputs and new values of its tensors.

    The new values are {name of a buffer or parameter: node}. Writes to an input raise TraceError, except data
    augmentation by random numbers of numpy or Python: the program leaves out these writes. Returns notes on them.

    Args:
        users_name: function from a tensor's name in the exported program to the user's name.
    """
    output = graph.output_node()
    kept: list[Any] = []
    updates: dict[str, fx.Node] = {}
    notes: list[str] = []
    for spec, result in zip(specs, output.args[0], strict=True):
        if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
            updates[users_name(spec.target)] = _detached(result)
        elif spec.kind is OutputKind.USER_OUTPUT:
            kept.append(result)
        elif any(map(is_host_draw, ancestors_of([result]))):
            name = users_name(spec.target)
            notes.append(f"forward() augments its input '{name}' in place: the caller's tensor keeps its values")
        elif _is_idempotent(graph, result, name := users_name(spec.target), call, constants):
            notes.append(f"forward() writes to its input '{name}': the caller's tensor keeps its values")
        else:
            raise TraceError(
                f"{type(model).__name__} writes to its input '{users_name(spec.target)}' in its forward",
                refusal=Refusal.WRITE,
                why="only buffers and parameters can be written",
                where=describe(result),
                hint="do it outside forward()",
            )
    output.args = (tuple(kept), updates)
    return tuple(notes)


@torch.no_grad()
def _is_idempotent(
    graph: fx.Graph, result: fx.Node, name: str, call: Call, constants: Mapping[str, torch.Tensor]
) -> bool:  # fmt: skip
    """Return True if writing a new value to an input a second time would change nothing.

    The new value must depend only on inputs and constants. It is computed twice, for the example's values and
    for some others.
    """
    needed = ancestors_of([result])
    nodes = [node for node in graph.nodes if node in needed]
    given = dict(zip(call.names, call.tensors, strict=True))
    if any(draws_random_numbers(node) or (node.op == "get_attr" and node.target not in constants) for node in nodes):
        return False
    if not all(map(has_values, (*given.values(), *constants.values()))):
        return False

    def written(tensor: torch.Tensor) -> torch.Tensor:
        values = {}
        for node in nodes:
            if node.op == "placeholder":
                source = tensor if node.meta["input_name"] == name else given[node.meta["input_name"]]
                values[node] = source.clone()
            elif node.op == "get_attr":
                values[node] = constants[str(node.target)]
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
        new: torch.Tensor = values[result]
        return new

    example = given[name]
    others = [~example] if example.dtype == torch.bool else [example + 1, example - 1, 10 * example]
    try:
        return all(torch.equal(once := written(tensor), written(once)) for tensor in (example, *others))
    except Exception:  # an operator does not accept the other values, so nothing is known
        return False


def _detached(update: fx.Node) -> fx.Node:
    """Detach a buffer's new value from autograd: the buffer must not keep the step's autograd graph alive."""
    if update.op != "call_function" or not is_floating(update):
        return update
    with update.graph.inserting_after(update):
        node = update.graph.call_function(torch.ops.aten.detach.default, (update,))
    node.meta = dict(update.meta)
    return node
