"""Traces of transformers' models, remembered in a process: many tests plan one small model, and tracing it takes longer
than what they look at.

Only `autopart.recipe` remembers, through which plans and programs go; `autopart.tracing.trace.trace` always traces. A
model is the same if it pickles to the same bytes, its code and classes are the same objects, and its buffers and the
call have the same values.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import types
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopart import recipe
from autopart.tracing.calls import Recent
from autopart.tracing.eager_semantics import ambient_autocast
from autopart.tracing.folding import copied
from autopart.tracing.skeleton import has_memory
from autopart.tracing.trace import Trace, flatten_call
from autopart.tracing.with_loss import users_model, users_name

REMEMBERED = 64
_CODE = type, types.FunctionType, types.ModuleType
_traced: Recent[tuple[Trace, list[Any]]] = Recent(REMEMBERED)
_trace = recipe.trace


def remember() -> None:
    """From here on."""
    recipe.trace = _remembered


def _remembered(model: nn.Module, arguments: Mapping[str, Any], written: Collection[str] = ()) -> Trace:
    of_transformers = type(users_model(model)).__module__.startswith("transformers.")
    key = _key(model, arguments, written) if of_transformers else None
    if key is None:
        return _trace(model, arguments, written)
    digest, code = key
    traced, _ = _traced.get(digest, lambda: (_without_tensors(_trace(model, arguments, written)), code))
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    named = {users_name(model, name): tensor for name, tensor in tensors}
    return replace(
        traced,
        graph=copied(traced.graph),
        call=replace(traced.call, tensors=flatten_call(arguments).tensors),
        parameters={name: named[name] for name in traced.parameters},
        buffers={name: named[name] for name in traced.buffers},
    )


def _without_tensors(traced: Trace) -> Trace:
    """Without what would keep the memory of a model."""
    nothing = torch.empty(0)
    call = replace(traced.call, tensors=())
    parameters, buffers = dict.fromkeys(traced.parameters, nothing), dict.fromkeys(traced.buffers, nothing)
    return replace(traced, call=call, parameters=parameters, buffers=buffers)


def _key(
    model: nn.Module, arguments: Mapping[str, Any], written: Collection[str]
) -> tuple[str, list[Any]] | None:  # fmt: skip
    """What tells calls apart, and the code that it names by its identity, which therefore must stay; None: what has no
    bytes."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    modes = torch.is_grad_enabled(), torch.get_default_dtype(), ambient_autocast("cpu")
    try:
        pickler.dump((model, dict(arguments), sorted(written), modes))
    except (TypeError, AttributeError, RuntimeError, pickle.PicklingError):
        return None
    return hashlib.sha256(pickled.getvalue()).hexdigest(), pickler.code


class _Pickler(pickle.Pickler):
    """Tensors by what a trace may see of them, code by its identity."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.code: list[Any] = []
        self.tensors: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            number = self.tensors.setdefault(id(value), len(self.tensors))
            return number, type(value), value.shape, value.stride(), value.dtype, value.requires_grad, _values(value)
        if isinstance(value, _CODE):
            self.code.append(value)
            return value.__name__, id(value)
        return None


def _values(tensor: Tensor) -> Any:
    if isinstance(tensor, nn.Parameter) or tensor.device.type != "cpu" or not has_memory(tensor):
        return tensor.device.type
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
