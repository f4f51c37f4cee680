"""Attention with dropout as one operator, whose dropout mask each rank draws from a shared seed.

On a GPU the operator calls torch's fused kernel. For backward, the CPU implementation saves the operands, the output,
and one number per query (Dao et al. 2022, arXiv:2205.14135, section 3.1). This number is the largest score of the
query. The CPU backward recomputes the attention weights, and draws the forward's dropout mask again from the seed.
Forward and backward process one sample of the batch at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopart.compat.torch_internals import recording_gradients, softmax_backward_
from autopart.ops.differentiate_once import check_differentiated_once
from autopart.ops.seeded_random import DropoutMasks, seeded

OPERATORS = ("attention_dropout", "attention_dropout_forward", "attention_dropout_backward")


def attention_dropout(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, seed: Tensor,
    salt: int | None, shard: Sequence[int], is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `scaled_dot_product_attention` with a reproducible dropout mask.

    The mask depends only on `seed`, `salt`, `shard` and the shape of the attention weights (`operators.dropout`
    explains these arguments). The output of a query that attends no key is zero.

    Shapes: query [b, h, q, d], key [b, g, k, d], value [b, g, k, e] -> output [b, h, q, e].
    """
    if type(query) is Tensor and _has_kernel(query, dropout_p):
        with seeded(query.device, seed, salt, shard):
            return _by_kernel(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # kernels use and save a floating-point bias
        is_masked = attn_mask.logical_not()
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(is_masked, -math.inf)
    options = attn_mask, dropout_p, seed, salt, shard, is_causal, scale, enable_gqa
    return attention_dropout_forward(query, key, value, *options)[0]


def _has_kernel(query: Tensor, dropout_p: float) -> bool:
    return query.is_cuda and query.numel() > 0 and dropout_p < 1


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Call torch's fused kernel, after converting the operands to a form that it supports.

    The kernel supports grouped heads only in 16-bit dtypes without a mask, and needs a contiguous last dim.
    """
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
    """Return the attention output, and the largest score of each query (zeros without a mask).

    On a GPU the second tensor is empty, because the backward runs the kernel's forward again. `torch.compile` treats
    this operator as opaque.
    """
    if _has_kernel(query, dropout_p):
        with seeded(query.device, seed, salt, shard):
            output = _by_kernel(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _kernel_layout(output), _empty_statistics(query, dropout_p)
    call = _CpuAttention.of(query, key, value, attn_mask, dropout_p, seed, salt, shard, is_causal, scale, enable_gqa)
    return call.forward(query.dtype)


@torch.library.custom_op("autopart::attention_dropout_backward", mutates_args=())
def attention_dropout_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, output: Tensor, largest: Tensor,
    dropout_p: float, seed: Tensor, salt: int | None, shard: Sequence[int], is_causal: bool, scale: float | None,
    enable_gqa: bool, of_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key, value and mask.

    If `of_mask` is False, the gradient of the mask is not computed, and an empty tensor is returned for it.
    """
    if _has_kernel(query, dropout_p):
        with seeded(query.device, seed, salt, shard):
            return _backward_of_kernel(
                grad, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, of_mask
            )
    call = _CpuAttention.of(query, key, value, attn_mask, dropout_p, seed, salt, shard, is_causal, scale, enable_gqa)
    of_mask = of_mask and attn_mask is not None
    of_query, of_key, of_value, of_scores = call.backward(grad, largest, of_mask)
    of_key, of_value = _sum_groups(of_key, key), _sum_groups(of_value, value)
    if of_mask and attn_mask is not None:
        of_scores = of_scores.sum_to_size(attn_mask.shape).to(attn_mask.dtype)
    return _like(of_query, query), _like(of_key, key), _like(of_value, value), of_scores


def _backward_of_kernel(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool, of_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Re-run the kernel's forward, then run its backward. The caller has set the forward's random seed."""
    with recording_gradients():
        query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
        differentiated = [query, key, value]
        if attn_mask is not None and of_mask:
            attn_mask = attn_mask.detach().requires_grad_()
            differentiated.append(attn_mask)
        output = _by_kernel(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        grads = torch.autograd.grad(output, differentiated, grad)
    of_query, of_key, of_value, *of_the_mask = (g.contiguous() for g in grads)
    return of_query, of_key, of_value, of_the_mask[0] if of_the_mask else grad.new_empty(0)


@dataclass
class _CpuAttention:
    """One call of attention with dropout on a CPU, which processes one sample of the batch at a time.

    Operands have the dtype of the computation (float32 or float64). Grouped keys and values are already repeated for
    all query heads.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    factor: float
    masks: DropoutMasks

    @functools.cached_property
    def causal_mask(self) -> Tensor:
        """Mask of causal attention, of shape [queries, keys], to be added to the scores."""
        return self.query.new_full((self.query.size(-2), self.key.size(-2)), -math.inf).triu_(1)

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, seed: Tensor,
        salt: int | None, shard: Sequence[int], is_causal: bool, scale: float | None, enable_gqa: bool,
    ) -> _CpuAttention:  # fmt: skip
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        query, key, value = (x.to(wide) for x in (query, key, value))
        if enable_gqa:
            key, value = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (key, value))
        mask = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.size(-2))
        factor = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0
        masks = DropoutMasks(dropout_p, seed, salt, shard)
        return cls(query, key, value, mask, is_causal, scale or query.size(-1) ** -0.5, factor, masks)

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the output, and the largest score of each query (zeros without a mask)."""
        output = _kernel_layout(self.query.new_empty(*self.query.shape[:-1], self.value.size(-1), dtype=dtype))
        largest = self.query.new_zeros(self.query.shape[:-1])
        for sample, value in enumerate(self.value):
            scores = self._scores(sample)
            if self.mask is not None:
                torch.amax(scores, -1, out=largest[sample])
            weights = self._weights(scores, largest[sample])
            weights.mul_(self.masks.draw(torch.empty_like(weights)))
            output[sample] = torch.bmm(weights, value).mul_(self.factor)
        return output, largest

    def backward(self, grad: Tensor, largest: Tensor, of_mask: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys, values and scores.

        Gradients of keys and values have one head per query head; the caller sums them over each group. If `of_mask` is
        False, an empty tensor is returned for the gradient of the scores.
        """
        of_query, of_key, of_value = (torch.empty_like(x) for x in (self.query, self.key, self.value))
        of_scores = self.query.new_zeros((*self.query.shape[:-1], self.key.size(-2)) if of_mask else 0)
        grad = grad.to(self.query.dtype) * self.factor
        for sample, (query, key, value, of_output) in enumerate(
            zip(self.query, self.key, self.value, grad, strict=True)
        ):
            weights = self._weights(self._scores(sample), largest[sample])
            mask = self.masks.draw(torch.empty_like(weights))
            of_weights = torch.bmm(of_output, value.mT).mul_(mask)
            of_value[sample] = torch.bmm(mask.mul_(weights).mT, of_output)
            of_sample = softmax_backward_(of_weights, weights)
            of_key[sample] = torch.bmm(of_sample.mT, query).mul_(self.scale)
            of_query[sample] = torch.bmm(of_sample, key).mul_(self.scale)
            if of_mask:
                of_scores[sample] = of_sample
        return of_query, of_key, of_value, of_scores

    def _scores(self, sample: int) -> Tensor:
        scores = torch.bmm(self.query[sample], self.key[sample].mT).mul_(self.scale)
        if self.mask is not None:
            scores += self.mask[sample]
        if self.is_causal:
            scores += self.causal_mask
        return scores

    def _weights(self, scores: Tensor, largest: Tensor) -> Tensor:
        """Replace scores by their softmax in place, and return them. Queries without attended keys get zeros."""
        weights = torch.softmax(scores, -1, out=scores)
        if self.mask is not None and (attends_none := largest == -math.inf).any():
            weights.masked_fill_(attends_none.unsqueeze(-1), 0.0)
        return weights


