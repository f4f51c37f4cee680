"""Calls that give a model its weights (lazy modules), and calls that give it nothing (no inputs, so no rows)."""

from __future__ import annotations

import dist
import pytest
import torch
import zoo
from torch import Tensor, nn

import autopart
from autopart.errors import Refusal, TraceError

MESHES = ["tp2", "dp2", "pp2", "dp2,tp2"]


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv1d(8, 3), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(8), nn.ReLU())


@pytest.mark.few
@pytest.mark.parametrize("mesh", MESHES)
def test_lazy_modules_get_their_weights_from_the_call(mesh):
    model, x = lazy(), torch.randn(8, 4, 6)
    assert autopart.verify(model, mesh, example_args=(x,)).ok
    assert type(model[0]) is nn.Conv1d and model[3].in_features == 32
    norm = model[1]
    assert norm.num_batches_tracked == 0 and not norm.running_mean.any(), "the model itself was not called"


def test_lazy_modules_are_initialized_as_a_first_call_does():
    model, own, x = lazy(), lazy(), torch.randn(8, 4, 6)
    torch.manual_seed(0)
    autopart.plan(model, "tp2", example_args=(x,))
    torch.manual_seed(0)
    own(x)
    for name, parameter in own.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_lazy_modules_on_meta():
    with torch.device("meta"):
        model, x = lazy(), torch.randn(8, 4, 6)
    assert autopart.plan(model, "tp2", example_args=(x,)).parameters


def test_a_first_call_that_fails_is_told():
    with pytest.raises(TraceError, match="their shapes come with its first call, which fails: RuntimeError") as error:
        autopart.plan(nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(8)), "tp2", example_args=(torch.randn(8, 4),))
    assert error.value.refusal is Refusal.PART and "'1' is a LazyLinear that has no weights yet" in str(error.value)


class NotCalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.LazyLinear(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


def test_a_lazy_module_that_is_not_called_is_told():
    with pytest.raises(TraceError, match="their shapes come with its first call, and this one does not call it"):
        autopart.plan(NotCalled(), "tp2", example_args=(torch.randn(8, 4),))


class WithoutInputs(nn.Module):
    """A field that is optimised itself, as those of style transfer, deep image priors and fixed sets of points."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(8, 8))
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, scale: float | Tensor = 1.0) -> Tensor:
        return self.b(self.a(self.start).relu()).square().mean() * scale


@pytest.mark.few
@pytest.mark.parametrize("mesh", [*MESHES, "dp2,pp2"])
@pytest.mark.parametrize("call", [{}, {"scale": torch.tensor(2.0)}], ids=["nothing", "a number"])
def test_a_call_without_rows_is_exact(call, mesh):
    torch.manual_seed(0)
    report = autopart.verify(WithoutInputs(), mesh, example_kwargs=call)
    assert report.ok, report


@pytest.mark.parametrize("mesh", ["dp2", "dp2,tp2"])
def test_a_call_without_rows_is_exact_with_parameters_cut_over_dp(mesh):
    report = autopart.verify(WithoutInputs(), mesh, example_kwargs={}, zero=3)
    assert report.ok, report


def trained(mesh):
    torch.manual_seed(0)
    model = WithoutInputs().double()
    zoo.assert_steps_alike(autopart.parallelize(model, mesh, example_kwargs={}), model)


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2"])
def test_a_call_without_rows_over_processes(mesh):
    dist.run_ranks(trained, 2, mesh, timeout_s=120.0)
