"""Cutting a sequence of operators into stages: the heaviest stage as light as possible, exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopart.cost.predict.table_rows import Parameter

SLACK = 0.015
"""How much heavier than the optimum the heaviest stage may become to send less, if nothing else is said."""

BOUND = 1.018
"""To send less the heaviest stage does not become heavier than so many times the lower bound, where it was not."""


@dataclass(frozen=True)
class Partition:
    """`cuts[k]` is the first position of stage k + 1; `loads` the weight of every stage.

    `lower_bound` is the larger of the mean stage and the heaviest operator: no partition can be under it.
    """

    cuts: tuple[int, ...]
    loads: tuple[float, ...]
    lower_bound: float


def balance(
    weights: Sequence[float] | np.ndarray,
    crossing: Sequence[float] | np.ndarray,
    num_stages: int,
    begins: Set[int] = frozenset(),
    slack: float = SLACK,
) -> Partition | None:
    """The exact min-max partition, and among partitions within `slack` of it the most even one that sends little.

    Where one operator outweighs the mean stage no other stage is bound by it, but a pipeline fills and drains the
    sooner, and ranks with several stages are the more even, the more even these are.

    Args:
        weights: cost of every operator, in order.
        crossing: bytes that a cut before operator i would send (infinite where no cut is possible).
        num_stages: how many non-empty stages.
        begins: positions at which a stage must begin.
        slack: how much heavier than the optimum the heaviest stage may become; up to `SLACK` within `BOUND` too.
    Returns None where there are too few places to cut, or more beginnings than stages.

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
    # A stage across a beginning would hold more than everything: `start` is above `end` where a stage must begin.
    across = 2 * float(total[-1]) + 1
    end, start = load + across * np.concatenate(([0], begun[:-1])), load + across * begun
    best = _min_max(end, start, num_stages)
    if best >= across:
        return None
    bound = float(max(total[-1] / num_stages, max(weights, default=0.0)))
    limit = best * (1 + slack)
    if slack <= SLACK and best <= bound * BOUND:
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
    """The least possible heaviest stage: dynamic program over (stages used, place), each step a bisection.

    A stage from place a to place b weighs `end[b] - start[a]`.
    """
    heaviest = end.copy()  # one stage up to each place
    for _ in range(num_stages - 1):
        low, high = np.zeros(len(end), dtype=int), np.arange(len(end))
        while np.any(low < high):  # the first place where what is before outweighs what is after
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
    """Places of the cuts with no stage over the limit for which half the sum of squares of the stages' loads and what
    they send is least. `shares`: the load before each place, in mean stages; `sent`: in what most cuts send."""
    if num_stages == 1:
        return []
    count, limit = len(end), limit * (1 + 1e-12)
    first = np.searchsorted(start, end - limit, side="left")
    widest = int((np.arange(count) - first).max())
    before = np.arange(count)[:, None] - np.arange(widest, 0, -1)  # of every place, those where its stage may begin
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
    """The `pp` coordinates that hold the same trained parameters; `ranks_hold`: {name there: the one in parameters}."""
    names = {name for held in ranks_hold for name, known in held.items() if parameters[known].trained}
    groups = {tuple(pp for pp, held in enumerate(ranks_hold) if name in held) for name in names}
    return [list(group) for group in sorted(groups) if len(group) > 1]
