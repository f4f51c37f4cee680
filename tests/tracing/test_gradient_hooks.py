"""Hooks on the gradients of a forward's own tensors: `h.register_hook(...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dist
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

import autopart
from autopart.errors import Refusal, TraceError

MESHES = ["tp2", "dp2", "pp2", "dp2,tp2"]
ROWS, SIZE = 8, 8


class Net(nn.Module):
    """`hooked` registers hooks on the activations that it makes."""

    def __init__(self, hooked: Callable[..., Any]):
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.hooked, self.scale = hooked, 0.5
        self.norms: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.hooked(self, x)


def clamped(m, x):
    h = m.a(x)
    h.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return m.b(h)


def reversed_and_scaled(m, x):
    h = m.a(x).tanh()
    h.register_hook(lambda gradient: -m.scale * gradient)
    return m.b(h) + h


def after_its_uses(m, x):
    h = m.a(x)
    y = m.b(h.relu()) + h[:, :1]
    h.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return y


def two_in_order(m, x):
    h = m.a(x)
    h.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    y = m.b(h)
    h.register_hook(lambda gradient: 3 * gradient)
    return y + h


def returned(m, x):
    h = m.a(x)
    h.register_hook(torch.sign)
    return m.b(h), h


def with_a_mask(m, x):
    h, mask = m.a(x), (x > 0).to(x)
    h.register_hook(lambda gradient: gradient * mask)
    return m.b(h)


def normalised(m, x):
    h = m.a(x)
    h.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-3))
    return m.b(h)


def of_rows(m, x):
    h = m.a(x)
    h.register_hook(lambda gradient: gradient / (gradient.norm(dim=-1, keepdim=True) + 1e-3))
    return m.b(h)


def written_before(m, x):
    h = m.a(x)
    h.relu_()
    h.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return m.b(h)


HOOKED = [
    clamped, reversed_and_scaled, after_its_uses, two_in_order, returned, with_a_mask, normalised, of_rows,
    written_before,
]  # fmt: skip


@pytest.mark.large
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("hooked", HOOKED, ids=lambda hooked: hooked.__name__)
def test_a_hook_changes_the_gradient_as_in_the_model(hooked, mesh):
    torch.manual_seed(0)
    report = autopart.verify(Net(hooked), mesh, example_args=(torch.randn(ROWS, SIZE),))
    assert report.ok and not any("compared" in note for note in report.notes), report


@pytest.mark.few
@pytest.mark.parametrize("hooked", HOOKED, ids=lambda hooked: hooked.__name__)
def test_the_gradients_are_those_of_eager_torch(hooked):
    """`verify` compares with the traced graph where it can: here the model itself is run."""
    torch.manual_seed(0)
    model, x = Net(hooked).double(), torch.randn(ROWS, SIZE, dtype=torch.float64)
    pm = autopart.parallelize(model, "dp1", example_args=(x,))
    for outputs in (model(x), pm(x)):
        (outputs[0] if isinstance(outputs, tuple) else outputs).square().sum().backward()
    for name, gradient in pm.full_grads().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-10, atol=1e-10)


class Blocks(nn.Module):
    """Blocks that repeat, each with a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Net(clamped) for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, target)


@pytest.mark.parametrize("mesh", MESHES)
def test_hooks_in_blocks_that_repeat(mesh, recwarn):
    torch.manual_seed(0)
    report = autopart.verify(Blocks(), mesh, example_args=(torch.randn(ROWS, SIZE), torch.randn(ROWS, SIZE)))
    assert report.ok and not [w for w in recwarn if "fault of autopart" in str(w.message)], report


def trained(mesh):
    torch.manual_seed(0)
    model, given = Blocks().double(), [torch.randn(ROWS, SIZE, dtype=torch.float64) for _ in range(2)]
    zoo.assert_steps_alike(autopart.parallelize(model, mesh, example_args=tuple(given)), model, *given)


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2"])
def test_hooks_over_processes(mesh):
    dist.run_ranks(trained, 2, mesh, timeout_s=120.0)


def looking(m, x):
    h = m.a(x)
    h.register_hook(lambda gradient: m.norms.append(gradient.norm()))
    return m.b(h)


def test_a_hook_that_gives_nothing_is_left_out_and_said():
    model, x = Net(looking), torch.randn(ROWS, SIZE)
    plan = autopart.plan(model, "tp2", example_args=(x,))
    (note,) = [note for note in plan.notes if "hook" in note]
    assert note.startswith("a hook on a gradient that changes nothing is not in the program: ") and "looking" in note
    assert not model.norms and autopart.verify(Net(looking), "dp2", example_args=(x,)).ok


def on_a_parameter(m, x):
    m.a.weight.register_hook(lambda gradient: gradient * 2)
    return m.b(m.a(x))


def removed(m, x):
    h = m.a(x)
    h.register_hook(lambda gradient: gradient * 2).remove()
    return m.b(h)


def written_after(m, x):
    h = m.a(x)
    h.register_hook(lambda gradient: gradient * 2)
    return m.b(h.relu_())


def writing(m, x):
    h = m.a(x)
    h.register_hook(lambda gradient: gradient.mul_(2))
    return m.b(h)


def drawing(m, x):
    h = m.a(x)
    h.register_hook(lambda gradient: gradient * torch.rand_like(gradient))
    return m.b(h)


def deciding(m, x):
    h = m.a(x)
    h.register_hook(lambda gradient: gradient * 2 if gradient.sum() > 0 else gradient)
    return m.b(h)


def too_early(m, x):
    h = m.a(x)
    mask = (h.detach() > 0).to(x)
    h.register_hook(lambda gradient: gradient * mask)
    return m.b(h)


REFUSED = {
    on_a_parameter: "it is on a parameter or an input, and every call would add one more",
    removed: "the forward removes it again",
    written_after: "relu_ writes to it",
    writing: "it writes to a tensor that it is given",
    drawing: "it draws random numbers, which its backward would draw again",
    deciding: "it cannot be run on a gradient alone",
    too_early: "it reads a tensor that is computed after the hook's own tensor was used",
}


@pytest.mark.parametrize("hooked", REFUSED, ids=lambda hooked: hooked.__name__)
def test_what_a_hook_may_not_do_is_said(hooked):
    with pytest.raises(TraceError) as error:
        autopart.plan(Net(hooked), "tp2", example_args=(torch.randn(ROWS, SIZE),))
    assert error.value.refusal is Refusal.HOOK and REFUSED[hooked] in str(error.value), error.value
    assert "a tensor has a hook on its gradient" in str(error.value) and "test_gradient_hooks.py" in str(error.value)
