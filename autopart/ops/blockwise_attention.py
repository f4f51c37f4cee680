"""Attention to keys and values that are read part by part: those of one rank after the other, as they go around (Liu et
al. 2023, arXiv:2310.01889), or those that all queries of a run see, and those of which each sees one more.

A visit gives an output and the logarithm of the sum of its exponentials, by which the outputs of all visits are put
together; the backward of a visit needs those of all together (Dao et al. 2022, arXiv:2205.14135, section 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopart.ir.mask_structure import Run
from autopart.ir.sharding import Cut
from autopart.ops.differentiate_once import check_differentiated_once
from autopart.ops.masked_attention import attention_with_masks, runs_of

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Attention on the CPU with the logarithms of its sums, and its gradients from those of more keys than it is given."""


class Part(NamedTuple):
    """Some of a rank's queries and of the visiting keys, by their first and number, and what is hidden of them.
    `is_causal`: query i sees the keys from the first to number i."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: Tensor | None
    is_causal: bool = False


@dataclass(frozen=True)
class Visit:
    """What comes by: the keys and values of the rank with this number. `cut`: of the sequence, dim -2, over all ranks.
    `mask`: [..., q, s] of this rank's queries and all keys, true where they are seen, or added to scores; None: what
    `runs` say is seen, or all if there are none. `scale`: of scores; None: 1 / sqrt(d)."""

    cut: Cut
    here: int
    rank: int
    mask: Tensor | None
    scale: float | None
    runs: Sequence[Run] = ()

    def parts(self, device: torch.device, has_kernel: bool) -> Iterable[Part]:
        """The queries and keys in pieces that lie together in the sequence, without those that see nothing. Without a
        kernel none is causal, and they are small: all of their scores are made."""
        own, visiting = self.cut.length(self.here), self.cut.length(self.rank)
        if not self.runs and self.mask is None:
            return [Part((0, own), (0, visiting), None)]
        if has_kernel and self._is_causal:
            return [Part((0, own), (0, own), None, is_causal=True)]
        parts = self._parts_of_mask(self.mask) if self.mask is not None else self._parts_of_runs(device, has_kernel)
        return _joined(parts) if has_kernel else parts

    @property
    def _is_causal(self) -> bool:
        """Whether it is of a rank's own keys, and every query sees those up to its own: pieces that are in order in the
        sequence are causal together."""
        pieces = self.cut.spans(self.here)
        return self.rank == self.here and len(self.runs) == len(pieces) and all(
            run.queries == count and run.low <= pieces[0][0] and not run.hides[0]
            and (run.end, run.high) == (position + 1, position + count)
            for run, (position, count) in zip(self.runs, pieces, strict=True)
        )  # fmt: skip

    def _parts_of_mask(self, mask: Tensor) -> Iterator[Part]:
        for first, (_, number) in _places(self.cut, self.here):
            rows = mask if mask.size(-2) == 1 else mask.narrow(-2, first, number)
            for start, (position, count) in _places(self.cut, self.rank):
                seen = rows if rows.size(-1) == 1 else rows.narrow(-1, position, count)
                if seen.dtype != torch.bool:
                    yield Part((first, number), (start, count), seen)
                elif bool(seen.any()):
                    yield Part((first, number), (start, count), None if bool(seen.all()) else seen)

    def _parts_of_runs(self, device: torch.device, has_kernel: bool) -> Iterator[Part]:
        first = 0
        for run in self.runs:
            for at, (position, count) in _places(self.cut, self.rank):
                for start, block in run.among(position, position + count, has_kernel):
                    is_causal = has_kernel and block.is_causal
                    mask = block.mask(device) if any(block.hides) and not is_causal else None
                    keys = (at + block.low - position, block.high - block.low)
                    yield Part((first + start, block.queries), keys, mask, is_causal)
            first += run.queries


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    """Parts one behind the other of which nothing is hidden as one, where they are the same queries or keys: in zigzag
    all of a rank's queries see one of its two pieces of keys, or half of them see both."""
    last: Part | None = None
    for part in parts:
        if last is not None:
            both = _together(last, part)
            if both is None:
                yield last
            part = both or part
        last = part
    if last is not None:
        yield last


def _together(first: Part, second: Part) -> Part | None:
    if any(part.mask is not None or part.is_causal for part in (first, second)):
        return None
    queries, keys = ((one[0], one[1] + other[1]) if sum(one) == other[0] else None
                     for one, other in zip(first[:2], second[:2], strict=True))  # fmt: skip
    if first.queries == second.queries and keys:
        return Part(first.queries, keys, None)
    return Part(queries, first.keys, None) if first.keys == second.keys and queries else None


def _places(cut: Cut, rank: int) -> list[tuple[int, tuple[int, int]]]:
    """The pieces of a rank: where each begins on the rank, and (where in the sequence, how long)."""
    pieces, start = [], 0
    for position, count in cut.spans(rank):
        pieces.append((start, (position, count)))
        start += count
    return pieces


Seen = tuple[Tensor, Tensor]
"""What visits give together: the output [b, h, q, e] and the logarithms [b, h, q]."""