def _sum_groups(grad: Tensor, heads: Tensor) -> Tensor:
    """Sum the gradients of K/V heads that were repeated for several query heads.

    `heads`: the K/V heads before the repetition. The result has one gradient per head of `heads`.
    """
    return grad.unflatten(-3, (heads.size(-3), -1)).sum(-3) if grad.size(-3) != heads.size(-3) else grad


def _like(grad: Tensor, operand: Tensor) -> Tensor:
    return grad.to(operand.dtype).contiguous()


def _kernel_layout(output: Tensor) -> Tensor:
    """Return the output with the strides of torch's kernels: contiguous as [batch, queries, heads, width]."""
    return output.transpose(-2, -3).contiguous().transpose(-2, -3)


def _empty_statistics(query: Tensor, dropout_p: float) -> Tensor:
    """Allocate the tensor for the largest score of each query.

    The tensor is empty on a GPU, where the backward does not need the scores.
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(0 if _has_kernel(query, dropout_p) else query.shape[:-1], dtype=wide)


@attention_dropout_forward.register_fake
def _like_output(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, *others: Any
) -> tuple[Tensor, Tensor]:
    return _kernel_layout(query.new_empty(*query.shape[:-1], value.size(-1))), _empty_statistics(query, dropout_p)


@attention_dropout_backward.register_fake
def _like_operands(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_mask = others[-1] and attn_mask is not None
    mask = attn_mask.new_empty(attn_mask.shape) if of_mask and attn_mask is not None else grad.new_empty(0)
    dq, dk, dv = (x.new_empty(x.shape) for x in (query, key, value))
    return dq, dk, dv, mask


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, attn_mask, ctx.dropout_p, seed, *ctx.others = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, attn_mask, *output, seed)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    rest = (None,) * 7
    if grad is None:
        return None, None, None, None, *rest
    check_differentiated_once(
        "attention with dropout",
        "its backward recomputes the weights and is not differentiable",
        "attention that is written as matrix products and a softmax, or pm.eval()",
    )
    *tensors, seed = ctx.saved_tensors
    of_mask = bool(ctx.needs_input_grad[3])
    *grads, mask = attention_dropout_backward(grad, *tensors, ctx.dropout_p, seed, *ctx.others, of_mask)
    return *grads, mask if of_mask else None, *rest


attention_dropout_forward.register_autograd(_backward, setup_context=_save_operands)
