"""Mixing matrices of gossip: doubly stochastic weights with which ranks average their values.

Row i of a matrix is ((rank, weight), ...) in rank order. Rank i computes the average of these ranks' values with these
weights. Sources of the exponential graphs: Assran et al. 2019 (arXiv:1811.10792) and Ying et al. 2021
(arXiv:2110.13363). Source of the grid's Metropolis weights: Xiao and Boyd 2004.
"""

from __future__ import annotations

import math

from autopart.extras.dp_sync.transports import Weights


def mixing_rows(graph: str, num_ranks: int, step: int = 0) -> list[Weights]:
    """Return the rows of a graph's mixing matrix at a step.

    Only the graph `one_peer` depends on the step, which is counted from 0.
    """
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
            peers = {rank ^ offsets[0]}
        else:
            peers = {(rank - offset) % num_ranks for offset in offsets}
        weight = 1 / (1 + len(peers))
        rows.append(tuple((other, weight) for other in sorted({rank, *peers})))
    return rows


def receivers(rows: list[Weights]) -> list[list[int]]:
    """Return, for each rank, the ranks that need its value for their average."""
    num_ranks = len(rows)
    return [[i for i in range(num_ranks) if i != rank and rank in dict(rows[i])] for rank in range(num_ranks)]


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _offsets(graph: str, num_ranks: int, step: int) -> list[int]:
    """Return the distances (in ranks) to the neighbours from which a rank receives values."""
    if graph == "ring":
        return [1] if num_ranks == 2 else [1, num_ranks - 1]
    powers = [2**k for k in range(math.ceil(math.log2(num_ranks)))]
    return [powers[step % len(powers)]] if graph == "one_peer" else powers


def _grid(num_ranks: int) -> list[Weights]:
    """Return the rows of Metropolis weights for a nearly square grid of ranks without wrap-around.

    The weight between ranks i and j is 1 / max(|N_i|, |N_j|). A neighbourhood N includes the rank itself.
    """
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
