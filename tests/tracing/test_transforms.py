"""`torch.func` in a forward: derivatives by its transforms, alone, nested, and over rows by `vmap`."""

from __future__ import annotations

from typing import Any

import dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import autopart
from autopart.errors import Refusal, TraceError

MESHES = ["tp2", "dp2", "pp2"]
ROWS, SIZE = 8, 4


class Net(nn.Module):
    def __init__(self, forward: Any):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(SIZE, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.run = forward
        self.norm, self.groups, self.conv = nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.Conv1d(1, 2, 3)
        self.force = grad(self.energy)  # made before the trace

    def hidden(self, x: Tensor) -> Tensor:
        return F.silu(self.b(torch.tanh(self.a(x))))

    def energy(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x)).sum()

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def score(m, x):
    net = functional_call
    return grad(lambda y: net(m.out, dict(m.out.named_parameters()), (m.hidden(y),)).square().sum())(x)


def with_value(m, x):
    gradient, value = grad_and_value(m.energy)(x)
    return gradient * value


def with_extra(m, x):
    gradient, (value, h) = grad_and_value(lambda y: (m.energy(y), m.hidden(y)), has_aux=True)(x)
    return gradient.sum(-1) + h.sum(-1) * value


def of_softmax(m, x):
    return vmap(grad(lambda row: m.hidden(row).softmax(-1).exp().prod()))(x)


def detached(m, x):
    return vmap(grad(lambda row: (m.hidden(row) * m.hidden(row).detach()).sum()))(x)


def of_weights(m, x):
    """The gradient of the weights of each row, as for differential privacy."""
    weights = dict(m.a.named_parameters())

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(m.a, weights, (row,)).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    return found["weight"].flatten(1) + found["bias"].sum(-1, keepdim=True)


def inner_step(m, x):
    """A step of the weights on one half of the rows, and the loss on the other, as MAML."""
    weights = {name: p for name, p in m.a.named_parameters()}
    gradient = grad(lambda w: functional_call(m.a, w, (x,)).square().mean())(weights)
    return functional_call(m.a, {name: p - 0.1 * gradient[name] for name, p in weights.items()}, (x,))


TRANSFORMED = {
    "grad": lambda m, x: grad(m.energy)(x),
    "grad made before": lambda m, x: m.force(x),
    "vmap of grad": lambda m, x: vmap(grad(m.energy))(x),
    "vmap of jacrev": lambda m, x: vmap(jacrev(m.hidden))(x),
    "vmap of jacfwd": lambda m, x: vmap(jacfwd(m.hidden))(x),
    "vmap of grad of grad": lambda m, x: vmap(grad(lambda y: grad(m.energy)(y).square().sum()))(x),
    "vmap of jacrev of grad": lambda m, x: vmap(jacrev(grad(m.energy)))(x),
    "Laplacian": lambda m, x: vmap(lambda y: hessian(m.energy)(y).diagonal().sum())(x),
    "jacrev": lambda m, x: jacrev(lambda y: m.hidden(y).sum(0))(x),
    "vjp": lambda m, x: vjp(m.hidden, x)[1](torch.ones_like(m.hidden(x)))[0],
    "jvp": lambda m, x: sum(jvp(m.hidden, (x,), (torch.ones_like(x),))),
    "vmap alone": lambda m, x: vmap(m.hidden)(x),
    "vmap with weights": lambda m, x: vmap(lambda y, w: y * w, in_dims=(0, None))(m.hidden(x), m.b.bias),
    "layer norm": lambda m, x: grad(lambda y: m.norm(m.a(y)).pow(3).sum())(x),
    "layer norm of rows": lambda m, x: vmap(grad(lambda y: m.norm(m.a(y)).pow(3).sum()))(x),
    "group norm": lambda m, x: vmap(grad(lambda y: m.groups(m.a(y)[None]).pow(3).sum()))(x),
    "cross entropy": lambda m, x: vmap(grad(lambda y: F.cross_entropy(m.a(y)[None], torch.tensor([2]))))(x),
    "attention": lambda m, x: vmap(grad(lambda y: F.scaled_dot_product_attention(*[m.a(y)[None]] * 3).sum()))(x),
    "maximum": lambda m, x: vmap(grad(lambda y: m.a(y).max(-1)[0].square() + m.a(y)[2:4].prod()))(x),
    "unit length": lambda m, x: vmap(grad(lambda y: F.normalize(m.a(y), dim=-1).pow(3).sum()))(x),
    "score": score, "value": with_value, "extra": with_extra, "softmax": of_softmax, "detached": detached,
    "weights": of_weights, "inner step": inner_step,
}  # fmt: skip


def rows() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, SIZE)


