"""Exact methods for a `BlockProblem`: dynamic programming and integer programming."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from autopart.common.integer_program import ProgramRow, integer_program
from autopart.extras.block_search.block_problem import BlockChoice, BlockProblem

# Dynamic programming


def dynamic_programming(problem: BlockProblem, seed: int, budget: int) -> tuple[BlockChoice | None, int, float]:
    """Solve a problem by dynamic programming: exactly, except that memory is rounded.

    The memory limit is divided into `budget` equal units, and the memory of each block is rounded up to whole units.
    The result therefore always fits into memory. But rounding wastes up to one unit per block, so the result can be
    slower than the optimum.

    For each stage of blocks i to j, a knapsack gives the least seconds for each number of units. Stages are chained by
    Pareto fronts of (slowest stage, sum of stages).

    Returns:
        The choice (None if nothing fits), the number of evaluated knapsacks, and 0.0, because no lower bound is known.
    """
    fill = _Fill(problem, budget)
    num_blocks, num_stages = problem.num_blocks, problem.num_stages
    fronts: list[dict[int, list[tuple[float, float, int, int]]]] = [{0: [(0.0, 0.0, 0, 0)]}]
    for stage in range(num_stages):
        times = fill.times(stage)
        last = stage == num_stages - 1
        fronts.append({})
        for stop in [num_blocks] if last else range(stage + 1, num_blocks - (num_stages - 1 - stage) + 1):
            reached = [
                (max(slowest, times[start, stop]), total + times[start, stop], start, i)
                for start, front in fronts[stage].items() if start < stop and np.isfinite(times[start, stop])
                for i, (slowest, total, _, _) in enumerate(front)
            ]  # fmt: skip
            if reached:
                fronts[-1][stop] = _undominated(reached)
    ends = fronts[-1].get(num_blocks, [])
    if not ends:
        return None, fill.count, 0.0
    _, _, start, i = min(ends, key=lambda end: end[1] + (problem.microbatches - 1) * end[0])
    stop, begins, options = num_blocks, list[int](), list[int]()
    for stage in reversed(range(num_stages)):
        options = [*fill.options(stage, start, stop), *options]
        begins = [start, *begins]
        stop, (_, _, start, i) = start, fronts[stage][start][i]
    return BlockChoice(tuple(options), tuple(begins[1:])), fill.count, 0.0


def _undominated(points: list[tuple[float, float, int, int]]) -> list[tuple[float, float, int, int]]:
    front: list[tuple[float, float, int, int]] = []
    for one in sorted(points):
        if not front or one[1] < front[-1][1]:
            front.append(one)
    return front


class _Fill:
    """Knapsack solver: finds the fastest options of the blocks of a stage that fit into memory."""

    def __init__(self, problem: BlockProblem, quanta: int):
        self.problem, self.kinds, self.count = problem, problem.kinds, 0
        self.quantum = problem.memory_bytes / quanta
        self.extras = np.unique(problem.temporary_bytes)

    def times(self, stage: int) -> np.ndarray:
        """Return the least seconds of a stage for each range of blocks; infinity if the blocks do not fit.

        The element [start, stop] of the array is for the blocks `start` to `stop - 1`.
        """
        size = self.problem.num_blocks + 1
        least_s = np.full((size, size), np.inf)
        for extra in self.extras:
            room, quanta, seconds = self._knapsack(stage, extra)
            if room < 0:
                continue
            known: dict[bytes, np.ndarray] = {b"": np.zeros(room + 1)}
            for start in range(size - 1):
                before = known[b""]
                for block in range(start, size - 1):
                    key = self.kinds[start : block + 1].tobytes()
                    if key not in known:
                        known[key] = _added(before, quanta[block], seconds[block])[0]
                        self.count += 1
                    before = known[key]
                    if not np.isfinite(before[-1]):
                        break
                    least_s[start, block + 1] = min(least_s[start, block + 1], before[-1])
        return least_s + self.problem.base_time_s[stage]

    def options(self, stage: int, start: int, stop: int) -> list[int]:
        """Return the fastest options that fit, for the blocks `start` to `stop - 1` on a stage."""
        best: tuple[float, list[int]] = (np.inf, [])
        for extra in self.extras:
            room, quanta, seconds = self._knapsack(stage, extra)
            if room < 0:
                continue
            value, chosen = np.zeros(room + 1), []
            for block in range(start, stop):
                value, option = _added(value, quanta[block], seconds[block])
                chosen.append(option)
            if value[-1] < best[0]:
                from_last, left = list[int](), room
                for block, option in zip(reversed(range(start, stop)), reversed(chosen), strict=True):
                    from_last.append(int(option[left]))
                    left -= quanta[block, from_last[-1]]
                best = value[-1], from_last[::-1]
        return best[1]

    def _knapsack(self, stage: int, extra: float) -> tuple[int, np.ndarray, np.ndarray]:
        """Return the knapsack problem of a stage: units of memory, and the costs of its blocks' options.

        Returns:
            The units of memory that blocks can use, and two arrays of shape [blocks, options]: units and seconds.
                Options that need more than `extra` bytes of workspace are excluded: their seconds are infinite.
        """
        problem = self.problem
        temporary = max(extra, problem.base_temporary_bytes[stage])
        room = np.floor((problem.memory_bytes - problem.base_bytes[stage] - temporary) / self.quantum + 1e-9)
        quanta = np.ceil(problem.held_bytes(stage) / self.quantum - 1e-9).astype(int)
        return int(room), quanta, np.where(problem.temporary_bytes <= extra, problem.time_s, np.inf)


def _added(before: np.ndarray, quanta: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add a block to the dynamic program of a knapsack. Memory is counted in equal units.

    Args:
        before: the least seconds without the block, for each number of units.
        quanta, seconds: units and seconds of the block under each option.
    Returns:
        The least seconds with the block, and the option of the block that gives them, for each number of units.
    """
    ways = np.full((len(quanta), len(before)), np.inf)
    for option, (used, time_s) in enumerate(zip(quanta, seconds, strict=True)):
        if used < len(before):
            ways[option, used:] = before[: len(before) - used] + time_s
    return ways.min(0), ways.argmin(0)


