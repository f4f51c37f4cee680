"""Numbers and flags that a forward changes for its next call: caches with a length, step counters, schedules."""

from __future__ import annotations

import copy
from typing import Any

import dist
import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.errors import InputError, TraceError

SIZE = 8


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.step = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), 0


class Rotary(Base):
    """A cache of angles, and how many of them are valid (rotary-embedding-torch)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cached", torch.zeros(64, SIZE), persistent=False)
        self.valid = 0

    def angles(self, length: int) -> Tensor:
        if length <= self.valid:
            return self.cached[:length]
        angles = torch.outer(torch.arange(length), torch.arange(SIZE)).cos().to(self.cached)
        self.cached[:length] = angles
        self.valid = length
        return angles

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) * self.angles(x.size(1))).square().mean()


class Schedule(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.a(x).square().mean() * min(1.0, self.step / 4)


class EveryThird(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.step % 3 == 2:
            y = y + self.b(x)
        self.step += 1
        return y.square().mean()


class Warm(Base):
    """A flag that the first call sets."""

    def __init__(self) -> None:
        super().__init__()
        self.is_warm = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) if self.is_warm else self.b(x)
        self.is_warm = True
        return y.square().mean()


class WrapsAround(Base):
    """A pointer that wraps around, and a flag that then stays: each pointer is seen with both values of the flag."""

    def __init__(self) -> None:
        super().__init__()
        self.pointer, self.is_full = 0, False

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) if self.is_full else self.b(x)
        end = min(self.pointer + len(x), 12)
        if end == 12:
            self.is_full = True
        self.pointer = 0 if end == 12 else end
        return y[:, : end // 4].square().mean()


class Queue(Base):
    """A queue of keys with a pointer buffer (MoCo): rows or columns are written at the pointer."""

    def __init__(self, columns: bool = False) -> None:
        super().__init__()
        self.columns = columns
        self.register_buffer("queue", torch.linspace(-1, 1, 12 * SIZE).view(12, SIZE))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        if columns:
            self.queue = self.queue.T.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        keys = self.a(x[:, 0])
        keys_of_queue = self.queue.clone().detach()
        loss = (keys @ (keys_of_queue if self.columns else keys_of_queue.T)).logsumexp(1).mean()
        start = int(self.pointer)
        if self.columns:
            self.queue[:, start : start + len(x)] = keys.detach().T
        else:
            self.queue[start : start + len(x)] = keys.detach()
        self.pointer[0] = (start + len(x)) % 12
        return loss


class Columns(Queue):
    def __init__(self) -> None:
        super().__init__(columns=True)


def compared(mesh: str, kind: type, lengths: tuple[int, ...]) -> tuple[float, int]:
    """Train copies of a model. Return the largest difference of losses and gradients, and the number of traces."""
    torch.manual_seed(0)
    model = kind().double()
    alone, worst = copy.deepcopy(model), 0.0
    pm = autopart.parallelize(model, mesh, example_args=(torch.randn(4, lengths[0], SIZE).double(),))
    for length in lengths:
        x = torch.randn(4, length, SIZE, generator=torch.Generator().manual_seed(length)).double()
        pm.zero_grad()
        alone.zero_grad()
        loss, expected = pm.step(x), alone(x)
        expected.backward()
        gradients = pm.full_grads()
        differences = [loss - expected.detach()]
        differences += [gradients[n] - p.grad for n, p in alone.named_parameters() if p.grad is not None]
        worst = max(worst, *(float(difference.abs().max()) for difference in differences))
    return worst, pm._compiler._num_traces


CASES: dict[type, tuple[tuple[int, ...], int]] = {
    Rotary: ((6, 6, 6, 4, 6, 8, 8), 6),
    Schedule: ((6,) * 8, 3),
    EveryThird: ((6,) * 9, 3),
    Warm: ((6,) * 3, 2),
    WrapsAround: ((6,) * 8, 6),
    Queue: ((6,) * 5, 1),
    Columns: ((6,) * 4, 1),
}


@pytest.mark.few
@pytest.mark.parametrize("kind", CASES)
def test_each_call_reads_what_the_one_before_has_set(kind):
    lengths, most = CASES[kind]
    worst, count = compared("dp1", kind, lengths)
    assert worst < 1e-10
    assert count <= most


def test_processes():
    for worst, _ in dist.run_ranks(compared, 2, "dp2", Rotary, (6, 6, 4), timeout_s=150):
        assert worst < 1e-10
    for kind in (EveryThird, Queue):
        for worst, _ in dist.run_ranks(compared, 2, "dp2", kind, (6,) * 4, timeout_s=150):
            assert worst < 1e-10


@pytest.mark.parametrize("kind", [Rotary, Schedule])
@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
def test_the_first_call_is_exact(kind, mesh):
    torch.manual_seed(0)
    result = autopart.verify(kind(), mesh, example_args=(torch.randn(4, 6, SIZE),))
    assert result.ok and result.max_error < 1e-10, result
    assert [note for note in result.notes if note.startswith("forward() changes")]


def test_steps_of_one_trace_cannot_be_verified():
    x: Any = torch.randn(4, 6, SIZE)
    with pytest.raises(InputError, match="each step needs a new trace"):
        autopart.verify(Schedule(), "dp2", example_args=(x,), steps=2)


@pytest.mark.few
@pytest.mark.parametrize("kind", [Queue, Columns])
def test_steps_with_a_pointer(kind):
    torch.manual_seed(0)
    result = autopart.verify(kind(), "dp2", example_args=(torch.randn(4, 6, SIZE),), steps=4)
    assert result.ok, result


class FirstColumns:
    """Replaces the forward of a layer (MatryoshkaLoss of sentence-transformers)."""

    def __init__(self, forward: Any, number: int) -> None:
        self.forward, self.number = forward, number

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)[:, : self.number]


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


class Matryoshka(nn.Module):
    """Replaces the forward of a layer for the time of a call, or for good."""

    def __init__(self, restores: bool) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(SIZE, SIZE))
        self.loss, self.restores = Loss(self.model), restores

    def forward(self, x: Tensor) -> Tensor:
        forward = self.model.forward
        self.model.forward = FirstColumns(forward, 4)
        loss = self.loss(x)
        if self.restores:
            self.model.forward = forward
        return loss


@pytest.mark.parametrize("was_called", [False, True])
def test_a_forward_that_is_replaced_during_the_call_is_exact(was_called):
    torch.manual_seed(0)
    model, x = Matryoshka(restores=True), torch.randn(8, SIZE)
    if was_called:
        model(x)
    before = vars(model.model).get("forward")
    report = autopart.verify(model, "tp2", example_args=(x,))
    assert report.ok, report
    assert vars(model.model).get("forward") == before


def test_a_forward_that_stays_replaced_is_refused():
    with pytest.raises(TraceError, match="Matryoshka computes something different in every call") as error:
        autopart.plan(Matryoshka(restores=False), "tp2", example_args=(torch.randn(8, SIZE),))
    assert "forward() stores model.forward = " in str(error.value)


class WarmsUp(nn.Module):
    """Sets a flag by comparing a counter, which is an input of the program from its second value on."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.is_warm, self.seen = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), True, 0

    def forward(self, x):
        if self.is_warm:
            self.seen += 1
            self.is_warm = self.seen < 3
        h = self.a(x)
        return (h if self.is_warm else self.b(h)).square().mean() * (1 + self.seen)


def test_a_flag_that_is_computed_from_a_counter():
    model, x = WarmsUp().double(), torch.randn(4, SIZE, dtype=torch.float64)
    expected = copy.deepcopy(model)
    module = autopart.parallelize(model, "dp1", example_args=(x,))
    for _ in range(5):
        assert module.step(x) == pytest.approx(float(expected(x)), abs=1e-12)
    assert (model.seen, model.is_warm) == (3, False)
