"""Blockwise attention: attention over blocks of keys and values, combined by their log-sum-exp.

In ring attention a block is the shard of one rank (Liu et al. 2023, arXiv:2310.01889). Attention on one rank splits the
queries into runs of consecutive queries (`QueryRun`). A run has two blocks of keys: keys that all of its queries
attend, and keys on the diagonal, where attention is causal.

A visit is the attention of the local queries to one block. It returns an output and the log-sum-exp of its scores. The
log-sum-exps determine how the outputs of all visits are averaged. The backward of a visit needs the combined output and
log-sum-exp (Dao et al. 2022, arXiv:2205.14135, section 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopart.ir.mask_structure import QueryRun
from autopart.ir.sharding import DimSharding
from autopart.ops.differentiate_once import check_differentiated_once
from autopart.ops.masked_attention import attention_with_masks, runs_of

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""CPU attention that returns the log-sum-exp of the scores, and its backward.

The backward accepts a log-sum-exp over more keys than its own.
"""


class ScoreBlock(NamedTuple):
    """Rectangular block of attention scores: (start, length) of its queries and of its keys, and its mask.

    `is_causal`: True if query i attends keys 0 to i of the block.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: Tensor | None
    is_causal: bool = False


@dataclass(frozen=True)
class KeyBlockVisit:
    """Description of a visit: attention of the local queries to the keys and values of one rank.

    Attributes:
        cut: sharding of the sequence dim (-2) over all ranks.
        here: index of the local rank.
        rank: index of the rank that owns the keys.
        mask: tensor [..., local queries, all keys]. Boolean: true if attended. Floating point: added to the scores.
            None: `runs` define the attended keys, or all keys are attended if there are no runs.
        scale: factor of the scores. None: 1 / sqrt(head width).
        runs: groups of consecutive local queries, each with the key ranges that it attends.
    """

    cut: DimSharding
    here: int
    rank: int
    mask: Tensor | None
    scale: float | None
    runs: Sequence[QueryRun] = ()

    def parts(self, device: torch.device, has_kernel: bool) -> Iterable[ScoreBlock]:
        """Return the blocks of scores to compute. Blocks in which every score is masked are left out.

        Queries and keys of a block are contiguous in the sequence. If no kernel can be used (`has_kernel` is False),
        all scores of a block are materialised, so blocks are small and none is causal.
        """
        num_queries, num_keys = self.cut.length(self.here), self.cut.length(self.rank)
        if not self.runs and self.mask is None:
            return [ScoreBlock((0, num_queries), (0, num_keys), None)]
        if has_kernel and self._is_causal:
            return [ScoreBlock((0, num_queries), (0, num_queries), None, is_causal=True)]
        parts = self._blocks_of_mask(self.mask) if self.mask is not None else self._blocks_of_runs(device, has_kernel)
        return _merge_blocks(parts) if has_kernel else parts

    @property
    def _is_causal(self) -> bool:
        """True if the keys are local and every query attends exactly the keys up to its own position.

        If a rank has several chunks of the sequence (zigzag), they are sorted by position. So one causal kernel call
        over the local shard gives the right result.
        """
        chunks = self.cut.spans(self.here)
        return self.rank == self.here and len(self.runs) == len(chunks) and all(
            run.queries == count and run.low <= chunks[0][0] and not run.hides[0]
            and (run.end, run.high) == (position + 1, position + count)
            for run, (position, count) in zip(self.runs, chunks, strict=True)
        )  # fmt: skip

    def _blocks_of_mask(self, mask: Tensor) -> Iterator[ScoreBlock]:
        for first, (_, number) in _chunks(self.cut, self.here):
            rows = mask if mask.size(-2) == 1 else mask.narrow(-2, first, number)
            for start, (position, count) in _chunks(self.cut, self.rank):
                block_mask = rows if rows.size(-1) == 1 else rows.narrow(-1, position, count)
                if block_mask.dtype != torch.bool:
                    yield ScoreBlock((first, number), (start, count), block_mask)
                elif bool(block_mask.any()):
                    yield ScoreBlock((first, number), (start, count), None if bool(block_mask.all()) else block_mask)

    def _blocks_of_runs(self, device: torch.device, has_kernel: bool) -> Iterator[ScoreBlock]:
        first = 0
        for run in self.runs:
            for at, (position, count) in _chunks(self.cut, self.rank):
                for start, block in run.among(position, position + count, has_kernel):
                    is_causal = has_kernel and block.is_causal
                    mask = block.mask(device) if any(block.hides) and not is_causal else None
                    keys = (at + block.low - position, block.high - block.low)
                    yield ScoreBlock((first + start, block.queries), keys, mask, is_causal)
            first += run.queries


def _merge_blocks(parts: Iterable[ScoreBlock]) -> Iterator[ScoreBlock]:
    """Merge consecutive unmasked blocks that have equal queries or equal keys.

    With a zigzag split, a rank has two chunks of queries, and gets two chunks of keys from another rank. A causal mask
    leaves one of two cases: both query chunks attend the first key chunk, or the second query chunk attends both key
    chunks. In either case the two blocks become one.
    """
    last: ScoreBlock | None = None
    for part in parts:
        if last is not None:
            both = _merged(last, part)
            if both is None:
                yield last
            part = both or part
        last = part
    if last is not None:
        yield last


def _merged(first: ScoreBlock, second: ScoreBlock) -> ScoreBlock | None:
    if any(part.mask is not None or part.is_causal for part in (first, second)):
        return None
    queries, keys = ((one[0], one[1] + other[1]) if sum(one) == other[0] else None
                     for one, other in zip(first[:2], second[:2], strict=True))  # fmt: skip
    if first.queries == second.queries and keys:
        return ScoreBlock(first.queries, keys, None)
    return ScoreBlock(queries, first.keys, None) if first.keys == second.keys and queries else None


def _chunks(cut: DimSharding, rank: int) -> list[tuple[int, tuple[int, int]]]:
    """Return the chunks of a rank as (start in the local shard, (start in the full sequence, length))."""
    chunks, start = [], 0
    for position, count in cut.spans(rank):
        chunks.append((start, (position, count)))
        start += count
    return chunks


VisitResult = tuple[Tensor, Tensor]
"""Combined result of visits: the output [b, h, q, e] and the log-sum-exp [b, h, q]."""


def attend_visits(query: Tensor, coming: Iterable[tuple[Tensor, Tensor, KeyBlockVisit]]) -> VisitResult:
    """Compute the attention of local queries to several blocks of keys (visits), and combine the results.

    Args:
        query: local queries, of shape [batch, heads, queries, width].
        coming: for each visit, its keys, its values and its description. Keys and values have the shape [batch, K/V
            heads, keys, width].
    Returns:
        The output in the dtype of the queries, and the log-sum-exp in at least float32.
    """
    so_far: VisitResult | None = None
    for key, value, of in coming:
        so_far = _combine_visit(so_far, query, key, value, of)
    assert so_far is not None, "the first visit is that of the local keys"
    output, total = so_far
    return output.to(query.dtype), total


def _combine_visit(
    so_far: VisitResult | None, query: Tensor, key: Tensor, value: Tensor, of: KeyBlockVisit
) -> VisitResult:
    """Compute one visit, and combine its result with that of the earlier visits in place.

    A visit is the attention of the local queries to one block of keys. `so_far`: combined result of the earlier visits,
    None for the first visit. `of`: description of the visit.
    """
    key, value = (_repeat_heads(x, query) for x in (key, value))
    for part in of.parts(query.device, _has_kernel(query, value)):
        keys, values = (x.narrow(2, *part.keys) for x in (key, value))
        new, logs = _attend(query.narrow(2, *part.queries), keys, values, part, of.scale)
        new = new.to(torch.promote_types(query.dtype, torch.float32))
        if so_far is None and part.queries == (0, query.size(2)):
            so_far = new, logs
            continue
        so_far = so_far or _empty_result(query, value)
        rows, before = (x.narrow(2, *part.queries) for x in so_far)
        both = torch.logaddexp(before, logs)
        rows.lerp_(new, (logs - _finite(both)).exp().unsqueeze(-1))
        before.copy_(both)
    return so_far or _empty_result(query, value)


def visit_backward(
    grads: Sequence[Tensor], grad: Tensor, output: Tensor, total: Tensor, query: Tensor, key: Tensor, value: Tensor,
    of: KeyBlockVisit,
) -> None:  # fmt: skip
    """Compute the gradients of one visit, and add them to `grads` in place.

    A visit is the attention of the local queries to one block of keys.

    Args:
        grads: gradient sums of the local queries, of the visit's keys and of its values.
        grad: gradient of the output.
        output, total: output and log-sum-exp, each combined over all visits.
        query, key, value: operands of the visit.
        of: description of the visit.
    """
    keys, values = (_repeat_heads(x, query) for x in (key, value))
    for part in of.parts(query.device, _has_kernel(query, value)):
        sides = [x.narrow(2, *part.queries) for x in (grad, output, query)]
        logs = total.narrow(2, *part.queries)
        local = [x.narrow(2, *part.keys) for x in (keys, values)]
        part_grads = _attend_backward(sides[0], sides[2], local[0], local[1], sides[1], logs, part, of.scale)
        for accumulator, span, part_grad in zip(grads, (part.queries, part.keys, part.keys), part_grads, strict=True):
            for of_one_head_a_group in part_grad.unflatten(1, (accumulator.size(1), -1)).unbind(
                2
            ):  # faster than adding new tensors
                accumulator.narrow(2, *span).add_(of_one_head_a_group)


class _RunAttention(torch.autograd.Function):
    """Autograd function of `attention_runs`, for devices with a kernel that returns the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, runs: Sequence[QueryRun], scale: float | None
    ) -> Tensor:  # fmt: skip
        ctx.visit = KeyBlockVisit(DimSharding(2, key.size(2), (), 1), 0, 0, None, scale, runs)
        output, total = attend_visits(query, [(key, value, ctx.visit)])
        ctx.save_for_backward(query, key, value, output, total)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 5
        check_differentiated_once(
            "attention by a kernel",
            "its backward is not differentiable, as on one device",
            "attention that is written as matrix products and a softmax",
        )
        query, key, value, output, total = ctx.saved_tensors
        grads = [torch.zeros_like(x) for x in (query, key, value)]
        visit_backward(grads, grad, output, total, query, key, value, ctx.visit)
        return *grads, None, None


