"""What is found out of models, remembered in a folder for one run of the tests: many tests and all of their ranks plan
one small model, and that takes longer than what they look at.

In tests of traces and passes the zoo's models and those of transformers are remembered, in others all; on ranks, which
trace and plan alike, plans too. Only `autopart.recipe.make_plan` and its compiler remember, through which plans and
programs go; `autopart.tracing.trace_model.trace` always traces. A model is the same if it pickles to the same bytes:
its tensors by shapes and dtypes, buffers and inputs by values, code by its name and the numbers beside it, so one
with a function or class that was made in another is traced. So is one whose trace has no bytes.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import pickle
import sys
import types
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autopart.ir.mesh import Mesh
from autopart.ir.trace import Trace
from autopart.options import Options
from autopart.plans.plan import Plan
from autopart.recipe import compiler, make_plan
from autopart.tracing.meta_copy import has_memory
from autopart.tracing.python.eager_semantics import ambient_autocast
from autopart.tracing.trace_model import flatten_call
from autopart.tracing.with_loss import users_model, users_name

FOLDER = "AUTOPART_REMEMBERED_TRACES"
"""The variable of the environment that names the folder; without it nothing is remembered."""
_OF_ONE_PROCESS = "autograd_function"
"""The namespace of operators that a trace makes."""
_CODE = type, types.FunctionType, types.ModuleType
_NO_BYTES = TypeError, AttributeError, RuntimeError, pickle.PicklingError
_trace = make_plan.trace
_make_plan = make_plan.make_plan
_checked = make_plan.with_gradients_checked
_DIGESTS = WeakKeyDictionary[fx.Graph, str]()
"""Of the graphs of traces that are remembered: which they are of."""
_ALL = False
"""Whether those of all models are, and what is found out of them."""


def remember() -> None:
    """From here on the traces of models that many tests have."""
    make_plan.trace, make_plan.with_gradients_checked = _remembered, _checked_once


def remember_all(all_models: bool = True) -> None:
    """From here on those of all models, or no longer."""
    global _ALL
    _ALL = all_models


def remember_on_ranks() -> None:
    """From here on the traces and plans of all models: every rank traces and plans the same."""
    remember()
    remember_all()
    compiler.make_plan = _remembered_plan


def _remembered(model: nn.Module, arguments: Mapping[str, Any], written: Collection[str] = ()) -> Trace:
    folder = os.environ.get(FOLDER)
    is_known = _ALL or type(users_model(model)).__module__.startswith(("transformers.", "zoo"))
    digest = _digest(model, arguments, written) if folder and is_known else None
    if digest is None:
        return _trace(model, arguments, written)
    with _made_once(Path(folder, digest)) as path:
        is_first = not path.exists()
        if is_first:
            traced = _trace(model, arguments, written)
            path.write_bytes(_bytes_of(traced))
    if not is_first:
        stored = path.read_bytes()
        traced = _of(stored, model, arguments) if stored else _trace(model, arguments, written)
    _DIGESTS[traced.graph] = digest
    return traced


def _remembered_plan(model: nn.Module, traced: Trace, mesh: Mesh, options: Options) -> Plan:
    """One that warns of something is made anew on every rank."""
    digest = _DIGESTS.get(traced.graph)
    if digest is None:
        return _make_plan(model, traced, mesh, options)
    with _made_once(_path("plan", digest, mesh, mesh.axes, options, traced.notes)) as path:
        if not path.exists():
            with warnings.catch_warnings(record=True) as told:
                plan = _make_plan(model, traced, mesh, options)
            if not told:
                path.write_text(plan.to_json())
            for one in told:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
            return plan
    return replace(Plan.from_json(path.read_text(), axes=mesh.axes), text="")


def _checked_once(model: nn.Module, arguments: Mapping[str, Any], traced: Trace, loss: fx.Node | None) -> Trace:
    """The trace where a process before has compared its gradients with the model's, and found nothing to say."""
    digest = _DIGESTS.get(traced.graph) if _ALL else None
    if digest is None:
        return _checked(model, arguments, traced, loss)
    with _made_once(_path("same gradients", digest, traced.notes, loss)) as path:
        if path.exists():
            return traced
        checked = _checked(model, arguments, traced, loss)
        if (checked.notes, checked.checkpointed) == (traced.notes, traced.checkpointed):
            path.touch()
        return checked


def _path(*known_by: Any) -> Path:
    """Where something is remembered that these tell from all else."""
    return Path(os.environ[FOLDER], hashlib.sha256(repr(known_by).encode()).hexdigest())


@contextmanager
def _made_once(path: Path) -> Iterator[Path]:
    """Of processes that ask at once one is inside, and the others wait."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path


# --- Which model and call ------------------------------------------------------------------------------------------


def _digest(model: nn.Module, arguments: Mapping[str, Any], written: Collection[str]) -> str | None:
    """What tells calls apart; None: it has no bytes."""
    pickled = io.BytesIO()
    modes = torch.is_grad_enabled(), torch.get_default_dtype(), ambient_autocast("cpu")
    try:
        _Described(pickled).dump((model, dict(arguments), sorted(written), modes, _numbers_beside(model)))
    except _NO_BYTES:
        return None
    return hashlib.sha256(pickled.getvalue()).hexdigest()


def _numbers_beside(model: nn.Module) -> list[tuple[str, str, Any]]:
    """What the modules of the model's classes name, which their code may read."""
    names = sorted({type(module).__module__ for module in model.modules()})
    own = [name for name in names if name in sys.modules and not name.startswith(("torch", "transformers."))]
    return [(name, key, value) for name in own for key, value in vars(sys.modules[name]).items()
            if isinstance(value, (bool, int, float, str)) and not key.startswith("__")]  # fmt: skip


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
    if traced.weight_updates:
        return b""  # they have graphs of their own
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
            if value.namespace == _OF_ONE_PROCESS:
                raise pickle.PicklingError("an operator of one process")
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
