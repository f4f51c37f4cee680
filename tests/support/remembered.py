"""Traces of the zoo's models and of others of transformers, remembered in a folder for one run of the tests: many tests
and all of their ranks plan one small model, and tracing it takes longer than what they look at.

Only `autopart.recipe` remembers, through which plans and programs go; `autopart.tracing.trace.trace` always traces. A
model is the same if it pickles to the same bytes: its tensors by shapes and dtypes, buffers and inputs by values, code
by its name, so one with a function or class that was made in another is traced. So is one whose trace has no bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import pickle
import types
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autopart import recipe
from autopart.tracing.eager_semantics import ambient_autocast
from autopart.tracing.skeleton import has_memory
from autopart.tracing.trace import Trace, flatten_call
from autopart.tracing.with_loss import users_model, users_name

FOLDER = "AUTOPART_REMEMBERED_TRACES"
"""The variable of the environment that names the folder; without it nothing is remembered."""
_CODE = type, types.FunctionType, types.ModuleType
_NO_BYTES = TypeError, AttributeError, RuntimeError, pickle.PicklingError
_trace = recipe.trace


def remember() -> None:
    """From here on."""
    recipe.trace = _remembered


def _remembered(model: nn.Module, arguments: Mapping[str, Any], written: Collection[str] = ()) -> Trace:
    folder = os.environ.get(FOLDER)
    is_known = type(users_model(model)).__module__.startswith(("transformers.", "zoo"))
    digest = _digest(model, arguments, written) if folder and is_known else None
    if digest is None:
        return _trace(model, arguments, written)
    path = Path(folder, digest)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of ranks that ask at once one traces, and the others wait
        if not path.exists():
            traced = _trace(model, arguments, written)
            path.write_bytes(_bytes_of(traced))
            return traced
    stored = path.read_bytes()
    return _of(stored, model, arguments) if stored else _trace(model, arguments, written)


# --- Which model and call ------------------------------------------------------------------------------------------


def _digest(model: nn.Module, arguments: Mapping[str, Any], written: Collection[str]) -> str | None:
    """What tells calls apart; None: it has no bytes."""
    pickled = io.BytesIO()
    modes = torch.is_grad_enabled(), torch.get_default_dtype(), ambient_autocast("cpu")
    try:
        _Described(pickled).dump((model, dict(arguments), sorted(written), modes))
    except _NO_BYTES:
        return None
    return hashlib.sha256(pickled.getvalue()).hexdigest()


class _Described(pickle.Pickler):
    """Tensors by what a trace may see of them, code by its name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            number = self.numbers.setdefault(id(value), len(self.numbers))
            shape = tuple(value.shape), value.stride(), str(value.dtype), value.requires_grad
            return number, type(value).__name__, shape, _values(value)
        if isinstance(value, set):
            return sorted(map(repr, value))
        if isinstance(value, _CODE):
            name = getattr(value, "__qualname__", value.__name__)
            if "<" in name:
                raise pickle.PicklingError(f"{name} has no name of its own")
            return getattr(value, "__module__", ""), name
        return None


def _values(tensor: Tensor) -> Any:
    if isinstance(tensor, nn.Parameter) or tensor.device.type != "cpu" or not has_memory(tensor):
        return tensor.device.type
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# --- Its trace -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Stands for a node of the graph."""

    node: int


def _bytes_of(traced: Trace) -> bytes:
    """A trace without the model's tensors; b"" where it has no bytes."""
    places = {node: _Place(index) for index, node in enumerate(traced.graph.nodes)}
    nodes = [
        (n.op, n.target, *fx.map_arg((n.args, n.kwargs), places.__getitem__), n.name, dict(n.meta)) for n in places
    ]
    nothing = replace(
        traced, graph=nodes, call=replace(traced.call, tensors=()),
        parameters=tuple(traced.parameters), buffers=tuple(traced.buffers),
    )  # fmt: skip
    pickled = io.BytesIO()
    try:
        _Pickler(pickled).dump(nothing)
    except _NO_BYTES:
        return b""
    return pickled.getvalue()


def _of(pickled: bytes, model: nn.Module, arguments: Mapping[str, Any]) -> Trace:
    """The trace of this model."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of torch's about its own trees
        stored = _Unpickler(io.BytesIO(pickled)).load()
    graph, nodes = fx.Graph(), list[fx.Node]()

    def node_at(value: Any) -> Any:
        return nodes[value.node] if isinstance(value, _Place) else value

    for op, target, args, kwargs, name, meta in stored.graph:
        args, kwargs = (fx.node.map_aggregate(used, node_at) for used in (args, kwargs))
        nodes.append(graph.create_node(op, target, args, kwargs, name))
        nodes[-1].meta = meta
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    named = {users_name(model, name): tensor for name, tensor in tensors}
    return replace(
        stored,
        graph=graph,
        call=replace(stored.call, tensors=flatten_call(arguments).tensors),
        parameters={name: named[name] for name in stored.parameters},
        buffers={name: named[name] for name in stored.buffers},
    )


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
        if isinstance(value, torch._ops.OpOverload):
            return value.namespace, value._opname, value._overloadname
        if isinstance(value, fx.Node):
            raise pickle.PicklingError("a fact that names a node")
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.mode = FakeTensorMode()

    def persistent_load(self, known: Any) -> Any:
        if len(known) == 3:
            namespace, name, overload = known
            return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
        shape, stride, dtype, device, requires_grad = known
        with self.mode:
            return torch.empty_strided(shape, stride, dtype=dtype, device=device, requires_grad=requires_grad)
