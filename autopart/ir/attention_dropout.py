"""Attention that drops weights, as one operator whose mask is drawn where it is, from a seed that ranks know.

On a GPU it is torch's own fused kernel. Elsewhere it keeps what that keeps for its backward (its operands, its output
and a number for every query; Dao et al. 2022, arXiv:2205.14135, section 3.1), which computes the weights and draws
the mask again: the same mask as `dropout` draws of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopart.compat import recording_gradients
from autopart.ir.seeds import kept, seeded

OPERATORS = ("attention_dropout", "attention_dropout_forward", "attention_dropout_backward")


def attention_dropout(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, seed: Tensor,
    salt: int | None, shard: Sequence[int], is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` whose mask of dropout depends on nothing but `seed`, `salt`, `shard` and the shape
    of the weights (see `dropout`). A query that sees no key gives zeros.

    query [b, h, q, d], key [b, g, k, d], value [b, g, k, e] -> [b, h, q, e]
    """
    if type(query) is Tensor and _has_kernel(query, dropout_p):
        with seeded(query.device, seed, salt, shard):
            return _by_kernel(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # as kernels are given it, and keep it
        hidden = attn_mask.logical_not()
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(hidden, -math.inf)
    drawn = attn_mask, dropout_p, seed, salt, shard, is_causal, scale, enable_gqa
    return attention_dropout_forward(query, key, value, *drawn)[0]


def _has_kernel(query: Tensor, dropout_p: float) -> bool:
    return query.is_cuda and query.numel() > 0 and dropout_p < 1


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Torch's own. Its kernels take groups of heads in 16 bits and without a mask, and heads whose numbers lie beside
    each other."""
    if enable_gqa and (attn_mask is not None or query.dtype.itemsize != 2):
        key, value = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (key, value))
        enable_gqa = False
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


@torch.library.custom_op("autopart::attention_dropout_forward", mutates_args=())
def attention_dropout_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, seed: Tensor,
    salt: int | None, shard: Sequence[int], is_causal: bool, scale: float | None, enable_gqa: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and the logarithm of the sum of every query's weights before they are divided by it. A compiler does
    not look inside; on a GPU, there alone, the backward runs the kernel's forward again and needs no sums."""
    if _has_kernel(query, dropout_p):
        with seeded(query.device, seed, salt, shard):
            output = _by_kernel(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _in_order(output), _sums(query, dropout_p)
    scores, _, wide_value = _scores(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    largest = scores.amax(-1)
    weights = _weights(scores, largest == -math.inf)
    sums = torch.where(largest == -math.inf, largest, largest - weights.amax(-1).log())
    weights *= _kept(weights, dropout_p, seed, salt, shard)
    output = weights.matmul(wide_value).mul_(_factor(dropout_p))
    return _in_order(output.to(query.dtype)), sums


@torch.library.custom_op("autopart::attention_dropout_backward", mutates_args=())
def attention_dropout_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, output: Tensor, sums: Tensor,
    dropout_p: float, seed: Tensor, salt: int | None, shard: Sequence[int], is_causal: bool, scale: float | None,
    enable_gqa: bool, of_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value, and of the mask where it is asked for (else an empty tensor)."""
    if _has_kernel(query, dropout_p):
        with seeded(query.device, seed, salt, shard):
            return _backward_of_kernel(
                grad, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, of_mask
            )
    scores, wide_key, wide_value = _scores(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    wide_grad = grad.to(scores.dtype)
    weights = _weights(scores, sums == -math.inf)
    dropped = _kept(weights, dropout_p, seed, salt, shard).to(weights.dtype).mul_(_factor(dropout_p))
    of_value = (weights * dropped).mT @ wide_grad
    of_weights = (wide_grad @ wide_value.mT).mul_(dropped)
    # What softmax takes off is the sum of weights times their gradients: that of outputs times theirs.
    of_scores = of_weights.sub_((wide_grad * output).sum(-1, keepdim=True)).mul_(weights)
    factor = scale or query.size(-1) ** -0.5
    of_query = (of_scores @ wide_key).mul_(factor)
    of_key = (of_scores.mT @ query.to(scores.dtype)).mul_(factor)
    of_the_mask = grad.new_empty(0)
    if of_mask and attn_mask is not None:
        of_the_mask = of_scores.sum_to_size(attn_mask.shape).to(attn_mask.dtype)
    of_key, of_value = _of_groups(of_key, key), _of_groups(of_value, value)
    return _like(of_query, query), _like(of_key, key), _like(of_value, value), of_the_mask


def _backward_of_kernel(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool, of_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The kernel's, behind its forward once more. Inside, the generator is where it was at the forward."""
    with recording_gradients():
        query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
        towards = [query, key, value]
        if attn_mask is not None and of_mask:
            attn_mask = attn_mask.detach().requires_grad_()
            towards.append(attn_mask)
        output = _by_kernel(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        grads = torch.autograd.grad(output, towards, grad)
    of_query, of_key, of_value, *of_the_mask = (g.contiguous() for g in grads)
    return of_query, of_key, of_value, of_the_mask[0] if of_the_mask else grad.new_empty(0)


def _scores(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The scores, keys and values that softmax and products are computed in, a key for each head of queries."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    query, key, value = (x.to(wide) for x in (query, key, value))
    if enable_gqa:
        key, value = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (key, value))
    scores = (query @ key.mT).mul_(scale or query.size(-1) ** -0.5)
    if is_causal:
        scores.masked_fill_(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu_(1), -math.inf)
    if attn_mask is not None:
        scores += attn_mask
    return scores, key, value


def _weights(scores: Tensor, sees_none: Tensor) -> Tensor:
    """The softmax of scores; zeros for queries that see no key."""
    return scores.softmax(-1).masked_fill_(sees_none.unsqueeze(-1), 0.0)


def _kept(weights: Tensor, dropout_p: float, seed: Tensor, salt: int | None, shard: Sequence[int]) -> Tensor:
    """The mask that `dropout` draws for these weights."""
    with seeded(weights.device, seed, salt, shard):
        return kept(weights, dropout_p)


def _factor(dropout_p: float) -> float:
    return 1 / (1 - dropout_p) if dropout_p < 1 else 0.0


def _of_groups(grad: Tensor, heads: Tensor) -> Tensor:
    """The gradient of heads that were repeated for several of queries."""
    return grad.unflatten(-3, (heads.size(-3), -1)).sum(-3) if grad.size(-3) != heads.size(-3) else grad


def _like(grad: Tensor, operand: Tensor) -> Tensor:
    return grad.to(operand.dtype).contiguous()


def _in_order(output: Tensor) -> Tensor:
    """An output in the order in memory that the kernels give it: heads beside each other."""
    return output.transpose(-2, -3).contiguous().transpose(-2, -3)


def _sums(query: Tensor, dropout_p: float) -> Tensor:
    """Room for a number for every query, which a kernel's backward here does not read."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(0 if _has_kernel(query, dropout_p) else query.shape[:-1], dtype=wide)


@attention_dropout_forward.register_fake
def _like_output(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, *others: Any
) -> tuple[Tensor, Tensor]:
    return _in_order(query.new_empty(*query.shape[:-1], value.size(-1))), _sums(query, dropout_p)


@attention_dropout_backward.register_fake
def _like_operands(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_mask = others[-1] and attn_mask is not None
    mask = attn_mask.new_empty(attn_mask.shape) if of_mask and attn_mask is not None else grad.new_empty(0)
    dq, dk, dv = (x.new_empty(x.shape) for x in (query, key, value))
    return dq, dk, dv, mask


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, attn_mask, ctx.dropout_p, seed, *ctx.others = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, attn_mask, *output, seed)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    rest = (None,) * 7
    if grad is None:
        return None, None, None, None, *rest
    *tensors, seed = ctx.saved_tensors
    of_mask = bool(ctx.needs_input_grad[3])
    *grads, mask = attention_dropout_backward(grad, *tensors, ctx.dropout_p, seed, *ctx.others, of_mask)
    return *grads, mask if of_mask else None, *rest


attention_dropout_forward.register_autograd(_backward, setup_context=_keep)
