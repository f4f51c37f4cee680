"""From a model and an example call to a flat `torch.fx` graph of functional operators.

`trace` uses `torch.export` (non-strict): the model's own Python runs once on fake tensors. The result keeps the
user's source lines and module paths on every node; parameters and buffers are `get_attr` nodes under their own names.
"""

from __future__ import annotations

import inspect
import io
import logging
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from autopart.compat import TreeSpec, keeping_draws, leaves_with_names
from autopart.errors import InputError, TraceError
from autopart.ir.facts import facts
from autopart.ir.graph import module_path, shape, source_text, spoken_name, value
from autopart.tracing.eager_semantics import ambient_autocast, no_autocast, traceable
from autopart.tracing.entry import PREFIX, Entry, register_dataclasses
from autopart.tracing.entry import call as call_model
from autopart.tracing.exported import CONSTANT, drop_checks, functional, inline_regions, name_outputs, own_graph
from autopart.tracing.functions import name_functions
from autopart.tracing.python_state import check_attributes, check_draws, check_hooks
from autopart.tracing.repeated import NotAlike, Repeats
from autopart.tracing.skeleton import without_values
from autopart.tracing.sparse import check_layouts
from autopart.tracing.trace_errors import shape_by_values, trace_error
from autopart.tracing.weight_updates import WeightUpdates, with_weight_updates

_NO_CACHE = "use_cache"
_LOGGERS = "torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor"


@dataclass(frozen=True)
class Call:
    """One call of the model, its arguments by name: tensors to feed, and options that the trace fixes.

    Which tensors need gradients is part of what a trace is for, as their shapes and dtypes are.
    """

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    options: Mapping[str, Any]

    @property
    def with_gradient(self) -> tuple[str, ...]:
        """The names of the tensors that need gradients."""
        return tuple(name for name, tensor in zip(self.names, self.tensors, strict=True) if tensor.requires_grad)


@dataclass(frozen=True)
class Trace:
    """A traced model.

    `graph`: placeholders are the tensor inputs in `call.names` order (`input_name`; with a true
    `input_grad` where the input needs a gradient); its output node holds the flat outputs and, as
    its second argument, `buffer_updates`.
    `parameters`: `{name: the model's own}` in the model's order; `aliases`: other names of a tied parameter.
    `constants`: tensors written into the trace. `notes`: what a user should know about how it was traced.
    `autocast`: the dtype of the `torch.autocast` that the model was called in, "" outside of one.
    `checkpointed`: paths of the modules that the model runs under `torch.utils.checkpoint`, "" for itself; None: of
    functions that hold no module.
    `written`: those of the buffers that are frozen parameters of the model. `weight_updates`: how trained parameters
    change before the graph runs.
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
    checkpointed: tuple[str | None, ...] = ()
    autocast: str = ""
    written: frozenset[str] = frozenset()
    weight_updates: WeightUpdates = field(default_factory=dict)

    def without_values(self) -> Trace:
        """The same, with parameters that hold no memory."""
        return replace(self, parameters={name: without_values(p) for name, p in self.parameters.items()})

    @property
    def buffer_updates(self) -> Mapping[str, fx.Node]:
        """{buffer: its value after the forward} of the buffers that the model writes."""
        rest = self.graph.output_node().args[1:]
        return rest[0] if rest else {}

    def values(self, inputs: Iterable[torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> dict[fx.Node, Any]:
        """Every value of the graph on these inputs; `tensors`: its parameters, buffers and constants by name."""
        run = _Run(nn.Module(), garbage_collect_values=False, graph=self.graph)
        run.tensors, run.extra_traceback = tensors, False
        run.run(*inputs)
        return run.env


class _Run(fx.Interpreter):
    tensors: Mapping[str, torch.Tensor]

    def fetch_attr(self, target: str) -> torch.Tensor:
        return self.tensors[target]


def device_of_weights(model: nn.Module) -> torch.device:
    """Where a model's parameters are; the host where it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def batch_size(trace: Trace) -> int:
    """Rows of the global batch: the first dim of the first input that has any (1 where none has)."""
    sizes = [shape(n)[0] for n in trace.graph.find_nodes(op="placeholder") if shape(n)]
    return max(sizes, key=sizes.count) if sizes else 1


class WithLoss(nn.Module):
    """A model that returns no loss, with the user's `loss_fn(output, target)` behind it."""

    def __init__(self, model: nn.Module, loss_fn: Any):
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, target: Any, call: dict[str, Any]) -> Any:
        return self.loss_fn(call_model(self.model, call), target)


class WithLossAndOutputs(WithLoss):
    """The same, which returns the loss and the model's own outputs."""

    def forward(self, target: Any, call: dict[str, Any]) -> Any:
        outputs = call_model(self.model, call)
        return self.loss_fn(outputs, target), outputs


