"""Partition of a sequence of operators into stages with an exact minimum of the largest load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopart.cost.predict.table_rows import Parameter

IMBALANCE_TOLERANCE = 0.015
"""Default imbalance tolerance of the most loaded stage over the optimum, to send less."""

BOUND = 1.018
"""Limit of the most loaded stage, as a multiple of the lower bound, if the optimum is within it. Larger excess is not
accepted to send less."""


@dataclass(frozen=True)
class Partition:
    """A partition into stages.

    Args:
        cuts: `cuts[k]` is the index of the first operator of stage k + 1.
        loads: load of every stage.
        lower_bound: the larger of the mean stage and the largest operator. No partition is below it.
    """

    cuts: tuple[int, ...]
    loads: tuple[float, ...]
    lower_bound: float


def balance(
    weights: Sequence[float] | np.ndarray,
    crossing: Sequence[float] | np.ndarray,
    num_stages: int,
    begins: Set[int] = frozenset(),
    slack: float = IMBALANCE_TOLERANCE,
) -> Partition | None:
    """Return the exact min-max partition, refined to send less and to be more even.

    Among the partitions within `slack` of the optimum, it returns the most even one that sends little. If one
    operator outweighs the mean stage, it does not bind the other stages. Their evenness still shortens the fill and
    drain of the pipeline, and balances ranks with several stages.

    Args:
        weights: load of every operator, in order.
        crossing: bytes that a stage boundary before operator i sends (infinite if no stage may begin there).
        num_stages: number of non-empty stages.
        begins: indices at which a stage must begin.
        slack: imbalance tolerance: relative excess of the most loaded stage over the optimum. Up to
            `IMBALANCE_TOLERANCE`, `BOUND` applies too.

    Returns None if there are too few stage boundaries, or more required beginnings than stages.

    >>> balance([3, 1, 1, 3], [0, 9, 9, 9], 2).cuts
    (2,)
    """
    total = np.concatenate(([0.0], np.cumsum(np.asarray(weights, dtype=float))))
    places = [i for i in range(1, len(weights)) if np.isfinite(crossing[i])]
    if len(places) < num_stages - 1 or not begins <= set(places):
        return None
    position = np.array([0, *places, len(weights)])
    begun = np.cumsum(np.isin(position, list(begins)))
    load = total[position]
    # A stage that spans a required beginning gets a load above the total: `start` exceeds `end` at beginnings.
    across = 2 * float(total[-1]) + 1
    end, start = load + across * np.concatenate(([0], begun[:-1])), load + across * begun
    best = _min_max(end, start, num_stages)
    if best >= across:
        return None
    bound = float(max(total[-1] / num_stages, max(weights, default=0.0)))
    limit = best * (1 + slack)
    if slack <= IMBALANCE_TOLERANCE and best <= bound * BOUND:
        limit = min(limit, bound * BOUND)
    sent = np.array([0.0, *(crossing[i] for i in places), 0.0])
    often = float(np.median(sent[1:-1])) or 1.0 if places else 1.0
    shares = load * num_stages / (load[-1] or 1.0)
    chosen = _evenest(end, start, shares, sent / often, num_stages, limit)
    cuts = tuple(int(position[i]) for i in chosen)
    edges = (0, *cuts, len(weights))
    loads = tuple(float(total[b] - total[a]) for a, b in pairwise(edges))
    return Partition(cuts, loads, bound)


def _min_max(end: np.ndarray, start: np.ndarray, num_stages: int) -> float:
    """Return the least possible load of the most loaded stage.

    This is a dynamic program over (stages used, position), each step a bisection. A stage from position a to
    position b has the load `end[b] - start[a]`.
    """
    heaviest = end.copy()  # one stage up to each position
    for _ in range(num_stages - 1):
        low, high = np.zeros(len(end), dtype=int), np.arange(len(end))
        while np.any(low < high):  # the first position at which the load before exceeds the load after
            middle = (low + high) // 2
            before = heaviest[middle] >= end - start[middle]
            high = np.where(before & (low < high), middle, high)
            low = np.where(~before & (low < high), middle + 1, low)
        after = np.maximum(heaviest[low], end - start[low])
        previous = np.maximum(low - 1, 0)
        heaviest = np.minimum(after, np.maximum(heaviest[previous], end - start[previous]))
    return float(heaviest[-1])


def _evenest(
    end: np.ndarray, start: np.ndarray, shares: np.ndarray, sent: np.ndarray, num_stages: int, limit: float
) -> list[int]:
    """Return the stage boundaries that minimise unevenness and communication under a load limit.

    The cost is half the sum of squares of the stages' loads, plus the bytes that they send.

    Args:
        shares: load before each position, in mean stages.
        sent: bytes of each boundary, relative to the median boundary.
    """
    if num_stages == 1:
        return []
    count, limit = len(end), limit * (1 + 1e-12)
    first = np.searchsorted(start, end - limit, side="left")
    widest = int((np.arange(count) - first).max())
    before = np.arange(count)[:, None] - np.arange(
        widest, 0, -1
    )  # [positions, candidates] possible starts of the stage that ends there
    able = (before >= first[:, None]) & (before >= 0)
    before = np.maximum(before, 0)
    uneven = np.where(able, (shares[:, None] - shares[before]) ** 2 / 2, np.inf)
    cost = np.where(end <= limit, shares**2 / 2, np.inf)
    cost[0] = np.inf
    came_from: list[np.ndarray] = []
    for _ in range(num_stages - 1):
        costs = (cost + sent)[before] + uneven
        chosen = costs.argmin(1)
        came_from.append(before[np.arange(count), chosen])
        cost = costs[np.arange(count), chosen]
    cuts, place = [], count - 1
    for origin in reversed(came_from):
        place = int(origin[place])
        cuts.append(place)
    return cuts[::-1]


def shared_by(ranks_hold: Sequence[Mapping[str, str]], parameters: Mapping[str, Parameter]) -> list[list[int]]:
    """Return the groups of `pp` coordinates that hold the same trained parameters.

    Args:
        ranks_hold: for each coordinate, {name of a parameter: its name in `parameters`}.
    """
    names = {name for held in ranks_hold for name, known in held.items() if parameters[known].trained}
    groups = {tuple(pp for pp, held in enumerate(ranks_hold) if name in held) for name in names}
    return [list(group) for group in sorted(groups) if len(group) > 1]
