"""Operators of a user's own, as `torch.library` makes them, and a model that uses them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

F64 = torch.float64


@torch.library.custom_op("autopart_test::scaled_mm", mutates_args=())
def scaled_mm(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight) * 0.5


@scaled_mm.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1])


def _scaled_mm_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    return 0.5 * grad @ weight.t(), 0.5 * x.flatten(0, -2).t() @ grad.flatten(0, -2)


scaled_mm.register_autograd(
    _scaled_mm_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@torch.library.custom_op("autopart_test::running_sums", mutates_args=())
def running_sums(values: list[Tensor], factor: int) -> list[Tensor]:
    """Each value summed up along its first dim (so rows of the batch mix), and the sum of all."""
    return [factor * value.cumsum(0) for value in values] + [torch.stack(values).sum(0)]


@running_sums.register_fake
def _(values: list[Tensor], factor: int) -> list[Tensor]:
    return [torch.empty_like(value) for value in (*values, values[0])]


def _running_sums_setup(ctx, inputs, output):
    ctx.factor = inputs[1]


def _running_sums_backward(ctx, grads):
    *each, total = grads
    return [ctx.factor * grad.flip(0).cumsum(0).flip(0) + total for grad in each], None


running_sums.register_autograd(_running_sums_backward, setup_context=_running_sums_setup)


class CustomModel(nn.Module):
    """Linear layers around operators of a user's own. `mixes`: use also the one that mixes rows of the batch."""

    def __init__(self, size: int = 8, mixes: bool = False) -> None:
        super().__init__()
        self.up, self.side, self.last = nn.Linear(size, 2 * size), nn.Linear(size, size), nn.Linear(size, size)
        self.down = nn.Parameter(torch.rand(2 * size, size) - 0.5)
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        y = scaled_mm(torch.relu(self.up(x)), self.down)
        if self.mixes:
            first, second, both = running_sums([y, self.side(y)], 3)
            return (self.last(first * second) + both).square().mean()
        return (self.last(y) + self.side(y)).square().mean()


def custom_model(mixes: bool = False) -> tuple[nn.Module, dict[str, Tensor]]:
    return CustomModel(mixes=mixes).double(), {"x": torch.randn(8, 3, 8, dtype=F64)}
