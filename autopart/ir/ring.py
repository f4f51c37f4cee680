"""Attention of a rank's queries to keys and values that come by one rank's at a time (Liu et al. 2023,
arXiv:2310.01889): the arithmetic of one visit, apart from what carries them.

A visit gives an output and the logarithm of the sum of its exponentials, by which the outputs of all visits are put
together; the backward of a visit needs those of all together (Dao et al. 2022, arXiv:2205.14135, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from autopart.compat import flash_attention_of_host, flash_attention_of_host_backward
from autopart.ir.pieces import Cut


class Part(NamedTuple):
    """Some of a rank's queries and of the visiting keys, by their first and number, and what the mask says of them."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: Tensor | None


@dataclass(frozen=True)
class Visit:
    """What comes by: the keys and values of the rank with this number. `cut`: of the sequence, dim -2, over all ranks.
    `mask`: [..., q, s] of this rank's queries and all keys, true where they are seen, or added to scores; None: all are
    seen. `scale`: of scores; None: 1 / sqrt(d)."""

    cut: Cut
    here: int
    rank: int
    mask: Tensor | None
    scale: float | None

    def parts(self) -> Iterator[Part]:
        """The queries and keys in pieces that lie together in the sequence, without those that see nothing."""
        queries, keys = (_places(self.cut, index) for index in (self.here, self.rank))
        if self.mask is None:
            yield Part((0, self.cut.length(self.here)), (0, self.cut.length(self.rank)), None)
            return
        for first, (_, number) in queries:
            rows = self.mask if self.mask.size(-2) == 1 else self.mask.narrow(-2, first, number)
            for start, (position, count) in keys:
                seen = rows if rows.size(-1) == 1 else rows.narrow(-1, position, count)
                if seen.dtype != torch.bool:
                    yield Part((first, number), (start, count), seen)
                elif bool(seen.any()):
                    yield Part((first, number), (start, count), None if bool(seen.all()) else seen)


def _places(cut: Cut, rank: int) -> list[tuple[int, tuple[int, int]]]:
    """The pieces of a rank: where each begins on the rank, and (where in the sequence, how long)."""
    found, start = [], 0
    for position, count in cut.spans(rank):
        found.append((start, (position, count)))
        start += count
    return found


def nothing_yet(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the logarithm before any visit: [b, h, q, e], [b, h, q]."""
    made = query.new_zeros(*query.shape[:-1], value.size(-1))
    return made, query.new_full(query.shape[:-1], float("-inf"))


def visit(made: Tensor, total: Tensor, query: Tensor, key: Tensor, value: Tensor, of: Visit) -> None:
    """Put what the visiting keys [b, g, k, d] and values [b, g, k, e] add to the output, in place."""
    key, value = (_repeated(x, query) for x in (key, value))
    for part in of.parts():
        rows, given = (x.narrow(2, *part.queries) for x in (made, query))
        before = total.narrow(2, *part.queries)
        keys, values = (x.narrow(2, *part.keys) for x in (key, value))
        new, logs = _attend(given, keys, values, part.mask, of.scale)
        both = torch.logaddexp(before, logs)
        none = both == float("-inf")
        rows.mul_(_share(before, both, none)).add_(new * _share(logs, both, none))
        before.copy_(both)


def visit_backward(
    grad: Tensor, made: Tensor, total: Tensor, query: Tensor, key: Tensor, value: Tensor, of: Visit
) -> tuple[Tensor, Tensor, Tensor]:
    """What a visit adds to the gradients of this rank's queries, and of the visiting keys and values."""
    groups = query.size(1) // key.size(1)
    keys, values = (_repeated(x, query) for x in (key, value))
    grads = [torch.zeros_like(x) for x in (query, keys, values)]
    for part in of.parts():
        sides = [x.narrow(2, *part.queries) for x in (grad, made, query)]
        logs = total.narrow(2, *part.queries)
        here = [x.narrow(2, *part.keys) for x in (keys, values)]
        found = _attend_backward(sides[0], sides[2], here[0], here[1], sides[1], logs, part.mask, of.scale)
        for whole, place, own in zip(grads, (part.queries, part.keys, part.keys), found, strict=True):
            whole.narrow(2, *place).add_(own)
    summed = [x.unflatten(1, (-1, groups)).sum(2) if groups > 1 else x for x in grads[1:]]
    return grads[0], summed[0], summed[1]


def _share(part: Tensor, whole: Tensor, none: Tensor) -> Tensor:
    """How much of the sum of exponentials is a part's; nothing where no key is seen."""
    return (part - whole).masked_fill(none, float("-inf")).exp().unsqueeze(-1)


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values, each head for its group of queries' heads."""
    groups = query.size(1) // x.size(1)
    return x.repeat_interleave(groups, 1) if groups > 1 else x


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if mask is None and query.device.type == "cpu":
        return flash_attention_of_host(query, key, value, scale)
    scores = _scores(query, key, mask, scale)
    logs = scores.logsumexp(-1)
    shares = (scores - logs.unsqueeze(-1)).masked_fill((logs == float("-inf")).unsqueeze(-1), float("-inf")).exp()
    return shares @ value, logs


def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, made: Tensor, logs: Tensor, mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values, of the output and the logarithm of all visits together."""
    if mask is None and query.device.type == "cpu" and bool(logs.isfinite().all()):
        return flash_attention_of_host_backward(grad, query, key, value, made, logs, scale)
    factor = query.size(-1) ** -0.5 if scale is None else scale
    none = (logs == float("-inf")).unsqueeze(-1)
    shares = (_scores(query, key, mask, scale) - logs.unsqueeze(-1)).masked_fill(none, float("-inf")).exp()
    inner = shares * (grad @ value.transpose(-2, -1) - (grad * made).sum(-1, keepdim=True))
    return inner @ key * factor, inner.transpose(-2, -1) @ query * factor, shares.transpose(-2, -1) @ grad
