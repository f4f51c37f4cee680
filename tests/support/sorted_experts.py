"""A mixture of experts that sorts its rows by expert."""

from __future__ import annotations

import torch
import transformers.integrations.moe  # noqa: F401  (registers torch.ops.transformers)
from torch import Tensor, nn

ROWS, WIDTH, EXPERTS = 8, 6, 4


class SortedExperts(nn.Module):
    """Rows sorted by expert, one product a group, and back. `fault`: what makes the order of the rows matter."""

    def __init__(self, fault: str = ""):
        super().__init__()
        self.fault = fault
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        best, experts = self.router(x).softmax(-1).topk(2)
        experts = experts.reshape(-1)
        sorted_experts, order = torch.sort(experts)
        counts = torch.histc(sorted_experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        if self.fault == "counts of something else":
            counts = counts.flip(0)
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        y = torch.ops.transformers.grouped_mm_fallback(x[order // 2], self.weight, offsets)
        y = torch.tanh(y + self.bias[sorted_experts])
        if self.fault == "a sum over the sorted rows":
            y = y.cumsum(0)
        y = y * (best.reshape(-1) if self.fault == "unsorted weights" else best.reshape(-1)[order]).unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(2 * x.size(0))
        return y[back].view(x.size(0), 2, WIDTH).sum(1)
