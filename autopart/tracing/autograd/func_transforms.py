"""`torch.func` in a forward: `grad`, `vjp`, `jvp`, `jacrev`, `jacfwd`, `hessian`, and `vmap` of these.

Each transform is first traced alone, so that its derivatives become operators. The model's trace then calls these
operators. A `vmap` that contains no derivative is traced directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from autopart.common.scoped import variable
from autopart.compat.export_internals import is_forward_mode, noted, trace_inside
from autopart.compat.torch_internals import GRAD_MODE, Tracing, decompositions, tree_flatten, tree_unflatten
from autopart.errors import Refusal
from autopart.ir.graph import name_of_target, operator_name, short_name
from autopart.tracing.autograd.differentiable_operators import BACKWARDS, plain_attention
from autopart.tracing.trace_errors import LostInTrace, wrong_third_derivative

_VMAP, _VJP = "vmap_impl", "_vjp_with_argnums"
_REVERSE = _VJP, "grad_and_value_impl", "vjp"
_depth: ContextVar[tuple[int, list[int]]] = ContextVar("reverse-mode transforms that run, and how many ran nested")
_DETACHING = (Tensor.detach, torch.detach, Tensor.detach_, cast(Any, Tensor.data).__get__)
_OWN = "of_the_model"
_running: ContextVar[str] = ContextVar("what a transform is run for: '', 'trace', or 'look'", default="")


class _Differentiates(Exception):
    """Exception: a vmap contains a transform that differentiates."""


class _Watch(TorchFunctionMode):
    """Torch function mode that marks each `detach` of the model's code inside a `torch.func` transform.

    `_attach` removes all `detach` calls without this mark. Raises LostInTrace for `no_grad()`, which the trace would
    lose.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is GRAD_MODE and not args[0]:
            raise LostInTrace("torch.no_grad() inside of a torch.func transform", "a trace of the transform "
                       "would lose it", "tensor.detach() in its place", Refusal.GRADIENT)  # fmt: skip
        if func is F.scaled_dot_product_attention:
            func = plain_attention
        if func in _DETACHING:
            return noted(lambda: func(*args, **(kwargs or {})), _OWN)
        return func(*args, **(kwargs or {}))


