"""Modes and attributes of single layers, set on a partitioned model: training is that of one process."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

import autopart
from autopart.errors import InputError, UsageError

TIMEOUT_S = 180.0
NUM_STEPS = 4
MESHES = [("tp2", 0), ("dp2", 0), ("pp2", 0), ("dp2", 3), ("dp2,tp2", 0)]


class Block(nn.Module):
    """Batch norm, a dropout that is a layer, and one that reads the block's own mode and attributes."""

    slope = 0.1  # of the class

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3)
        self.rate, self.residual = 0.2, True

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(F.leaky_relu(self.norm(self.linear(x)), self.slope))
        h = F.dropout(h, self.rate, self.training)
        return x + h if self.residual else h


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.scale = 1.0
        self.backbone = nn.Sequential(nn.Linear(8, width), *(Block(width) for _ in range(3)))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(self.backbone(x))


class FrozenNorms(Net):
    """Keeps its batch norms in eval mode and two parameters frozen, whatever mode is set."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm1d):
                layer.eval()
        self.backbone[1].drop.p = 0.25
        self.backbone[1].norm.weight.requires_grad = self.backbone[1].norm.bias.requires_grad = False
        return self


class FrozenBlock(Block):
    def train(self, mode: bool = True) -> Any:
        return super().train(False)


class WithFrozenBlock(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone[2] = FrozenBlock(16)


Change = Callable[[Any, int], None]
"""What the loop does to the model, plain or partitioned, before a step with this number."""


def norms_by_class(model: Any, step: int) -> None:
    model.train()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.Dropout):
            layer.eval()


def norms_by_apply(model: Any, step: int) -> None:
    def freeze(layer: nn.Module) -> None:
        if "BatchNorm" in layer.__class__.__name__:
            layer.eval()

    model.train().apply(freeze)


def flags(model: Any, step: int) -> None:
    model.backbone[1].training = False
    model.backbone.get_submodule("2.norm").training = step % 2 == 0


def a_part(model: Any, step: int) -> None:
    model.train()
    model.backbone.eval()


def some_of_a_part(model: Any, step: int) -> None:
    model.train()
    for layer in model.backbone[:3]:
        layer.train(False)
    model.backbone[2].drop.train()


def in_turn(model: Any, step: int) -> None:
    (model.train, model.eval, model.backbone.train, model.backbone[3].eval)[step]()


def train_all(model: Any, step: int) -> None:
    model.train(True)


def attributes(model: Any, step: int) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0 if step % 2 else 0.4
        if isinstance(layer, nn.BatchNorm1d):
            layer.momentum, layer.eps = 0.3, 1e-3
    model.backbone[1].rate, model.backbone[1].residual = 0.0, False
    model.backbone[2].slope = 0.5
    model.scale = 2.0
    model.backbone[3].norm.track_running_stats = step > 1


CASES: dict[str, tuple[Callable[[], nn.Module], Change]] = {
    change.__name__: (Net, change)
    for change in (norms_by_class, norms_by_apply, flags, a_part, some_of_a_part, in_turn, attributes)
}
CASES["own_train"] = (FrozenNorms, train_all)
CASES["own_train_of_a_block"] = (WithFrozenBlock, train_all)
CASES["own_train_in_turn"] = (WithFrozenBlock, in_turn)


def eval_before() -> nn.Module:
    model = Net()
    model.backbone.eval()
    return model


def kept_in_eval() -> nn.Module:
    """As a frozen encoder is kept in eval mode: by another `train` of the object."""
    model = Net()
    model.backbone.eval()
    model.backbone.train = types.MethodType(lambda self, mode=True: self, model.backbone)
    return model


CASES["eval_before"] = (eval_before, lambda model, step: None)
CASES["eval_before_then_train"] = (eval_before, train_all)
CASES["kept_in_eval"] = (kept_in_eval, train_all)


def trained(model: Any, plain: bool, change: Change, by_step: bool) -> list[dict[str, Any]]:
    """Return the loss, gradients and state of each step."""
    torch.manual_seed(3)
    batches = [(torch.randn(8, 8).double(), torch.randn(8, 4).double()) for _ in range(NUM_STEPS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = []
    for step, (x, y) in enumerate(batches):
        change(model, step)
        torch.manual_seed(step)
        if plain or not by_step:
            loss = F.mse_loss(model(x), y)
            loss.backward()
        else:
            loss = model.step(x, loss_fn=F.mse_loss, target=y)
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None} if plain else None
        optimizer.step()
        entry = {"loss": float(loss), "grads": grads if plain else model.full_grads()}
        history.append(entry | {"state": copy.deepcopy(model.state_dict()) if plain else model.full_state_dict()})
        optimizer.zero_grad()
    return history


def compare(mesh: str, zero: int, case: str, by_step: bool) -> None:
    make, change = CASES[case]
    torch.manual_seed(0)
    plain = make().double()
    options: dict[str, Any] = {"rng": "exact", **({"zero": zero} if zero else {})}
    options |= {"microbatches": 1} if "pp" in mesh else {}
    pm = autopart.parallelize(copy.deepcopy(plain), mesh, example_args=(torch.randn(8, 8).double(),), **options)
    modes = [(name, layer.training) for name, layer in plain.named_modules()]
    assert [(name, layer.training) for name, layer in pm.named_modules()] == modes
    expected, got = trained(plain, True, change, by_step), trained(pm, False, change, by_step)
    modes = [(name, layer.training) for name, layer in plain.named_modules()]
    assert [(name, layer.training) for name, layer in pm.named_modules()] == modes
    for step, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-10, abs=1e-10), (case, step)
        for kind in ("grads", "state"):
            assert ours[kind].keys() == theirs[kind].keys(), (case, step, kind)
            for name, value in theirs[kind].items():
                torch.testing.assert_close(
                    ours[kind][name], value, rtol=1e-10, atol=1e-10, msg=f"{case}, step {step}: {kind} {name}"
                )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("mesh", "zero"), MESHES)
def test_training_with_layers_in_other_modes(mesh, zero, case):
    size = autopart.Mesh.parse(mesh).num_ranks
    for by_step in (True, False)[: 1 if "pp" in mesh else 2]:
        dist.run_ranks(compare, size, mesh, zero, case, by_step, timeout_s=TIMEOUT_S)
