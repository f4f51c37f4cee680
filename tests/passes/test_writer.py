"""What the writer of stage graphs has to get right and no model of the zoo shows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import autopart


class LargeLogits(nn.Module):
    """A head of 40 classes whose logits overflow `exp` unless the largest is taken off first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 16), nn.Linear(16, 40, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(1e4 * self.head(torch.tanh(self.up(x))), labels)


def test_a_loss_over_sharded_classes_is_finite_for_large_logits():
    batch = {"x": torch.randn(4, 8), "labels": torch.randint(40, (4,))}
    report = autopart.verify(LargeLogits(), "tp2", example_kwargs=batch)
    assert report.ok, report
    plan = autopart.plan(LargeLogits(), "tp2", example_kwargs=batch)
    assert plan.placement_text("head.weight", "tp") == "S(0)"


class ProductReadTwice(nn.Module):
    """A product that is read before its bias is added, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = F.linear(x, self.weight)
        return ((product + self.bias).tanh() * product).sum()


def test_a_bias_stays_apart_from_a_product_that_others_read():
    report = autopart.verify(ProductReadTwice(), "dp2", example_kwargs={"x": torch.randn(4, 8)})
    assert report.ok, report
