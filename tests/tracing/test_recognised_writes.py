"""In-place writes in every spelling: later reads of values by Python, and slices at run-time positions, see them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.errors import TraceError


class Net(nn.Module):
    def __init__(self, compute: Callable[[Net, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.compute = nn.Linear(8, 8), compute
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("queue", torch.randn(20, 8))
        self.register_buffer("pointer", torch.tensor(12))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.compute(self, self.a(x), counts)


def after(write: Callable[[Tensor], object]) -> Callable[[Net, Tensor, Tensor], Tensor]:
    """Return a forward that writes to a copy of the counts, and slices by their sum."""

    def compute(m: Net, h: Tensor, counts: Tensor) -> Tensor:
        written = counts.clone()
        write(written)
        return h[: int(written.sum())].square().sum()

    return compute


def in_data(counts: Tensor) -> None:
    counts.data = counts + 1


def by_operators(counts: Tensor) -> None:
    counts |= 1
    counts ^= 2


WRITES: dict[str, Callable[[Tensor], object]] = {
    "inplace=True": lambda c: F.threshold(c, 1, 0, inplace=True),
    "inplace by position": lambda c: F.hardtanh(c, 0.0, 1.0, True),
    "an overload": lambda c: torch.ops.aten.add_.Tensor(c, 1),
    "operators": by_operators,
    "data": in_data,
    "data filled": lambda c: c.data.fill_(2),
}
REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "a list": (lambda c: torch._foreach_mul_([c], 2), "decides what to run by the values"),
    "out=": (lambda c: torch.add(c, c, out=c), "decides what to run by the values"),
    "its array": (lambda c: c.numpy().__setitem__(0, 5), "after Python has written to its numpy array"),
}


def enqueue(m: Net, h: Tensor) -> tuple[int, Tensor]:
    """Return the position of the pointer, and the loss before the queue is written; move the pointer."""
    loss = (h @ m.queue.clone().T).logsumexp(1).mean()
    begin = int(m.pointer)
    m.pointer.copy_((m.pointer + 4) % 20)
    return begin, loss


def assigned(m: Net, h: Tensor, counts: Tensor) -> Tensor:
    begin, loss = enqueue(m, h)
    m.queue[begin : begin + 4] = h[:4].detach()
    return loss


def copied(m: Net, h: Tensor, counts: Tensor) -> Tensor:
    begin, loss = enqueue(m, h)
    with torch.no_grad():
        m.queue[begin : begin + 4].copy_(h[:4])
    return loss


def changed_twice(m: Net, h: Tensor, counts: Tensor) -> Tensor:
    begin, loss = enqueue(m, h)
    with torch.no_grad():
        m.queue[begin : begin + 4] += h[:4]
        part = m.queue[begin : begin + 4]
        part[0].zero_()
        part.mul_(0.5)
    return loss + (h[:4] * part).sum()


def with_a_cast(m: Net, h: Tensor, counts: Tensor) -> Tensor:
    """Compute partly in float32, so that the steps of `verify` train the trace."""
    begin, loss = enqueue(m, h)
    with torch.no_grad():
        m.queue[begin : begin + 4] = h[:4]
    return loss + h.float().mean().square()


def outdated(m: Net, h: Tensor, counts: Tensor) -> Tensor:
    begin, loss = enqueue(m, h)
    part = m.queue[begin : begin + 4]
    m.queue[begin : begin + 4] = h[:4].detach()
    return loss + (h[:4] * part).sum()


def outdated_by_a_scale(m: Net, h: Tensor, counts: Tensor) -> Tensor:
    begin, loss = enqueue(m, h)
    part = m.queue[begin : begin + 4]
    m.queue.mul_(0.5)
    return loss + (h[:4] * part).sum()


def statistics_read(m: Net, h: Tensor, counts: Tensor) -> Tensor:
    h = m.norm(h)
    return (h * int(m.norm.running_mean.abs().sum() > 0)).square().sum() + h.sum()


def example() -> tuple[Tensor, ...]:
    return torch.randn(12, 8), torch.tensor([1, 0, 2])


def check_exact(compute: Callable[[Net, Tensor, Tensor], Tensor], mesh: str, steps: int | None = None) -> None:
    torch.manual_seed(0)
    result = autopart.verify(Net(compute), mesh, example_args=example(), steps=steps)
    assert result.ok, str(result)


@pytest.mark.parametrize("name", list(WRITES))
def test_values_are_read_after_a_write(name: str) -> None:
    check_exact(after(WRITES[name]), "tp2")


@pytest.mark.parametrize("name", list(REFUSED))
def test_refuses_values_whose_write_cannot_be_recorded(name: str) -> None:
    write, text = REFUSED[name]
    with pytest.raises(TraceError, match=text):
        autopart.plan(Net(after(write)), "tp2", example_args=example())


def test_statistics_are_written_by_a_norm() -> None:
    with pytest.raises(TraceError, match="decides what to run by the values"):
        autopart.plan(Net(statistics_read), "tp2", example_args=example())


@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2"])
@pytest.mark.parametrize("compute", [with_a_cast, assigned, copied, changed_twice])
def test_writes_at_a_pointer_are_exact(compute: Callable[..., Tensor], mesh: str) -> None:
    check_exact(compute, mesh, steps=2)


@pytest.mark.parametrize("compute", [outdated, outdated_by_a_scale])
def test_refuses_an_outdated_slice_at_a_pointer(compute: Callable[..., Tensor]) -> None:
    with pytest.raises(TraceError, match="is used after its tensor was written"):
        autopart.plan(Net(compute), "tp2", example_args=example())


def test_refuses_data_of_another_shape() -> None:
    def compute(m: Net, h: Tensor, counts: Tensor) -> Tensor:
        scale = torch.ones(8)
        scale.data = torch.ones(1)
        return (h * scale).sum()

    with pytest.raises(TraceError, match=r"assigns to \.data of a tensor of shape \[8\] a tensor of shape \[1\]"):
        autopart.plan(Net(compute), "tp2", example_args=example())


def test_a_size_is_compared_with_none() -> None:
    def compute(m: Net, h: Tensor, counts: Tensor) -> Tensor:
        step = h.shape[0] + 1
        return h.flatten()[:: 1 if step in (None, 1) else step].sum() * (2 if h.shape[0] == None else 1)  # noqa: E711

    check_exact(compute, "dp2")
