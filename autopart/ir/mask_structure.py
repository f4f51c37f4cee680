"""Structure of an attention mask: causal, sliding window, or runs of key ranges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Band(NamedTuple):
    """Query i sees the keys from i - `before` to i + `after`, as far as there are any."""

    before: int
    after: int


class Run(NamedTuple):
    """Queries one behind the other, whose intervals of keys begin and end with the keys from `low` to before `high`:
    that of query i of the run is [max(low, first + i), min(high, end + i))."""

    queries: int
    low: int
    high: int
    first: int
    end: int

    def part(self, start: int, stop: int) -> Run:
        """Of its queries those from one to before another."""
        low, high = max(self.low, self.first + start), min(self.high, self.end + stop - 1)
        return Run(stop - start, low, high, self.first + start, self.end + start)

    @property
    def seen(self) -> int:
        """How many pairs of a query and a key it sees there are.

        >>> Run(3, 0, 3, -3, 1).seen
        6
        """
        at = torch.arange(self.queries)
        return int(((self.end + at).clamp(max=self.high) - (self.first + at).clamp(min=self.low)).sum())

    @property
    def hides(self) -> tuple[bool, bool]:
        """Whether some query does not see the first of the keys, and the last."""
        return self.first + self.queries - 1 > self.low, self.end < self.high

    @property
    def is_causal(self) -> bool:
        """Whether query i sees the keys from the first to number i, of as many keys as queries."""
        return not self.hides[0] and self.end == self.low + 1 and self.queries == self.high - self.low

    def among(self, low: int, high: int, has_kernel: bool) -> Iterator[tuple[int, Run]]:
        """Itself and some of its keys: (the first of a block's queries, the block). In one where a kernel knows what it
        hides, or in what is seen whole and what is causal; else in blocks, that masks and scores be small."""
        run = self._replace(low=max(self.low, low), high=min(self.high, high))
        behind = run._replace(low=max(run.low, run.end - 1))
        if has_kernel and run.low < behind.low and behind.is_causal and not run.hides[0]:
            yield 0, run._replace(high=behind.low)
            run = behind
        is_known = has_kernel and (run.is_causal or not any(run.hides))
        step = run.queries if is_known else ROWS
        for start in range(0, run.queries, step):
            block = run.part(start, min(start + step, run.queries))
            if block.low < block.high:
                yield start, block

    def mask(self, device: torch.device) -> Tensor:
        """Which of the keys its queries see: [queries, high - low]."""
        at = torch.arange(self.queries, device=device).unsqueeze(-1)
        position = torch.arange(self.low, self.high, device=device)
        return (position >= self.first + at) & (position < self.end + at)


ROWS = 256
"""Queries of a block of a run, each with a mask of its own."""
