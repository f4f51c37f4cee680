"""Structure of attention masks that kernels can use without reading the mask.

The structure is a sliding window, or a list of runs. A run is a group of consecutive queries, each of which attends one
range of keys. From one query of a run to the next, each end of this range stays or moves by one key.
"""

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
    """Group of consecutive queries, each of which attends one contiguous range of keys.

    Query i attends the keys from max(low, first + i) up to, but not including, min(high, end + i). So the range moves
    by one key per query, as in a causal mask or a sliding window, but stays within the keys `low` to `high - 1`.
    """

    queries: int
    low: int
    high: int
    first: int
    end: int

    def part(self, start: int, stop: int) -> QueryRun:
        """Return the run of the queries `start` to `stop - 1` of this run."""
        low, high = max(self.low, self.first + start), min(self.high, self.end + stop - 1)
        return QueryRun(stop - start, low, high, self.first + start, self.end + start)

    @property
    def seen(self) -> int:
        """Number of pairs (query, key) in which the query attends the key.

        >>> QueryRun(3, 0, 3, -3, 1).seen
        6
        """
        at = torch.arange(self.queries)
        return int(((self.end + at).clamp(max=self.high) - (self.first + at).clamp(min=self.low)).sum())

    @property
    def hides(self) -> tuple[bool, bool]:
        """Two booleans: some query of the run masks key `low`; some query masks key `high - 1`."""
        return self.first + self.queries - 1 > self.low, self.end < self.high

    @property
    def is_causal(self) -> bool:
        """True if the run is a square causal mask: query i attends exactly the first i + 1 keys."""
        return not self.hides[0] and self.end == self.low + 1 and self.queries == self.high - self.low

    def among(self, low: int, high: int, has_kernel: bool) -> Iterator[tuple[int, QueryRun]]:
        """Split the attention of these queries to the keys `low` to `high - 1` into blocks for a kernel.

        If a kernel supports the mask, there are one or two blocks, each with all queries. If there are two, the first
        has the keys that all queries attend, and the second has the last keys with a causal mask. If no kernel supports
        the mask, each block has at most `ROWS` queries, so that masks and scores stay small.

        Args:
            has_kernel: True if the device has an attention kernel for causal and unmasked blocks.
        Yields: (index of the block's first query in this run, block).
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
        """Return the boolean mask of shape [queries, high - low].

        An entry is True if the query attends the key.
        """
        at = torch.arange(self.queries, device=device).unsqueeze(-1)
        position = torch.arange(self.low, self.high, device=device)
        return (position >= self.first + at) & (position < self.end + at)


ROWS = 256
"""Number of queries per block when a run is split. Each block has its own mask."""
