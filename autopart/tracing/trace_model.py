"""Trace of a model: convert an example call to a flat `torch.fx` graph of functional operators.

`trace` uses `torch.export` (non-strict): the model's own Python runs once on fake tensors. Every node has the user's
source line and module path. Parameters and buffers are `get_attr` nodes under their names in the model.
"""

from __future__ import annotations

import inspect
import io
import logging
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from autopart.common.scoped import no_autocast
from autopart.compat.export_internals import compiled_when_called, restored_transforms, short_stacks
from autopart.compat.nested_internals import make_view_dummy
from autopart.compat.symbolic_shape_internals import many_elements
from autopart.compat.torch_internals import keeping_draws, leaves_with_names
from autopart.errors import InputError, TraceError
from autopart.ir.facts import facts
from autopart.ir.graph import display_name, module_path, source_of, source_text, value
from autopart.ir.trace import Call, Trace, device_of_weights
from autopart.tracing.autograd.autograd_functions import name_function_nodes
from autopart.tracing.autograd.differentiable_operators import differentiable_operators
from autopart.tracing.autograd.in_place_writes import explicit_writes
from autopart.tracing.autograd.saved_views import saved_views
from autopart.tracing.autograd.tensor_hooks import Rewrites
from autopart.tracing.autograd.traced_weight_updates import with_weight_updates
from autopart.tracing.blocks.repeated_blocks import NotARepeat, RepeatedBlocks
from autopart.tracing.call_signature import PREFIX, ExportEntry, register_dataclasses, tensor_names
from autopart.tracing.dynamic.input_decisions import Site
from autopart.tracing.dynamic.random_branches import random_branch_notes, with_random_branches
from autopart.tracing.dynamic.unbacked_sizes import with_bounded_sizes
from autopart.tracing.exported_graph import CONSTANT, drop_checks, functional, inline_regions, name_outputs, own_graph
from autopart.tracing.model_checks import (
    check_hooks,
    check_model,
    check_no_new_parameters,
    check_not_empty,
    give_lazy_weights,
)
from autopart.tracing.python.assigned_buffers import again_filled, check_caches, computed
from autopart.tracing.python.eager_semantics import EagerSemantics, ambient_autocast, traceable
from autopart.tracing.python.python_random import DRAWN_BY_TORCH
from autopart.tracing.python.python_state import check_attributes, check_draws, same_containers
from autopart.tracing.sparse_buffers import check_layouts
from autopart.tracing.trace_errors import TraceAgain, shape_by_values, trace_error, without_values_error
from autopart.tracing.with_loss import WithLoss, check_unwritten, is_of_loss, users_inputs, users_model, users_name

_NO_CACHE = "use_cache"
_LOGGERS = "torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor"


