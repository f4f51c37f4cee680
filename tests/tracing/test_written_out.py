"""Functions of torch that a trace takes in another form give what torch's give, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.tracing.written_out import WRITTEN_OUT

GAUSSIAN = {
    "as large": ((4, 8), {}),
    "one a row": ((4,), {"full": True, "reduction": "sum"}),
    "one for all": ((4, 1), {"reduction": "none"}),
    "a number": (None, {"eps": 0.5}),
    "at the bound": ((4, 8), {"eps": 0.7}),
}


@pytest.mark.parametrize("name", GAUSSIAN)
def test_the_gaussian_loss_is_torchs(name):
    shape, options = GAUSSIAN[name]
    found = []
    for function in (F.gaussian_nll_loss, WRITTEN_OUT[F.gaussian_nll_loss]):
        generator = torch.Generator().manual_seed(0)
        source, target = (torch.randn(4, 8, generator=generator, dtype=torch.float64) for _ in range(2))
        var = 0.3 if shape is None else torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_()
        loss = function(source.requires_grad_(), target, var, **options)
        loss.square().sum().backward()
        found.append([loss.detach(), source.grad, torch.zeros(1) if shape is None else var.grad])
    for own, torchs in zip(*found, strict=True):
        torch.testing.assert_close(own, torchs, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
@pytest.mark.parametrize("name", ["unique", "unique_consecutive"])
def test_distinct_values_are_torchs(name, dtype):
    for values in (torch.randint(3, (4, 5)).to(dtype), torch.zeros(0).to(dtype), torch.ones(1, 3).to(dtype)):
        for options in ({}, {"return_inverse": True}, {"return_counts": True, "return_inverse": True}):
            own, torchs = (f(values, **options) for f in (WRITTEN_OUT[getattr(torch, name)], getattr(torch, name)))
            torch.testing.assert_close(own, torchs, rtol=0, atol=0)


class Model(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.first, self.loss = nn.Linear(8, 8), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.first(x))


LOSSES = {
    "gaussian": lambda h: F.gaussian_nll_loss(h, torch.zeros_like(h), h.exp()),
    "pairs of rows, which are not contiguous": lambda h: F.pdist(h[:, 0]).square().mean(),
}


@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2"])
@pytest.mark.parametrize("name", LOSSES)
def test_they_are_exact(name, mesh):
    torch.manual_seed(0)
    assert autopart.verify(Model(LOSSES[name]), mesh, example_args=(torch.randn(4, 3, 8),)).ok