def bind_call(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, in the order of the model's `forward`; those of `*args` in a tuple.

    Raises InputError where the call does not fit the signature.
    """
    if not isinstance(model, nn.Module):
        raise TraceError(
            f"a {type(model).__name__} is not a model", why="autopart partitions an nn.Module",
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
        else:
            arguments[name] = argument
    if _takes_cache(model, signature) and arguments.get(_NO_CACHE) is None:
        arguments[_NO_CACHE] = False
    register_dataclasses(arguments)
    return arguments


def _takes_cache(model: nn.Module, signature: inspect.Signature) -> bool:
    """Whether a model may return a cache, also one that hands its arguments on to another (peft)."""
    hands_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    configured = bool(getattr(getattr(model, "config", None), _NO_CACHE, False))
    return _NO_CACHE in signature.parameters or (hands_on and configured)


def _names(args: tuple, kwargs: Mapping[str, Any]) -> str:
    return ", ".join([f"{len(args)} positional inputs"] * bool(args) + list(kwargs)) or "no inputs"


def flatten_call(arguments: Mapping[str, Any]) -> Call:
    """Split the arguments into tensors (inputs) and everything else (options)."""
    leaves = leaves_with_names(dict(arguments))
    tensors = [(name, leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor)]
    options = {name: leaf for name, leaf in leaves if not isinstance(leaf, torch.Tensor)}
    return Call(tuple(t for _, t in tensors), tuple(name for name, _ in tensors), options)


def check_values(call: Call) -> None:
    """Raises InputError where an input of a call that computes has no values."""
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if tensor.is_meta:
            raise InputError(
                f"the input '{name}' is on meta", why="it has a shape and no values to compute with",
                hint=f"a tensor with values, of shape {list(tensor.shape)}; a plan alone needs none, on meta",
            )  # fmt: skip


def trace(model: nn.Module, arguments: Mapping[str, Any], written: Collection[str] = ()) -> Trace:
    """Trace `model(**arguments)`.

    Args:
        model: any module; its parameters may be on `meta`.
        arguments: the call by name, from `bind_call`.
        written: frozen parameters that another call writes, and which are buffers of this one too.
    Raises:
        TraceError: the model cannot be traced, with the user's line and what to try.
    """
    device = device_of_weights(model)
    call = flatten_call(arguments)
    if device.type != "meta":
        check_values(call)
    # Two inputs that are one tensor object would be merged into one by torch.export: trace on distinct copies.
    dtype = ambient_autocast(device.type)
    entry = Entry(model, arguments, call.names, torch.autocast(device.type, dtype) if dtype is not None else None)
    example = {name: _copy(t, device) for name, t in zip(entry.tensor_names, call.tensors, strict=True)}
    check_hooks(model)
    check_layouts(model, dict(zip(call.names, call.tensors, strict=True)))
    try:
        program = _export(entry, example)
        if entry.state.drawn or entry.state.numbers:  # full traces are compared below: which blocks repeat may differ
            program = _exported(entry, example)
        check_draws(model, entry.state, program, lambda: _exported(entry, example))
        notes = check_attributes(model, entry.state, program, lambda: _exported(entry, example))
        with _quiet(), keeping_draws():
            program = functional(program)
    except TraceError:
        raise
    except Exception as error:  # torch.export raises many kinds; each is reported with the user's own line
        raise trace_error(model, error, entry.semantics.asked) from error
    traced = replace(_from_exported(model, program, call, arguments, notes), checkpointed=entry.checkpoints.found)
    traced = replace(traced, autocast=str(dtype).removeprefix("torch.") if dtype is not None else "")
    _check_shapes(model, traced.graph, entry.semantics.asked)
    traced = _without_loss_wrapper(traced) if isinstance(model, WithLoss) else traced
    frozen = {name for name, parameter in traced.parameters.items() if not parameter.requires_grad}
    traced = _with_buffers(traced, {*written, *traced.buffer_updates} & frozen)
    return with_weight_updates(traced, type(model.model if isinstance(model, WithLoss) else model).__name__)


def _export(entry: Entry, example: Mapping[str, torch.Tensor]) -> Any:
    """The exported program without regions, blocks that repeat traced once where they can be."""
    repeats = Repeats(entry.model, entry.semantics.known)
    if not repeats.blocks:
        return _exported(entry, example)
    try:
        with repeats.watching():
            program = _exported(entry, example)
        repeats.expand(program.graph)
    except Exception as error:  # of a repeat that is not one, or of the model itself: then the full trace has it too
        if not repeats.tried:
            raise
        program = _exported(entry, example)
        if not repeats.lost and not isinstance(error, NotAlike):
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
            warnings.warn(
                f"the blocks of {type(entry.model).__name__} that repeat were traced one by one, which takes longer: "
                f"{reason}. This is a fault of autopart, and changes no result.",
                stacklevel=2,
            )
    return program


def _exported(entry: Entry, example: Mapping[str, torch.Tensor]) -> Any:
    with torch.enable_grad(), no_autocast(), _quiet(), traceable(entry, entry.apply_function):
        program = torch.export.export(entry, (), dict(example), strict=False)
    inline_regions(program.graph_module)
    drop_checks(program.graph)
    return program


def _check_shapes(model: nn.Module, graph: fx.Graph, origin: str) -> None:
    """Raises TraceError where a shape depends on values: nothing can be planned for it."""
    for node in graph.nodes:
        made = value(node)
        if isinstance(made, torch.Tensor) and not all(isinstance(size, int) for size in made.shape):
            raise shape_by_values(model, spoken_name(node), source_text(node), module_path(node), origin)


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        copied = torch.empty_like(tensor, device=device).copy_(tensor)
    return copied.requires_grad_(tensor.requires_grad)


def _from_exported(
    model: nn.Module, program: Any, call: Call, arguments: Mapping[str, Any], notes: tuple[str, ...]
) -> Trace:
    signature = program.graph_signature
    parameters, aliases = _parameter_names(model)
    constants = {f"{CONSTANT}{i}": program.constants[name] for i, name in enumerate(_lifted(program))}
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names |= dict(zip(signature.inputs_to_lifted_tensor_constants, constants, strict=True))
    first_name = {alias: name for name, others in aliases.items() for alias in others}
    own_names = {node: target.removeprefix(PREFIX) for node, target in names.items()}
    attributes = {node: first_name.get(target, target) for node, target in own_names.items()}
    graph = own_graph(program.graph_module, attributes, signature.inputs_to_parameters, call)
    name_outputs(model, graph, signature.output_specs)
    name_functions(graph)
    if arguments.get(_NO_CACHE) is False:
        notes = (f"traced with {_NO_CACHE}=False", *notes)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    mode = ("train" if model.training else "eval") + ("+input gradients" if call.with_gradient else "")
    return Trace(graph, call, parameters, aliases, buffers, constants, program.call_spec.out_spec, notes, mode)


def names_without_loss(names: tuple[str, ...]) -> tuple[str, ...]:
    """The input names of a model under `WithLoss` as the user knows them."""
    return tuple(name.removeprefix("call.") for name in names)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch.export's warnings about itself, and without the graph it dumps on stderr when it fails."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels, dumped = [logger.level for logger in loggers], io.StringIO()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(dumped):
            warnings.simplefilter("ignore", FutureWarning)
            yield
        sys.stderr.write(dumped.getvalue())
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _without_loss_wrapper(traced: Trace) -> Trace:
    """Names as the user's model has them, and operators of the loss marked (`loss`)."""
    prefix = "model."

    def own(name: str) -> str:
        return name.removeprefix(prefix)

    for node in traced.graph.nodes:
        if node.op == "get_attr":
            node.target = own(node.target)
        if node.op == "output":
            node.args = (node.args[0], {own(name): made for name, made in traced.buffer_updates.items()})
        stack = facts(node).get("nn_module_stack") or {}
        paths = [path for path, _ in stack.values()]
        facts(node)["loss"] = not any(path == "model" or path.startswith(prefix) for path in paths)
        named = {key: ("" if path == "model" else own(path), kind) for key, (path, kind) in stack.items()}
        facts(node)["nn_module_stack"] = named
    names = names_without_loss(traced.call.names)
    return replace(
        traced, call=replace(traced.call, names=names), mode=f"{traced.mode}+loss",
        parameters={own(n): p for n, p in traced.parameters.items()},
        aliases={own(n): tuple(map(own, others)) for n, others in traced.aliases.items()},
        buffers={own(n): b for n, b in traced.buffers.items()},
        checkpointed=tuple(path and own(f"{path}.").rstrip(".") for path in traced.checkpointed),
    )  # fmt: skip


def _with_buffers(traced: Trace, written: Collection[str]) -> Trace:
    """The trace with the frozen parameters that are written among its buffers: every rank holds them whole."""
    for node in traced.graph.find_nodes(op="get_attr"):
        facts(node)["parameter"] = bool(facts(node).get("parameter")) and node.target not in written
    parameters = {name: p for name, p in traced.parameters.items() if name not in written}
    buffers = {name: traced.parameters[name] for name in traced.parameters if name in written}
    return replace(traced, parameters=parameters, buffers={**traced.buffers, **buffers}, written=frozenset(buffers))


def _lifted(program: Any) -> list[str]:
    return list(program.graph_signature.inputs_to_lifted_tensor_constants.values())


def _parameter_names(model: nn.Module) -> tuple[dict, dict]:
    """Parameters by the name `named_parameters()` gives, with the other names of tied ones."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    parameters = dict(model.named_parameters())
    aliases = {names[0]: tuple(names[1:]) for names in by_id.values() if len(names) > 1}
    return parameters, aliases
