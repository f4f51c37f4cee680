"""Optimizer groups by names that have no parameter on some stage: saved, and loaded on any mesh, as in one process."""

from __future__ import annotations

from typing import Any

import checkpoint_models
import dist
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_models import BUILD, TIMEOUT_S
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

RATE, NORM_RATE, UNUSED_RATE = 1e-2, 3e-2, 5e-2
OPTIONS = {
    "flat": {"options": StateDictOptions(flatten_optimizer_state_dict=True)},
    "nested": {},
    "two": {},
    "inner": {},
}


class Outer(nn.Module):
    """A module that contains the model, as a LightningModule does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def optimizers_of(module: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    """Return optimizers with a group of norms, which only the last stage has, and a group that no stage has."""
    named = list(module.named_parameters())
    rest = {"params": [p for name, p in named if "norm" not in name], "weight_decay": 0.1}
    norms = {"params": [p for name, p in named if "norm" in name], "lr": NORM_RATE}
    unused = {"params": [p for name, p in named if "unused" in name], "lr": UNUSED_RATE}
    groups = [[norms], [rest]] if kind == "two" else [[norms, rest]] if kind == "flat" else [[norms, unused, rest]]
    return [torch.optim.AdamW(some, lr=RATE) for some in groups]


def train(module: nn.Module, optimizers: list[torch.optim.Optimizer], batch: Any, steps: int) -> None:
    for _ in range(steps):
        if hasattr(module, "full_grads"):
            module.step(**batch)
        else:
            module(**batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9


def one_process(kind: str, steps: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model, batch = BUILD["quiet"]()
    optimizers = optimizers_of(model, kind)
    train(model, optimizers, batch, steps)
    return model, optimizers


def make(kind: str, mesh: str) -> tuple[Any, nn.Module, list[torch.optim.Optimizer], Any]:
    pm, batch = checkpoint_models.make("quiet", mesh)
    return pm, Outer(pm) if kind == "inner" else pm, optimizers_of(pm, kind), batch


def save(kind: str, mesh: str, path: str) -> list[int]:
    pm, module, optimizers, batch = make(kind, mesh)
    train(pm, optimizers, batch, steps=2)
    weights, state = get_state_dict(module, optimizers, **OPTIONS[kind])
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    return [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]


def load(kind: str, mesh: str, path: str) -> None:
    pm, module, optimizers, batch = make(kind, mesh)
    weights, state = get_state_dict(module, optimizers, **OPTIONS[kind])
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(module, optimizers, model_state_dict=weights, optim_state_dict=state, **OPTIONS[kind])
    for steps in (2, 4):
        model, expected = one_process(kind, steps)
        rates = [[group["lr"] for group in one.param_groups] for one in optimizers]
        assert rates == [[group["lr"] for group in one.param_groups] for one in expected], (kind, mesh, steps)
        for name, value in pm.full_state_dict().items():
            assert (value - model.state_dict()[name]).abs().max() <= 1e-10, (kind, mesh, name)
        train(pm, optimizers, batch, steps=2)


@pytest.mark.parametrize(("kind", "saved_on", "loaded_on"), [
    ("nested", "pp2", "pp2"), ("flat", "pp2", "pp2"),
    pytest.param("nested", "pp2", "tp2", marks=pytest.mark.large),
    pytest.param("nested", "tp2", "pp2", marks=pytest.mark.large),
    pytest.param("flat", "tp2", "pp2", marks=pytest.mark.large),
    pytest.param("two", "pp2", "pp2", marks=pytest.mark.large),
    pytest.param("two", "pp2", "tp2", marks=pytest.mark.large),
    pytest.param("inner", "pp2", "pp2", marks=pytest.mark.large),
    pytest.param("inner", "pp2", "tp2", marks=pytest.mark.large),
])  # fmt: skip
@pytest.mark.whole
def test_groups_without_parameters_on_a_stage(kind, saved_on, loaded_on, tmp_path):
    counts = dist.run_ranks(save, 2, kind, saved_on, str(tmp_path), timeout_s=TIMEOUT_S)
    assert saved_on != "pp2" or [of_stage[0] for of_stage in counts] == [0, 2]
    dist.run_ranks(load, 2, kind, loaded_on, str(tmp_path), timeout_s=TIMEOUT_S)
