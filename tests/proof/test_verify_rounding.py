"""A bias before a batch norm has a gradient of rounding alone: its steps decide nothing; later faults are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.proof.comparison import GraphUnderTest
from autopart.proof.steps import lockstep_steps
from autopart.recipe.make_plan import find_loss, prepare
from autopart.tracing.trace_model import bind_call

NOT_COMPARED = "gradient is only rounding are not compared: conv.bias"


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.relu(self.bn(self.conv(image / 255))).mean((2, 3))), label)


def normed() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Normed()
    return model, {"image": torch.randint(0, 255, (8, 3, 12, 12)).double(), "label": torch.randint(4, (8,))}


class Signs(torch.optim.Optimizer):
    """A step of `lr` by the sign of a gradient, whatever its size."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * group["lr"])


def signs(named: Any) -> Signs:
    return Signs([p for _, p in named])


def found(mesh: str, optimizer: Any) -> autopart.Verification:
    model, batch = normed()
    return autopart.verify(model, mesh, example_kwargs=batch, steps=3, optimizer=optimizer)


@pytest.mark.few
@pytest.mark.parametrize("optimizer", [None, signs])
@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2"])
def test_a_running_mean_after_a_bias_is_exact(mesh, optimizer):
    result = found(mesh, optimizer)
    assert result.ok and result.max_error < 1e-11, str(result)
    assert result.errors["step 3 buffer bn.running_mean"] < 1e-11
    assert any(NOT_COMPARED in note for note in result.notes)


@pytest.mark.few
@pytest.mark.parametrize("error", [1e-6, 3e-10])
def test_a_wrong_running_mean_is_found(monkeypatch, error):
    backward = lockstep_steps.AllRanks.backward

    def wrong(ranks: Any, subject: Any) -> Any:
        outcome = backward(ranks, subject)
        ranks.new_buffers[1]["bn.running_mean"][3] += error
        return outcome

    monkeypatch.setattr(lockstep_steps.AllRanks, "backward", wrong)
    first = found("dp2", signs).first_mismatch
    assert (first.step, first.kind, first.name, first.rank) == (1, "buffer", "bn.running_mean", 1), str(first)


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
def test_a_loop_with_such_a_bias_is_exact(mesh):
    def train(model, batches):
        optimizer = Signs(model.parameters())
        for batch in batches:
            model.step(**batch)
            optimizer.step()
            optimizer.zero_grad()

    model, batch = normed()
    result = autopart.verify_loop(train, mesh, model, [batch] * 3, time_limit_s=60)
    assert result.ok and result.max_error < 1e-11, str(result)
    assert any(NOT_COMPARED in note for note in result.notes)


def test_a_loop_that_changes_a_running_mean_is_found():
    def train(model, batches):
        optimizer = Signs(model.parameters())
        for batch in batches:
            model.step(**batch)
            if isinstance(model, autopart.ParallelModule):
                model.bn.running_mean.add_(1e-6)
            optimizer.step()
            optimizer.zero_grad()

    model, batch = normed()
    first = autopart.verify_loop(train, "dp2", model, [batch] * 3, time_limit_s=60).first_mismatch
    assert (first.step, first.kind, first.name) == (1, "weight", "bn.running_mean"), str(first)


class Centred(nn.Module):
    """Batch norm of images whose mean is subtracted: the running mean is the rounding of their values."""

    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3, 1, 1)) if scaled else 1
        self.bn, self.conv, self.head = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 16, 16), nn.Linear(4, 4)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        image = image * self.gain
        rows = self.conv(self.bn(image - image.mean((0, 2, 3), keepdim=True))).mean((2, 3))
        return F.cross_entropy(self.head(rows), label)


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
def test_a_running_mean_near_zero_may_have_the_rounding_of_its_terms(mesh):
    batch = {"image": torch.randint(0, 2**16, (8, 3, 48, 48)).float(), "label": torch.randint(4, (8,))}
    assert (result := autopart.verify(Centred(), mesh, example_kwargs=batch, steps=1)).ok, result


