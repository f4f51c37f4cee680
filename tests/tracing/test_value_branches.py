"""Branches on values that only replace a value: both sides are computed, and the condition selects."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.errors import Refusal, TraceError


class Guarded(nn.Module):
    def __init__(self, guard: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.guard = nn.Linear(8, 8), nn.Linear(8, 8), guard

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.guard(self.second(self.first(x)), y)


def clamped(h: Tensor, y: Tensor) -> Tensor:
    if not torch.isfinite(h).all():
        h = torch.clamp(h, -100, 100)
    return F.mse_loss(h, y)


def either(h: Tensor, y: Tensor) -> Tensor:
    if torch.isinf(h).any() or torch.isnan(h).any():
        h = torch.nan_to_num(h)
    if not (h.abs() < 100).all() and h.mean() > 0:
        h = h / 2
    return F.mse_loss(h, y)


def long_loss(h: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(h, y)
    if loss.item() > 0.1:
        loss = loss / loss.detach()
    return loss


def two_sides(h: Tensor, y: Tensor) -> Tensor:
    if h.mean() > y.mean():
        return (h - y).square().mean()
    else:
        return (h - y).abs().mean()


def skipped(h: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(h, y)
    if torch.isnan(loss) or torch.isinf(loss):
        loss = torch.tensor(0.0, dtype=loss.dtype, requires_grad=True)
    return loss


def skipped_now(h: Tensor, y: Tensor) -> Tensor:
    """The loss is NaN and its own derivative is, too: the model gives no gradient of it."""
    loss = torch.sqrt(-h.square().sum())
    if torch.isnan(loss):
        loss = torch.zeros_like(loss)
    return loss + F.mse_loss(h, y)


def root(h: Tensor, y: Tensor) -> Tensor:
    """The side that is not selected has an infinite derivative."""
    distance = (h * 0).square().sum()
    length = distance
    if distance > 0:
        length = distance.sqrt() * 2
    return length + F.mse_loss(h, y)


def checked(h: Tensor, y: Tensor) -> Tensor:
    if torch.isnan(h).any():
        raise ValueError("not a number")
    return clamped(h, y)


GUARDS = [clamped, either, long_loss, two_sides, skipped, skipped_now, root, checked]


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.__name__)
def test_both_sides_of_a_branch(guard):
    example = torch.randn(4, 8), torch.randn(4, 8)
    for mesh in ("dp2", "tp2"):
        torch.manual_seed(0)
        result = autopart.verify(Guarded(guard), mesh, example_args=example)
        assert result.ok, result
        assert any("both sides of a branch on values" in note for note in result.notes), result.notes


def test_a_guard_in_every_layer_and_in_stages():
    class Layer(nn.Linear):
        def forward(self, h: Tensor) -> Tensor:
            h = h + super().forward(h).relu()
            if self.training and not torch.isfinite(h).all():
                h = torch.clamp(h, -100, 100)
            return h

    for mesh in ("tp2", "pp2"):
        assert autopart.verify(nn.Sequential(Layer(8, 8), Layer(8, 8)), mesh, example_args=(torch.randn(4, 8),)).ok


def nested(h: Tensor, y: Tensor) -> Tensor:
    if not torch.isfinite(h).all():
        if torch.isnan(h).any():
            h = torch.nan_to_num(h)
        h = h.clamp(-10, 10)
    return F.mse_loss(h, y)


def dropped(h: Tensor, y: Tensor) -> Tensor:
    if h.mean() > 0:
        h = F.dropout(h, 0.5)
    return F.mse_loss(h, y)


def normalized(h: Tensor, y: Tensor) -> Tensor:
    if h.mean() > 0:
        h = STATISTICS(h)
    return F.mse_loss(h, y)


STATISTICS = nn.BatchNorm1d(8)


def shorter(h: Tensor, y: Tensor) -> Tensor:
    if h.mean() > 0:
        h, y = h[:2], y[:2]
    return F.mse_loss(h, y)


def repeated(h: Tensor, y: Tensor) -> Tensor:
    while not h.norm() < 1:
        h = h / 2
    return F.mse_loss(h, y)


LIMITS = {
    nested: "the number of branches depends on the outcome of another one",
    dropped: "a side of a branch draws random numbers",
    shorter: "the two sides of a branch give tensors of different shapes or dtypes",
    repeated: "there are more than 64 branches, as in a loop",
}


@pytest.mark.parametrize("guard", LIMITS, ids=lambda guard: guard.__name__)
def test_what_cannot_be_selected_is_refused(guard):
    with pytest.raises(TraceError, match="this line decides what to run by the values in a tensor") as error:
        autopart.plan(Guarded(guard), "tp2", example_args=(torch.randn(4, 8), torch.randn(4, 8)))
    assert error.value.refusal is Refusal.DECISION and "test_value_branches.py" in str(error.value)
    assert f"cannot compute both sides of the branch either: {LIMITS[guard]}" in str(error.value)


def test_running_statistics_of_one_side_are_refused():
    model = Guarded(normalized)
    model.statistics = STATISTICS
    with pytest.raises(TraceError, match="this line decides what to run by the values in a tensor"):
        autopart.plan(model, "tp2", example_args=(torch.randn(4, 8), torch.randn(4, 8)))


class Counting(nn.Module):
    """Counts the losses that are not finite in a Python attribute."""

    def __init__(self):
        super().__init__()
        self.linear, self.skipped = nn.Linear(8, 8), 0

    def forward(self, x):
        loss = self.linear(x).square().mean()
        if not torch.isfinite(loss):
            loss = loss * 0
            self.skipped += 1
        return loss


def test_a_side_that_changes_an_attribute_is_refused():
    with pytest.raises(TraceError, match="decides what to run by the values in a tensor"):
        autopart.plan(Counting(), "tp2", example_args=(torch.randn(8, 8),))
