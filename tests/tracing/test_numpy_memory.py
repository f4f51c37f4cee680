"""Numpy arrays of a forward: what eager torch reads of them is exact, or refused in words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.errors import TraceError


class Arrays(nn.Module):
    """A linear layer, and a function of it and the input that uses numpy."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function, self.array = nn.Linear(4, 4), function, np.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x).square().sum()


def copied_then_changed(model, x):
    array = np.arange(4.0)
    factor = torch.tensor(array)
    y = model.linear(x) * factor
    array[1] = 7.0
    return y * factor


def new_tensor_then_changed(model, x):
    array = np.arange(4.0)
    factor = x.new_tensor(array)
    y = model.linear(x) * factor
    array[1] = 7.0
    return y * factor


def shared_and_unchanged(model, x):
    return model.linear(x) * torch.from_numpy(np.arange(4.0)) + torch.as_tensor(np.ones(4))


def shared_then_changed(model, x):
    array = np.zeros(4)
    offset = torch.from_numpy(array)
    y = model.linear(x) + offset
    array[0] = 5.0
    return y * offset


def viewed_then_changed(model, x):
    array = np.zeros(4)
    offset = torch.as_tensor(array)
    y = model.linear(x) + offset
    array += 1
    return y * offset


def kept(model, x):
    y = model.linear(x) * torch.tensor(model.array)
    model.array[0] += 1.0
    return y


@pytest.mark.whole
@pytest.mark.parametrize("function", [copied_then_changed, new_tensor_then_changed, shared_and_unchanged])
def test_values_at_the_time_of_use_are_exact(function):
    x = torch.randn(8, 4, dtype=torch.float64)
    assert autopart.verify(Arrays(function).double(), "dp2", example_args=(x,)).ok


@pytest.mark.whole
@pytest.mark.parametrize("function", [shared_then_changed, viewed_then_changed])
def test_an_array_that_changes_under_its_tensor_is_refused(function):
    with pytest.raises(TraceError, match="a numpy array that shares memory with a tensor is changed") as error:
        autopart.plan(Arrays(function).double(), "dp2", example_args=(torch.randn(8, 4, dtype=torch.float64),))
    assert "torch.tensor(array), which copies it" in str(error.value)


def test_an_array_that_counts_calls_is_refused():
    model = Arrays(kept).double()
    with pytest.raises(TraceError, match="computes something different in every call"):
        autopart.plan(model, "dp2", example_args=(torch.randn(8, 4, dtype=torch.float64),))
    assert model.array.tolist() == [1.0] * 4  # tracing has changed nothing
