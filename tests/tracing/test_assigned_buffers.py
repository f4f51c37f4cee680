"""Buffers that are None until the forward fills them: caches, which every call of a program computes again."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.errors import TraceError

SIZE = 8
Value = Callable[["Cached", Tensor], Tensor]


def slopes(model: Cached, x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device).to(x) * model.scale


class Cached(nn.Module):
    """Adds what it keeps in `bias`. `is_declared`: whether the buffer is there, as None, from the start."""

    def __init__(self, value: Value = slopes, is_declared: bool = True):
        super().__init__()
        self.linear, self.value = nn.Linear(SIZE, SIZE), value
        self.register_buffer("scale", torch.rand(SIZE))
        if is_declared:
            self.register_buffer("bias", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "bias", None) is None:
            self.register_buffer("bias", self.value(self, x), persistent=False)
        return self.after(self.linear(x) + self.bias)

    def after(self, h: Tensor) -> Tensor:
        return h


class Longest(Cached):
    """Keeps the bias of the largest batch so far, and reads a part of it."""

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x)
        if self.bias is not None and len(self.bias) >= rows:
            return self.linear(x) * self.bias[:rows]
        bias = torch.arange(rows, dtype=x.dtype)[:, None] + self.scale.to(x)
        self.bias = bias
        return self.linear(x) * bias


class Blocks(nn.Module):
    """Blocks that repeat, of which one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Cached(), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "declared": Cached,
    "new": lambda: Cached(is_declared=False),
    "part": Longest,
    "blocks": Blocks,
}


@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("mesh", ["tp2", "dp2"])
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_is_computed_in_every_call(name, mesh, is_training):
    model, x = MODELS[name]().train(is_training), torch.randn(4, SIZE)
    result = autopart.verify(model, mesh, example_args=(x,))
    assert result.ok and result.max_error < 1e-10, result
    assert not result.notes


@pytest.mark.few
@pytest.mark.parametrize("name", MODELS)
def test_the_second_call_and_the_users_model(name):
    model, x = MODELS[name]().double(), torch.randn(4, SIZE, dtype=torch.float64)
    before = [(dict(m._buffers), set(m._non_persistent_buffers_set)) for m in model.modules()]
    module = autopart.parallelize(copy.deepcopy(model), "dp1", example_args=(x,))
    autopart.plan(model, "tp2", example_args=(x,))
    autopart.verify(model, "tp2", example_args=(x,))
    assert [(dict(m._buffers), set(m._non_persistent_buffers_set)) for m in model.modules()] == before
    for scale in (1, 2):
        assert torch.equal(module(scale * x), model(scale * x))
    assert torch.equal(module.eval()(x), model.eval()(x))
    assert list(module.full_state_dict()) == list(model.state_dict())


def drawn(model: Cached, x: Tensor) -> Tensor:
    return torch.zeros(SIZE).bernoulli(0.5).to(x)


VALUES: dict[str, Value] = {
    "input": lambda model, x: x.mean(0),
    "parameter": lambda model, x: model.linear.weight.detach().sum(0),
    "random": drawn,
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_differs_from_call_to_call_is_refused(name):
    model = Cached(VALUES[name])
    with pytest.raises(TraceError) as caught:
        autopart.plan(model, "tp2", example_args=(torch.randn(4, SIZE),))
    assert str(caught.value).startswith("Cached fills its buffer 'bias' in its forward\n  why    it was None, and")
    assert "call the model once before parallelize()" in str(caught.value)
    assert model.bias is None


class Counts(Cached):
    def after(self, h: Tensor) -> Tensor:
        self.scale += 1
        return h


class CountsByAssigning(Cached):
    def after(self, h: Tensor) -> Tensor:
        self.scale = self.scale + 1
        return h


@pytest.mark.parametrize("kind", [Counts, CountsByAssigning])
def test_a_cache_of_a_buffer_that_is_written_is_refused(kind):
    with pytest.raises(TraceError, match=f"{kind.__name__} fills its buffer 'bias' in its forward"):
        autopart.plan(kind(), "tp2", example_args=(torch.randn(4, SIZE),))


class FirstCallDiffers(Cached):
    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            self.bias = slopes(self, x)
            return self.linear(x)
        return self.linear(x) + self.bias


def test_a_first_call_that_differs_is_refused():
    model, x = FirstCallDiffers(), torch.randn(4, SIZE)
    with pytest.raises(TraceError) as caught:
        autopart.plan(model, "tp2", example_args=(x,))
    assert str(caught.value).startswith("the traced call of FirstCallDiffers differs from later calls\n")
    assert "fills the buffer 'bias' and branches on whether it is None" in str(caught.value)
    assert model.bias is None
    model(x)
    result = autopart.verify(model, "tp2", example_args=(x,))
    assert result.ok and result.max_error < 1e-10, result


class Lengthening(nn.Module):
    """Registers its buffer in the first forward, and keeps its length in a plain attribute."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.q, self.longest, self.counts, self.count = nn.Linear(16, 16), 0, counts, 0

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            angles = torch.outer(torch.arange(self.longest), torch.arange(16) / 16)
            self.register_buffer("cos", torch.cos(angles), persistent=False)
        if self.counts:
            self.count += 1
            x = x * self.count
        return (self.q(x) * self.cos[: x.shape[1]]).square().mean()


@pytest.mark.parametrize("is_filled", [False, True])
def test_a_buffer_that_is_registered_in_forward_is_a_cache(is_filled):
    torch.manual_seed(0)
    model = Lengthening()
    if is_filled:
        model(torch.randn(8, 9, 16))
    found = autopart.verify(model, "dp2", example_kwargs={"x": torch.randn(8, 6, 16)}, steps=2)
    assert found.ok, str(found)
    assert (model.longest, "cos" in model._buffers) == ((9, True) if is_filled else (0, False))


def test_a_number_that_changes_beside_such_a_buffer_is_found():
    with pytest.raises(TraceError, match="the traced call of Lengthening differs from later calls"):
        autopart.plan(Lengthening(counts=True), "dp2", example_kwargs={"x": torch.randn(8, 6, 16)})
