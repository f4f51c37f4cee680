"""Checks that a model makes of its values are passed by a trace, and named; decisions are not passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import checked
import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.errors import TraceError


class Checked(nn.Module):
    def __init__(self, check: Callable[[Tensor], Any]):
        super().__init__()
        self.first, self.second, self.check = nn.Linear(8, 8), nn.Linear(8, 8), check

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.check(h)
        return self.second(h).square().mean()


@pytest.mark.few
@pytest.mark.parametrize("check", checked.CHECKS, ids=lambda check: check.__name__)
def test_a_check_is_passed_and_named(check):
    model, x = Checked(check), torch.randn(4, 8)
    result = autopart.verify(model, "tp2", example_args=(x,))
    assert result.ok, result
    notes = [note for note in result.notes if note.startswith("the program does not contain a check of values: ")]
    assert notes and all("(checked.py:" in note for note in notes)
    assert not any("compared" in note for note in result.notes), "the gradients are compared all the same"
    operators = autopart.parallelize(model, "dp1", example_args=(x,)).graph().graph.nodes
    assert not [n for n in operators if "isnan" in n.name or "isfinite" in n.name or n.name.startswith("eq")]


def decides(h: Tensor) -> Tensor:
    return h if h.max() > 0 else -h


def decides_by_a_number(h: Tensor) -> Tensor:
    return h if h.max().item() > 0 else -h


def decides_by_an_error(h: Tensor) -> bool:
    try:
        if h.max() > 0:
            raise ValueError
    except ValueError:
        return True
    return False


def counts(h: Tensor) -> int:
    number = 0
    if h.max() > 0:
        number += 1
    return number


@pytest.mark.parametrize("check", [decides, decides_by_a_number, decides_by_an_error, counts])
def test_a_decision_is_no_check(check):
    result = autopart.verify(Checked(check), "tp2", example_args=(torch.randn(4, 8),))
    assert result.ok and not any("check of values" in note for note in result.notes), result


def test_a_check_of_known_values_is_made():
    with pytest.raises(TraceError, match="AssertionError: six"):
        autopart.plan(Checked(checked.fails), "tp2", example_args=(torch.randn(4, 8),))


def test_a_check_of_plain_numbers_is_made():
    """As in the module that `torch.export` gives, which checks the sizes of its inputs."""
    exported = torch.export.export(nn.Linear(8, 8), (torch.randn(4, 8),)).module()
    result = autopart.verify(exported, "tp2", example_args=(torch.randn(4, 8),))
    assert result.ok and not [note for note in result.notes if "check" in note]
    with pytest.raises(TraceError, match="too small"):
        autopart.plan(
            Checked(lambda h: torch._assert(h.shape[0] > 9, "too small")), "tp2", example_args=(torch.ones(4, 8),)
        )


class StoresTensors(nn.Module):
    """Stores a buffer, or creates a parameter, in its first call."""

    def __init__(self, as_parameter: bool):
        super().__init__()
        self.lin, self.as_parameter, self.scale = nn.Linear(8, 8), as_parameter, None
        if not as_parameter:
            del self.scale
            self.register_buffer("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None and self.as_parameter:
            del self.scale
            self.scale = nn.Parameter(torch.ones(8))
        elif self.scale is None:
            self.scale = torch.arange(8.0)
        return (self.lin(x) * self.scale).mean()


def test_tensors_that_another_trace_left_are_named():
    model, x = StoresTensors(as_parameter=False), torch.randn(4, 8)
    torch.export.export(model, (x,))
    with pytest.raises(TraceError, match=r"'scale' is a fake tensor(.|\n)* call it once before torch.export"):
        autopart.plan(model, "tp2", example_args=(x,))


def test_a_parameter_that_forward_creates_is_named_and_removed():
    model, x = StoresTensors(as_parameter=True), torch.randn(4, 8)
    with pytest.raises(TraceError, match=r"creates the parameter 'scale'(.|\n)* call the model once before"):
        autopart.plan(model, "tp2", example_args=(x,))
    assert not dict(model.named_parameters()).keys() & {"scale"}
    model(x)
    assert autopart.verify(model, "tp2", example_args=(x,)).ok


class Policy(nn.Module):
    """The loss of an actor: distributions check their arguments and what they are asked about."""

    def __init__(self):
        super().__init__()
        self.mean, self.scale, self.logits = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, actions: Tensor) -> Tensor:
        normal = torch.distributions.Normal(self.mean(x), self.scale(x).exp())
        prior = torch.distributions.Normal(torch.zeros_like(x), torch.ones_like(x))
        choice = torch.distributions.Categorical(logits=self.logits(x))
        divergence = torch.distributions.kl_divergence(normal, prior).mean()
        return divergence - normal.log_prob(x).mean() - choice.log_prob(actions).mean() - choice.entropy().mean()


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2"])
def test_distributions(mesh):
    result = autopart.verify(Policy(), mesh, example_args=(torch.randn(4, 8), torch.randint(4, (4,))))
    assert result.ok, result
