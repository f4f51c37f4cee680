"""Operators that can be differentiated twice, for a forward that calls `torch.autograd.grad`.

`torch.export` records a composite operator such as `softmax` or `matmul` as one node. The backward of the operator
reads intermediate tensors that have no node. So composite operators on values with a gradient are recorded as the
operators that they consist of. Some fused operators have a backward that reads statistics (a layer norm's mean) or has
no derivative (an attention kernel). These operators are recorded as plain operators, whose derivatives of any order
have sharding rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from autopart.compat.torch_internals import argument_of, decomposed_calls, is_composite, tree_flatten

aten = torch.ops.aten


def differentiable_operators(twice_only: dict[str, None]) -> AbstractContextManager[None]:
    """Record each operator of a trace as operators that can be differentiated again, in a `with` block.

    Args:
        twice_only: receives the names of operators whose third derivative is wrong in eager PyTorch. Their formula for
            the second derivative treats the mean and the standard deviation as constants.
    """

    def form_of(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
        form = _form(func, args, kwargs)
        if form is _layer_norm or (form is _batch_norm and argument_of(func, args, kwargs, "training")):
            twice_only[func.__name__.partition(".")[0].removeprefix("native_")] = None
        return form

    return decomposed_calls(form_of)


def _form(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return a function that computes an operator by differentiable ones; None to record it as it is."""
    if func in BACKWARDS:
        return BACKWARDS[func]
    leaves = tree_flatten((args, dict(kwargs)))[0]
    if not torch.is_grad_enabled() or not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        return None
    if func in _FORMS:
        return _FORMS[func]
    return func.decompose if is_composite(func) else None


def _normalized(source: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized source, its mean, and its inverse standard deviation over `dims`."""
    mean = source.mean(dims, keepdim=True)
    away = source - mean
    rstd = (away.square().mean(dims, keepdim=True) + eps).rsqrt()
    return away * rstd, mean, rstd


def _scaled(rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    rows = rows if weight is None else rows * weight
    return rows if bias is None else rows + bias


def _layer_norm(
    source: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, mean, rstd = _normalized(source, list(range(-len(shape), 0)), eps)
    return _scaled(rows, weight, bias), mean, rstd


def _rms_norm(
    source: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:  # fmt: skip
    eps = torch.finfo(source.dtype).eps if eps is None else eps
    power = source.square().mean(list(range(-len(shape), 0)), keepdim=True)
    return _scaled(source * (power + eps).rsqrt(), weight, None)


def _group_norm(
    source: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    groups = source.unflatten(1, (num_groups, source.shape[1] // num_groups))
    rows, _, _ = _normalized(groups, list(range(2, groups.ndim)), eps)
    return _by_channel(rows.flatten(1, 2), weight, bias)


def _batch_norm(
    source: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    if not training:
        assert running_mean is not None and running_var is not None
        rows = (source - _channels(running_mean, source)) * _channels((running_var + eps).rsqrt(), source)
        return _by_channel(rows, weight, bias)
    dims = [dim for dim in range(source.ndim) if dim != 1]
    rows, mean, rstd = _normalized(source, dims, eps)
    if running_mean is not None and running_var is not None:
        count = math.prod(source.shape[dim] for dim in dims)
        var = (rstd.detach().pow(-2) - eps).reshape(-1) * (count / max(count - 1, 1))
        for running, new in ((running_mean, mean.detach().reshape(-1)), (running_var, var)):
            running.copy_((1 - momentum) * running + momentum * new)
    return _by_channel(rows, weight, bias)


def _by_channel(rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    wide = (None if one is None else _channels(one, rows) for one in (weight, bias))
    return _scaled(rows, *wide)


def _channels(vector: Tensor, like: Tensor) -> Tensor:
    """Return a vector of channels (dim 1) with the number of dims of `like`."""
    return vector.reshape(-1, *[1] * (like.ndim - 2))


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.dropout(scores.softmax(-1), dropout_p, dropout_p > 0) @ value


def _convolution_backward(
    grad: Tensor, source: Tensor, weight: Tensor, bias_sizes: list[int] | None, stride: list[int],
    padding: list[int], dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
    wanted: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute a convolution's gradients by other convolutions, and a product with windows of its input."""
    geometry = stride, padding, dilation
    of_source = of_weight = of_bias = None
    if wanted[0] and transposed:
        of_source = torch.convolution(grad, weight, None, *geometry, False, output_padding, groups)
    elif wanted[0]:
        sizes = zip(source.shape[2:], grad.shape[2:], weight.shape[2:], *geometry, strict=True)
        missing = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in sizes]
        of_source = torch.convolution(grad, weight, None, *geometry, True, missing, groups)
    if wanted[1]:
        pair = (grad, source) if transposed else (source, grad)
        of_weight = _of_kernel(*pair, list(weight.shape[2:]), geometry, groups)
    if wanted[2]:
        of_bias = grad.sum([0, *range(2, grad.ndim)])
    return of_source, of_weight, of_bias


def _of_kernel(
    source: Tensor, grad: Tensor, kernel: list[int], geometry: tuple[list[int], ...], groups: int
) -> Tensor:  # fmt: skip
    """Return the gradient of a convolution's kernel, from the input and the gradient `grad` of the output."""
    windows = torch.constant_pad_nd(source, [side for p in reversed(geometry[1]) for side in (p, p)])
    for dim, (size, stride, dilation) in enumerate(zip(kernel, geometry[0], geometry[2], strict=True), start=2):
        windows = windows.unfold(dim, dilation * (size - 1) + 1, stride)[..., ::dilation]
        windows = windows.narrow(dim, 0, grad.shape[dim])
    channels, outputs = (t.unflatten(1, (groups, t.shape[1] // groups)) for t in (windows, grad))
    outer, inside = "xyz"[: len(kernel)], "uvw"[: len(kernel)]
    product = torch.einsum(f"ngc{outer}{inside},ngo{outer}->goc{inside}", channels, outputs)
    return product.flatten(0, 1)


_FORMS: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.rms_norm.default: _rms_norm,
    aten.group_norm.default: _group_norm,
    aten.batch_norm.default: _batch_norm,
    aten.scaled_dot_product_attention.default: plain_attention,
}
"""{operator: function that computes it with plain operators}"""
BACKWARDS: dict[Any, Callable[..., Any]] = {aten.convolution_backward.default: _convolution_backward}
"""{backward operator: function that computes it with plain operators}.

These backward operators can return None for a gradient, which no sharding rule describes.
"""
