"""Partition of a sequence of operators into pipeline stages, such that the slowest stage is fast.

A stage boundary sends the values that later operators use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from autopart.cost.predict.operator_work import chosen_ranks
from autopart.cost.predict.send_costs import load_per_byte
from autopart.cost.predict.table_rows import Parameter
from autopart.errors import StageError

if TYPE_CHECKING:
    from autopart.cost.hardware.profile import Hardware
    from autopart.cost.predict.run_setting import RunSetting
    from autopart.cost.predict.table import Table

MAX_IMBALANCE = 0.1
"""Maximum share by which a stage load may exceed the largest load of the most even partition.

The cost of sends does not change this limit.
"""

TIME_TOLERANCE = 0.015
"""Share by which the slowest stage may be slower than possible, if the partition is more even or sends less."""

BOUND = 1.018
"""Maximum time of the slowest stage, as a multiple of a lower bound of the largest stage load.

This limit holds in addition to `TIME_TOLERANCE`, if a partition that meets it exists.
"""


@dataclass(frozen=True)
class Partition:
    """A partition of a sequence of operators into stages.

    Args:
        cuts: `cuts[k]` is the index of the first operator of stage k + 1.
        loads: load of every stage.
        lower_bound: lower bound of the largest stage load: the mean load of a stage, or the largest load of an operator
            if that is larger.
        least_load: largest stage load in the most even partition.
    """

    cuts: tuple[int, ...]
    loads: tuple[float, ...]
    lower_bound: float
    least_load: float


def balance(
    weights: Sequence[float] | np.ndarray,
    crossing: Sequence[float] | np.ndarray,
    num_stages: int,
    begins: Set[int] = frozenset(),
    send_cost: float = 0.0,
) -> Partition | None:
    """Return an even partition that sends little, and whose slowest stage is nearly as fast as possible.

    The time of a stage is its load plus `send_cost` times the bytes that it receives and sends. The largest stage load
    is at most `MAX_IMBALANCE` above the least possible largest load. Under this limit, the function computes the least
    time of the slowest stage exactly. Among partitions within `TIME_TOLERANCE` of this time, it returns one that is
    even and sends little. If one operator exceeds the mean load of a stage, the other stages are still made even: this
    shortens the fill and drain of the pipeline, and balances ranks with several stages.

    Args:
        weights: load of every operator, in order.
        crossing: for each operator i, the bytes that a stage boundary before it sends (infinite if no stage may begin
            at it).
        num_stages: number of non-empty stages.
        begins: indices of operators at which a stage must begin.
        send_cost: load per byte of a boundary, for each of its two stages (`send_costs.load_per_byte`).

    Returns None if there are too few stage boundaries, or more entries in `begins` than stages.

    >>> balance([3, 1, 1, 3], [0, 9, 9, 9], 2).cuts
    (2,)
    >>> balance([30, 1, 1, 30], [0, 9, 9, 1], 2, send_cost=1).cuts
    (3,)
    """
    total = np.concatenate(([0.0], np.cumsum(np.asarray(weights, dtype=float))))
    places = [i for i in range(1, len(weights)) if np.isfinite(crossing[i])]
    if len(places) < num_stages - 1 or not begins <= set(places):
        return None
    position = np.array([0, *places, len(weights)])
    begun = np.cumsum(np.isin(position, list(begins)))
    load = total[position]
    # At a required beginning, `start` exceeds `end`, so a stage that spans it gets a load above the total.
    across = 2 * float(total[-1]) + 1
    end, start = load + across * np.concatenate(([0], begun[:-1])), load + across * begun
    least = _least_max_load(end, start, num_stages)
    if least >= across:
        return None
    bound = float(max(total[-1] / num_stages, max(weights, default=0.0)))
    sent = np.array([0.0, *(crossing[i] for i in places), 0.0])
    stages = _Stages(load * num_stages / (load[-1] or 1.0), sent, end, start, send_cost * sent, num_stages)
    chosen = stages.evenest(least, bound) if num_stages > 1 else []
    cuts = tuple(int(position[i]) for i in chosen)
    edges = (0, *cuts, len(weights))
    loads = tuple(float(total[b] - total[a]) for a, b in pairwise(edges))
    return Partition(cuts, loads, bound, least)


def _least_max_load(end: np.ndarray, start: np.ndarray, num_stages: int) -> float:
    """Return the largest stage load of the most even partition.

    Positions are the indices of possible stage boundaries. A stage from position a to position b has the load `end[b]
    - start[a]`. A dynamic program adds one stage at a time, and finds the best start of the stage by bisection.
    """
    heaviest = end.copy()  # one stage that ends at each position
    for _ in range(num_stages - 1):
        low, high = np.zeros(len(end), dtype=int), np.arange(len(end))
        while np.any(low < high):  # the first position at which the earlier stages' load exceeds the last stage's load
            middle = (low + high) // 2
            before = heaviest[middle] >= end - start[middle]
            high = np.where(before & (low < high), middle, high)
            low = np.where(~before & (low < high), middle + 1, low)
        after = np.maximum(heaviest[low], end - start[low])
        previous = np.maximum(low - 1, 0)
        heaviest = np.minimum(after, np.maximum(heaviest[previous], end - start[previous]))
    return float(heaviest[-1])


class _Stages:
    """Dynamic programs that choose stage boundaries among positions, the possible boundaries.

    Args:
        shares: load of all operators before each position, as a multiple of the mean load of a stage.
        sent: bytes that a boundary at each position sends.
        end, start: a stage from position a to position b has the load `end[b] - start[a]`.
        send: cost of a boundary at each position, in units of load, for each of its two stages.
    """

    def __init__(
        self, shares: np.ndarray, sent: np.ndarray, end: np.ndarray, start: np.ndarray, send: np.ndarray,
        num_stages: int,
    ):  # fmt: skip
        self.shares, self.sent, self.end, self.start, self.send = shares, sent, end, start, send
        self.num_stages = num_stages

    def evenest(self, least_load: float, bound: float) -> list[int]:
        """Return the positions of the stage boundaries of an even partition that sends little.

        The function minimizes a cost. Each stage adds half the square of its load. Each boundary adds the bytes that it
        sends, divided by the median bytes of a boundary. Partitions are excluded if their slowest stage takes more than
        `TIME_TOLERANCE` longer than the slowest stage of the fastest partition.

        Args:
            least_load: largest stage load in the most even partition.
            bound: lower bound of the largest stage load.
        """
        max_load = least_load * (1 + MAX_IMBALANCE)
        quickest = self._least_max_time(max_load) if self.send.any() else least_load
        limit = quickest * (1 + TIME_TOLERANCE)
        if quickest <= bound * BOUND:
            limit = min(limit, bound * BOUND)
        first, time = self._stage_times(min(limit, max_load))
        often, widest = float(np.median(self.sent[1:-1])) or 1.0, time.shape[1]
        uneven = np.where(
            time <= limit * (1 + 1e-12), (self.shares[:, None] - _preceding(self.shares, widest)) ** 2 / 2, np.inf
        )
        cost = np.where(first <= limit * (1 + 1e-12), self.shares**2 / 2, np.inf)
        chosen: list[np.ndarray] = []
        every = np.arange(len(self.end))
        for _ in range(self.num_stages - 1):
            costs = _preceding(cost + self.sent / often, widest) + uneven
            chosen.append(costs.argmin(1))
            cost = costs[every, chosen[-1]]
        cuts, place = [], len(self.end) - 1
        for columns in reversed(chosen):
            place += int(columns[place]) - widest
            cuts.append(place)
        return cuts[::-1]

    def _least_max_time(self, max_load: float) -> float:
        """Return the least possible time of the slowest stage, if no stage has a load above `max_load`."""
        slowest, time = self._stage_times(max_load)
        for _ in range(self.num_stages - 1):
            slowest = np.maximum(_preceding(slowest, time.shape[1]), time).min(1)
        return float(slowest[-1])

    def _stage_times(self, max_load: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the times of all possible stages, as two arrays.

        The first array has shape [positions]: the time of a first stage that ends at each position. The second array
        has shape [positions, widest]. Its entry [i, j] is the time of a stage from position `i - widest + j` to i;
        `widest` is the largest number of positions that a stage can span. A stage with a load above `max_load` has
        infinite time.
        """
        max_load *= 1 + 1e-12
        every = np.arange(len(self.end))
        widest = int((every - np.searchsorted(self.start, self.end - max_load, side="left")).max())
        able = self.end[:, None] - _preceding(self.start, widest, -np.inf) <= max_load
        time = (self.end + self.send)[:, None] - _preceding(self.start - self.send, widest)
        first = np.where((self.end <= max_load) & (every > 0), self.end + self.send, np.inf)
        return first, np.where(able, time, np.inf)


