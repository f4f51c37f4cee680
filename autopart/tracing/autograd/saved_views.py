"""Trace nodes for tensors that autograd saves, so that a forward can call `torch.autograd.grad`.

A composite operator such as `linear` is one node of a trace. Its backward uses tensors that have no node, mostly views
of an input such as `weight.t()`. Other backwards use the operator's output, which autograd returns as a new tensor
object without a node. Torch would treat tensors without a node as constants of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autopart.compat.torch_internals import Tracing, has_values, intercepted, tree_flatten
from autopart.errors import Refusal
from autopart.tracing.python.concrete_constants import memory_of
from autopart.tracing.trace_errors import LostInTrace

aten = torch.ops.aten


@contextmanager
def saved_views() -> Iterator[None]:
    """Add missing trace nodes, inside a `with` block, for views of traced tensors that operators read."""
    kept: list[Any] = []  # the trace drops the node of a tensor that is not referenced

    def meet(run: Callable[[], Any], tracer: Any, function: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        tracing = Tracing(tracer)
        for tensor in tree_flatten((args, dict(kwargs)))[0]:
            if isinstance(tensor, Tensor) and tracing.node_of(tensor) is None:
                _adopt(tracing, tensor)
                if tracing.node_of(tensor) is None and not has_values(tensor):
                    raise _lost(function)
        kept.append(run())
        return kept[-1]

    with intercepted(meet):
        yield


def _lost(function: Any) -> LostInTrace:
    return LostInTrace(
        "the forward takes a gradient that cannot be traced",
        f"{getattr(function, '__name__', function)} reads a tensor that no operator returned in the trace",
        "plain operations in the differentiated function, or the gradient outside of the model",
        Refusal.GRADIENT,
    )


def _adopt(tracing: Tracing, tensor: Tensor) -> None:
    """Add a node for a tensor, if it is a view of a traced tensor."""
    memory = memory_of(tensor)
    for base in tracing.tracked() if memory is not None else ():
        if memory_of(base) != memory or not _is_made_of(tensor, base):
            continue
        if tensor.stride() == base.stride() and tensor.shape == base.shape:
            return tracing.adopt(tensor, aten.alias.default, base)
        if tensor.is_contiguous() and base.is_contiguous():
            return tracing.adopt(tensor, aten.view.default, base, list(tensor.shape))
        if (order := _order(tensor, base)) is not None:
            return tracing.adopt(tensor, aten.permute.default, base, order)
    return None


def _is_made_of(tensor: Tensor, base: Tensor) -> bool:
    """Return True if autograd's graph shows that `tensor` is `base` or the result of one operator on it."""
    if tensor.dtype != base.dtype or tensor.numel() != base.numel() or tensor.storage_offset() != base.storage_offset():
        return False
    if tensor.is_leaf and tensor.requires_grad:  # torch.zeros(..., requires_grad=True) copies its result
        return not base.requires_grad
    if tensor.requires_grad != base.requires_grad:
        return False
    if tensor.grad_fn is None:
        return not tensor.requires_grad
    if base.grad_fn is not None and tensor.grad_fn is base.grad_fn:
        return tensor.output_nr == base.output_nr
    before = [node for node, _ in tensor.grad_fn.next_functions]
    return any(n is not None and (n is base.grad_fn or getattr(n, "variable", None) is base) for n in before)


def _order(tensor: Tensor, base: Tensor) -> list[int] | None:
    """Return dims such that `base.permute(dims)` has the shape and strides of `tensor`; else None."""
    left = list(enumerate(zip(base.shape, base.stride(), strict=True)))
    order: list[int] = []
    for wanted in zip(tensor.shape, tensor.stride(), strict=True):
        place = next((i for i, (_, dim) in enumerate(left) if dim == wanted), None)
        if place is None:
            return None
        order.append(left.pop(place)[0])
    return order
