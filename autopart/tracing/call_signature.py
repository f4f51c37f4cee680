"""Wrapper of a model for one trace: it has only the call's tensors as inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import CheckpointFunction

from autopart.compat.export_internals import redirected_conditions, redirected_transforms
from autopart.compat.nested_internals import jagged_operators
from autopart.compat.torch_internals import (
    Tracing,
    has_values,
    leaves_with_names,
    register_mapping,
    tree_flatten,
    tree_unflatten,
)
from autopart.tracing.autograd.autograd_functions import apply_as_operator
from autopart.tracing.autograd.cond_branches import both_branches
from autopart.tracing.autograd.func_transforms import transformed
from autopart.tracing.dynamic.host_functions import host_functions
from autopart.tracing.nested_tensors import check_outputs, run_jagged
from autopart.tracing.python.assigned_buffers import AssignedBuffers
from autopart.tracing.python.concrete_constants import tensors_in
from autopart.tracing.python.eager_semantics import EagerSemantics, ambient_autocast
from autopart.tracing.python.number_inputs import NUMBERS, assigned
from autopart.tracing.python.python_random import drawn_by_torch
from autopart.tracing.python.python_state import PythonState
from autopart.tracing.python.recorded_reads import watched_frames
from autopart.tracing.python.user_checkpoints import UserCheckpoints
from autopart.tracing.with_loss import call_model, users_inputs, users_modules, users_name, without_caches

PREFIX = "model."
"""Prefix of the model's own parameters and modules inside an `ExportEntry`."""


class ExportEntry(nn.Module):
    """Module that torch.export traces: it calls the model with the call's tensors as its only inputs.

    All other arguments are constants of the trace, and can be of any type. The names of the inputs come from
    `tensor_names`. The outputs are those of the model.

    Attributes:
        autocast: the autocast state of the call.
        state: recorder of the forward's side effects.

    Args:
        buffers: {name: current value} of buffers that differ from the model's.
    """

    def __init__(
        self, model: nn.Module, arguments: Mapping[str, Any], names: tuple[str, ...], device: torch.device,
        buffers: Mapping[str, Tensor] = MappingProxyType({}),
    ):  # fmt: skip
        super().__init__()
        dtype = ambient_autocast(device.type)
        self.autocast = torch.autocast(device.type, dtype) if dtype is not None else nullcontext()
        self.model, self.state, self.assigned = model, PythonState(model), AssignedBuffers(model)
        self.checkpoints = UserCheckpoints(model)
        self.numbers = dict(arguments.get(NUMBERS, {}))
        leaves, self.spec = tree_flatten({name: leaf for name, leaf in arguments.items() if name != NUMBERS})
        self.leaf_names = [name for name, _ in leaves_with_names(arguments)][: len(leaves)]
        self.options = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        inputs = [leaf for leaf in (*leaves, *self.numbers.values()) if isinstance(leaf, Tensor)]
        self.real = inputs
        self.semantics = EagerSemantics([*model.parameters(), *model.buffers(), *inputs])
        of_model = {users_name(model, name): buffer for name, buffer in model.named_buffers(remove_duplicate=False)}
        real = {name: buffer for name, buffer in {**of_model, **buffers}.items() if has_values(buffer)}
        self.semantics.known.buffers = real
        self.draws_by_torch = False  # True: torch draws Python's random numbers
        self.draws_on_host = False  # True: functions that draw them are host functions
        self.spoken = users_inputs(model, names)
        self.tensor_names = tensor_names(names)

    def apply_function(self, apply: Any, function: type, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Trace `function.apply(*args, **kwargs)` of an autograd.Function. `apply` is torch's own function."""
        if function is CheckpointFunction:
            return self.checkpoints.apply(apply, function, args, kwargs)
        args, kwargs = self.semantics.without_frozen(args, kwargs)
        return apply_as_operator(apply, function, args, kwargs, self.semantics.spend)

    def forward(self, **tensors: Tensor) -> Any:
        for name, spoken in zip(self.tensor_names, self.spoken, strict=True):
            self.semantics.named(tensors[name], f"the input {spoken}")
        is_traced = Tracing.current() is not None
        if is_traced:
            self.semantics.known.bind([tensors[name] for name in self.tensor_names], self.real)
        remaining = iter([tensors[name] for name in self.tensor_names])
        pairs = zip(self.leaf_names, self.options, self.is_tensor, strict=True)
        leaves = {name: next(remaining) if is_tensor else option for name, option, is_tensor in pairs}
        given = zip(self.numbers.items(), remaining, strict=True)
        numbers = {name: (tensor if is_traced else real).item() for (name, real), tensor in given}
        if is_traced:
            self.semantics.known.bind_numbers(list(numbers.values()))
        arguments = [numbers.get(name, leaf) for name, leaf in leaves.items()]
        paths = {module: f"the output of {path or 'the model'}" for path, module in users_modules(self.model)}

        def name_output(module: nn.Module, args: Any, output: Any) -> None:
            if module in paths:
                self.semantics.named(output, paths[module])

        semantics = self.semantics if is_traced else nullcontext()
        hook = register_module_forward_hook(name_output)
        floats, checkpoints = self.semantics.floats.given(), self.checkpoints.watching()
        written = self.assigned.written(self.semantics.known if is_traced else None)
        draws = drawn_by_torch(as_numbers=not is_traced) if self.draws_by_torch else nullcontext()
        host: AbstractContextManager[None] = nullcontext()
        if is_traced:
            host = host_functions(self.model, self.semantics.known, self.semantics.found, self.draws_on_host)
        conditions = redirected_conditions(self.semantics.condition if is_traced else both_branches)
        transforms = redirected_transforms(transformed)
        nested = jagged_operators(partial(run_jagged, self.semantics.read), lambda: self.semantics)
        # Entered before `semantics`, which inspects its callers' frames.
        watched = watched_frames(self.semantics.sizes if is_traced else None)
        with (
            watched, written, assigned(numbers), self.state, self.autocast, floats, semantics, hook, checkpoints,
            conditions, transforms, draws, host, nested,
        ):  # fmt: skip
            call = tree_unflatten(arguments, self.spec)
            returned = call_model(self.model, call)
            output = without_caches(returned, call)
            self.semantics.drops_caches = output is not returned
            self.semantics.check_unspent(tensors_in(output))
            check_outputs(tensors_in(output))
            self.semantics.arrays.check_unchanged()
            self.semantics.check_unfrozen()
        register_dataclasses(output)
        return output


def tensor_names(names: Sequence[str]) -> list[str]:
    """Return one Python identifier per input tensor. Dots, as in `pair.0`, become underscores."""
    plain: list[str] = []
    for name in names:
        new = name.replace(".", "_")
        plain.append(new if new not in plain else f"{new}_{len(plain)}")
    return plain


def register_dataclasses(value: Any) -> None:
    """Register container classes in a value as pytree nodes: dataclasses with tensors, dict subclasses.

    Classes that are registered already are left unchanged.
    """
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, dict):
            register_mapping(type(leaf))
            return register_dataclasses(value)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            continue
        fields = [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
        register_dataclasses(fields)
        if any(isinstance(part, Tensor) for part in tree_flatten(fields)[0]):
            kind = type(leaf)
            torch.export.register_dataclass(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
            return register_dataclasses(value)
    return None
