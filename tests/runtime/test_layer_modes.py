"""Modes and attributes of single layers, set on a partitioned model: training is that of one process."""

from __future__ import annotations

import copy
import re
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
"""Changes that a loop makes to the model, plain or partitioned, before the step of this number."""


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


@pytest.mark.large
@pytest.mark.parametrize(
    ("mesh", "zero", "case"),
    [(mesh, zero, case) for index, case in enumerate(CASES) for mesh, zero in (MESHES[0], MESHES[1 + index % 4])],
)
def test_training_with_layers_in_other_modes(mesh, zero, case):
    """On `tp2` and one other mesh, by `step` and by `backward` in turn."""
    size, is_even = autopart.Mesh.parse(mesh).num_ranks, list(CASES).index(case) % 2 == 0
    by_step = "pp" in mesh or is_even == (mesh == "tp2")
    dist.run_ranks(compare, size, mesh, zero, case, by_step, timeout_s=TIMEOUT_S)


# --- other uses -------------------------------------------------------------------------------------------------------


def statistics_of_averages(mesh: str, zero: int) -> None:
    """`update_bn` of an average of weights, and the same by hand on one layer."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).double()
    x, y = torch.randn(8, 8).double() * 3 + 1, torch.randn(8, 4).double()
    options = {"zero": zero} if zero else {"microbatches": 1} if "pp" in mesh else {}
    pm = autopart.parallelize(copy.deepcopy(plain), mesh, example_kwargs={"input": x}, **options)
    states = []
    for each in (plain, pm):
        optimizer, average = torch.optim.SGD(each.parameters(), lr=0.1), AveragedModel(each)
        for _ in range(3):
            if each is pm:
                each.step(x, loss_fn=F.mse_loss, target=y)
            else:
                F.mse_loss(each(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(each)
        each[1].reset_running_stats()
        with torch.no_grad():
            each(x - 1)
        update_bn([x, x + 1], average)
        assert each[1].momentum == average.module[1].momentum == 0.1
        for one in (each, average.module):
            states.append(one.full_state_dict() if isinstance(one, autopart.ParallelModule) else one.state_dict())
    for theirs, ours in zip(states[:2], states[2:], strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.large
@pytest.mark.parametrize(("mesh", "zero"), MESHES[:4])
def test_update_of_batch_norms(mesh, zero):
    dist.run_ranks(statistics_of_averages, 2, mesh, zero, timeout_s=TIMEOUT_S)


def ranks_that_differ(mesh: str) -> list[str]:
    torch.manual_seed(0)
    x = torch.randn(8, 8).double()
    pm = autopart.parallelize(Net().double(), mesh, example_args=(x,))
    rank, said = torch.distributed.get_rank(), []
    for change in (
        lambda: pm.backbone.train(rank == 0),
        lambda: setattr(pm.train().backbone[1].drop, "p", 0.25 * rank),
        lambda: setattr(pm.backbone[1].drop.train(rank == 0), "p", 0.3),
    ):
        change()
        with pytest.raises(InputError) as error:
            pm.step(x, loss_fn=F.mse_loss, target=x[:, :4])
        said.append(re.sub(r", seeds i64\[\d\]", "", str(error.value)))
    return said


CALLED = "step(target f64[8,4], x f64[8,8])"
DIFFER = f"""the ranks are called with different inputs
  why    rank 0: {CALLED} in train mode; rank 1: {CALLED} in train mode, backbone in eval mode
  where  step 1
  try    pass the same global batch on every rank; or parallelize(..., local_batch=True), and pass local samples"""
OTHERS = (
    "train mode, backbone.1.drop.p=0.0; rank 1: step",
    f"train mode; rank 1: {CALLED} in train mode, backbone.1.drop in eval mode\n",
)


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
def test_ranks_that_differ_in_a_layer(mesh):
    first, second = dist.run_ranks(ranks_that_differ, 2, mesh, timeout_s=TIMEOUT_S)
    assert first == second and first[0] == DIFFER
    assert all(part in text for part, text in zip(OTHERS, first[1:], strict=True)), first[1:]


def small(**options: Any) -> Any:
    torch.manual_seed(0)
    return autopart.parallelize(Net().double(), "tp1", example_args=(torch.randn(8, 8).double(),), **options)


def test_a_call_without_settings_has_the_key_of_the_example():
    pm, x = small(), torch.randn(8, 8).double()
    pm(x)
    pm.backbone.eval()
    pm.backbone.train()
    pm.backbone[1].drop.p = 0.5
    pm.backbone[1].drop.p = 0.3
    pm(x)
    assert len(pm._compiler._traced) == 1 and pm._modes.settings == ((), ()) and pm._modes.text == "train mode"


def test_layers_have_the_classes_and_attributes_of_the_models_own():
    model = Net().double()
    model.again = model.backbone[1]  # one layer by two names
    pm = autopart.parallelize(model, "tp1", example_args=(torch.randn(8, 8).double(),))
    assert repr(pm).partition("\n")[2] == repr(model).partition("\n")[2]
    names = [name for name, _ in model.named_modules()]
    assert [name for name, _ in pm.named_modules()] == names
    assert pm.again is pm.backbone[1] and isinstance(pm.again, Block)
    for (_, ours), (_, theirs) in list(zip(pm.named_modules(), model.named_modules(), strict=True))[1:]:
        assert ours.__class__ is type(theirs) and isinstance(ours, type(theirs))
    assert pm.again.drop.p == 0.3 and pm.again.slope == 0.1 and pm.again.norm.num_features == 16
    assert len(pm.backbone) == 4 and list(pm.backbone) == [pm.backbone[i] for i in range(4)]
    assert isinstance(pm.backbone[1:], nn.Sequential) and pm.backbone[-1] is pm.backbone[1:][2]
    pm.again.eval()
    assert not pm.backbone[1].drop.training and pm._modes.text.startswith("train mode, backbone.1 in eval mode")
    pm.again.drop.p = 0.9
    assert "Dropout(p=0.9, inplace=False)" in repr(pm) and model.again.drop.p == 0.3
    with pytest.raises(ValueError, match="training mode is expected to be boolean"):
        pm.again.train(1)


def test_a_copy_has_modes_of_its_own():
    pm = small()
    pm.backbone[1].drop.p = 0.9
    copied = copy.deepcopy(pm)
    copied.backbone.eval()
    copied.backbone[1].drop.p = 0.1
    assert pm.backbone[1].training and pm.backbone[1].drop.p == 0.9
    assert copied._modes.root is copied and pm._modes.root is pm and len(copied._modes.settings.layers) == 14
    assert pm._modes.settings.values[0][:3] == ("backbone.1.drop", "p", "0.9")
    part = copy.deepcopy(pm.head)
    part.eval()
    assert pm.head.training and bool((part.weight == pm.head.weight).all())


def test_layers_before_the_first_call():
    torch.manual_seed(0)
    plain, x = Net().double(), torch.randn(8, 8).double()
    pm = autopart.parallelize(copy.deepcopy(plain), "tp1")
    with pytest.raises(AttributeError, match="'weight' is not available yet"):
        pm.head.weight  # noqa: B018
    for each in (plain, pm):
        each.backbone.eval()
        each.scale = 3.0
    torch.testing.assert_close(pm(x), plain(x), rtol=1e-10, atol=1e-10)


def initialised(mesh: str, zero: int) -> None:
    def init(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.uniform_(layer.bias)
        elif isinstance(layer, nn.BatchNorm1d):
            layer.weight.data.normal_(1.0, 0.02)

    torch.manual_seed(0)
    plain = Net().double()
    options = {"zero": zero} if zero else {}
    pm = autopart.parallelize(copy.deepcopy(plain), mesh, example_args=(torch.randn(8, 8).double(),), **options)
    for each in (plain, pm):
        torch.manual_seed(1)
        each.apply(init)
    for name, value in pm.full_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=0, msg=name)


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "zero"), [("tp2", 0), ("dp2", 0), ("dp2", 3)])
def test_initialising_with_apply(mesh, zero):
    dist.run_ranks(initialised, 2, mesh, zero, timeout_s=TIMEOUT_S)


def state_of_a_part(mesh: str) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    pm = autopart.parallelize(copy.deepcopy(plain), mesh, example_args=(torch.randn(8, 8).double(),))
    for parameter in plain.parameters():
        parameter.data.mul_(2)
    result = pm.backbone.load_state_dict(plain.backbone.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    full = pm.full_state_dict()
    for name, value in plain.state_dict().items():
        factor = 1.0 if name.startswith("backbone") else 0.5
        torch.testing.assert_close(full[name], value * factor if value.is_floating_point() else value, msg=name)
    saved = {name.removeprefix("backbone."): v for name, v in pm.state_dict().items() if name.startswith("backbone.")}
    ours = pm.backbone.state_dict()
    assert list(ours) == list(saved) and all(type(ours[name]) is type(saved[name]) for name in saved)
    pm.backbone.load_state_dict(ours)
    with pytest.raises(UsageError) as error:
        pm.backbone[1].load_state_dict({"norm.weigth": plain.backbone[1].norm.weight, **plain.backbone[1].state_dict()})
    assert (
        str(error.value)
        == """the state dict does not fit 'backbone.1'
  why    it lacks [] and has ['norm.weigth'] in addition
  try    load_state_dict(..., strict=False)"""
    )


@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_the_state_of_a_part(mesh):
    dist.run_ranks(state_of_a_part, 2, mesh, timeout_s=TIMEOUT_S)


def loop(model: Any, batches: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.eval()
    model.backbone[2].drop.p = 0.0
    for x in batches:
        F.mse_loss(model(x), x[:, :4]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.large
def test_verify_of_layers_in_other_modes():
    torch.manual_seed(0)
    model, batches = Net(), [torch.randn(8, 8) for _ in range(2)]
    assert (result := autopart.verify_loop(loop, "tp2", model, batches)).ok, result
    model.backbone.eval()
    assert (result := autopart.verify(model, "tp2", example_args=(batches[0],))).ok, result
