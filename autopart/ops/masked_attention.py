"""Attention masks by their values, and attention to a window by blocks.

A mask that lets every query see the keys around its own position, so many before it and so many behind it, is a `Band`:
causal attention, a sliding window, and attention to all keys are bands. A kernel that is told so reads no mask, and
leaves out the keys that none of its queries sees (Dao et al. 2022, arXiv:2205.14135, section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopart.ir.mask_structure import ROWS, Band, Run

_SMALLEST_BLOCK = 64
"""Queries of a block of window attention: with fewer, the calls cost more than the keys that they leave out."""


def band_of(mask: Tensor, queries: int, keys: int) -> Band | None:
    """The band that a mask is, of attention with [queries, keys] scores; None: it is none, or differs between rows.

    `mask`, of any shape that broadcasts to [..., queries, keys]: booleans, true for what is seen; or numbers that are
    added to the scores, 0 for what is seen, -inf or the lowest of the dtype (or more than half of it) for what is not.

    >>> band_of(torch.ones(3, 3).tril().bool(), 3, 3)
    Band(before=2, after=0)
    """
    if not (queries and keys and mask.numel()):
        return None
    seen, is_band = _seen(_distinct(mask))
    first = seen[0].expand(queries, keys)
    is_band &= (seen == seen[:1]).all()
    before, after = first[:, 0].sum() - 1, first[0].sum() - 1
    query, key = (torch.arange(size, device=mask.device) for size in (queries, keys))
    query = query.unsqueeze(-1)
    is_band &= ((key >= query - before) & (key <= query + after)).eq_(first).all()
    is_band &= (before >= 0) & (after >= 0) & (queries - before <= keys)  # every query sees a key
    known, *around = torch.stack([is_band, before, after]).tolist()  # the one value that a GPU is waited for
    return Band(*around) if known else None


def _distinct(mask: Tensor) -> Tensor:
    """The mask as [rows, queries, keys], without rows that are the same memory."""
    for dim in range(mask.ndim - 2):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    mask = mask.reshape((1,) * max(0, 3 - mask.ndim) + mask.shape)
    return mask.flatten(0, -3)


def _seen(mask: Tensor) -> tuple[Tensor, Tensor]:
    """What a mask lets be seen, and whether it says nothing else."""
    if mask.dtype == torch.bool:
        return mask, torch.ones((), dtype=torch.bool, device=mask.device)
    seen = mask == 0
    return seen, (seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()


def blocks_fit(band: Band, length: int) -> bool:
    """Whether attention to this window is less work by blocks, of so many queries and keys."""
    block, left, right = _blocks(band)
    return 3 * (left + block + right) <= 2 * length


def _blocks(band: Band) -> tuple[int, int, int]:
    """Queries of a block, and the keys before and behind them that the block sees."""
    block = max(*band, _SMALLEST_BLOCK)
    return block, block * (band.before > 0), block * (band.after > 0)


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    before: int,
    after: int,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention in which query i sees the keys from i - `before` to i + `after` (Beltagy et al. 2020, arXiv:2004.05150,
    section 3.1): blocks of queries, each with its own keys and those of the blocks beside it.

    query [b, h, s, d], key [b, g, s, d], value [b, g, s, e] -> [b, h, s, e], as `scaled_dot_product_attention`.
    """
    if enable_gqa and query.is_cuda:  # whose kernels take a mask, or groups of heads
        key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
        enable_gqa = False
    length = query.size(-2)
    block, left, right = _blocks(Band(before, after))
    count = -(-length // block)
    span, rest = left + block + right, count * block - length

    def of_blocks(x: Tensor, size: int) -> Tensor:
        """[b, h, s, d] -> [b * blocks, h, size, d]"""
        return x.unfold(2, size, block).permute(0, 2, 1, 4, 3).flatten(0, 1)

    queries = of_blocks(F.pad(query, (0, 0, 0, rest)), block)
    keys, values = (of_blocks(F.pad(x, (0, 0, left, rest + right)), span) for x in (key, value))
    at = torch.arange(block, device=query.device).unsqueeze(-1)
    beside = torch.arange(span, device=query.device) - left
    first = block * torch.arange(count, device=query.device).view(-1, 1, 1)
    exists = (first + beside >= 0) & (first + beside < length) | (first + at >= length)  # a query added sees anything
    mask = (beside >= at - before) & (beside <= at + after) & exists
    mask = mask.repeat(query.size(0), 1, 1).unsqueeze(1)
    output = F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=enable_gqa)
    output = output.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)
    return output[:, :, :length]


def runs_of(numbers: Sequence[int]) -> list[Run]:
    """Runs from the numbers of all, one run behind the other."""
    return [Run(*fields) for fields in zip(*[iter(numbers)] * len(Run._fields), strict=True)]


def attention_with_masks(query: Tensor, key: Tensor, value: Tensor, runs: Sequence[Run], **options: Any) -> Tensor:
    """Attention of runs of queries, with a mask for a block of them where no kernel knows what a run hides."""
    outputs, start = [], 0
    for run in runs:
        queries = query.narrow(-2, start, run.queries)
        outputs += [_attend(queries, key, value, run, options)]
        start += run.queries
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -2)


def _attend(query: Tensor, key: Tensor, value: Tensor, run: Run, options: Mapping[str, Any]) -> Tensor:
    """Attention of one run: in one call where a kernel knows what it hides, else in blocks with a mask each."""
    keys, values = (x.narrow(-2, run.low, run.high - run.low) for x in (key, value))
    hides_first, hides_last = run.hides
    number = run.high - run.low
    if not hides_first and not hides_last:
        return F.scaled_dot_product_attention(query, keys, values, **options)
    if run.is_causal:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, **options)
    if not hides_first and run.end + run.queries - 1 == run.high and query.is_cuda and query.dtype.itemsize == 2:
        from torch.nn.attention.bias import causal_lower_right  # loads the compiler

        behind = causal_lower_right(run.queries, number)
        return F.scaled_dot_product_attention(query, keys, values, behind, **options)
    if run.queries > ROWS:
        starts = range(0, run.queries, ROWS)
        parts = [(start, min(start + ROWS, run.queries)) for start in starts]
        blocks = (query.narrow(-2, start, stop - start) for start, stop in parts)
        runs = (run.part(start, stop) for start, stop in parts)
        return torch.cat([_attend(q, key, value, r, options) for q, r in zip(blocks, runs, strict=True)], -2)
    if options["enable_gqa"] and query.is_cuda:  # whose kernels take a mask, or groups of heads
        keys, values = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (keys, values))
        options = {**options, "enable_gqa": False}
    return F.scaled_dot_product_attention(query, keys, values, run.mask(query.device), **options)