def _preceding(values: np.ndarray, widest: int, fill: float = np.inf) -> np.ndarray:
    """Return a view of shape [positions, widest] that has the `widest` values before each position.

    Entry [i, j] is the value at position `i - widest + j`.

    Args:
        values: one value per position.
        widest: number of preceding positions.
        fill: value for positions below 0.
    """
    return sliding_window_view(np.concatenate((np.full(widest, fill), values)), widest)[: len(values)]


def stage_boundaries(table: Table, setting: RunSetting, hardware: Hardware) -> tuple[int, ...]:
    """Return the stage boundaries that a plan for this setting would have.

    A boundary is the index of a stage's first operator. Stage 0 has no boundary. The boundaries balance the loads and
    sent bytes of one microbatch on a rank. Raises StageError if the model has too few operators at which a stage may
    begin.
    """
    num_stages, mesh = setting.mesh.size("pp") * setting.schedule.virtual_stages, setting.mesh
    if num_stages == 1:
        return ()
    times = table.times(setting)
    unsharded = times._replace(tp=1 / table.tp)
    of_rank = table.row_flops * setting.b / table.load / math.prod(chosen_ranks(mesh).values())
    loads = np.array([0.0 if row.once else float(row.load.at(times)) for row in table.rows])[table.positions] * of_rank
    sent = np.array([math.inf if row.crossing is None or row.once else float(row.crossing.at(unsharded))
                     for row in table.rows])  # fmt: skip
    sent = sent[table.positions] / mesh.tensor_parallel_size
    cost = load_per_byte(loads, table.dtype, mesh, hardware)
    if setting.system.fills_stages:
        filled = filled_stages(loads, _block_starts(table, sent), num_stages)
        if filled is not None:
            return filled
    partition = balance(loads, sent, num_stages, send_cost=cost)
    if partition is None:
        raise StageError(
            f"the model cannot be split into {num_stages} stages",
            why="it has too few operators at which a stage can begin",
        )
    return partition.cuts


