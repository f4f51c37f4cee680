"""Views that are read by strides, and values that are written in place, are exact: values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopart

WEIGHTS = torch.arange(8.0, dtype=torch.float64)


class Writes(nn.Module):
    """A function of a value [8, 8] with a gradient."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return (self.function(self.second(self.first(x).cos())) * WEIGHTS.to(x.dtype)).square().mean()


def no_diagonal(h: Tensor) -> Tensor:
    return (h @ h.T).fill_diagonal_(0)


def diagonal_of_a_transposed_value(h: Tensor) -> Tensor:
    scores = h[:, :6].clone().t()
    scores.copy_(h[:6].exp())
    return scores.fill_diagonal_(0.5)


def diagonals_of_a_batch(h: Tensor) -> Tensor:
    scores = torch.stack([h, h * 2])
    scores[0].fill_diagonal_(0)
    scores[1, 1:, 2:].t().fill_diagonal_(1.0)
    return scores


def wrapped_diagonal(h: Tensor) -> Tensor:
    return torch.cat([h, h.sin()])[:, :3].contiguous().fill_diagonal_(2.0, wrap=True).sum(1, keepdim=True)


def diagonal_of_a_cube(h: Tensor) -> Tensor:
    return (h[:, :, None] * h[:, None]).fill_diagonal_(-1)


def by_strides(h: Tensor) -> Tensor:
    h = h * 2
    h.as_strided((4,), (3,), 1).mul_(3.0)
    return h


def by_strides_of_a_transposed_value(h: Tensor) -> Tensor:
    h = (h * 2).t()
    h.as_strided((2, 3, 2), (20, 4, 1), 3).mul_(3.0)
    return h


def a_view_of_strides(h: Tensor) -> Tensor:
    h = h * 2
    h.as_strided((3, 2, 4), (16, 1, 4)).transpose(0, 1)[1].exp_()
    return h


def windows(h: Tensor) -> Tensor:
    h = h * 2
    h.unfold(1, 2, 4).mul_(3.0)
    h.unfold(0, 3, 4)[0, 1].fill_(1.0)
    return h


def strides_of_a_copy(h: Tensor) -> Tensor:
    return h.t().contiguous().as_strided((7, 8), (4, 2), 1)


def repeated_by_strides(h: Tensor) -> Tensor:
    return h.as_strided((3, 2, 8), (0, 9, 1), 4)


def a_detached_copy(h: Tensor) -> Tensor:
    order = h.detach()
    order = order * 2
    order.data[:, 0] = 7.0
    return h * order


FUNCTIONS = (
    no_diagonal,
    diagonal_of_a_transposed_value,
    diagonals_of_a_batch,
    wrapped_diagonal,
    diagonal_of_a_cube,
    by_strides,
    by_strides_of_a_transposed_value,
    a_view_of_strides,
    windows,
    strides_of_a_copy,
    repeated_by_strides,
    a_detached_copy,
)


@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_they_are_exact(function, mesh):
    torch.manual_seed(0)
    found = autopart.verify(Writes(function), mesh, example_args=(torch.randn(8, 8),))
    assert found.ok, str(found)


def incomplete_windows(h: Tensor) -> Tensor:
    h = h * 2
    h.unfold(0, 2, 3).mul_(3.0)
    return h


def detached_view(h: Tensor) -> Tensor:
    h = h * 2
    h.detach()[0] = 1.0
    return h


def data_of_a_value(h: Tensor) -> Tensor:
    h = h * 2
    h.data.mul_(2.0)
    return h


def logical_write(h: Tensor) -> Tensor:
    h = h * 2
    h.logical_not_()
    return h


def outside(h: Tensor) -> Tensor:
    return h[:, 1:].as_strided((4, 8), (8, 1))


def wrapped_diagonal_outside(h: Tensor) -> Tensor:
    return torch.cat([h, h.sin()])[:, :3].fill_diagonal_(2.0, wrap=True).sum(1, keepdim=True)


def strided_scatter(h: Tensor) -> Tensor:
    return torch.as_strided_scatter(h, h[0, :4].exp(), (4,), (9,), 1)


REFUSED = {
    strided_scatter: "as_strided_scatter has a wrong gradient in torch",
    wrapped_diagonal_outside: "writes memory outside of its input",
    incomplete_windows: "a view made by unfold is written in place",
    detached_view: "fill_ writes in place to a detached value whose gradient is used",
    data_of_a_value: "mul_ writes in place to a detached value whose gradient is used",
    logical_write: "logical_not_ writes in place to a value that has a gradient",
    outside: "as_strided reads memory outside of its input",
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_has_no_right_form_is_refused(function):
    with pytest.raises(autopart.errors.TraceError, match=REFUSED[function]) as refused:
        autopart.plan(Writes(function), "tp2", example_args=(torch.randn(8, 8),))
    assert "test_in_place_writes.py" in str(refused.value)


def test_a_masked_diagonal_is_sharded():
    """No operator of `fill_diagonal_` runs on gathered inputs."""
    plan = autopart.plan(Writes(no_diagonal), "dp2", example_args=(torch.randn(8, 8),))
    assert not any("masked_fill" in note for note in plan.notes), plan.notes
