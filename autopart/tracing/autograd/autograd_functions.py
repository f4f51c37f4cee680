"""A user's `torch.autograd.Function` as one operator of a trace, with the Function's own backward.

While a model is traced, `Function.apply` calls a custom operator in the namespace `autograd_function`, with one
overload for every class and signature. The operator runs the Function. Its backward runs the Function again, with
gradients. The operator has no sharding rule, so it is replicated until the user registers a rule.

The Function is also traced alone, forward and backward. A Function that draws random numbers is rejected. A Function
that writes to its inputs gets copies of them, and later uses of such an input are rejected. If its backward writes to
saved tensors or gradients, as fused kernels do to save memory, it gets copies too.

If both traces contain only pointwise operators on tensors of one shape, they are correct on any shard. The custom
operator then runs these traces instead of the Function, and gets torch's tag `pointwise`.

If the traced backward is not linear in the gradients (it clips them, for example), the operator must not get partial
sums as gradients (`passes/rules/operators/autograd_function_rules.py`).
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from autopart.common.scoped import default_dtype, variable
from autopart.compat.export_internals import lasting_library
from autopart.compat.torch_internals import (
    DataDependentOutputException,
    is_operator,
    trace_apart,
    tree_flatten,
)
from autopart.errors import Refusal
from autopart.ir.facts import facts
from autopart.ir.graph import operator_name, tensor_inputs, value
from autopart.tracing.python.python_state import random_state
from autopart.tracing.trace_errors import LostInTrace

NAMESPACE = "autograd_function"
_LIBRARY = lasting_library(NAMESPACE)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_ELEMENTWISE = frozenset(
    f"aten::{name}"
    for name in ["alias", "clone", "copy", "detach", "empty_like", "ones_like", "zeros_like", "_to_copy"]
)
"""Pointwise operators in addition to those with torch's tag."""
_VIEWS = frozenset(f"aten::{name}" for name in ["view", "_unsafe_view", "reshape", "expand"])
_WRITES_ALL = "aten::copy_"
_HINT = "torch.library.custom_op with register_autograd, and autopart.rule to shard it; or plain operations"
_WRITES = "it writes to a tensor that it is given"
_COMPUTING = ("torch.nn.", "torch.masked.")
"""Modules of torch whose autograd.Functions are traced like those of users."""
_running: ContextVar[bool] = ContextVar("an autograd.Function runs, and what it calls is its own", default=False)


