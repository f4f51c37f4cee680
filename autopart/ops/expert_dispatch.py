"""Dropless dispatch of rows to the ranks of their experts (Gale et al. 2022, arXiv:2211.15841).

A row is one token for one of its experts. Each row is sent only to the rank of its expert, with no limit on rows per
expert. This file computes the row order and the row counts of the all-to-all; it sends nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DispatchPlan:
    """Order and counts of the rows that one rank sends to, and receives from, the ranks of an expert axis.

    Attributes:
        order: row indices in the order of sending, sorted by destination rank.
        sends, receives: number of rows to send to each rank of the axis, and to receive from it.
        times: number of rows per token.
    """

    order: Tensor
    sends: list[int]
    receives: list[int]
    times: int

    @staticmethod
    def of(expert: Tensor, counts: Tensor, times: int, num_experts: int) -> DispatchPlan:
        """Build the plan of the local rows.

        Args:
            expert: integer tensor with the expert of each local row.
            counts: result of `exchange_counts` for `expert`.
            times: number of rows per token.
            num_experts: number of experts of the model.
        """
        sends, receives = counts.tolist()
        order = _ranks_of(expert, num_experts, len(sends)).argsort(stable=True)
        return DispatchPlan(order, sends, receives, times)

    def rows_of(self, tokens: Tensor) -> Tensor:
        """Return one row per token and expert of the token, in the order of sending."""
        return tokens[self.order // self.times]

    def tokens_of(self, rows: Tensor) -> Tensor:
        """Return one value per token: the sum of the token's rows. `rows` are in the order of sending."""
        in_place = torch.empty_like(rows).index_copy_(0, self.order, rows)
        return in_place.unflatten(0, (rows.size(0) // self.times, self.times)).sum(1)


def count_rows(expert: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """Return the number of rows whose expert is on each rank, a tensor of shape [ranks]."""
    ranks = torch.arange(num_ranks, device=expert.device)
    return (_ranks_of(expert, num_experts, num_ranks).unsqueeze(-1) == ranks).sum(0)


def _ranks_of(expert: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """Return the rank that stores each row's expert.

    A row without an expert is sent to some rank, which returns zeros for it.
    """
    return (expert // -(-num_experts // num_ranks)).clamp(0, num_ranks - 1)
