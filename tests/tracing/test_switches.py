"""Switches inside a forward: parameters frozen for a part, hooks that collect features."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.errors import TraceError
from autopart.proof.reference import OLD_STATISTICS


class Adversarial(nn.Module):
    """Both losses of a GAN: the discriminator is frozen while it judges for the generator."""

    def __init__(self, frozen_at_first: bool) -> None:
        super().__init__()
        self.frozen_at_first = frozen_at_first
        self.generator, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)
        self.critic = nn.Sequential(self.norm, nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def judged(self, fake: Tensor) -> Tensor:
        for parameter in self.critic.parameters():
            parameter.requires_grad = False
        loss = F.softplus(-self.critic(fake)).mean()
        self.critic.requires_grad_(True)
        return loss

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        fake = self.generator(noise)
        first = self.judged(fake) if self.frozen_at_first else 0
        trained = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
        return trained + (first if self.frozen_at_first else self.judged(fake))


@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2"])
@pytest.mark.parametrize("frozen_at_first", [True, False])
def test_parameters_frozen_for_a_part(mesh, frozen_at_first):
    example = torch.randn(4, 8), torch.randn(4, 4)
    result = autopart.verify(Adversarial(frozen_at_first), mesh, example_args=example)
    assert result.ok and not any("compared" in note for note in result.notes), result


class Repeated(nn.Module):
    """Equal blocks, first frozen and then trained: no trace of a block stands for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(self.first(x))
        self.blocks.requires_grad_(False)
        reference = self.blocks(self.first(x))
        assert not self.blocks[0].weight.requires_grad
        self.blocks.requires_grad_(True)
        return (h - 1).square().mean() + (reference * h).mean()


@pytest.mark.large
def test_repeated_blocks_that_are_frozen_once():
    assert autopart.verify(Repeated(), "tp2", example_args=(torch.randn(4, 8),)).ok


class ForGood(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.requires_grad_(False)
        return super().forward(x).square().mean()


def test_a_parameter_that_stays_frozen_is_refused():
    with pytest.raises(TraceError, match=r"forward\(\) freezes a parameter and does not undo it"):
        autopart.plan(ForGood(8, 8), "tp2", example_args=(torch.randn(4, 8),))


class Features(nn.Module):
    """The features of two layers, which hooks collect."""

    def __init__(self, store: str) -> None:
        super().__init__()
        self.teacher, self.student = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        names, kept = {self.teacher: "teacher", self.student: "student"}, {}
        self.kept: dict[str, Tensor] = kept
        hooks = {
            "attribute": lambda module, args, output: self.kept.__setitem__(names[module], output),
            "closure": lambda module, args, output: kept.__setitem__(names[module], output),
            "default": lambda module, args, output, kept=kept: kept.__setitem__(names[module], output),
        }
        for name in ("teacher", "student"):
            hook = partial(self.keep, name) if store == "method" else hooks[store]
            getattr(self, name).register_forward_hook(hook)

    def keep(self, name: str, module: nn.Module, args: tuple, output: Tensor) -> None:
        self.kept[name] = output

    def forward(self, x: Tensor) -> Tensor:
        self.teacher(x), self.student(x)
        return F.mse_loss(self.kept["student"], self.kept["teacher"])


@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
@pytest.mark.parametrize("store", ["attribute", "closure", "default", "method"])
def test_hooks_that_collect_features(store, mesh):
    model, x = Features(store), torch.randn(4, 8)
    model(x)
    kept = dict(model.kept)
    assert autopart.verify(model, mesh, example_args=(x,)).ok
    assert model.kept.keys() == kept.keys() and all(model.kept[name] is kept[name] for name in kept)


def test_a_dict_of_functions_alone_stays_theirs():
    kept: dict[str, Tensor] = {}

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.layer.register_forward_hook(lambda module, args, output: kept.__setitem__("h", output))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean() + kept["h"].square().mean()

    assert autopart.verify(Reads(), "tp2", example_args=(torch.randn(4, 8),)).ok


class TargetInside(nn.Module):
    """A target by the same layers in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.eval()
        with torch.no_grad():
            target = self.layers(x)
        self.train()
        return F.mse_loss(self.layers[:2](x), target)


@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
def test_eval_mode_for_a_part(mesh):
    assert autopart.verify(TargetInside(), mesh, example_args=(torch.randn(4, 8),)).ok


class EvalThenTrain(nn.Module):
    """A norm with a gradient in eval mode, and then in training mode, which updates its running statistics."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), norm, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).mT
        self.norm.eval()
        a = self.last(self.norm(h).mT)
        self.norm.train()
        return (a - self.last(self.norm(h).mT)).square().mean() + a.abs().mean()


NORMS = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "batch norm with means over all batches": lambda: nn.BatchNorm1d(8, momentum=None),
    "instance norm": lambda: nn.InstanceNorm1d(8, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_in_eval_mode_that_is_updated_later(norm):
    """Eager PyTorch differentiates the call in eval mode with the updated statistics, so finite differences decide."""
    torch.manual_seed(0)
    model, x = EvalThenTrain(NORMS[norm]()).double(), torch.randn(4, 5, 8, dtype=torch.float64)
    for options in ({}, {"steps": 2}):
        result = autopart.verify(model, "tp2", example_args=(x,), **options)
        assert result.ok and OLD_STATISTICS in result.notes, result
    module = autopart.parallelize(copy.deepcopy(model), "dp1", example_args=(x,))
    module.step(x)
    losses = []
    for change in (1e-6, -1e-6):
        changed = copy.deepcopy(model)
        with torch.no_grad():
            changed.first.bias[0] += change
        losses.append(changed(x).item())
    assert float(module.full_grads()["first.bias"][0]) == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-6)


class Untracked(nn.Module):
    """Virtual adversarial training: the second call of the norms does not track statistics."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), norm, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        def called(x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x).mT).mT)

        h = called(x)
        self.norm.track_running_stats ^= True
        changed = called(x + 0.1)
        self.norm.track_running_stats ^= True
        return (h.detach() - changed).square().mean() + h.abs().mean()


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_that_does_not_track_for_a_part(norm):
    torch.manual_seed(0)
    model = Untracked(NORMS[norm]()).double()
    result = autopart.verify(model, "tp2", example_args=(torch.randn(4, 5, 8, dtype=torch.float64),))
    assert result.ok, result
