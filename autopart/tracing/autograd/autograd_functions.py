"""A user's `torch.autograd.Function` as one operator of a trace, with the Function's own backward.

While a model is traced, `Function.apply` calls a custom operator in the namespace `autograd_function`, with one
overload for every class and signature. The operator runs the Function. Its backward runs the Function again, with
gradients. The operator has no sharding rule, so it is replicated until the user registers a rule.

The Function is also traced alone, forward and backward. A Function that draws random numbers is rejected. A Function
that writes to its inputs gets copies of them, and later uses of such an input are rejected.

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
from autopart.compat.torch_internals import is_operator, trace_apart, tree_flatten
from autopart.errors import Refusal
from autopart.ir.facts import facts
from autopart.ir.graph import operator_name, tensor_inputs, value
from autopart.tracing.python.python_state import random_state
from autopart.tracing.trace_errors import LostInTrace

NAMESPACE = "autograd_function"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_ELEMENTWISE = frozenset(
    f"aten::{name}" for name in ["alias", "clone", "detach", "ones_like", "zeros_like", "_to_copy"]
)
"""Pointwise operators in addition to those with torch's tag."""
_VIEWS = frozenset(f"aten::{name}" for name in ["view", "_unsafe_view", "reshape", "expand"])
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
        written: indices of the tensors that the Function writes to. The Function gets copies of these tensors.
    """

    function: Any
    arguments: tuple[Any, ...]
    autocast: torch.dtype | None
    dtypes: tuple[torch.dtype, ...]
    written: frozenset[int] = frozenset()

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
    """Exception: an autograd.Function writes to tensors that it was passed."""

    def __init__(self, tensors: frozenset[int]):
        super().__init__()
        self.tensors = tensors


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
    try:
        user_operator = _operator(user, tensors, wanted)
    except _WritesArguments as writes:
        user = replace(user, written=writes.tensors)
        user_operator = _operator(user, tensors, wanted)
    return user, user_operator, tensors


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
    code = (examined := _examined(user, tensors, wanted)).code
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
        if _versions(all_tensors) != before:
            raise _lost(user.function, _WRITES)
        return grads

    state = random_state()
    traces = [trace_apart(forward, tensors)]
    if any(wanted):
        traces.append(trace_apart(backward, [*tensors, *(n.meta["val"] for n in _returned(traces[0]))]))
    drawn = any(torch.Tag.nondeterministic_seeded in n.target.tags for trace in traces for n in _calls(trace))
    if drawn or state != random_state():
        raise _lost(user.function, "it draws random numbers, which its backward would draw again")
    for trace in traces:
        _without_views(trace)
    is_pointwise = single[0] and all(_is_pointwise(trace, tensors) for trace in traces)
    return Examined(traces[0], traces[1] if any(wanted) else None, single[0], is_pointwise)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [t._version for t in tensors]


def _changed(before: Sequence[int], after: Sequence[int]) -> frozenset[int]:
    return frozenset(i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)


def _calls(trace: fx.GraphModule) -> list[fx.Node]:
    return [n for n in trace.graph.nodes if n.op == "call_function" and is_operator(n.target)]


def _returned(trace: fx.GraphModule) -> Sequence[Any]:
    return trace.graph.output_node().args[0]


def _without_views(trace: fx.GraphModule) -> None:
    """Remove views that keep the shape, and unused calls, from a traced graph."""
    for node in _calls(trace):
        if operator_name(node) in _VIEWS and value(node).shape == value(node.args[0]).shape:
            node.replace_all_uses_with(node.args[0])
    trace.graph.eliminate_dead_code()
    trace.recompile()


def _is_pointwise(trace: fx.GraphModule, tensors: Sequence[Tensor]) -> bool:
    """Return True if every call of a graph is pointwise, and all tensors have one shape."""
    full = tensors[0].shape
    for node in trace.graph.nodes:
        if node.op == "output":
            continue
        if not isinstance(value(node), Tensor) or value(node).shape != full:
            return False
        if node.op == "placeholder":
            continue
        if node.op != "call_function" or not is_operator(node.target) or not tensor_inputs(node):
            return False
        tagged = torch.Tag.pointwise in node.target.tags or operator_name(node) in _ELEMENTWISE
        if not tagged or node.kwargs.get("device") is not None:
            return False
    return True
