"""Attention with dropout, as one operator that draws its mask locally from a seed that all ranks have.

On a GPU it is torch's fused kernel. On a CPU it saves what that kernel saves for backward: its operands, its output and
one number per query (Dao et al. 2022, arXiv:2205.14135, section 3.1). The backward recomputes the weights and draws the
mask again; it is the mask that `dropout` draws for the weights. Forward and backward work on chunks of the weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autopart.compat.torch_internals import recording_gradients, softmax_backward_
from autopart.ops.differentiate_once import check_differentiated_once
from autopart.ops.seeded_random import PART, Masks, seeded

OPERATORS = ("attention_dropout", "attention_dropout_forward", "attention_dropout_backward")


def attention_dropout(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, seed: Tensor,
    salt: int | None, shard: Sequence[int], is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `scaled_dot_product_attention` with a reproducible dropout mask.

    The mask depends only on `seed`, `salt`, `shard` and the shape of the weights (see `dropout`). A query that attends
    no key returns zeros.

    query [b, h, q, d], key [b, g, k, d], value [b, g, k, e] -> [b, h, q, e]
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
    """Call torch's kernel after converting the operands to what it supports.

    Its kernels support grouped heads only in 16 bits and without a mask, and need a contiguous last dim.
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
    """Return the output, and one number per query as a kernel saves it. Opaque to compilers.

    On a GPU the backward re-runs the kernel's forward and needs no such numbers.
    """
    if _has_kernel(query, dropout_p):
        with seeded(query.device, seed, salt, shard):
            output = _by_kernel(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _kernel_layout(output), _empty_statistics(query, dropout_p)
    call = _OnHost.of(query, key, value, attn_mask, dropout_p, seed, salt, shard, is_causal, scale, enable_gqa)
    return call.forward(query.dtype)


@torch.library.custom_op("autopart::attention_dropout_backward", mutates_args=())
def attention_dropout_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, output: Tensor, largest: Tensor,
    dropout_p: float, seed: Tensor, salt: int | None, shard: Sequence[int], is_causal: bool, scale: float | None,
    enable_gqa: bool, of_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key, value and, if `of_mask`, of the mask (else an empty tensor)."""
    if _has_kernel(query, dropout_p):
        with seeded(query.device, seed, salt, shard):
            return _backward_of_kernel(
                grad, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, of_mask
            )
    call = _OnHost.of(query, key, value, attn_mask, dropout_p, seed, salt, shard, is_causal, scale, enable_gqa)
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
    """Re-run the kernel's forward, then its backward. The caller has restored the forward's seed."""
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


_FEWEST = 16
"""Least queries of a chunk, if a head has as many: products with fewer are slow."""
_BLOCK = 128
"""Queries of a chunk of causal attention, which skips the keys after the last of them. With fewer queries, or with few
chunks, the calls cost more than the skipped keys."""


class _WeightChunk(NamedTuple):
    """Chunk of the weights that fits a cache: samples, or heads of one sample, or queries of one head."""

    rows: slice
    heads: slice
    queries: slice
    keys: slice

    @property
    def of_queries(self) -> tuple[slice, slice, slice]:
        return self.rows, self.heads, self.queries

    @property
    def of_keys(self) -> tuple[slice, slice, slice]:
        return self.rows, self.heads, self.keys


def _weight_chunks(
    num_rows: int, num_heads: int, num_queries: int, num_keys: int, is_causal: bool
) -> Iterator[_WeightChunk]:
    """Yield the chunks in memory order of the weights."""
    queries = min(num_queries, max(_FEWEST, PART // max(1, num_keys)))
    if is_causal and num_queries >= 4 * _BLOCK:
        queries = min(queries, _BLOCK)
    heads = max(1, min(num_heads, PART // max(1, num_queries * num_keys))) if queries >= num_queries else 1
    rows = max(1, PART // max(1, num_heads * num_queries * num_keys)) if heads >= num_heads else 1
    for row in range(0, num_rows, rows):
        for head in range(0, num_heads, heads):
            for query in range(0, num_queries, queries):
                stop = min(query + queries, num_queries)
                keys = min(stop, num_keys) if is_causal else num_keys
                yield _WeightChunk(slice(row, row + rows), slice(head, head + heads), slice(query, stop), slice(keys))


@dataclass
class _OnHost:
    """A call on a CPU, in its compute dtype, with keys and values repeated for each query head."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    factor: float
    masks: Masks

    @functools.cached_property
    def hidden(self) -> Tensor:
        """Causal bias of a chunk's scores, for keys from its first query on."""
        queries = next(self.pieces()).queries
        return self.query.new_full((queries.stop, queries.stop), -math.inf).triu_(1)

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, seed: Tensor,
        salt: int | None, shard: Sequence[int], is_causal: bool, scale: float | None, enable_gqa: bool,
    ) -> _OnHost:  # fmt: skip
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        query, key, value = (x.to(wide) for x in (query, key, value))
        if enable_gqa:
            key, value = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (key, value))
        mask = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.size(-2))
        factor = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0
        masks = Masks(dropout_p, seed, salt, shard)
        return cls(query, key, value, mask, is_causal, scale or query.size(-1) ** -0.5, factor, masks)

    def pieces(self) -> Iterator[_WeightChunk]:
        rows, heads, queries, _ = self.query.shape
        return _weight_chunks(rows, heads, queries, self.key.size(-2), self.is_causal)

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the output, and the largest score of every query.

        Without a mask the second tensor is zeros, because every query then attends a key.
        """
        output = _kernel_layout(self.query.new_empty(*self.query.shape[:-1], self.value.size(-1), dtype=dtype))
        largest = self.query.new_zeros(self.query.shape[:-1])
        buffers = [self.query.new_empty(0) for _ in range(3)]
        for piece in self.pieces():
            value, to = self.value[piece.of_keys].flatten(0, 1), output[piece.of_queries]
            scores = self._scores(piece, buffers[0])
            if self.mask is not None:
                torch.amax(scores.view(*to.shape[:-1], -1), -1, out=largest[piece.of_queries])
            weights = self._weights(scores, largest[piece.of_queries])
            weights.mul_(self.masks.draw(_reused(buffers[1], weights.shape), self.key.size(-2)))
            products = torch.bmm(weights, value, out=_reused(buffers[2], (*weights.shape[:-1], value.size(-1))))
            torch.mul(products.view(to.shape), self.factor, out=to)
        return output, largest

    def backward(self, grad: Tensor, largest: Tensor, of_mask: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of query, key, value (per query head) and all scores (empty without `of_mask`)."""
        operands = self.query, self.key, self.value
        of_query, of_key, of_value = (x.new_zeros(x.shape) for x in operands)
        of_scores = self.query.new_zeros((*self.query.shape[:-1], self.key.size(-2)) if of_mask else 0)
        buffers = [self.query.new_empty(0) for _ in range(3)]
        grad = grad.to(self.query.dtype) * self.factor
        for piece in self.pieces():
            query, of_output, to_query = (x[piece.of_queries].flatten(0, 1) for x in (self.query, grad, of_query))
            keyed = self.key, self.value, of_key, of_value
            key, value, to_key, to_value = (x[piece.of_keys].flatten(0, 1) for x in keyed)
            weights = self._weights(self._scores(piece, buffers[0]), largest[piece.of_queries])
            mask = self.masks.draw(_reused(buffers[1], weights.shape), self.key.size(-2))
            of_weights = torch.bmm(of_output, value.mT, out=_reused(buffers[2], weights.shape)).mul_(mask)
            to_value.baddbmm_(mask.mul_(weights).mT, of_output)
            of_piece = softmax_backward_(of_weights, weights)
            to_key.baddbmm_(of_piece.mT, query, alpha=self.scale)
            to_query.baddbmm_(of_piece, key, alpha=self.scale)
            if of_mask:
                to_scores = of_scores[piece.of_queries][..., piece.keys]
                to_scores.copy_(of_piece.view(to_scores.shape))
        return of_query, of_key, of_value, of_scores

    def _scores(self, piece: _WeightChunk, buffer: Tensor) -> Tensor:
        query, key = self.query[piece.of_queries].flatten(0, 1), self.key[piece.of_keys].flatten(0, 1)
        scores = _reused(buffer, (*query.shape[:-1], key.size(-2)))
        if self.mask is None:
            torch.baddbmm(scores, query, key.mT, beta=0, alpha=self.scale, out=scores)
        else:
            mask = self.mask[piece.of_queries][..., piece.keys].to(scores.dtype).flatten(0, 1)
            torch.baddbmm(mask, query, key.mT, alpha=self.scale, out=scores)
        if self.is_causal:
            diagonal_scores = scores[..., piece.queries.start :]  # keys that some of these queries mask
            diagonal_scores += self.hidden[: diagonal_scores.size(-2), : diagonal_scores.size(-1)]
        return scores

    def _weights(self, scores: Tensor, largest: Tensor) -> Tensor:
        """Compute the softmax of scores in place, zeros for queries that attend no key."""
        weights = torch.softmax(scores, -1, out=scores)
        if self.mask is not None and (attends_none := largest == -math.inf).any():
            weights.masked_fill_(attends_none.view(*weights.shape[:-1], 1), 0.0)
        return weights


def _reused(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of this shape in a reused buffer."""
    if buffer.numel() < (number := math.prod(shape)):
        buffer.resize_(number)
    return buffer[:number].view(shape)


def _sum_groups(grad: Tensor, heads: Tensor) -> Tensor:
    return grad.unflatten(-3, (heads.size(-3), -1)).sum(-3) if grad.size(-3) != heads.size(-3) else grad


def _like(grad: Tensor, operand: Tensor) -> Tensor:
    return grad.to(operand.dtype).contiguous()


def _kernel_layout(output: Tensor) -> Tensor:
    """Return the output in the kernels' memory layout, [b, q, h, e]."""
    return output.transpose(-2, -3).contiguous().transpose(-2, -3)


def _empty_statistics(query: Tensor, dropout_p: float) -> Tensor:
    """Allocate the number per query, empty if the kernel's backward does not read it."""
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
