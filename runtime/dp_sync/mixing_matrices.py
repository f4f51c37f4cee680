"""Who averages with whom: rows of doubly stochastic mixing matrices.

`w[i]` is what rank i averages, ((rank, weight), ...), in the order of ranks. Assran et al. 2019 (arXiv:1811.10792) and
Ying et al. 2021 (arXiv:2110.13363) have the exponential graphs; Xiao and Boyd 2004 the Metropolis weights of the grid.
"""

from __future__ import annotations

import math

from autopart.runtime.dp_sync.transports import Weights


def mixing(graph: str, num_ranks: int, step: int = 0) -> list[Weights]:
    """The rows of the matrix of a graph, at a step (from 0) where it changes with them."""
    if num_ranks == 1:
        return [((0, 1.0),)]
    if graph == "complete":
        return [tuple((rank, 1 / num_ranks) for rank in range(num_ranks))] * num_ranks
    if graph == "grid":
        return _grid(num_ranks)
    offsets = _offsets(graph, num_ranks, step)
    rows: list[Weights] = []
    for rank in range(num_ranks):
        if graph == "one_peer" and _is_power_of_two(num_ranks):
            others = {rank ^ offsets[0]}
        else:
            others = {(rank - offset) % num_ranks for offset in offsets}
        weight = 1 / (1 + len(others))
        rows.append(tuple((other, weight) for other in sorted({rank, *others})))
    return rows


def receivers(rows: list[Weights]) -> list[list[int]]:
    """Whom each rank sends its values: those that average them."""
    num_ranks = len(rows)
    return [[i for i in range(num_ranks) if i != rank and rank in dict(rows[i])] for rank in range(num_ranks)]


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _offsets(graph: str, num_ranks: int, step: int) -> list[int]:
    """How far away those are whose values a rank gets."""
    if graph == "ring":
        return [1] if num_ranks == 2 else [1, num_ranks - 1]
    powers = [2**k for k in range(math.ceil(math.log2(num_ranks)))]
    return [powers[step % len(powers)]] if graph == "one_peer" else powers


def _grid(num_ranks: int) -> list[Weights]:
    """Neighbours in a grid, as square as it goes and open at its sides: 1 / max(|N_i|, |N_j|), counting themselves."""
    height = max(h for h in range(1, math.isqrt(num_ranks) + 1) if num_ranks % h == 0)
    width = num_ranks // height

    def neighbours(rank: int) -> list[int]:
        row, column = divmod(rank, width)
        beside = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        return [r * width + c for r, c in beside if 0 <= r < height and 0 <= c < width]

    rows: list[Weights] = []
    for rank in range(num_ranks):
        counts = {other: 1 + max(len(neighbours(rank)), len(neighbours(other))) for other in neighbours(rank)}
        weights = {other: 1 / count for other, count in counts.items()}
        weights[rank] = 1 - sum(weights.values())
        rows.append(tuple(sorted(weights.items())))
    return rows
