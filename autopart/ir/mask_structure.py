"""Structure of an attention mask as data: a sliding window, or runs of queries with key ranges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class MaskWindow(NamedTuple):
    """Sliding window: query i attends the keys from i - `before` to i + `after` that exist."""

    before: int
    after: int


class QueryRun(NamedTuple):
    """Run of consecutive queries whose range of attended keys moves by one key per query.

    Query i of the run attends the keys from max(low, first + i) to before min(high, end + i).
    """

    queries: int
    low: int
    high: int
    first: int
    end: int

    def part(self, start: int, stop: int) -> QueryRun:
        """Return the run that consists of the queries `start` to `stop - 1` of this run."""
        low, high = max(self.low, self.first + start), min(self.high, self.end + stop - 1)
        return QueryRun(stop - start, low, high, self.first + start, self.end + start)

    @property
    def seen(self) -> int:
        """Number of attended (query, key) pairs.

        >>> QueryRun(3, 0, 3, -3, 1).seen
        6
        """
        at = torch.arange(self.queries)
        return int(((self.end + at).clamp(max=self.high) - (self.first + at).clamp(min=self.low)).sum())

    @property
    def hides(self) -> tuple[bool, bool]:
        """Two flags: some query masks the first key of the run; some query masks the last key of the run."""
        return self.first + self.queries - 1 > self.low, self.end < self.high

    @property
    def is_causal(self) -> bool:
        """True if query i attends exactly the run's keys 0 to i, and the run has as many keys as queries."""
        return not self.hides[0] and self.end == self.low + 1 and self.queries == self.high - self.low

    def among(self, low: int, high: int, has_kernel: bool) -> Iterator[tuple[int, QueryRun]]:
        """Restrict the run to the keys from `low` to before `high`. Yield (first query, block) of each block.

        If the kernel supports the mask of the run, the run is one block, or one unmasked and one causal block.
        Otherwise it is split into blocks of `ROWS` queries, so that masks and scores stay small.
        """
        run = self._replace(low=max(self.low, low), high=min(self.high, high))
        last_keys = run._replace(low=max(run.low, run.end - 1))
        if has_kernel and run.low < last_keys.low and last_keys.is_causal and not run.hides[0]:
            yield 0, run._replace(high=last_keys.low)
            run = last_keys
        is_supported = has_kernel and (run.is_causal or not any(run.hides))
        step = run.queries if is_supported else ROWS
        for start in range(0, run.queries, step):
            block = run.part(start, min(start + step, run.queries))
            if block.low < block.high:
                yield start, block

    def mask(self, device: torch.device) -> Tensor:
        """Return the boolean mask of shape [queries, high - low], True if the query attends the key."""
        at = torch.arange(self.queries, device=device).unsqueeze(-1)
        position = torch.arange(self.low, self.high, device=device)
        return (position >= self.first + at) & (position < self.end + at)


ROWS = 256
"""Number of queries per block when a run is split. Each block has its own mask."""