def test_a_wrong_running_mean_near_zero_is_found():
    """Samples of the two ranks have different means, so the mean of one rank is wrong."""
    image = torch.randint(0, 256, (8, 3, 32, 32)).float()
    image[:4] += 1

    def local_means(program, shards):
        reduced = [
            n for n in program.stages[0].graph.graph.nodes if str(n.target) == "autopart.all_reduce_both.default"
        ]
        reduced[1].replace_all_uses_with(reduced[1].args[0])
        program.stages[0].graph.recompile()

    batch = {"image": image, "label": torch.randint(4, (8,))}
    result = autopart.verify(Centred(scaled=True), "dp2", example_kwargs=batch, tamper=local_means)
    assert result.errors["buffer bn.running_mean"] > 1e-3, result


def gained(size: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A gain before a batch norm: its gradient is a sum of terms that cancel."""
    torch.manual_seed(0)
    return Centred(scaled=True), {
        "image": torch.randint(0, size, (8, 3, 48, 48)).float(), "label": torch.randint(4, (8,))
    }  # fmt: skip


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
@pytest.mark.parametrize("size", [2**8, 2**16])
def test_a_gain_before_a_batch_norm_is_exact(mesh, size):
    """Adam divides the gradient by its size, so that its rounding becomes an update of 1e-4."""
    model, batch = gained(size)
    result = autopart.verify(model, mesh, example_kwargs=batch, steps=3)
    assert result.ok and result.max_error < 1e-11, str(result)
    assert any("gradient is only rounding are not compared: gain" in note for note in result.notes)


def test_a_gradient_that_differs_by_more_than_the_rounding_of_its_terms_is_found(monkeypatch):
    backward = lockstep_steps.AllRanks.backward

    def wrong(ranks: Any, subject: Any) -> Any:
        outcome = backward(ranks, subject)
        ranks.shards[1]["gain"].grad += 1e-12  # 3e-13 of its terms, far below the largest gradient
        return outcome

    monkeypatch.setattr(lockstep_steps.AllRanks, "backward", wrong)
    model, batch = gained(2**8)
    first = autopart.verify(model, "dp2", example_kwargs=batch, steps=1).first_mismatch
    assert (first.step, first.kind, first.name) == (1, "weight", "gain"), str(first)


class Weighed(nn.Module):
    """Parameters whose gradients have terms of known magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(2, 1)), nn.Parameter(torch.zeros(3))
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x * self.gain.expand(2, 3) - self.shift)).sum()


def test_magnitudes_of_the_terms_of_gradients():
    model, x = Weighed().double(), torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0]]).double()
    traced = prepare(model, bind_call(model, (x,), {}))
    found = GraphUnderTest(traced, find_loss(traced)).gradient_magnitudes(model.state_dict().keys(), 0.5)
    columns = model.linear.weight.detach().sum(0).abs()
    expected = {
        "gain": (x.abs() @ columns).unsqueeze(1), "shift": 2 * columns, "linear.bias": torch.full((2,), 2.0),
        "linear.weight": x.abs().sum(0).expand(2, 3),
    }  # fmt: skip
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.double() * 0.5)


class Counts(nn.Module):
    """A loss, and float32 numbers that are counts of activations: an accuracy, and a share of sorted truths."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self.a(x)
        truth = (label == 1).float()
        found = truth[logits[:, 1].argsort(descending=True)].cumsum(0) / torch.arange(1, len(x) + 1)
        loss = F.cross_entropy(logits, label) + (logits[:, 1].sort()[0] * found).mean()
        return loss, (logits.argmax(-1) == label).float().mean(), found


def test_counts_in_float32_are_rounded_alike_on_all_ranks():
    """Seeds for which the mean of two float32 means differs from the float32 mean."""
    for seed in range(3):
        torch.manual_seed(seed)
        result = autopart.verify(Counts(), "dp2", example_args=(torch.randn(96, 6), torch.randint(4, (96,))))
        assert result.ok and result.max_error < 1e-10, str(result)
