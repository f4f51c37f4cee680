"""How rows go to the ranks of their experts and back, each to the rank of its own expert alone, with no limit of rows
an expert (Gale et al. 2022, arXiv:2211.15841): what one rank sends and receives, apart from what carries it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Route:
    """The way of one rank's rows.

    order: [rows], the numbers of the rows in the order in which they are sent: by the rank that they go to.
    sends, receives: how many rows go to each rank of the axis, and come from it.
    times: how many rows a token has.
    """

    order: Tensor
    sends: list[int]
    receives: list[int]
    times: int

    @staticmethod
    def of(expert: Tensor, counts: Tensor, times: int, num_experts: int) -> Route:
        """`expert`: [rows], integers, of each row of a rank. `counts`: what `exchange_counts` gives of it."""
        sends, receives = counts.tolist()
        order = _ranks_of(expert, num_experts, len(sends)).argsort(stable=True)
        return Route(order, sends, receives, times)

    def rows_of(self, tokens: Tensor) -> Tensor:
        """[tokens, ...] -> [rows, ...]: each token as often as it has rows, in the order in which they are sent."""
        return tokens[self.order // self.times]

    def tokens_of(self, rows: Tensor) -> Tensor:
        """[rows, ...] in the order in which they were sent -> [tokens, ...]: the sum of each token's rows."""
        in_place = torch.empty_like(rows).index_copy_(0, self.order, rows)
        return in_place.unflatten(0, (rows.size(0) // self.times, self.times)).sum(1)


def count_rows(expert: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """[ranks]: how many rows have their expert on each rank."""
    ranks = torch.arange(num_ranks, device=expert.device)
    return (_ranks_of(expert, num_experts, num_ranks).unsqueeze(-1) == ranks).sum(0)


def _ranks_of(expert: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """The rank of each row's expert; a row that has none goes anywhere, and gives zeros there."""
    return (expert // -(-num_experts // num_ranks)).clamp(0, num_ranks - 1)
