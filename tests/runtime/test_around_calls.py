"""What scripts put around a partitioned model: criteria with tensors, checkpoints, torch.compile, inference mode."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopart
from autopart.errors import TraceError, UsageError

X, Y = torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8), torch.arange(8) % 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()


def partitioned(made: nn.Module | None = None) -> autopart.ParallelModule:
    return autopart.parallelize(made or model(), "tp1", example_kwargs={"input": X})


def text_of(error: pytest.ExceptionInfo) -> str:
    return str(error.value).splitlines()[0]


def test_a_criterion_has_the_weights_of_each_call():
    plain, criterion = model(), nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3, 4]).double())
    pm = partitioned(copy.deepcopy(plain))
    for factor in (1.0, 5.0):
        criterion.weight[0] *= factor
        plain.zero_grad()
        pm.zero_grad()
        loss = criterion(plain(X), Y)
        loss.backward()
        assert abs(pm.step(X, loss_fn=criterion, target=Y) - loss) < 1e-12
        grads = pm.full_grads()
        assert all((grads[n] - p.grad).abs().max() < 1e-10 for n, p in plain.named_parameters())


class Centres(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.ones(4, 4))

    def forward(self, output, target):
        return F.cross_entropy(output, target) + (output - self.centres[target]).square().mean()


def test_trained_parameters_of_a_criterion_are_refused_and_frozen_ones_run():
    criterion, what = Centres().double(), "loss_fn has parameters of its own: make it a part of the model"
    with pytest.raises(TraceError) as error:
        partitioned().step(X, loss_fn=criterion, target=Y)
    assert text_of(error) == what
    with pytest.raises(TraceError, match=what):
        autopart.verify(model(), "tp2", example_kwargs={"input": X}, loss_fn=criterion, target=Y)
    criterion.requires_grad_(False)
    loss = partitioned().step(X, loss_fn=criterion, target=Y)
    assert abs(loss - criterion(model()(X), Y)) < 1e-12


def test_a_call_inside_of_a_checkpoint_is_traced_apart():
    plain = model()
    pm = partitioned(copy.deepcopy(plain))
    for each in (pm, plain):
        F.cross_entropy(checkpoint(each, X.clone().requires_grad_(), use_reentrant=False), Y).backward()
    grads = pm.full_grads()
    assert all((grads[n] - p.grad).abs().max() < 1e-12 for n, p in plain.named_parameters())


def test_inference_mode_and_spelled_devices_change_nothing():
    made = model()
    with torch.inference_mode():
        pm, x = partitioned(made), X.clone()
    loss = pm.step(x, loss_fn=F.cross_entropy, target=Y)
    with torch.inference_mode():
        again = pm.step(X, loss_fn=F.cross_entropy, target=Y)
    assert abs(loss - again) < 1e-12 and all(p.grad is not None for p in pm.parameters())
    for device in ("cpu", torch.device("cpu"), torch.device("cpu", 0)):
        assert pm.to(device) is pm
    assert pm[0].weight.shape == (16, 8)


def test_texts_of_steps_that_cannot_be():
    pm = partitioned()
    with pytest.raises(UsageError) as error:
        pm.step(X, loss_fn=F.cross_entropy, target=Y).backward()
    assert text_of(error) == "backward() is called on a tensor that requires no gradient"
    for p in pm.parameters():
        p.requires_grad_(False)
    with pytest.raises(UsageError) as error:
        pm.step(X, loss_fn=F.cross_entropy, target=Y)
    assert text_of(error) == "step() has nothing to train"


def by_partial(output, target, criterion):
    return criterion(output, target)


class Objective:
    def __init__(self, criterion):
        self.criterion = criterion

    def loss(self, output, target):
        return self.criterion(output, target)


HIDDEN = {
    "closure": lambda criterion: lambda output, target: criterion(output, target),
    "partial": lambda criterion: functools.partial(by_partial, criterion=criterion),
    "method": lambda criterion: Objective(criterion).loss,
    "forward": lambda criterion: criterion.forward,
    "tensor": lambda criterion: lambda output, target: F.cross_entropy(output * criterion.centres.mean(), target),
}


@pytest.mark.few
@pytest.mark.parametrize("form", HIDDEN)
def test_trained_parameters_that_a_function_reads_are_refused_and_frozen_ones_run(form):
    criterion = Centres().double()
    loss_fn = HIDDEN[form](criterion)
    for call in (
        lambda: partitioned().step(X, loss_fn=loss_fn, target=Y),
        lambda: partitioned().step(X, loss_fn=loss_fn, target=Y, outputs=True),
        lambda: autopart.verify(model(), "tp2", example_kwargs={"input": X}, loss_fn=loss_fn, target=Y),
    ):
        with pytest.raises(TraceError) as error:
            call()
        assert str(error.value) == (
            "loss_fn has parameters of its own: make it a part of the model\n"
            "  why    it reads a tensor of shape [4, 4] that needs a gradient, and pm.parameters() has only the "
            "model's parameters\n"
            "  try    a module whose forward returns loss_fn(model(x), target); or loss_fn.requires_grad_(False)"
        )
    criterion.requires_grad_(False)
    pm = partitioned()
    for _ in range(2):
        assert abs(pm.step(X, loss_fn=loss_fn, target=Y) - loss_fn(model()(X), Y)) < 1e-12
        criterion.centres.mul_(2.0)


@pytest.mark.large
def test_what_a_function_reads_detached_runs():
    criterion = Centres().double()

    def loss_fn(output, target):
        return F.cross_entropy(output, target) + (output - criterion.centres.detach()[target]).square().mean()

    assert abs(partitioned().step(X, loss_fn=loss_fn, target=Y) - loss_fn(model()(X), Y)) < 1e-12


class Counting(nn.Module):
    """A criterion in half a verification's precisions: its buffer is as before afterwards."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, output, target):
        return F.cross_entropy(output * self.scale.to(output.dtype), target)


@pytest.mark.large
def test_a_criterion_is_as_before_a_verification():
    criterion = Counting()
    made = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    found = autopart.verify(
        made, "dp2", example_kwargs={"input": X.float()}, loss_fn=criterion, target=Y, precision="bf16"
    )
    assert found.ok, str(found)
    assert criterion.scale.dtype == torch.float32 and criterion.scale.tolist() == [1.0, 2.0, 3.0, 4.0]
