"""From a model and an example call to a flat `torch.fx` graph of functional operators.

`trace` uses `torch.export` (non-strict): the model's own Python runs once on fake tensors. The result keeps the
user's source lines and module paths on every node; parameters and buffers are `get_attr` nodes under their own names.
"""

from __future__ import annotations

import inspect
import io
import logging
import operator
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from autopart.compat import TreeSpec, is_higher_order, leaves_with_names, tree_map
from autopart.errors import InputError, TraceError

_NO_CACHE = "use_cache"
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True)
class Call:
    """One call of the model, its arguments by name: tensors to feed, and options that the trace fixes."""

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Trace:
    """A traced model.

    `graph`: placeholders are the tensor inputs in `call.names` order; its output node holds the flat outputs.
    `parameters`: `{name: fake tensor}` in the model's order; `aliases`: other names of a tied parameter.
    `constants`: tensors written into the trace. `notes`: what a user should know about how it was traced.
    """

    graph: fx.Graph
    call: Call
    parameters: Mapping[str, torch.Tensor]
    aliases: Mapping[str, tuple[str, ...]]
    buffers: Mapping[str, torch.Tensor]
    constants: Mapping[str, torch.Tensor]
    output_spec: TreeSpec
    notes: tuple[str, ...]
    mode: str


class WithLoss(nn.Module):
    """A model that returns no loss, with the user's `loss_fn(output, target)` behind it."""

    def __init__(self, model: nn.Module, loss_fn: Any):
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, target: Any, call: dict[str, Any]) -> Any:
        return self.loss_fn(self.model(**call), target)