@pytest.mark.few
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [name for name in TRANSFORMED if name != "grad made before"])  # a copy has the old one
def test_a_transform_is_exact(name, mesh):
    torch.manual_seed(0)
    report = autopart.verify(Net(TRANSFORMED[name]), mesh, example_args=(rows(),))
    assert report.ok, report


@pytest.mark.few
@pytest.mark.parametrize("name", TRANSFORMED)
def test_gradients_are_those_of_eager_torch(name):
    torch.manual_seed(0)
    model, x = Net(TRANSFORMED[name]).double(), rows().double()
    pm = autopart.parallelize(model, "dp1", example_args=(x,))
    for module in (model, pm):
        module(x).square().sum().backward()
    for name, gradient in pm.full_grads().items():
        own = model.get_parameter(name).grad
        torch.testing.assert_close(gradient, torch.zeros_like(gradient) if own is None else own, rtol=1e-10, atol=1e-10)


def test_both_axes_at_once():
    torch.manual_seed(0)
    assert autopart.verify(Net(TRANSFORMED["vmap of grad"]), "dp2,tp2", example_args=(rows(),)).ok


def test_a_vmap_alone_keeps_its_operators_whole():
    plan = autopart.plan(Net(TRANSFORMED["vmap alone"]), "tp2", example_args=(rows(),))
    assert any(layout["tp"].startswith("S") for layout in plan.parameters.values()), plan.parameters


def trained(mesh):
    torch.manual_seed(0)
    model, x = Net(TRANSFORMED["vmap of grad"]).double(), rows().double()
    pm = autopart.parallelize(model, mesh, example_args=(x,))
    options = {"loss_fn": F.mse_loss, "target": torch.zeros_like(x)}
    loss, expected = pm.step(x, **options), F.mse_loss(model(x), torch.zeros_like(x))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-10)
    found = pm.full_grads()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2"])
def test_transforms_over_processes(mesh):
    dist.run_ranks(trained, 2, mesh, timeout_s=120.0)


def test_a_third_derivative_that_torch_gets_wrong_is_refused():
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    model = Net(lambda m, x: grad(lambda y: grad(lambda z: m.net(z).sin().sum())(y).square().sum())(x))
    model.net = net
    with pytest.raises(TraceError, match="the loss needs a third derivative of layer_norm"):
        autopart.plan(model, "tp2", example_args=(rows(),))


def test_the_gradient_of_a_convolution():
    model = Net(lambda m, x: vmap(grad(lambda y: m.conv(y[None]).pow(3).sum()))(x))
    result = autopart.verify(model, "tp2", example_args=(rows(),))
    assert result.ok, result


def test_an_operator_whose_backward_has_no_gradient_in_a_program_is_refused():
    with pytest.raises(TraceError, match="it needs the gradient of _cdist_backward") as error:
        autopart.plan(Net(lambda m, x: grad(lambda y: torch.cdist(m.hidden(y), m.hidden(y) + 1).sum())(x)), "tp2",
                      example_args=(rows(),))  # fmt: skip
    assert error.value.refusal is Refusal.GRADIENT and "test_transforms.py" in str(error.value)


def without_gradient(m, x):
    def energy(y: Tensor) -> Tensor:
        with torch.no_grad():
            scale = m.hidden(y)
        return (m.hidden(y) * scale).sum()

    return grad(energy)(x)


def test_what_cannot_be_traced_inside_is_told():
    with pytest.raises(TraceError, match=r"a torch.func transform cannot be traced") as error:
        autopart.plan(Net(lambda m, x: vmap(jacfwd(jacrev(m.energy)))(x)), "tp2", example_args=(rows(),))
    assert error.value.refusal is Refusal.GRADIENT and "test_transforms.py" in str(error.value)


def test_a_part_without_gradient_inside_is_refused():
    with pytest.raises(TraceError, match=r"torch.no_grad\(\) inside of a torch.func transform") as error:
        autopart.plan(Net(without_gradient), "tp2", example_args=(rows(),))
    assert error.value.refusal is Refusal.GRADIENT and "test_transforms.py" in str(error.value)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mask_is_computed_by_a_function_of_positions(mesh):
    """Masks of transformers index tensors with positions, under `vmap` and a mode that keeps them tensors."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    def attended(m, x):
        group = (x[..., 0] > 0).long()

        def is_attended(row: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) | (group[row, query] == group[row, key])

        by_key = vmap(is_attended, in_dims=(None, None, 0))
        by_row = vmap(vmap(by_key, in_dims=(None, 0, None)), in_dims=(0, None, None))
        with TransformGetItemToIndex():
            mask = by_row(torch.arange(len(x)), torch.arange(5), torch.arange(5))
        h = m.a(x)
        return F.scaled_dot_product_attention(h, h, m.b(h), attn_mask=mask)

    result = autopart.verify(Net(attended), mesh, example_args=(torch.randn(ROWS, 5, SIZE),))
    assert result.ok, result