def attention_runs(
    query: Tensor, key: Tensor, value: Tensor, runs: Sequence[int],
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute attention by runs of queries, skipping keys that none of a run's queries attends.

    Args:
        query, key, value: as in `scaled_dot_product_attention`, of shapes [b, h, q, d], [b, g, s, d], [b, g, s, e]. `q`
            can be less than `s`.
        runs: the fields of all runs (`QueryRun`: consecutive queries and their key ranges), in one flat list. Together
            the runs have `q` queries.
    Returns:
        The output, of shape [b, h, q, e].

    If the device has a kernel that returns the log-sum-exp, a run is computed in two calls. One call attends, without a
    mask, the keys that all queries of the run attend. The other call attends the last keys with a causal mask. Both
    results are combined by their log-sum-exp.
    """
    all_runs = runs_of(runs)
    needs_masks = any(any(run.hides) and not run.is_causal for run in all_runs)
    if needs_masks and _has_kernel(query, value):
        return _RunAttention.apply(query, key, value, all_runs, scale)
    return attention_with_masks(query, key, value, all_runs, scale=scale, enable_gqa=enable_gqa)


def _empty_result(query: Tensor, value: Tensor) -> VisitResult:
    dtype = torch.promote_types(query.dtype, torch.float32)
    output = query.new_zeros(*query.shape[:-1], value.size(-1), dtype=dtype)
    return output, query.new_full(query.shape[:-1], float("-inf"), dtype=dtype)


def _repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    groups = query.size(1) // x.size(1)
    return x.repeat_interleave(groups, 1) if groups > 1 else x


def _score_bias(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return a mask as a 4-d additive bias of the scores."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = query.new_zeros(mask.shape).masked_fill(~mask, float("-inf"))
    return mask.to(query.dtype)[(None,) * (4 - mask.dim())]


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    return query.device.type == "cpu" and query.size(-1) == value.size(-1)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    scores = scores.to(torch.promote_types(query.dtype, torch.float32))
    return scores if mask is None else scores + mask


def _attend(
    query: Tensor, key: Tensor, value: Tensor, part: ScoreBlock, scale: float | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    mask = _score_bias(part.mask, query)
    if _has_kernel(query, value):
        output, logs = _KERNEL(query, key, value, 0.0, part.is_causal, attn_mask=mask, scale=scale)
        if mask is not None:  # the kernel returns 0 for a query that attends no key
            logs = logs.masked_fill((mask == float("-inf")).all(-1), float("-inf"))
        return output, logs
    scores = _scores(query, key, mask, scale)
    logs = scores.logsumexp(-1)
    return (scores - _finite(logs).unsqueeze(-1)).exp().to(value.dtype) @ value, logs


def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logs: Tensor, part: ScoreBlock,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values of one block of scores.

    `output`, `logs`: output and log-sum-exp, each combined over all blocks of keys.
    """
    mask, logs = _score_bias(part.mask, query), _finite(logs)
    if _has_kernel(query, value):
        return _KERNEL_BACKWARD(
            grad, query, key, value, output, logs, 0.0, part.is_causal, attn_mask=mask, scale=scale
        )  # fmt: skip
    factor = query.size(-1) ** -0.5 if scale is None else scale
    shares = (_scores(query, key, mask, scale) - logs.unsqueeze(-1)).exp()
    inner = (shares * (grad @ value.transpose(-2, -1) - (grad * output).sum(-1, keepdim=True))).to(query.dtype)
    return (
        inner @ key * factor,
        inner.transpose(-2, -1) @ query * factor,
        shares.to(grad.dtype).transpose(-2, -1) @ grad,
    )


def _finite(logs: Tensor) -> Tensor:
    """Replace a log-sum-exp of -inf by 0.

    Only a query that attends no key has a log-sum-exp of -inf. With 0, its attention weights are 0 instead of NaN.
    """
    return logs.masked_fill(logs == float("-inf"), 0.0)
