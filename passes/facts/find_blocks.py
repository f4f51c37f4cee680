"""Search for repeated blocks of operators, by operator kinds and data flow, never by names.

A block is a sequence of operators that is immediately followed by copies with equal operator kinds. Every copy must
use a value of the copy before it. So the layers of a model are blocks, but its q, k and v projections are not. The
inputs of the first copy and the consumers of the last copy are arbitrary.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from typing import NamedTuple

import numpy as np


class BlockPosition(NamedTuple):
    """Position of an operator or a parameter in a repeated block.

    Args:
        like: key that is equal for corresponding operators in all copies of a block.
        block: (index of the first operator of all copies, number of this copy); None outside repeated blocks.
        times: number of copies.
    """

    like: Hashable
    block: tuple[int, int] | None = None
    times: int = 1

    def end(self, number: int) -> int | None:
        """Return the number of this copy if it is one of the first or last `number` copies, else None.

        Last copies are counted from the end: -1, -2, ...
        """
        if self.block is None:
            return None
        _, copy = self.block
        if copy < number:
            return copy
        return copy - self.times if copy >= self.times - number else None


class _RepeatedRun(NamedTuple):
    start: int
    period: int
    times: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.times


def places(
    kinds: Sequence[Hashable], reads: Sequence[Sequence[int]], products: Set[int] = frozenset(),
    times: Sequence[int] = (),
) -> list[BlockPosition]:  # fmt: skip
    """Find repeated blocks, and return the position of every operator in them.

    If a block has only one product with a weight, pairs of blocks are merged. The two products can then be sharded
    along output features and input features in turn (column- and row-parallel).

    Args:
        kinds: kind of each operator.
        reads: for each operator, the indices of the operators whose results it uses.
        products: indices of products with a weight.
        times: number of operators of the full model that each operator represents. Empty if each represents one.

    >>> places(["embed", "linear", "relu", "linear", "relu", "head"], [[], [0], [1], [2], [3], [4]])[4:]
    [BlockPosition(like=2, block=(1, 1), times=2), BlockPosition(like=5, block=None, times=1)]
    """
    positions = [BlockPosition(i) for i in range(len(kinds))]
    numbers: dict[Hashable, int] = {}
    sequence = np.array([numbers.setdefault(kind, len(numbers)) for kind in kinds], dtype=np.int64)
    crossing = _crossing(reads) * np.array([*(times or [1] * len(kinds)), 1], dtype=np.int64)
    left = [(0, len(kinds))]
    while left:
        start, stop = left.pop()
        run = _longest(sequence, reads, crossing, start, stop)
        if run is None:
            continue
        left += [(start, run.start), (run.stop, stop)]
        if sum(i in products for i in range(run.start, run.start + run.period)) == 1:
            run = _RepeatedRun(run.start, 2 * run.period, run.times // 2)
        for i in range(run.start, run.stop):
            copy, offset = divmod(i - run.start, run.period)
            if run.times > 1:
                positions[i] = BlockPosition(run.start + offset, (run.start, copy), run.times)
    return positions


def _crossing(reads: Sequence[Sequence[int]]) -> np.ndarray:
    """Return, for each operator, the number of earlier values that it or a later operator uses."""
    last = {source: i for i, sources in enumerate(reads) for source in sources}
    change = np.zeros(len(reads) + 1, dtype=np.int64)
    for producer, read in last.items():
        change[producer + 1] += 1
        change[read + 1] -= 1
    return np.cumsum(change)


def _longest(
    kinds: np.ndarray, reads: Sequence[Sequence[int]], crossing: np.ndarray, start: int, stop: int
) -> _RepeatedRun | None:
    """Return the repeated block whose copies together cover the most operators.

    If several blocks cover equally many operators, returns the smallest block. Returns None if no block is repeated.

    `start`, `stop`: range of operators to search.
    """
    candidates: list[tuple[int, int, int, int]] = []
    for period in range(1, (stop - start) // 2 + 1):
        same = kinds[start + period : stop] == kinds[start : stop - period]
        if np.count_nonzero(same) < period:
            continue
        edges = np.flatnonzero(np.diff(same, prepend=False, append=False)).reshape(-1, 2) + start
        for first, last in edges[edges[:, 1] - edges[:, 0] >= period].tolist():
            size = (last - first) // period * period + period
            candidates.append((-size, period, first, last + period - size))
    for size, period, first, last in sorted(candidates):
        # A block begins at the operator at which the fewest values cross from one copy to the next.
        _, begin = min((crossing[i + period : i - size : period].sum(), -i) for i in range(first, last + 1))
        run = _RepeatedRun(-begin, period, -size // period)
        if _is_chain(run, reads):
            return run
    return None


def _is_chain(run: _RepeatedRun, reads: Sequence[Sequence[int]]) -> bool:
    """Return True if every copy of a repeated block uses a value of the copy before it."""
    return all(
        any(begin - run.period <= source < begin for i in range(begin, begin + run.period) for source in reads[i])
        for begin in range(run.start + run.period, run.stop, run.period)
    )