def transformed(name: str, original: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Trace one call of a `torch.func` transform and return its result.

    `original`: torch's function that implements the transform.
    """
    running, tracing = _running.get(), Tracing.current()
    if running == "look" and name != _VMAP:
        raise _Differentiates
    if running == "trace" and name in _REVERSE and not is_forward_mode.get():
        depth, deepest = _depth.get()
        deepest.append(depth + 1)
        with variable(_depth, (depth + 1, deepest)):
            return original(*args, **kwargs)
    if running or tracing is None:
        return original(*args, **kwargs)
    if name == _VJP:
        return _vjp(original, args, kwargs)
    if name == _VMAP and not _differentiates(original, args, kwargs, tracing):
        return original(*args, **kwargs)
    return _as_operators(original, args, kwargs, int(name in _REVERSE and not is_forward_mode.get()))


def _differentiates(original: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any], tracing: Tracing) -> bool:
    """Return True if a vmap contains a transform that differentiates.

    Runs the vmap once, outside the trace.
    """
    try:
        with tracing.apart(), variable(_running, "look"):
            original(*args, **kwargs)
    except _Differentiates:
        return True
    except Exception:  # the trace itself will raise a clearer error
        return False
    return False


def _vjp(original: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Compute `torch.func.vjp`: return the outputs, and a function from output to input gradients."""
    function, *primals = args
    outputs = function(*primals)

    def backward(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        def run(primals: tuple, cotangents: Any) -> Any:
            return original(function, *primals, **kwargs)[1](cotangents, retain_graph, create_graph)

        return transformed("vjp", run, (tuple(primals), cotangents), {})

    return (outputs[0], backward, outputs[1]) if kwargs.get("has_aux") else (outputs, backward)


def _as_operators(original: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any], depth: int) -> Any:
    """Trace a `torch.func` transform into a separate graph, then run its operators in the model's trace.

    Args:
        original: torch's function that implements the transform.
        args, kwargs: arguments of `original`.
        depth: 1 if this transform is in reverse mode (such as `grad`), else 0. Reverse-mode transforms inside of it are
            added, to detect third derivatives.
    """
    leaves, spec = tree_flatten((args, dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    outputs: list[Any] = []
    deepest = [depth]

    def run(*inputs: Tensor) -> list[Any]:
        rest = iter(inputs)
        args, kwargs = tree_unflatten([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        with variable(_running, "trace"), variable(_depth, (depth, deepest)), _Watch(), torch.enable_grad():
            outputs[:] = [original(*args, **kwargs)]
        return [leaf for leaf in tree_flatten(outputs[0])[0] if isinstance(leaf, Tensor)]

    try:
        traced = trace_inside(run, tensors, _backward_forms())
    except LostInTrace:
        raise
    except Exception as error:  # torch or the model's code may raise anything for tensors without values
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
        raise LostInTrace("a torch.func transform cannot be traced", reason, "grad, vjp or jacrev in place of jvp "
        "and jacfwd, "
                   "and functions of tensors alone", Refusal.GRADIENT) from error  # fmt: skip
    _attach(traced.graph)
    if max(deepest) > 1 and any(node.target in _WITH_STATISTICS for node in traced.graph.nodes):
        raise wrong_third_derivative("layer_norm")
    values: dict[Any, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), tensors, strict=True))
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(traced, node.target)
        elif node.op == "call_function":
            called = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            target = _WITH_STATISTICS.get(node.target, node.target)
            values[node] = target(*called[0], **called[1])
    results = iter([values[node] for node in traced.graph.output_node().args[0]])
    flat, spec = tree_flatten(outputs[0])
    return tree_unflatten([next(results) if isinstance(leaf, Tensor) else leaf for leaf in flat], spec)


def _attach(graph: fx.Graph) -> None:
    """Remove the `detach` calls that autograd inserts for saved tensors, which would stop the gradient.

    `detach` calls of the model's code stay. Raises LostInTrace for an operator whose gradient cannot be traced, such as
    a fused backward operator.
    """
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default and _OWN not in node.meta:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        name = operator_name(node)
        if name in _STRIDED or _is_fused(name, node.target):
            raise LostInTrace("a torch.func transform cannot be traced", f"it needs the gradient of {short_name(node)}",
                       "plain operations there, or the gradient outside of the model", Refusal.GRADIENT)  # fmt: skip


def _layer_norm(
    source: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the layer norm. Returns the output, mean and inverse standard deviation, all differentiable."""
    dims = list(range(source.ndim - len(shape), source.ndim))
    variance = source.var(dims, correction=0, keepdim=True)
    mean = source.mean(dims, keepdim=True)
    return torch.layer_norm(source, shape, weight, bias, eps), mean, (variance + eps).rsqrt()


@functools.cache
def _backward_forms() -> Mapping[Any, Callable[..., Any]]:
    """Return {fused backward operator that has no derivative: its decomposition}, for second derivatives."""
    fused = {
        target: form for target, form in decompositions().items()
        if _is_fused(name_of_target(target), target) and not name_of_target(target).startswith("aten::_")
    }  # fmt: skip
    return {**fused, **BACKWARDS}


def _is_fused(name: str, target: Any) -> bool:
    """Return True for a backward operator that torch can differentiate only in some cases, or never."""
    is_kept = name in _KEPT or torch.Tag.pointwise in getattr(target, "tags", ())
    return name.endswith(("_backward", "_backward_data")) and not is_kept


_WITH_STATISTICS: Any = {torch.ops.aten.native_layer_norm.default: _layer_norm}
_STRIDED = "aten::as_strided", "aten::as_strided_"
_KEPT = frozenset(
    f"aten::{name}" for name in (
        "native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward", "nll_loss_backward",
        "_softmax_backward_data", "_log_softmax_backward_data", "softplus_backward", "threshold_backward",
        "embedding_dense_backward", "select_backward", "slice_backward", "value_selecting_reduction_backward",
    )
)  # fmt: skip
"""Backward operators that can be differentiated in a program. Pointwise ones can be too."""
