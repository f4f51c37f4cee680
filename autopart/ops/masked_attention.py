"""Detection of sliding windows in attention masks, and attention that is computed in blocks.

If each query attends a fixed number of keys before and after its position, the mask is a `MaskWindow`. Causal
attention, a sliding window and attention to all keys are windows in this sense. A kernel that gets the window instead
of the mask reads no mask and skips the keys that none of its queries attends (Dao et al. 2022, arXiv:2205.14135,
section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopart.ir.mask_structure import ROWS, MaskWindow, QueryRun

_SMALLEST_BLOCK = 64
"""Minimum number of queries in a block of window attention.

With fewer, calls cost more than skipped keys.
"""


def mask_window_of(mask: Tensor, queries: int, keys: int) -> MaskWindow | None:
    """Return the sliding window that a mask describes.

    Returns None if the mask describes no sliding window, or differs between samples.

    Args:
        mask: any shape that broadcasts to [..., queries, keys]. Boolean: true if attended. Floating point: added to the
            scores, 0 if attended; masked if -inf, or if at most half of the lowest number of the dtype.
        queries, keys: number of queries and keys.

    >>> mask_window_of(torch.ones(3, 3).tril().bool(), 3, 3)
    MaskWindow(before=2, after=0)
    """
    if not (queries and keys and mask.numel()):
        return None
    attended, is_band = _attended(_distinct(mask))
    first = attended[0].expand(queries, keys)
    is_band &= (attended == attended[:1]).all()
    before, after = first[:, 0].sum() - 1, first[0].sum() - 1
    query, key = (torch.arange(size, device=mask.device) for size in (queries, keys))
    query = query.unsqueeze(-1)
    is_band &= ((key >= query - before) & (key <= query + after)).eq_(first).all()
    is_band &= (before >= 0) & (after >= 0) & (queries - before <= keys)  # every query attends a key
    is_window, *widths = torch.stack([is_band, before, after]).tolist()  # the only GPU synchronisation
    return MaskWindow(*widths) if is_window else None


def _distinct(mask: Tensor) -> Tensor:
    """Return the mask as [samples, queries, keys]. If it is broadcast over samples, `samples` is 1."""
    for dim in range(mask.ndim - 2):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    mask = mask.reshape((1,) * max(0, 3 - mask.ndim) + mask.shape)
    return mask.flatten(0, -3)


def _attended(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return two boolean tensors: the attended pairs of query and key, and a scalar.

    The scalar is True if all other pairs are masked. It is False if the mask adds a finite bias to a score.
    """
    if mask.dtype == torch.bool:
        return mask, torch.ones((), dtype=torch.bool, device=mask.device)
    attended = mask == 0
    return attended, (attended | (mask <= torch.finfo(mask.dtype).min / 2)).all()


def blocks_fit(band: MaskWindow, length: int) -> bool:
    """Return True if `window_attention` needs much less work than full attention.

    `window_attention` computes each block of queries with the adjacent blocks of keys. `length`: number of queries and
    keys.
    """
    block, left, right = _blocks(band)
    return 3 * (left + block + right) <= 2 * length


def _blocks(band: MaskWindow) -> tuple[int, int, int]:
    """Return the queries per block, and the keys that a block reads before and after its own positions."""
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
    """Compute attention in which query i attends the keys from i - `before` to i + `after`.

    Each block of queries attends its own keys and those of the adjacent blocks (Beltagy et al. 2020, arXiv:2004.05150,
    section 3.1).

    Shapes as in `scaled_dot_product_attention`: query [b, h, s, d], key [b, g, s, d], value [b, g, s, e] -> [b, h, s,
    e].
    """
    if enable_gqa and query.is_cuda:  # CUDA kernels support a mask or grouped heads, not both
        key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
        enable_gqa = False
    length = query.size(-2)
    block, left, right = _blocks(MaskWindow(before, after))
    count = -(-length // block)
    span, rest = left + block + right, count * block - length

    def of_blocks(x: Tensor, size: int) -> Tensor:
        """Split the sequence into blocks of `size`: [b, h, s, d] -> [b * blocks, h, size, d]."""
        return x.unfold(2, size, block).permute(0, 2, 1, 4, 3).flatten(0, 1)

    queries = of_blocks(F.pad(query, (0, 0, 0, rest)), block)
    keys, values = (of_blocks(F.pad(x, (0, 0, left, rest + right)), span) for x in (key, value))
    at = torch.arange(block, device=query.device).unsqueeze(-1)
    beside = torch.arange(span, device=query.device) - left
    first = block * torch.arange(count, device=query.device).view(-1, 1, 1)
    exists = (first + beside >= 0) & (first + beside < length) | (first + at >= length)  # padding
    mask = (beside >= at - before) & (beside <= at + after) & exists
    mask = mask.repeat(query.size(0), 1, 1).unsqueeze(1)
    output = F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=enable_gqa)
    output = output.unflatten(0, (-1, count)).transpose(1, 2).flatten(2, 3)
    return output[:, :, :length]


def runs_of(numbers: Sequence[int]) -> list[QueryRun]:
    """Convert a flat list of numbers to `QueryRun`s.

    The list contains all fields of the first run, then those of the next run, and so on.
    """
    return [QueryRun(*fields) for fields in zip(*[iter(numbers)] * len(QueryRun._fields), strict=True)]


def attention_with_masks(query: Tensor, key: Tensor, value: Tensor, runs: Sequence[QueryRun], **options: Any) -> Tensor:
    """Compute attention run by run. A run (`QueryRun`) is a group of consecutive queries.

    If no kernel supports the mask structure of a run, the run is computed in blocks of queries, each with a mask.
    """
    outputs, start = [], 0
    for run in runs:
        queries = query.narrow(-2, start, run.queries)
        outputs += [_attend(queries, key, value, run, options)]
        start += run.queries
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -2)


def _attend(query: Tensor, key: Tensor, value: Tensor, run: QueryRun, options: Mapping[str, Any]) -> Tensor:
    """Compute the attention of one run: in one call if a kernel supports its mask, else in masked blocks."""
    keys, values = (x.narrow(-2, run.low, run.high - run.low) for x in (key, value))
    hides_first, hides_last = run.hides
    number = run.high - run.low
    if not hides_first and not hides_last:
        return F.scaled_dot_product_attention(query, keys, values, **options)
    if run.is_causal:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, **options)
    if not hides_first and run.end + run.queries - 1 == run.high and query.is_cuda and query.dtype.itemsize == 2:
        from torch.nn.attention.bias import causal_lower_right  # imported late, because this loads the compiler

        bias = causal_lower_right(run.queries, number)
        return F.scaled_dot_product_attention(query, keys, values, bias, **options)
    if run.queries > ROWS:
        starts = range(0, run.queries, ROWS)
        spans = [(start, min(start + ROWS, run.queries)) for start in starts]
        blocks = (query.narrow(-2, start, stop - start) for start, stop in spans)
        runs = (run.part(start, stop) for start, stop in spans)
        return torch.cat([_attend(q, key, value, r, options) for q, r in zip(blocks, runs, strict=True)], -2)
    if options["enable_gqa"] and query.is_cuda:  # CUDA kernels support a mask or grouped heads, not both
        keys, values = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (keys, values))
        options = {**options, "enable_gqa": False}
    return F.scaled_dot_product_attention(query, keys, values, run.mask(query.device), **options)
