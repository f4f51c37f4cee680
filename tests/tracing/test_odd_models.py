"""Memory layouts that operators need, tensors of size 0, masks of a default dtype, targets of one element, vmap."""

import pytest
import torch
from torch import Tensor, nn

import autopart
from autopart.errors import TraceError


def pairs(y: Tensor) -> Tensor:
    return y.unflatten(-1, (2, 4)).transpose(-1, -2)


COMPLEX = {
    "contiguous": lambda y: torch.view_as_complex(pairs(y).contiguous()),
    "contiguous, then a view": lambda y: torch.view_as_complex(pairs(y).contiguous().reshape(4, 6, 4, 2)),
    "clone": lambda y: torch.view_as_complex(pairs(y).clone(memory_format=torch.contiguous_format)),
    "of a stack": lambda y: torch.view_as_complex(torch.stack([y, y * 2], -1)),
}


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self.linear(x)).abs()


@pytest.mark.few
@pytest.mark.parametrize("name", COMPLEX)
@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
def test_a_complex_view_gets_a_contiguous_operand(name, mesh):
    model = Applied(COMPLEX[name]).double()
    found = autopart.verify(model, mesh, example_args=(torch.randn(4, 6, 8, dtype=torch.float64),))
    assert found.ok and found.max_error < 1e-12, str(found)


class EmptyPrefix(nn.Module):
    """Attention prefix of length 0: a parameter of size 0, expanded and reshaped."""

    def __init__(self):
        super().__init__()
        self.linear, self.prefix = nn.Linear(8, 8), nn.Parameter(torch.randn(2, 0, 4))

    def forward(self, x):
        prefix = self.prefix.expand(2, 0, 4).reshape(1, 0, 2, 4).expand(x.size(0), -1, -1, -1).flatten(2)
        return torch.cat([prefix, self.linear(x)], 1)


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
def test_reshapes_of_a_tensor_of_size_0(mesh):
    found = autopart.verify(EmptyPrefix().double(), mesh, example_args=(torch.randn(4, 6, 8, dtype=torch.float64),))
    assert found.ok and found.max_error < 1e-12, str(found)


class DefaultDtypeMask(nn.Module):
    """Causal mask made in torch's default dtype from the smallest number of the model's dtype."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.linear(x)[:, None].chunk(3, -1)
        n = x.size(1)
        mask = torch.full((n, n), torch.finfo(q.dtype).min).triu(1).to(q.dtype)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.large
def test_a_mask_that_float64_weights_make_impossible_is_verified_in_float32():
    found = autopart.verify(DefaultDtypeMask(), "tp2", example_args=(torch.randn(4, 6, 8),))
    assert found.ok and found.max_error < 1e-12, str(found)
    assert any("does not run in float64" in note for note in found.notes)


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2"])
@pytest.mark.parametrize("target", [torch.zeros(1), torch.zeros(3)], ids=["one", "three"])
def test_the_batch_size_is_that_of_the_models_inputs(mesh, target):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    found = autopart.verify(
        model, mesh, example_args=(torch.randn(8, 8),), loss_fn=lambda out, t: out.square().mean() + t.sum(),
        target=target,
    )  # fmt: skip
    assert found.ok and found.max_error < 1e-12, str(found)


class NestedVmap(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.vmap(lambda row: torch.vmap(lambda u: self.linear.weight @ u)(row))(x)


def test_a_refusal_inside_vmap_leaves_no_transform_entered():
    with pytest.raises(TraceError):
        autopart.plan(NestedVmap(), "tp2", example_args=(torch.randn(4, 6, 8),))
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    torch.rand(1)  # raises inside of a vmap


class Adaptive(nn.Module):
    """A softmax by clusters, of which one has layers of size 0. Torch's layer compares numbers of selected rows."""

    def __init__(self):
        super().__init__()
        self.a, self.softmax = nn.Linear(8, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 20, cutoffs=[5, 10])

    def forward(self, x, y):
        return self.softmax(self.a(x), y).loss


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
@pytest.mark.parametrize("targets", [[3, 7, 9, 19, 4, 4, 12, 1], [6, 1, 6, 0, 7, 7, 7, 7]])
def test_sizes_of_inputs_in_a_layer_of_torch(targets, mesh):
    call = torch.randn(8, 8, dtype=torch.float64), torch.tensor(targets)
    found = autopart.verify(Adaptive().double(), mesh, example_args=call)
    assert found.ok and found.max_error < 1e-12, str(found)


class WithNumbers(nn.Module):
    """Returns Python numbers beside its loss: of activations, and of a parameter."""

    def __init__(self):
        super().__init__()
        self.linear, self.log_vars = nn.Linear(8, 8), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        h = self.linear(x)
        loss = (torch.exp(-self.log_vars[0]) * h).square().mean()
        numbers = {"clipped": (h.abs() > 0.2).double().mean().item(), "positive": (h > 0).sum().item()}
        return {"loss": loss, **numbers, "half": h.sum().item() / 2, "log_vars": self.log_vars.data.tolist()}


@pytest.mark.few
@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2"])
def test_numbers_that_a_model_returns(mesh):
    found = autopart.verify(WithNumbers().double(), mesh, example_args=(torch.randn(8, 8, dtype=torch.float64),))
    assert found.ok and found.max_error < 1e-12, str(found)


@pytest.mark.large
def test_numbers_are_returned_as_numbers():
    model, x = WithNumbers().double(), torch.randn(8, 8, dtype=torch.float64)
    expected, found = model(x), autopart.parallelize(model, "dp1", example_args=(x,))(x)
    for name, value in expected.items():
        if name != "loss":
            assert type(found[name]) is type(value) and found[name] == pytest.approx(value)


class WrittenQueue(nn.Module):
    """Writes a buffer that its own backward needs, which torch rejects in eager mode, too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("queue", torch.randn(4, 8))

    def forward(self, x):
        y = self.linear(x)
        loss = (y @ self.queue.T).square().mean()
        self.queue[:2] = y[:2].detach()
        return loss


def test_a_model_that_torch_cannot_differentiate_is_refused_in_words():
    with pytest.raises(TraceError, match="cannot be differentiated by torch itself"):
        autopart.verify(WrittenQueue(), "tp2", example_args=(torch.randn(8, 8),))
