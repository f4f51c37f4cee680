"""Functions of torch that a trace takes in another form give what torch's give, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.tracing.autograd.decompositions import TRACE_DECOMPOSITIONS

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
    for function in (F.gaussian_nll_loss, TRACE_DECOMPOSITIONS[F.gaussian_nll_loss]):
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
            own, torchs = (
                f(values, **options) for f in (TRACE_DECOMPOSITIONS[getattr(torch, name)], getattr(torch, name))
            )
            torch.testing.assert_close(own, torchs, rtol=0, atol=0)


@pytest.mark.whole
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", ["unique", "unique_consecutive"])
def test_distinct_rows_are_torchs(name, dim):
    for values in (torch.randint(2, (7, 3)), torch.randint(2, (2, 6, 2)).double(), torch.ones(3, 1)):
        for options in ({}, {"return_inverse": True, "return_counts": True}):
            torchs = getattr(torch, name)
            own, expected = (f(values, dim=dim, **options) for f in (TRACE_DECOMPOSITIONS[torchs], torchs))
            torch.testing.assert_close(own, expected, rtol=0, atol=0)


def test_counts_are_torchs():
    values, weights = torch.tensor([1, 3, 1, 0]), torch.tensor([0.5, 2.0, 1.5, 4.0])
    for given in (None, weights, weights.double(), weights.long()):
        own, expected = (f(values, given, 6) for f in (TRACE_DECOMPOSITIONS[torch.bincount], torch.bincount))
        torch.testing.assert_close(own, expected, rtol=0, atol=0)
    with pytest.raises((RuntimeError, IndexError)):
        TRACE_DECOMPOSITIONS[torch.bincount](values, minlength=3)


COVARIANCES = {
    "plain": (torch.cov, {}), "not corrected": (torch.cov, {"correction": 0}),
    "times": (torch.cov, {"fweights": torch.tensor([1, 2, 0, 3, 1])}),
    "weights": (torch.cov, {"aweights": torch.tensor([0.1, 0.5, 0.2, 1.0, 0.3], dtype=torch.float64)}),
    "both": (torch.cov, {"fweights": torch.tensor([1, 2, 0, 3, 1]),
                         "aweights": torch.tensor([0.1, 0.5, 0.2, 1.0, 0.3], dtype=torch.float64)}),
    "correlation": (torch.corrcoef, {}), "pairs": (torch.combinations, {}),
    "triples": (torch.combinations, {"r": 3, "with_replacement": True}),
}  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("name", COVARIANCES)
def test_covariances_and_combinations_are_torchs(name):
    function, options = COVARIANCES[name]
    shapes = ((5,),) if function is torch.combinations else ((3, 5), (5,))
    for shape in shapes:
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        own, expected = (f(x, **options) for f in (TRACE_DECOMPOSITIONS[function], function))
        torch.testing.assert_close(own, expected, rtol=1e-13, atol=1e-13)
        grads = (torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (own, expected))
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


class Model(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.first, self.loss = nn.Linear(8, 8), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.first(x))


LOSSES = {
    "gaussian": lambda h: F.gaussian_nll_loss(h, torch.zeros_like(h), h.exp()),
    "covariance": lambda h: (h.flatten(0, 1) @ torch.cov(h.flatten(0, 1).T)).square().mean(),
    "distinct rows": lambda h: h.square().mean() * (h.flatten(0, 1) > 0).unique(dim=0).sum(),
    "counts": lambda h: (h * torch.bincount(h.argmax(-1).flatten(), minlength=8)).square().mean(),
    "combinations": lambda h: torch.combinations(h.mean((0, 1))).prod(-1).square().sum(),
    "pairs of rows, which are not contiguous": lambda h: F.pdist(h[:, 0]).square().mean(),
}


@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2"])
@pytest.mark.parametrize("name", LOSSES)
def test_they_are_exact(name, mesh):
    torch.manual_seed(0)
    assert autopart.verify(Model(LOSSES[name]), mesh, example_args=(torch.randn(4, 3, 8),)).ok
