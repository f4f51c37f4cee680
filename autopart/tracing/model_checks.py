"""Checks that a model can be traced, made before its first trace."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

from autopart.compat.export_internals import initialize_lazy
from autopart.compat.torch_internals import has_values
from autopart.errors import InputError, Refusal, TraceError
from autopart.ir.trace import Call

_NAMES_OF_GRAPHS = frozenset({"meta", *dir(fx.GraphModule)}.difference(dir(nn.Module)))
"""Attributes of fx.GraphModule: a GraphModule could not hold a model's tensor of one of these names."""


def give_lazy_weights(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Initialize the lazy modules of a model as its first call would, without other effects of that call.

    A copy of the model is called. Each lazy module of the model is then initialized with the inputs that its copy got,
    in the order of these calls. Raises TraceError if the call fails.
    """
    paths = [path for path, module in model.named_modules() if _is_lazy(module)]
    if not paths:
        return
    buffers = [b for b in model.buffers() if is_lazy(b)]  # torch cannot copy lazy parameters
    kind: Any = UninitializedBuffer
    new = {id(b): kind(requires_grad=False, device=b.device, dtype=b.dtype) for b in buffers}
    copied, calls = copy.deepcopy(model, new), dict[str, tuple[tuple, dict[str, Any]]]()

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any], path: str) -> None:
        calls.setdefault(path, (args, kwargs))

    for path in paths:
        copied.get_submodule(path).register_forward_pre_hook(partial(note, path=path), with_kwargs=True)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            copied(*args, **kwargs)
    except Exception as error:  # the model's code may raise anything
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
        raise _lazy(model, paths[0], f"their shapes come with its first call, which fails: {reason}") from error
    for path, (args, kwargs) in calls.items():
        initialize_lazy(model.get_submodule(path), args, kwargs)


def _is_lazy(module: nn.Module) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(is_lazy(tensor) for tensor in tensors if tensor is not None)


def _lazy(model: nn.Module, path: str, why: str) -> TraceError:
    name = f"'{path}'" if path else "the model"
    return TraceError(
        f"{name} is a {type(model.get_submodule(path)).__name__} that has no weights yet", refusal=Refusal.PART,
        why=why, hint="call the model once before: with torch.no_grad(): model(...)",
    )  # fmt: skip


def check_model(model: Any) -> None:
    """Raise TraceError for an object that cannot be traced, such as a TorchScript or lazy module."""
    if not isinstance(model, nn.Module):
        raise TraceError(
            f"a {type(model).__name__} is not a model", why="autopart partitions an nn.Module",
            hint="an nn.Module whose forward calls it",
        )  # fmt: skip
    for name in (*model._parameters, *model._buffers, *model._modules):
        if name in _NAMES_OF_GRAPHS:
            raise TraceError(
                f"{type(model).__name__} has a parameter, buffer or module called '{name}'", refusal=Refusal.PART,
                why=f"the modules of torch.fx that run its program have an attribute '{name}' of their own",
                hint=f"another name, such as self.{name}_",
            )  # fmt: skip
    for path, module in model.named_modules():
        name = f"'{path}'" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise TraceError(
                f"{name} is a TorchScript module", refusal=Refusal.PART, why="it has no Python code to trace",
                hint="the nn.Module that it was scripted or traced from; compile=True compiles it",
            )  # fmt: skip
        if _is_lazy(module):
            raise _lazy(model, path, "their shapes come with its first call, and this one does not call it")
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not tensor.is_meta and not has_values(tensor):
                raise TraceError(
                    f"'{f'{path}.{name}'.lstrip('.')}' is a fake tensor, without values", refusal=Refusal.STATE,
                    why="an earlier torch.export ran the forward, which stores this tensor in its first call; or the "
                    "model was built under FakeTensorMode",
                    hint="build the model again, and call it once before torch.export; or use torch.device('meta')",
                )  # fmt: skip


def check_no_new_parameters(model: nn.Module, names: Collection[str]) -> None:
    """Raise TraceError if a forward has created parameters."""
    for name in names:
        raise TraceError(
            f"forward() of {type(model).__name__} creates the parameter '{name}'", refusal=Refusal.STATE,
            why="an optimizer and a plan need all parameters before the first call",
            hint="create it in __init__; or call the model once before: with torch.no_grad(): model(...)",
        )  # fmt: skip


def check_hooks(model: nn.Module) -> None:
    """Raise TraceError if a module has backward hooks, which a trace of the forward does not record."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise TraceError(
                f"'{name or type(model).__name__}' has a backward hook",
                refusal=Refusal.HOOK,
                why="only the forward is traced; its gradients are computed without hooks of modules",
                hint="remove it, or use tensor.register_hook inside forward()",
            )


def check_not_empty(call: Call) -> None:
    """Raise InputError if a call has no samples, or no elements at all, such as sequences of length 0."""
    sizes = [tensor.size(0) for tensor in call.tensors if tensor.dim()]
    if not sizes or (max(sizes, key=sizes.count) and any(tensor.numel() for tensor in call.tensors if tensor.dim())):
        return
    name, tensor = next((name, t) for name, t in zip(call.names, call.tensors, strict=True) if not t.numel())
    raise InputError(
        f"the input '{name}' is empty: its shape is {list(tensor.shape)}",
        why="there is nothing to compute" + (": the batch has no samples" if not tensor.size(0) else ""),
        hint="leave out this call, on every rank",
    )
