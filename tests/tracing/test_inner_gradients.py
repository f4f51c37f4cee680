"""Gradients that a forward takes itself, with `torch.autograd.grad`: forces of an energy, penalties, inner steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call

ACTIVATIONS = {
    "tanh": torch.tanh, "silu": F.silu, "gelu": F.gelu, "softplus": F.softplus, "sigmoid": torch.sigmoid,
    "square": torch.square, "exp": torch.exp, "sin": torch.sin, "leaky": F.leaky_relu,
}  # fmt: skip


class Energy(nn.Module):
    """Forces as a neural network potential gives them: the gradient of its energy by the positions."""

    def __init__(self, activation: Callable[[Tensor], Tensor], depth: int = 2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.out, self.activation = nn.Linear(8, 1), activation

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.detach().requires_grad_(True)
        h = positions
        for layer in self.layers:
            h = self.activation(layer(h))
        energy = self.out(h).sum()
        forces = -torch.autograd.grad(energy, positions, create_graph=True)[0]
        return energy, forces


@pytest.mark.parametrize("shape", [(4, 8), (4, 3, 8)], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_forces(name, shape):
    result = autopart.verify(Energy(ACTIVATIONS[name]), "tp2", example_args=(torch.randn(shape),))
    assert result.ok and not any("compared" in note for note in result.notes), result


@pytest.mark.parametrize("mesh", ["dp2", "tp2", "dp2,tp2"])
def test_a_loss_of_energy_and_forces(mesh):
    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return output[0] / 4 + F.mse_loss(output[1], target)

    x = torch.randn(4, 8)
    result = autopart.verify(Energy(torch.tanh), mesh, example_args=(x,), loss_fn=loss_fn, target=torch.randn(4, 8))
    assert result.ok, result


class Residual(nn.Module):
    """The loss of a network that solves a differential equation: it asks for gradients of its input itself, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(2, 8), nn.Linear(8, 1)

    def forward(self, points: Tensor) -> Tensor:
        points = points.requires_grad_()
        u = self.out(torch.sin(self.hidden(points)))
        (first,) = torch.autograd.grad(u, points, torch.ones_like(u), create_graph=True)
        second = [torch.autograd.grad(first[:, i].sum(), points, create_graph=True)[0][:, i] for i in range(2)]
        return (sum(second) - u[:, 0]).square().mean()


@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2"])
def test_a_residual_of_second_derivatives(mesh):
    result = autopart.verify(Residual(), mesh, example_args=(torch.randn(4, 2),))
    assert result.ok, result


class InnerStep(nn.Module):
    """A step of gradient descent in the forward; without `create_graph` the outer gradient takes it as given."""

    def __init__(self, create_graph: bool):
        super().__init__()
        self.linear, self.create_graph = nn.Linear(8, 8), create_graph

    def forward(self, x: Tensor) -> Tensor:
        inner = self.linear(x).square().sum()
        (grad,) = torch.autograd.grad(inner, self.linear.weight, create_graph=self.create_graph)
        return F.linear(x, self.linear.weight - 0.1 * grad, self.linear.bias)


class OfAnActivation(nn.Module):
    """The leaf is an activation without its gradient: what is saved belongs to the leaf, and not to the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        leaf = h.detach().requires_grad_(True)
        (grad,) = torch.autograd.grad(self.second(leaf).pow(3).sum(), leaf, create_graph=True)
        return (h * grad).sum()


@pytest.mark.parametrize(
    "build", [lambda: InnerStep(True), lambda: InnerStep(False), OfAnActivation], ids=["second order", "first", "leaf"]
)
@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
def test_what_the_outer_gradient_passes_through(build, mesh):
    result = autopart.verify(build(), mesh, example_args=(torch.randn(4, 8),))
    assert result.ok, result


def test_a_trace_does_not_grow_by_it():
    """Views of weights and aliases of outputs: nothing is computed twice."""
    x = torch.randn(4, 8)
    graph = prepare(model := Energy(torch.tanh), bind_call(model, (x,), {})).graph
    names = [node.name for node in graph.nodes if node.op == "call_function"]
    assert sum(name.startswith("tanh") and "backward" not in name for name in names) == 2, names
    assert sum(name.startswith("linear") for name in names) == 3 + 3, f"forward and backward: {names}"