def _block_starts(table: Table, sent: np.ndarray) -> list[int]:
    """Return the index of the first operator of each block but the first.

    A module outside of blocks, such as a head, is a block too. Between the parameters of two blocks, the second block
    starts at the operator before which the fewest bytes are sent.

    Args:
        sent: for each operator, the bytes that a stage boundary before it sends.
    """
    starts, before, last = list[int](), None, 0
    for i, (row, path, number) in enumerate(table.order):
        if names := table.rows[row].parameters or table.rows[row].reads_also:
            block = (path, number) if path else names
            if before not in (None, block):
                starts.append(max(range(last + 1, i + 1), key=lambda j: (-sent[j], j)))
            before, last = block, i
    return [start for start in starts if math.isfinite(sent[start])]


def filled_stages(loads: np.ndarray, starts: Sequence[int], num_stages: int) -> tuple[int, ...] | None:
    """Return the boundaries of stages that are filled with blocks in order.

    A stage ends with the block with which the load of all blocks so far exceeds the share of the stages so far. So
    early stages may have a block more than later ones. Returns None if there are too few blocks.

    Args:
        loads: load of every operator, in order.
        starts: index of the first operator of each block but the first.

    >>> filled_stages(np.ones(5), range(1, 5), 4)
    (2, 3, 4)
    """
    total, cuts = np.cumsum(loads), list[int]()
    for start in starts:
        if len(cuts) < num_stages - 1 and total[start - 1] > total[-1] * (len(cuts) + 1) / num_stages:
            cuts.append(start)
    return tuple(cuts) if len(cuts) == num_stages - 1 else None


def shared_by(ranks_hold: Sequence[Mapping[str, str]], parameters: Mapping[str, Parameter]) -> list[list[int]]:
    """Return groups of `pp` coordinates whose ranks share a trained (tied) parameter.

    Args:
        ranks_hold: for each `pp` coordinate, {name of a parameter: its name in `parameters`}.
    """
    names = {name for held in ranks_hold for name, known in held.items() if parameters[known].trained}
    groups = {tuple(pp for pp, held in enumerate(ranks_hold) if name in held) for name in names}
    return [list(group) for group in sorted(groups) if len(group) > 1]
