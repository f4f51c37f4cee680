"""Gradients that a forward takes itself, with `torch.autograd.grad`: forces of an energy, penalties, inner steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopart
from autopart.errors import Refusal, TraceError
from autopart.recipe.make_plan import prepare
from autopart.tracing.autograd.differentiable_operators import BACKWARDS
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


@pytest.mark.few
@pytest.mark.parametrize("shape", [(4, 8), (4, 3, 8)], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_forces(name, shape):
    result = autopart.verify(Energy(ACTIVATIONS[name]), "tp2", example_args=(torch.randn(shape),))
    assert result.ok and not any("compared" in note for note in result.notes), result


@pytest.mark.few
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


@pytest.mark.few
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


@pytest.mark.few
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


class Atoms(nn.Module):
    """An energy of atoms by a network between layers, and the loss of its forces and its strain."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.kinds, self.out = nn.Embedding(5, 16), nn.Linear(16, 1)
        self.first, self.layers = nn.Linear(3, 16), nn.ModuleDict(layers)
        self.register_buffer("pairs", torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 0, 4, 3, 3]]))

    def forward(self, positions: Tensor, wanted: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        strain = torch.zeros(3, 3, dtype=positions.dtype, requires_grad=True)
        moved = positions + positions @ strain
        h = self.first(moved) + self.kinds(torch.arange(5))
        sources, targets = self.pairs
        h = h + torch.zeros_like(h).index_add(
            1, targets, F.silu(h[:, sources] * (moved[:, sources] ** 2).sum(-1, True))
        )
        for layer in self.layers.values():
            h = h + layer(h).tanh()
        energy = self.out(h).sum((1, 2))
        forces, stress = torch.autograd.grad(energy.sum(), [positions, strain], create_graph=True)
        return energy.square().mean() + F.mse_loss(-forces, wanted) + stress.square().sum()


class Channels(nn.Module):
    """A layer whose channels are dim 1."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(16), "rms norm": lambda: nn.RMSNorm(16),
    "group norm": lambda: Channels(nn.GroupNorm(4, 16)), "batch norm": lambda: Channels(nn.BatchNorm1d(16)),
    "attention": Attention, "softmax": lambda: nn.Softmax(-1), "gelu": nn.GELU,
    "convolution": lambda: Channels(nn.Conv1d(16, 16, 3, padding=1, groups=2)),
}  # fmt: skip


@pytest.mark.few
@pytest.mark.parametrize("layer", LAYERS)
def test_forces_through_layers(layer):
    example = torch.randn(4, 5, 3), torch.randn(4, 5, 3)
    for mesh in ("dp2", "tp2"):
        torch.manual_seed(0)
        result = autopart.verify(Atoms(layer=LAYERS[layer]()), mesh, example_args=example)
        assert result.ok, result


class Penalty(nn.Module):
    """A critic with the gradient penalty of a Wasserstein GAN."""

    def __init__(self) -> None:
        super().__init__()
        conv = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.critic = nn.Sequential(conv[0], nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.2), conv[1],
                                    nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 1))  # fmt: skip

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        between = torch.lerp(real, fake, 0.3).requires_grad_(True)
        score = self.critic(between)
        (grad,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
        return self.critic(fake).mean() - self.critic(real).mean() + (grad.flatten(1).norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2"])
def test_a_gradient_penalty(mesh):
    result = autopart.verify(Penalty(), mesh, example_args=(torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8)))
    assert result.ok, result


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_a_convolution(transposed):
    x, w = torch.randn(2, 4, 9, 8).double(), torch.randn(4, 4, 3, 2).double()[:, : 2 if not transposed else 4]
    options = [2, 2], [1, 0], [1, 2], transposed, [1, 1] if transposed else [0, 0], 1 if transposed else 2
    grad = torch.randn_like(torch.convolution(x, w, None, *options))
    expected = torch.ops.aten.convolution_backward(grad, x, w, [4], *options, [True] * 3)
    found = BACKWARDS[torch.ops.aten.convolution_backward.default](grad, x, w, [4], *options, [True] * 3)
    torch.testing.assert_close(found, expected)


def second_derivative(layer: nn.Module) -> nn.Module:
    class Third(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), layer, nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            (first,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
            return second.square().mean()

    return Third()


def test_a_third_derivative_that_torch_gets_wrong_is_refused():
    with pytest.raises(TraceError, match="the loss needs a third derivative of layer_norm") as error:
        autopart.plan(second_derivative(nn.LayerNorm(8)), "tp2", example_args=(torch.randn(4, 2),))
    assert error.value.refusal is Refusal.GRADIENT and "test_inner_gradients.py" in str(error.value)
    assert autopart.verify(second_derivative(nn.GroupNorm(1, 8)), "tp2", example_args=(torch.randn(4, 2),)).ok


@pytest.mark.large
def test_a_gradient_that_torch_itself_cannot_take_is_refused():
    class Distances(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            (grad,) = torch.autograd.grad(super().forward(torch.cdist(x, x.detach() + 1)).sum(), x, create_graph=True)
            return grad.square().mean()

    with pytest.raises(TraceError, match=r"cannot be differentiated by torch itself\n  why .*_cdist_backward"):
        autopart.verify(Distances(4, 4), "tp2", example_args=(torch.randn(4, 3),))


def test_backward_in_a_forward_is_refused():
    class Backward(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            super().forward(x).square().sum().backward(create_graph=True)
            return x.grad.square().mean()

    with pytest.raises(TraceError, match=r"forward\(\) calls backward\(\)\n(.*\n)*  try .*torch.autograd.grad"):
        autopart.plan(Backward(4, 4), "tp2", example_args=(torch.randn(4, 4),))
