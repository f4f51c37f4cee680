"""Forwards that write to an input: accepted if a second write would change nothing, such as a mask of labels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.errors import TraceError


class Net(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.a, self.b, self.write = nn.Linear(8, 8), nn.Linear(8, 6), write

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.write(self, x, labels)
        return F.cross_entropy(self.b(self.a(x).relu()), labels)


def padding_as_ignored(m, x, labels):
    labels[labels == 0] = -100


def clamped(m, x, labels):
    labels.clamp_(0, 4)


def filled_where_another_input_is_small(m, x, labels):
    labels.masked_fill_(x[:, 0] < 0, -100)


def scaled(m, x, labels):
    x.mul_(2)


def counted_down(m, x, labels):
    labels[labels > 4] -= 1


def written_by_a_layer(m, x, labels):
    x.copy_(m.a(x))


def example():
    torch.manual_seed(0)
    return {"x": torch.randn(8, 8), "labels": torch.arange(8) % 6}


@pytest.mark.parametrize("write", [padding_as_ignored, clamped, filled_where_another_input_is_small])
def test_idempotent_write_is_exact_and_noted(write):
    found = autopart.verify(Net(write), "dp2,tp2", example_kwargs=example(), steps=2)
    assert found.ok, str(found)
    assert "forward() writes to its input 'labels': the caller's tensor keeps its values" in found.notes


@pytest.mark.parametrize("write", [scaled, counted_down, written_by_a_layer])
def test_other_writes_are_refused(write):
    with pytest.raises(TraceError, match="Net writes to its input"):
        autopart.plan(Net(write), "dp2", example_kwargs=example())