@dataclass(frozen=True)
class UserFunction:
    """An autograd.Function together with all arguments of one call, except the tensors.

    Args:
        arguments: the call's arguments, with `Tensor` in place of each tensor.
        dtypes: the dtypes of the call's tensors. If `verify` later passes float64 tensors instead, tensors that the
            Function creates are float64 too.
        written: indices of the tensors that the forward writes to. The Function gets copies of these tensors.
        written_after: the same for the backward; gradients of outputs follow the tensors.
    """

    function: Any
    arguments: tuple[Any, ...]
    autocast: torch.dtype | None
    dtypes: tuple[torch.dtype, ...]
    written: frozenset[int] = frozenset()
    written_after: frozenset[int] = frozenset()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the autograd.Function and return its outputs.

        An output that shares memory with an input or with another output is copied.
        """
        with torch.no_grad():
            return self.separate(self.outputs(tensors), tensors)

    def separate(self, outputs: Any, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs; copy those that share memory with an input or with another output."""
        copies: list[Tensor] = []
        for output in _as_tuple(outputs):
            shared = any(_storage(output) == _storage(other) for other in (*tensors, *copies))
            copies.append(output.clone() if shared else output)
        return tuple(copies)

    def backward(
        self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs whose entry in `wanted` is True, and None for all other inputs."""
        copied = [
            t.clone() if t is not None and i in self.written_after else t for i, t in enumerate((*tensors, *grads))
        ]
        tensors, grads = copied[: len(tensors)], copied[len(tensors) :]  # type: ignore[assignment]
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)]
            outputs = _as_tuple(self.outputs(inputs))
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        leaves = [t for t in inputs if t.requires_grad]
        if not pairs or not leaves:
            return (None,) * len(inputs)
        differentiated, seeds = zip(*pairs, strict=True)
        with variable(_running, True):
            gradients = iter(torch.autograd.grad(differentiated, leaves, seeds, allow_unused=True))
        return tuple(next(gradients) if t.requires_grad else None for t in inputs)

    def outputs(self, tensors: Sequence[Tensor]) -> Any:
        """Run the autograd.Function on these tensors and return its results."""
        remaining = iter([t.clone() if i in self.written else t for i, t in enumerate(tensors)])
        arguments = [next(remaining) if a is Tensor else copy.deepcopy(a) for a in self.arguments]
        is_upcast = any(t.dtype is torch.float64 is not dtype for t, dtype in zip(tensors, self.dtypes, strict=True))
        precise = default_dtype(torch.float64) if is_upcast else nullcontext()
        cast = torch.autocast(tensors[0].device.type, self.autocast) if self.autocast else nullcontext()
        with variable(_running, True), precise, cast:
            return self.function.apply(*arguments)


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class Examined:
    """Traces of an autograd.Function's forward and backward, and properties derived from them.

    Args:
        backward: graph from input tensors and output gradients to input gradients; None if no input needs a gradient.
        single: True if the Function returns one tensor, not a tuple.
        is_pointwise: True if all operators are pointwise on tensors of one shape.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    single: bool
    is_pointwise: bool

    @property
    def code(self) -> str:
        return self.forward.code + (self.backward.code if self.backward is not None else "")


@dataclass(frozen=True)
class Made:
    """A custom operator that was registered for an autograd.Function, and the traces of that Function."""

    operator: Any
    examined: Examined


_MADE: dict[tuple[type, str, str], Made] = {}
_CODES: dict[tuple[type, str, tuple[torch.Size, ...]], str] = {}
_CLASSES: dict[str, list[type]] = {}
_BY_OPERATOR: dict[Any, tuple[str, Made]] = {}


def made_for(node: fx.Node) -> Made | None:
    """Return the operator and the traces of a node that runs an autograd.Function; None for other nodes."""
    return _BY_OPERATOR[node.target][1] if node.target in _BY_OPERATOR else None


def name_function_nodes(graph: fx.Graph) -> None:
    """Set the name of each node that runs an autograd.Function to the name of the Function's class."""
    for node in graph.nodes:
        if node.target in _BY_OPERATOR:
            facts(node)["named"] = facts(node)["written_for"] = _BY_OPERATOR[node.target][0]


class _WritesArguments(Exception):
    """Exception: an autograd.Function's forward or backward writes to tensors that it was passed."""

    def __init__(self, tensors: frozenset[int], in_backward: bool = False):
        super().__init__()
        self.tensors, self.in_backward = tensors, in_backward


def apply_as_operator(
    apply: Callable[..., Any], function: type, args: tuple, kwargs: dict[str, Any],
    spend: Callable[[Tensor], bool] = lambda tensor: False,
) -> Any:  # fmt: skip
    """Run `function.apply(*args, **kwargs)` in a trace as one operator, and return the result.

    Raises LostInTrace for a call that cannot be one operator.

    Args:
        spend: called for each tensor that the Function writes to, so that later uses of the tensor are rejected. If it
            returns False, later uses cannot be detected, and the call itself is rejected.
    """
    if _running.get() or not is_of_a_model(function):
        return apply(function, *args, **kwargs)
    if kwargs:  # keyword arguments: only a Function with `setup_context` takes them, as its forward has no ctx
        bound = inspect.signature(function.forward).bind(*args, **kwargs)  # type: ignore[attr-defined]
        bound.apply_defaults()
        args = bound.args
    user, user_operator, tensors = _registered(function, args)
    outputs = user_operator.operator(*tensors)
    if not all(spend(tensors[i]) for i in user.written):
        raise _lost(function, _WRITES)
    return outputs if user_operator.examined.single or isinstance(outputs, (tuple, list)) else (outputs,)


def operator_of(function: type, *args: Any) -> tuple[Any, list[Tensor]]:
    """Return the operator that a trace calls in place of `function.apply(*args)`, and its tensors.

    Raises LostInTrace for a call that cannot be one operator.
    """
    _, user_operator, tensors = _registered(function, args)
    return user_operator.operator, tensors


def function_name(function: type) -> str:
    """Return the name of the operator of an autograd.Function, without overload, as in plans and rules."""
    return f"{NAMESPACE}::" + re.sub(r"\W+", "_", f"{function.__module__}.{function.__qualname__}")


def _registered(function: type, args: tuple) -> tuple[UserFunction, Made, list[Tensor]]:
    tensors = [a for a in args if isinstance(a, Tensor)]
    for argument in args:
        if not isinstance(argument, Tensor):
            _check_plain(function, argument)
    if not tensors or not all(isinstance(size, int) for t in tensors for size in t.shape):
        raise _lost(function, "it is given no tensor" if not tensors else "its sizes depend on the values in a tensor")
    device = tensors[0].device.type
    autocast = torch.get_autocast_dtype(device) if _autocasts(device) else None
    arguments = tuple(Tensor if isinstance(a, Tensor) else copy.deepcopy(a) for a in args)
    wanted = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
    user = UserFunction(function, arguments, autocast, tuple(t.dtype for t in tensors))
    while True:
        try:
            return user, _operator(user, tensors, wanted), tensors
        except _WritesArguments as writes:
            if writes.in_backward:
                user = replace(user, written_after=writes.tensors)
            else:
                user = replace(user, written=writes.tensors)


def code_of(function: type, tensors: Sequence[Tensor]) -> str:
    """Return the code of the graphs into which an autograd.Function's forward and backward are traced.

    All arguments of the Function must be tensors. Raises LostInTrace if the Function cannot be one operator.
    """
    wanted = [t.requires_grad for t in tensors]
    try:
        user = UserFunction(function, (Tensor,) * len(tensors), None, tuple(t.dtype for t in tensors))
        return _examined(user, tensors, wanted).code
    except _WritesArguments:
        raise _lost(function, _WRITES) from None


def is_of_a_model(function: type) -> bool:
    """Return True for an autograd.Function of a model's code, False for Functions of torch's tracing."""
    name = function.__module__
    return not name.startswith("torch.") or name.startswith(_COMPUTING)


def _autocasts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _check_plain(function: type, argument: Any) -> None:
    for leaf in tree_flatten(argument)[0]:
        if not isinstance(leaf, _PLAIN):
            raise _lost(function, f"it receives {_a(leaf)}; only tensors, numbers and strings are supported")


def _lost(function: type, why: str) -> LostInTrace:
    return LostInTrace(
        f"{function.__qualname__} is an autograd.Function that cannot be traced", why, _HINT, Refusal.FUNCTION
    )


def _a(value: Any) -> str:
    """Return the name of a value's type with its article: `a ModuleList`, `an Embedding`; `None` for None."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _operator(user: UserFunction, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> Made:
    """Return the custom operator for an autograd.Function and its arguments. The first call registers it.

    The operator's name and overload depend only on names, values and traced operators, so they are equal in all
    processes. If several classes in this process have one name, their overloads also depend on a class number. Inputs
    of different sizes share one operator if their traces are equal.
    """
    full = f"{user.function.__module__}.{user.function.__qualname__}"
    namesakes = _CLASSES.setdefault(full, [])
    if user.function not in namesakes:
        namesakes.append(user.function)
    try:
        code = (examined := _examined(user, tensors, wanted)).code
    except DataDependentOutputException as error:
        raise _lost(user.function, "it reads the value of a tensor, as `if` and .item() do") from error
    kinds = [(t.dim(), t.dtype, t.device.type, w) for t, w in zip(tensors, wanted, strict=True)]
    signature = repr((namesakes.index(user.function), user.arguments, user.autocast, kinds))
    if _CODES.setdefault((user.function, signature, tuple(t.shape for t in tensors)), code) != code:
        raise _lost(user.function, "its result differs from that of an earlier call with equal arguments")
    key = user.function, signature, code
    if key not in _MADE:
        overload = "of_" + hashlib.sha256(f"{full}{signature}{code}".encode()).hexdigest()[:12]
        name = function_name(user.function).removeprefix(f"{NAMESPACE}::")
        _MADE[key] = _make(f"{name}.{overload}", user, examined, wanted)
        _BY_OPERATOR[_MADE[key].operator] = user.function.__name__, _MADE[key]
    return _MADE[key]


def _make(name: str, user: UserFunction, examined: Examined, wanted: Sequence[bool]) -> Made:
    num_outputs = len(_returned(examined.forward))
    inputs = ", ".join(f"Tensor x{i}" for i in range(len(wanted)))
    outputs = ", ".join(["Tensor"] * num_outputs)
    backward = examined.backward if examined.is_pointwise else None
    compute: Callable[..., Any] = examined.forward if examined.is_pointwise else user.forward

    def run(*tensors: Tensor) -> Any:
        results = compute(*tensors)
        return results if num_outputs > 1 else results[0]

    def differentiate(ctx: Any, *grads: Tensor | None) -> Any:
        needed = ctx.needs_input_grad
        if backward is not None and all(w or not n for n, w in zip(needed, wanted, strict=True)):
            return tuple(g if n else None for g, n in zip(backward(*ctx.saved_tensors, *grads), needed, strict=True))
        return user.backward(ctx.saved_tensors, grads, needed)

    def save(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)

    full = f"{NAMESPACE}::{name}"
    tags = (torch.Tag.pointwise,) if examined.is_pointwise else ()
    _LIBRARY.define(f"{name}({inputs}) -> ({outputs})", tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(full, run, lib=_LIBRARY)
    torch.library.register_autograd(full, differentiate, setup_context=save, lib=_LIBRARY)
    packet, overload = name.split(".")
    return Made(getattr(getattr(getattr(torch.ops, NAMESPACE), packet), overload), examined)


# traces of a Function


def _examined(user: UserFunction, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> Examined:
    """Trace the forward and backward of an autograd.Function.

    Raises LostInTrace if the Function cannot be one operator.
    """
    single = []

    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        before = _versions(inputs)
        with torch.no_grad():
            outputs = user.outputs(inputs)
        if written := _changed(before, _versions(inputs)):
            raise _WritesArguments(written)
        for output in _as_tuple(outputs):
            if not isinstance(output, Tensor):
                raise _lost(user.function, f"it returns {_a(output)}; it may return only tensors")
        single.append(isinstance(outputs, Tensor))
        return user.separate(outputs, inputs)

    def backward(*all_tensors: Tensor) -> tuple[Tensor | None, ...]:
        before = _versions(all_tensors)
        grads = user.backward(all_tensors[: len(tensors)], all_tensors[len(tensors) :], wanted)
        if written := _changed(before, _versions(all_tensors)):
            raise _WritesArguments(written, in_backward=True)
        return grads

    state = random_state()
    traces = [trace_apart(forward, tensors)]
    if any(wanted):
        traces.append(trace_apart(backward, [*tensors, *(n.meta["val"] for n in _returned(traces[0]))]))
    drawn = any(torch.Tag.nondeterministic_seeded in n.target.tags for trace in traces for n in _calls(trace))
    if drawn or state != random_state():
        raise _lost(user.function, "it draws random numbers, which its backward would draw again")
    full = tensors[0].shape
    pointwise = [_pointwise(trace, full) for trace in traces] if single[0] else []
    found = [trace for trace in pointwise if trace is not None]
    is_pointwise = len(found) == len(traces)
    traces = found if is_pointwise else traces
    return Examined(traces[0], traces[1] if any(wanted) else None, single[0], is_pointwise)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [t._version for t in tensors]


def _changed(before: Sequence[int], after: Sequence[int]) -> frozenset[int]:
    return frozenset(i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)


def _calls(trace: fx.GraphModule) -> list[fx.Node]:
    return [n for n in trace.graph.nodes if n.op == "call_function" and is_operator(n.target)]


def _returned(trace: fx.GraphModule) -> Sequence[Any]:
    return trace.graph.output_node().args[0]


def _pointwise(trace: fx.GraphModule, full: torch.Size) -> fx.GraphModule | None:
    """Return the graph without views and writes if all calls are pointwise on tensors of one shape.

    Views that only merge or split dims are removed: they do not move elements. Returns None for other graphs.
    """
    if not all(_may_be_pointwise(node, full) for node in trace.graph.nodes):
        return None
    inputs = [node.meta["val"] for node in trace.graph.nodes if node.op == "placeholder"]
    if any(operator_name(node) == _WRITES_ALL or node.target._schema.is_mutable for node in _calls(trace)):
        trace = trace_apart(torch.func.functionalize(trace, remove="mutations"), inputs)
        if not all(_may_be_pointwise(node, full) for node in trace.graph.nodes):
            return None
    for node in _calls(trace):
        if operator_name(node) in _VIEWS:
            node.replace_all_uses_with(node.args[0])
    trace.graph.eliminate_dead_code()
    trace.recompile()
    has_other_shapes = any(value(node).shape != full for node in _calls(trace))
    return trace_apart(trace, inputs) if has_other_shapes else trace


def _may_be_pointwise(node: fx.Node, full: torch.Size) -> bool:
    """Return True for a pointwise call or a view on tensors with as many elements as the shape `full`."""
    if node.op == "output":
        return True
    if not isinstance(value(node), Tensor) or value(node).numel() != full.numel():
        return False
    if node.op == "placeholder":
        return bool(value(node).shape == full)
    if node.op != "call_function" or not is_operator(node.target) or not tensor_inputs(node):
        return False
    name = operator_name(node)
    known = torch.Tag.pointwise in node.target.tags or name in _ELEMENTWISE or name in _VIEWS or name == _WRITES_ALL
    return known and node.kwargs.get("device") is None