def bind_call(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call's arguments by name, in the order of the model's `forward`; `*args` as a tuple.

    Also initializes lazy modules. Adds `use_cache=False` if the model can return a key/value cache and the call does
    not set `use_cache`.
    Raises InputError if the call does not fit the signature, TraceError if the model cannot be traced.
    """
    if isinstance(model, nn.Module):
        give_lazy_weights(model, args, kwargs)
    check_model(model)
    return bind_next_call(model, inspect.signature(model.forward), args, kwargs)


def bind_next_call(
    model: nn.Module, signature: inspect.Signature, args: tuple, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Bind a call of a model that was traced before: like `bind_call`, without checking its modules again."""
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
    if others := [argument for argument in arguments.values() if not isinstance(argument, torch.Tensor)]:
        register_dataclasses(others)
    return arguments


def _takes_cache(model: nn.Module, signature: inspect.Signature) -> bool:
    """Return True if a model, or the model that it wraps (as peft does), can return a key/value cache."""
    hands_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    return _NO_CACHE in signature.parameters or (hands_on and _has_cache(getattr(model, "config", None)))


def _has_cache(config: Any) -> bool:
    """Return True if a config, or one nested in it (`config.text_config`), has `use_cache=True`."""
    nested = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return bool(getattr(config, _NO_CACHE, False)) or any(map(_has_cache, nested))


def _names(args: tuple, kwargs: Mapping[str, Any]) -> str:
    return ", ".join([f"{len(args)} positional inputs"] * bool(args) + list(kwargs)) or "no inputs"


def flatten_call(arguments: Mapping[str, Any]) -> Call:
    """Split the arguments of a call into tensors (the inputs) and all other values (the options)."""
    leaves = leaves_with_names(arguments)
    tensors = [(name, leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor)]
    options = {name: leaf for name, leaf in leaves if not isinstance(leaf, torch.Tensor)}
    gradients = tuple(t.requires_grad for _, t in tensors)
    return Call(tuple(t for _, t in tensors), tuple(name for name, _ in tensors), options, gradients)


def check_values(call: Call) -> None:
    """Raise InputError if an input of a call that will run is on the meta device."""
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if tensor.is_meta:
            raise InputError(
                f"the input '{name}' is on meta", why="it has a shape, but no values to compute with",
                hint=f"a tensor with values, of shape {list(tensor.shape)}; only plan() accepts inputs on meta",
            )  # fmt: skip


@restored_transforms()
def trace(
    model: nn.Module, arguments: Mapping[str, Any], written: Collection[str] = (),
    buffers: Mapping[str, torch.Tensor] = MappingProxyType({}), read: set[Site] | None = None,
) -> Trace:  # fmt: skip
    """Trace `model(**arguments)` and return its graph, parameters and buffers.

    Args:
        model: any module; its parameters can be on `meta`.
        arguments: the call by name, from `bind_call`.
        written: frozen parameters that the forward writes in another call. They become buffers in this trace, too.
        buffers: {name: current value} of buffers that differ from the model's.
        read: calls in the user's code, such as `x.item()`, that return the real value of an input instead of a symbol.
            The trace adds further calls that need this.
    Raises:
        TraceError: the model cannot be traced. The error has the user's source line and a hint.
    """
    make_view_dummy()
    device = device_of_weights(model)
    call = flatten_call(arguments)
    if device.type != "meta":
        check_values(call)
    check_not_empty(call)
    # torch.export would merge two inputs that are one tensor object, so they are copied for the trace.
    entry = ExportEntry(model, arguments, call.names, device, buffers)
    example = {name: _copy(t, device) for name, t in zip(entry.tensor_names, call.tensors, strict=True)}
    check_hooks(users_model(model))
    check_layouts(users_model(model), dict(zip(call.names, call.tensors, strict=True)))
    decisions = entry.semantics.decisions
    decisions.sites |= read or set()
    entry.semantics.may_rewrite |= bool(read)  # a guard needs it
    while True:
        try:
            traced = _traced(model, arguments, written, call, entry, example)
            if read is not None:
                read |= decisions.sites
            return traced
        except TraceError as error:
            if not decisions.specialise(error):
                raise (
                    without_values_error(error) if entry.semantics.known.lacks_values else error
                ) from error.__cause__


def _traced(
    model: nn.Module, arguments: Mapping[str, Any], written: Collection[str], call: Call, entry: ExportEntry,
    example: Mapping[str, torch.Tensor],
) -> Trace:  # fmt: skip
    try:
        program = _export(entry, example)
        check_no_new_parameters(users_model(model), entry.state.new_parameters)
        # The comparisons below need full traces, because blocks may repeat differently in each trace.
        if entry.state.drawn or entry.state.numbers:
            program = _exported(entry, example)
        program = _with_draws(entry, example, program)
        of_numbers = entry.state.pop_symbolic(entry.semantics.known)
        notes, updates = check_attributes(
            users_model(model), entry.state, program, entry.semantics.known,
            lambda: again_filled(entry.assigned, lambda: _exported(entry, example)),
            computed if entry.assigned.caches else None,
        )  # fmt: skip
        check_caches(users_model(model), entry.assigned, program, lambda: _exported(entry, example))
        with _quiet(entry.semantics), keeping_draws():
            explicit_writes(program.graph)
            program = functional(program)
    except TraceError:
        raise
    except Exception as error:  # torch.export raises many kinds of errors; each is reported with the user's source line
        raise trace_error(model, error, entry.semantics.asked, entry.semantics.chances.limit) from error
    traced = replace(_from_exported(model, program, call, arguments, notes), checkpointed=entry.checkpoints.found)
    with_bounded_sizes(traced.graph, list(entry.semantics.skipped.lines))
    passed = [f"the program does not contain a check of values: {text}" for text in entry.semantics.passed]
    both = ["both branches of torch.cond are computed, and the condition selects the result"] * entry.semantics.both
    notes = (
        *traced.notes,
        *passed,
        *both,
        *random_branch_notes(entry.semantics.chances, traced.graph),
        *[DRAWN_BY_TORCH] * entry.draws_by_torch,
        *["the key/value cache among the outputs is dropped"] * entry.semantics.drops_caches,
        *entry.semantics.hook_notes,
        *entry.semantics.skipped.notes(),
        *entry.semantics.decisions.notes(),
    )
    traced = replace(traced, has_random_branches=entry.semantics.chances.count > 0)
    dtype = ambient_autocast(device_of_weights(model).type)
    autocast = str(dtype).removeprefix("torch.") if dtype is not None else ""
    traced = replace(traced, notes=notes, autocast=autocast, value_guards=entry.semantics.decisions.guards,
                     size_conditions=tuple(entry.semantics.sizes))  # fmt: skip
    traced = replace(traced, attribute_updates={**updates, **of_numbers})
    _check_shapes(model, traced.graph, entry.semantics.asked)
    frozen = {name for name, parameter in traced.parameters.items() if not parameter.requires_grad}
    traced = _with_buffers(traced, {*written, *traced.buffer_updates} & frozen)
    return with_weight_updates(traced, type(users_model(model)).__name__)


def _with_draws(entry: ExportEntry, example: Mapping[str, torch.Tensor], program: Any) -> Any:
    """Return the program, or another trace if the program depends on random numbers of Python or numpy.

    The other trace draws these numbers from torch's generator. If this fails, the program calls the functions of the
    model that draw them in every step (host functions).
    """

    def check(program: Any) -> None:
        check_draws(users_model(entry.model), entry.state, program, lambda: _exported(entry, example))

    try:
        check(program)
        return program
    except TraceError as refused:
        entry.semantics.may_rewrite = True
        for entry.draws_by_torch, entry.draws_on_host in ((True, False), (False, True)):
            try:
                program = _exported(entry, example)
                check(program)
                return program
            except Exception as error:  # torch returns a tensor where a number is needed
                failure = error
        raise refused from (failure if isinstance(failure, TraceError) else None)


def _export(entry: ExportEntry, example: Mapping[str, torch.Tensor]) -> Any:
    """Run torch.export, tracing repeated blocks once if possible, and inline nested regions."""
    while True:
        try:
            return _export_blocks(entry, example)
        except TraceAgain:
            continue
        except Rewrites:
            entry.semantics.may_rewrite = True
        except Exception:
            semantics = entry.semantics
            if semantics.numbers_stay or not semantics.numbers_drawn:
                raise
            semantics.may_rewrite = semantics.numbers_stay = True


def _export_blocks(entry: ExportEntry, example: Mapping[str, torch.Tensor]) -> Any:
    if entry.semantics.may_rewrite:
        return _exported(entry, example)
    repeats = RepeatedBlocks(entry.model, entry.semantics.known)
    try:
        with repeats.watching():
            program = _exported(entry, example)
        repeats.expand(program.graph)
    except (TraceAgain, Rewrites):
        raise
    except Exception as error:  # caused by the handling of repeated blocks; an error of the model itself occurs again
        if not repeats.tried and not entry.semantics.differentiates:
            raise
        program = _exported(entry, example)
        if repeats.tried and not repeats.lost and not isinstance(error, NotARepeat):
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
            warnings.warn(
                f"the blocks of {type(users_model(entry.model)).__name__} that are equal were traced one by one, which "
                f"takes longer: {reason}. This is a fault of autopart, and changes no result.",
                stacklevel=2,
            )
    return program


def _exported(entry: ExportEntry, example: Mapping[str, torch.Tensor]) -> Any:
    chances = entry.semantics.chances
    chances.start()
    chances.by_values.clear()
    try:
        program = _exported_once(entry, example)
        if not chances.count:
            return program
        numbers = {name: str(number) for name, number in entry.state.numbers.items()}

        def again() -> Any:
            side = _exported_once(entry, example)
            if chances.by_values and numbers != {name: str(number) for name, number in entry.state.numbers.items()}:
                raise TraceError("a side of a branch on values changes an attribute of the model")
            return side

        return with_random_branches(program, chances, again)
    except (TraceAgain, Rewrites):
        raise
    except Exception as error:  # a side raises, or the sides cannot be merged: trace again, rejecting the branch
        if not chances.by_values:
            raise
        chances.refuse_values(error)
        return _exported(entry, example)


def _exported_once(entry: ExportEntry, example: Mapping[str, torch.Tensor]) -> Any:
    differentiated = _differentiated(entry.semantics) if entry.semantics.differentiates else nullcontext()
    quiet = _quiet(entry.semantics)
    entry.semantics.sizes.clear()
    entry.semantics.hooked.clear()
    entry.semantics.toggled.clear()
    entry.semantics.spent.clear()
    entry.semantics.slices.clear()
    entry.semantics.arrays.clear()
    entry.semantics.hooks.clear()
    entry.semantics.skipped.running.clear()
    traced = traceable(entry, entry.apply_function, entry.semantics.to_list)
    stacks = short_stacks(ExportEntry.forward.__code__)
    containers = same_containers(entry.model)
    with torch.enable_grad(), no_autocast(), compiled_when_called(), stacks, quiet, traced, differentiated, containers:
        program = torch.export.export(entry, (), dict(example), strict=False)
    inline_regions(program.graph_module)
    drop_checks(program.graph)
    return program


@contextmanager
def _differentiated(semantics: EagerSemantics) -> Iterator[None]:
    """Trace operators in a `with` block so that `torch.autograd.grad` can differentiate them."""
    semantics.twice_only.clear()
    semantics.gradients.clear()
    with saved_views(), differentiable_operators(semantics.twice_only):
        yield


def _check_shapes(model: nn.Module, graph: fx.Graph, origin: str) -> None:
    """Raise TraceError if a shape in the graph depends on tensor values: such a graph cannot be planned."""
    for node in graph.nodes:
        output = value(node)
        if isinstance(output, torch.Tensor) and not all(isinstance(size, int) for size in output.shape):
            raise shape_by_values(model, display_name(source_of(node)[0]), source_text(node), module_path(node), origin)


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.no_grad():
        copied = torch.empty_like(tensor, device=device).copy_(tensor)
    return copied.requires_grad_(tensor.requires_grad)


def _from_exported(
    model: nn.Module, program: Any, call: Call, arguments: Mapping[str, Any], notes: tuple[str, ...]
) -> Trace:
    signature = program.graph_signature

    def name_of(name: str) -> str:
        return users_name(model, name.removeprefix(PREFIX))

    plain_names = tensor_names(call.names)
    call = replace(call, names=users_inputs(model, call.names))
    named, aliases = _parameter_names(model)
    parameters = {name: parameter for name, parameter in named.items() if not is_of_loss(model, name)}
    lifted = signature.inputs_to_lifted_tensor_constants
    constants = {f"{CONSTANT}{i}": program.constants[name] for i, name in enumerate(lifted.values())}
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names |= dict(zip(lifted, constants, strict=True))
    kept = _kept_elsewhere(model, constants)
    names = {node: kept.get(name, name) for node, name in names.items()}
    constants = {name: constant for name, constant in constants.items() if name not in kept}
    first_name = {alias: name for name, others in aliases.items() for alias in others}
    own_names = {node: name_of(target) for node, target in names.items()}
    attributes = {node: first_name.get(target, target) for node, target in own_names.items()}
    of_model = [node for node in signature.inputs_to_parameters if attributes[node] in parameters]
    graph = own_graph(program.graph_module, attributes, of_model, call)
    if isinstance(model, WithLoss):
        _mark_loss(model, graph)
    inputs = dict(zip(plain_names, call.names, strict=True))

    def named_as(target: str) -> str:
        return inputs.get(target, name_of(target))

    notes += name_outputs(users_model(model), graph, signature.output_specs, named_as, call, constants)
    check_unwritten(model, graph.output_node().args[1])
    name_function_nodes(graph)
    if arguments.get(_NO_CACHE) is False:
        notes = (f"traced with {_NO_CACHE}=False", *notes)
    buffers = {users_name(model, name): buffer for name, buffer in model.named_buffers(remove_duplicate=False)}
    buffers |= {name: parameter for name, parameter in named.items() if name not in parameters}
    mode = ("train" if model.training else "eval") + ("+input gradients" if call.with_gradient else "")
    mode += "+loss" if isinstance(model, WithLoss) else ""
    return Trace(graph, call, parameters, aliases, buffers, constants, program.call_spec.out_spec, notes, mode)


@contextmanager
def _quiet(semantics: EagerSemantics) -> Iterator[None]:
    """Run torch.export in a `with` block, without its warnings and the graph that it prints when it fails.

    Conditions on data-dependent sizes are decided by `many_elements` (torch would raise an error). An `if` that only
    controls writes is traced as if its code always ran.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels, dumped = [logger.level for logger in loggers], io.StringIO()
    decided = many_elements(semantics.skipped.answer, semantics.decisions.decide, semantics.by_values)
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(dumped), decided:
            warnings.simplefilter("ignore", FutureWarning)
            yield
        sys.stderr.write(dumped.getvalue())
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _mark_loss(model: WithLoss, graph: fx.Graph) -> None:
    """Mark the operators and inputs that only the loss function uses (in each node's metadata).

    Also replace paths of modules in the `WithLoss` wrapper by their paths in the user's model.
    """
    for node in graph.nodes:
        stack = facts(node).get("nn_module_stack") or {}
        facts(node)["loss"] = not any(f"{path}.".startswith("model.") for path, _ in stack.values())
        facts(node)["nn_module_stack"] = {key: (users_name(model, path), kind) for key, (path, kind) in stack.items()}
    for node in graph.find_nodes(op="placeholder"):
        facts(node)["loss"] = all(facts(user)["loss"] for user in node.users)


def _with_buffers(traced: Trace, written: Collection[str]) -> Trace:
    """Return a trace in which frozen parameters that the forward writes are buffers."""
    for node in traced.graph.find_nodes(op="get_attr"):
        facts(node)["parameter"] = bool(facts(node).get("parameter")) and node.target not in written
    parameters = {name: p for name, p in traced.parameters.items() if name not in written}
    buffers = {name: traced.parameters[name] for name in traced.parameters if name in written}
    return replace(traced, parameters=parameters, buffers={**traced.buffers, **buffers}, written=frozenset(buffers))


def _kept_elsewhere(model: nn.Module, constants: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return {constant: name} for constants of a trace that are parameters or buffers of the model.

    Such a constant exists if the forward reads the tensor through a list or dict, not a module attribute.
    """
    names_by_place = {_place(t): f"{PREFIX}{name}" for name, t in (*model.named_buffers(), *model.named_parameters())}
    return {name: names_by_place[_place(t)] for name, t in constants.items() if _place(t) in names_by_place}


def _place(tensor: torch.Tensor) -> tuple:
    """Return a key of a tensor's memory, which also works for a tensor without values."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _parameter_names(model: nn.Module) -> tuple[dict, dict]:
    """Return {name: parameter} without duplicates, and {name: other names} for tied parameters."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(users_name(model, name))
    parameters = {users_name(model, name): parameter for name, parameter in model.named_parameters()}
    aliases = {names[0]: tuple(names[1:]) for names in by_id.values() if len(names) > 1}
    return parameters, aliases