# Integer programming


def integer_programming(problem: BlockProblem, seed: int, budget: int) -> tuple[BlockChoice | None, int, float]:
    """Solve a problem exactly with HiGHS.

    A run is a sequence of equal blocks. A variable is the number of blocks of one run that are on one stage and have
    one option. Equal blocks are interchangeable, so variables that count blocks avoid symmetric solutions.

    Returns:
        The choice (None if nothing fits), the number of nodes that HiGHS explored, and its lower bound.
    """
    counts, bound_s, nodes = _Counts(problem), 0.0, 0
    # Within the solver's tolerance, a solution may exceed the limit: lower it and solve again.
    for limit in (1.0, 1 - 1e-6, 1 - 1e-5):
        solution = counts.solved(limit, budget)
        nodes += int(solution.mip_node_count or 0)
        if limit == 1.0:
            bound_s = float(solution.mip_dual_bound or 0.0) * problem.time_s.max()
        if solution.x is None:
            return None, nodes, bound_s
        choice = counts.choice(solution.x)
        if problem.fits(choice):
            return choice, nodes, bound_s
    return None, nodes, bound_s


class _Counts:
    """Integer program over numbers of blocks. A run is a sequence of equal blocks.

    Variables:
        n[stage, run, option]: number of blocks of the run that are on the stage and have the option.
        used[stage, run, option]: 1 if this number is not zero.
        done[stage, run]: 1 if all blocks of the run are on this stage or earlier stages.
        extra[stage]: largest workspace of a block on the stage.
        slowest: seconds of the slowest stage.

    Seconds are divided by the slowest block's seconds, bytes by the memory limit.
    """

    def __init__(self, problem: BlockProblem):
        self.problem = problem
        self.runs = np.flatnonzero(np.diff(problem.kinds, prepend=-1))
        self.lengths = np.diff([*self.runs, problem.num_blocks])
        shape = (problem.num_stages, len(self.runs), problem.num_options)
        sizes = [int(np.prod(shape))] * 2 + [shape[0] * shape[1], shape[0], 1]
        parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        self.n, self.used = parts[0].reshape(shape), parts[1].reshape(shape)
        self.done, self.extra, self.slowest = parts[2].reshape(shape[:2]), parts[3], parts[4][0]
        self.size = sum(sizes)

    def solved(self, limit: float, nodes: int) -> Any:
        problem, longest = self.problem, self.problem.time_s.max()
        seconds = problem.time_s[self.runs] / longest
        cost = np.zeros(self.size)
        cost[self.n], cost[self.slowest] = seconds, problem.microbatches - 1
        upper = np.full(self.size, np.inf)
        upper[self.n], upper[self.used], upper[self.done] = self.lengths[:, None], 1, 1
        whole = np.ones(self.size)
        whole[[*self.extra, self.slowest]] = 0
        rows = list(self._rows(limit, seconds, problem.base_time_s / longest))
        solution = integer_program(cost, rows, upper, whole, {"mip_rel_gap": 1e-6, "node_limit": nodes})
        if solution.mip_dual_bound is not None:
            solution.mip_dual_bound += problem.base_time_s.sum() / longest
        return solution

    def _rows(self, limit: float, seconds: np.ndarray, base_s: np.ndarray) -> Iterator[ProgramRow]:
        """Yield every constraint: its (column, factor) pairs, its lower bound and its upper bound."""
        problem, memory, free = self.problem, self.problem.memory_bytes, np.inf
        temporary = problem.temporary_bytes[self.runs] / memory
        for run, length in enumerate(self.lengths):
            yield [(column, 1.0) for column in self.n[:, run].ravel()], length, length
        for stage, mine in enumerate(self.n):
            blocks = mine.ravel()
            yield [(column, 1.0) for column in blocks], 1, free
            yield [*zip(blocks, seconds.ravel(), strict=True), (self.slowest, -1.0)], -free, -base_s[stage]
            held = (problem.held_bytes(stage)[self.runs] / memory).ravel()
            extra = self.extra[stage]
            yield [*zip(blocks, held, strict=True), (extra, 1.0)], -free, limit - problem.base_bytes[stage] / memory
            yield [(extra, 1.0)], problem.base_temporary_bytes[stage] / memory, free
            for (run, option), column in np.ndenumerate(mine):
                used = self.used[stage, run, option]
                yield [(column, 1.0), (used, -float(self.lengths[run]))], -free, 0
                yield [(extra, 1.0), (used, -temporary[run, option])], 0, free
            for run in range(len(self.runs) - 1):  # a run begins only after the previous run has ended
                done, now, after = self.done[stage, run], self.n[: stage + 1, run], self.n[: stage + 1, run + 1]
                yield [*((column, 1.0) for column in now.ravel()), (done, -float(self.lengths[run]))], 0, free
                yield [*((column, 1.0) for column in after.ravel()), (done, -float(self.lengths[run + 1]))], -free, 0

    def choice(self, values: np.ndarray) -> BlockChoice:
        numbers = np.round(values[self.n]).astype(int)
        options = np.concatenate([np.repeat(np.arange(numbers.shape[2]), run) for stage in numbers for run in stage])
        return BlockChoice(tuple(map(int, options)), tuple(map(int, np.cumsum(numbers.sum((1, 2)))[:-1])))
