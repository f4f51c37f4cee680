"""Models for tests of checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

import autopart

TIMEOUT_S = 120.0


SIZES = {"vocab": 14, "hidden": 6}


class Tied(nn.Module):
    """An embedding tied to the head, shards of unequal and no size, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SIZES["vocab"], SIZES["hidden"])
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, SIZES["vocab"], bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5]))
        self.register_buffer("shift", torch.tensor(0.5), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(torch.tanh(self.up(x)))
        logits = self.head(self.norm(x) * self.scale + self.shift)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.loaded = state


class Quiet(Tied):
    """Without an extra state."""

    get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state


def tied() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Tied().double(), {"ids": torch.arange(32).reshape(8, 4) * 5 % SIZES["vocab"]}


def quiet() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Quiet().double(), tied()[1]


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    return zoo.gpt2(num_layers=2, hidden=32, heads=4, rows=4)


BUILD = {"tied": tied, "quiet": quiet, "gpt2": gpt2}


def other_weights(model: nn.Module) -> nn.Module:
    """The same model with other values of everything in its state dict."""
    with torch.no_grad():
        for value in model.state_dict().values():
            if isinstance(value, Tensor):
                value.mul_(-0.7).add_(0.1)
    return model


def make(name: str, mesh: str, *, changed: bool = False, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    model, batch = BUILD[name]()
    model = other_weights(model) if changed else model
    return autopart.parallelize(model, mesh, example_kwargs=batch, **options), batch


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two state dicts are equal bit for bit."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name