def visited(query: Tensor, coming: Iterable[tuple[Tensor, Tensor, Visit]]) -> Seen:
    """What these queries see of all that comes by: keys [b, g, k, d] and values [b, g, k, e], visit after visit. The
    output is in the dtype of the queries, the logarithms in float32 at least, as all is between visits."""
    so_far: Seen | None = None
    for key, value, of in coming:
        so_far = _with_visit(so_far, query, key, value, of)
    assert so_far is not None, "a rank's own keys come by"
    output, total = so_far
    return output.to(query.dtype), total


def _with_visit(so_far: Seen | None, query: Tensor, key: Tensor, value: Tensor, of: Visit) -> Seen:
    """What the visits so far give with one more, in place; None: it is the first."""
    key, value = (_repeated(x, query) for x in (key, value))
    for part in of.parts(query.device, _has_kernel(query, value)):
        keys, values = (x.narrow(2, *part.keys) for x in (key, value))
        new, logs = _attend(query.narrow(2, *part.queries), keys, values, part, of.scale)
        new = new.to(torch.promote_types(query.dtype, torch.float32))
        if so_far is None and part.queries == (0, query.size(2)):
            so_far = new, logs
            continue
        so_far = so_far or _nothing(query, value)
        rows, before = (x.narrow(2, *part.queries) for x in so_far)
        both = torch.logaddexp(before, logs)
        rows.lerp_(new, (logs - _finite(both)).exp().unsqueeze(-1))
        before.copy_(both)
    return so_far or _nothing(query, value)


def visit_backward(
    grads: Sequence[Tensor], grad: Tensor, output: Tensor, total: Tensor, query: Tensor, key: Tensor, value: Tensor,
    of: Visit,
) -> None:  # fmt: skip
    """Add what a visit gives to the gradients of this rank's queries, and of the visiting keys and values, in place."""
    keys, values = (_repeated(x, query) for x in (key, value))
    for part in of.parts(query.device, _has_kernel(query, value)):
        sides = [x.narrow(2, *part.queries) for x in (grad, output, query)]
        logs = total.narrow(2, *part.queries)
        here = [x.narrow(2, *part.keys) for x in (keys, values)]
        part_grads = _attend_backward(sides[0], sides[2], here[0], here[1], sides[1], logs, part, of.scale)
        for whole, place, part_grad in zip(grads, (part.queries, part.keys, part.keys), part_grads, strict=True):
            for of_one_head_a_group in part_grad.unflatten(1, (whole.size(1), -1)).unbind(2):  # faster than their sum
                whole.narrow(2, *place).add_(of_one_head_a_group)


class _Runs(torch.autograd.Function):
    """Attention of runs of queries to keys that are all here: one visit."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, runs: Sequence[Run], scale: float | None
    ) -> Tensor:  # fmt: skip
        ctx.visit = Visit(Cut(2, key.size(2), (), 1), 0, 0, None, scale, runs)
        output, total = visited(query, [(key, value, ctx.visit)])
        ctx.save_for_backward(query, key, value, output, total)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 5
        check_differentiated_once(
            "attention by a kernel",
            "its backward has no gradient of its own, as on one device",
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
    """Attention of some of a sequence's queries to all of its keys, those left out that none of them sees.

    query [b, h, q, d], key [b, g, s, d], value [b, g, s, e] -> [b, h, q, e], as `scaled_dot_product_attention`.
    `runs`: the numbers of every `Run`, one run behind the other, together `q` queries. Where a kernel gives logarithms,
    the keys before a run are read without a mask and those beside it as causal, and both put together.
    """
    all_runs = runs_of(runs)
    needs_masks = any(any(run.hides) and not run.is_causal for run in all_runs)
    if needs_masks and _has_kernel(query, value):
        return _Runs.apply(query, key, value, all_runs, scale)
    return attention_with_masks(query, key, value, all_runs, scale=scale, enable_gqa=enable_gqa)


def _nothing(query: Tensor, value: Tensor) -> Seen:
    """Of queries that have seen no key."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    output = query.new_zeros(*query.shape[:-1], value.size(-1), dtype=dtype)
    return output, query.new_full(query.shape[:-1], float("-inf"), dtype=dtype)


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values, each head for its group of queries' heads."""
    groups = query.size(1) // x.size(1)
    return x.repeat_interleave(groups, 1) if groups > 1 else x


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """What a mask adds to scores, with four dims."""
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
    query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    mask = _added(part.mask, query)
    if _has_kernel(query, value):
        output, logs = _KERNEL(query, key, value, 0.0, part.is_causal, attn_mask=mask, scale=scale)
        if mask is not None:  # of a query that sees no key the kernel says 0
            logs = logs.masked_fill((mask == float("-inf")).all(-1), float("-inf"))
        return output, logs
    scores = _scores(query, key, mask, scale)
    logs = scores.logsumexp(-1)
    return (scores - _finite(logs).unsqueeze(-1)).exp().to(value.dtype) @ value, logs


def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logs: Tensor, part: Part,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values, of the output and the logarithm of all visits together."""
    mask, logs = _added(part.mask, query), _finite(logs)
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
    """With 0 where no key is seen: there every share is 0."""
    return logs.masked_fill(logs == float("-inf"), 0.0)