def bind_call(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, in the order of the model's `forward`.

    Raises InputError where the call does not fit the signature.
    """
    if not isinstance(model, nn.Module):
        raise TraceError(
            f"a {type(model).__name__} is no model", why="autopart partitions an nn.Module",
            hint="an nn.Module whose forward calls it",
        )  # fmt: skip
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"{type(model).__name__} cannot be called with {_names(args, kwargs)}",
            why=str(error),
            hint=f"its inputs are {', '.join(signature.parameters)}",
        ) from None
    arguments: dict[str, Any] = {}
    for name, argument in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(argument)
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise InputError(
                f"{type(model).__name__}.forward takes '{name}' by position only",
                why="autopart names every input",
                hint="give the parameter a name in forward()",
            )
        else:
            arguments[name] = argument
    if _NO_CACHE in signature.parameters and arguments.get(_NO_CACHE) is None:
        arguments[_NO_CACHE] = False
    return arguments


def _names(args: tuple, kwargs: Mapping[str, Any]) -> str:
    return ", ".join([f"{len(args)} positional inputs"] * bool(args) + list(kwargs)) or "no inputs"


def flatten_call(arguments: Mapping[str, Any]) -> Call:
    """Split the arguments into tensors (inputs) and everything else (options)."""
    leaves = leaves_with_names(dict(arguments))
    tensors = [(name, leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor)]
    options = {name: leaf for name, leaf in leaves if not isinstance(leaf, torch.Tensor)}
    return Call(tuple(t for _, t in tensors), tuple(name for name, _ in tensors), options)


def trace(model: nn.Module, arguments: Mapping[str, Any]) -> Trace:
    """Trace `model(**arguments)`.

    Args:
        model: any module; its parameters may be on `meta`.
        arguments: the call by name, from `bind_call`.
    Raises:
        TraceError: the model cannot be traced, with the user's line and what to try.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    call = flatten_call(arguments)
    # Two inputs that are one tensor object would be merged into one by torch.export: trace on distinct copies.
    distinct = iter([torch.empty_like(t, device=device).copy_(t) for t in call.tensors])
    example = tree_map(lambda x: next(distinct) if isinstance(x, torch.Tensor) else x, dict(arguments))
    try:
        with torch.enable_grad(), _quiet():
            program = torch.export.export(model, (), example, strict=False)
            if _needs_functionalization(program.graph_module):
                program = program.run_decompositions({})
    except Exception as error:  # torch.export raises many kinds; each is told with the user's own line
        raise _trace_error(model, error) from error
    traced = _from_exported(model, program, call, arguments)
    return _without_loss_wrapper(traced) if isinstance(model, WithLoss) else traced


def _from_exported(model: nn.Module, program: Any, call: Call, arguments: Mapping[str, Any]) -> Trace:
    signature = program.graph_signature
    if signature.buffers_to_mutate:
        raise TraceError(
            f"{type(model).__name__} updates buffers in its forward: {', '.join(signature.buffers_to_mutate.values())}",
            why="updating buffers (such as batch-norm statistics) is not built yet",
            hint="model.eval(), or GroupNorm in place of BatchNorm",
        )
    parameters, aliases = _parameter_names(model)
    constants = {f"_constant_{i}": program.constants[name] for i, name in enumerate(_lifted(program))}
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names |= dict(zip(signature.inputs_to_lifted_tensor_constants, constants, strict=True))
    first_name = {alias: name for name, others in aliases.items() for alias in others}
    attributes = {node: first_name.get(target, target) for node, target in names.items()}
    graph = _own_graph(program.graph_module, attributes, call.names)
    notes = (f"traced with {_NO_CACHE}=False",) if arguments.get(_NO_CACHE) is False else ()
    buffers = dict(model.named_buffers(remove_duplicate=False))
    mode = "train" if model.training else "eval"
    return Trace(graph, call, parameters, aliases, buffers, constants, program.call_spec.out_spec, notes, mode)


def names_without_loss(names: tuple[str, ...]) -> tuple[str, ...]:
    """The input names of a model under `WithLoss` as the user knows them."""
    return tuple(name.removeprefix("call.") for name in names)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch.export's warnings about itself, and without the graph it dumps on stderr when it fails."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level, dumped = logger.level, io.StringIO()
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(dumped):
            warnings.simplefilter("ignore", FutureWarning)
            yield
        sys.stderr.write(dumped.getvalue())
    finally:
        logger.setLevel(level)


def _without_loss_wrapper(traced: Trace) -> Trace:
    """Names as the user's model has them, and operators of the loss marked (`meta["loss"]`)."""
    prefix = "model."

    def own(name: str) -> str:
        return name.removeprefix(prefix)

    for node in traced.graph.nodes:
        if node.op == "get_attr":
            node.target = own(node.target)
        stack = node.meta.get("nn_module_stack") or {}
        paths = [path for path, _ in stack.values()]
        node.meta["loss"] = not any(path == "model" or path.startswith(prefix) for path in paths)
        named = {key: ("" if path == "model" else own(path), kind) for key, (path, kind) in stack.items()}
        node.meta["nn_module_stack"] = named
    names = names_without_loss(traced.call.names)
    return replace(
        traced, call=replace(traced.call, names=names), mode=f"{traced.mode}+loss",
        parameters={own(n): p for n, p in traced.parameters.items()},
        aliases={own(n): tuple(map(own, others)) for n, others in traced.aliases.items()},
        buffers={own(n): b for n, b in traced.buffers.items()},
    )  # fmt: skip


def _lifted(program: Any) -> list[str]:
    return list(program.graph_signature.inputs_to_lifted_tensor_constants.values())


def _own_graph(module: fx.GraphModule, attributes: Mapping[str, str], input_names: tuple[str, ...]) -> fx.Graph:
    """A copy of the exported graph in which parameters, buffers and constants are `get_attr` nodes, inputs stay
    placeholders, and no-grad regions are inlined."""
    graph, names = fx.Graph(), iter(input_names)
    values: dict[fx.Node, Any] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        if node.name in attributes:
            values[node] = graph.get_attr(attributes[node.name])
            values[node].meta = dict(node.meta)
        elif isinstance(node.meta.get("val"), torch.Tensor):
            values[node] = graph.node_copy(node)
            values[node].meta["input_name"] = next(names)
    outputs = _copy_calls(graph, module, values)
    graph.output(outputs)
    for node in graph.nodes:
        if node.meta.get("stack_trace"):
            node.meta["stack_trace"] = own_frames(node.meta["stack_trace"])
    return graph


def _copy_calls(graph: fx.Graph, module: Any, values: dict[fx.Node, Any]) -> Any:
    """Copy the calls of a module's graph, its placeholders being known, and return what its outputs became."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        source = values[node.args[0]] if node.target is operator.getitem else None
        if "set_grad_enabled" in str(node.target):
            values[node] = _inline_region(graph, node, module, values)
        elif isinstance(source, (tuple, list)):
            values[node] = source[node.args[1]]
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    return fx.map_arg(module.graph.output_node().args[0], values.__getitem__)


def _inline_region(graph: fx.Graph, node: fx.Node, owner: nn.Module, values: Mapping[fx.Node, Any]) -> Any:
    """Copy the body of a `torch.no_grad()` region into the graph, its operands detached; returns its results."""
    enabled, region, *operands = node.args
    operands = [values[o] if isinstance(o, fx.Node) else o for o in operands]
    if not enabled:
        operands = [_detached(graph, operand) for operand in operands]
    body: Any = owner.get_submodule(region.target)
    return _copy_calls(graph, body, dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True)))


def own_frames(stack_trace: str) -> str:
    """A stack trace without the frames inside `torch.nn`, so that it ends in the user's code, where there is any."""
    frames = re.split(r"(?m)^(?=  File )", stack_trace)
    own = [f for f in frames if "/torch/nn/" not in f]
    return "".join(own if any(f.startswith("  File ") for f in own) else frames)


def _parameter_names(model: nn.Module) -> tuple[dict, dict]:
    """Parameters by the name `named_parameters()` gives, with the other names of tied ones."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    parameters = dict(model.named_parameters())
    aliases = {names[0]: tuple(names[1:]) for names in by_id.values() if len(names) > 1}
    return parameters, aliases


def _needs_functionalization(module: fx.GraphModule) -> bool:
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return True
        if is_higher_order(node.target) and "set_grad" not in str(node.target):
            return True
    return False


def _detached(graph: fx.Graph, operand: Any) -> Any:
    if not isinstance(operand, fx.Node):
        return operand
    node = graph.call_function(torch.ops.aten.detach.default, (operand,))
    node.meta = {**operand.meta}
    return node


def _trace_error(model: nn.Module, error: Exception) -> TraceError:
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f for f in frames if not f.filename.startswith(_NOT_THE_USERS) and not f.filename.startswith("<eval_with_key")
    ]
    where = f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "DataDependent" in type(error).__name__ or "data-dependent" in str(error):
        why = "this line decides what to run by the values in a tensor, which a graph cannot hold"
        hint = "torch.where(condition, a, b) or torch.cond, or take the decision outside forward()"
    else:
        why = f"{type(error).__name__}: {first_line[:300]}"
        hint = "torch.export.export(model, args, kwargs, strict=False) shows the same failure in full"
    return TraceError(f"{type(model).__name__} cannot be traced", why=why, where=where, hint=hint)
