"""A model that computes NaN is not `exact`: `verify` says what is not finite, and where it begins."""

from __future__ import annotations

import linecache
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart


class Net(nn.Module):
    """Two layers, and something between them."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.between, self.down = nn.Linear(8, 16), between or nn.Tanh(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x))).square().mean()


class RootOfNegatives(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()  # the first


class Overflow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 1e6).exp()  # overflows


class MaskedRows(nn.Module):
    """A row of attention in which all is masked: its softmax is NaN, of infinities."""

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(x > -1e9, -torch.inf).softmax(-1)  # of infinities alone


class RootOfZero(nn.Module):
    """The forward is finite, the backward is not."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0).sqrt()  # infinite slope


class Statistic(nn.Module):
    """A statistic that is NaN, and has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("statistic", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        self.statistic.copy_((x.detach().mean(0) - 1e3).log())  # of negatives
        return torch.tanh(x)


BATCH = {"x": torch.linspace(-1, 1, 64).reshape(8, 8)}


def line_of(text: str) -> str:
    """The line of this file that a report names."""
    numbers = re.findall(r"test_verify_finite\.py:(\d+)", text)
    assert numbers, text
    return linecache.getline(__file__, int(numbers[-1]))


@pytest.mark.few
@pytest.mark.parametrize(
    ("kind", "mesh", "value", "makes", "line"),
    [
        (RootOfNegatives, "tp2", "loss is nan", "computes nan from finite numbers", "# the first"),
        (Overflow, "dp2", "loss is nan", "computes nan from infinities, which exp at", "# overflows"),
        (MaskedRows, "pp2", "loss is nan", "softmax at test", "# of infinities alone"),
        (RootOfZero, "tp2", "gradient of up.weight holds 128 nan of 128", "the backward of sqrt", "# infinite slope"),
        (Statistic, "dp2", "buffer between.statistic holds 16 nan of 16", "computes nan from finite", "# of negatives"),
    ],
)
def test_what_is_not_finite_is_named_with_its_line(kind, mesh, value, makes, line):
    found = autopart.verify(Net(kind()).double(), mesh, example_kwargs=BATCH)
    assert not found.ok and found.not_finite is not None and found.first_mismatch is None, str(found)
    text = str(found)
    assert text.startswith("NOT FINITE on") and "exact" not in text
    assert value in text and makes in text and "the same numbers in the same positions" in text, text
    assert line in line_of(found.not_finite.maker)
    assert not found.not_finite.begins


def test_weights_that_are_nan_from_the_start():
    model = Net()
    with torch.no_grad():
        model.up.weight[3, :2] = torch.nan
    found = autopart.verify(model, "tp2", example_kwargs=BATCH)
    assert not found.ok and found.not_finite.begins == {"parameter up.weight": "holds 2 nan of 128"}
    assert "begins   parameter up.weight holds 2 nan of 128" in str(found) and "finite weights and inputs" in str(found)


def test_inputs_that_are_nan():
    x = BATCH["x"].clone()
    x[0, 0] = torch.nan
    found = autopart.verify(Net(), "dp2", example_kwargs={"x": x})
    assert not found.ok and found.not_finite.begins == {"input x": "holds 1 nan of 64"}


def test_a_loss_that_is_infinite():
    class Overflows(Net):
        def forward(self, x: Tensor) -> Tensor:
            return (self.up(x).square().sum() + 800).exp()  # too large

    found = autopart.verify(Overflows(), "dp2", example_kwargs=BATCH)
    assert not found.ok and "loss is inf" in str(found) and "infinities, which exp at" in str(found)
    assert "# too large" in line_of(found.not_finite.maker)


def test_a_model_full_of_nan_in_float32_losses():
    """Where the trace stands for a model that casts down, too."""

    class Casts(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).float()

    found = autopart.verify(Casts(RootOfNegatives()), "tp2", example_kwargs=BATCH)
    assert not found.ok and "loss is nan" in str(found)


class MaskedLogits(Net):
    """Logits of which some are masked: infinities that are as they should be."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.down(self.between(self.up(x)))
        logits = logits.masked_fill(torch.arange(8) > 5, -torch.inf)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2"])
def test_masked_logits_are_exact(mesh):
    batch = {**BATCH, "y": torch.arange(8) % 5}
    found = autopart.verify(MaskedLogits(), mesh, example_kwargs=batch)
    assert found.ok and found.not_finite is None, str(found)
    assert any("holds 16 inf of 64" in note for note in found.notes)


def test_a_program_that_makes_nan_of_a_finite_model():
    def tamper(program, parameters):
        parameters[1]["up.bias"].data[0] = torch.nan

    found = autopart.verify(Net(), "tp2", example_kwargs=BATCH, tamper=tamper)
    assert not found.ok and found.not_finite is None
    assert found.first_mismatch.name == "up.bias" and "is nan, not" in str(found.first_mismatch)


def test_a_step_after_which_weights_are_nan():
    def diverges(named):
        return torch.optim.SGD([p for _, p in named], lr=1e200)

    found = autopart.verify(Net(), "dp2", example_kwargs=BATCH, steps=3, optimizer=diverges)
    assert not found.ok and found.first_mismatch.step == 2, str(found)
    assert "not finite on one device" in str(found)
