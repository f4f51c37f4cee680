"""`torch.cond` in a forward: both branches are computed, and the values and gradients are those of the taken one."""

from __future__ import annotations

from typing import Any

import dist
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, cond, nn

import autopart
from autopart.errors import Refusal, TraceError

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch.cond is refused on torch 2.11")
MESHES = ["tp2", "dp2", "pp2", "dp2,tp2"]
ROWS, SIZE = 8, 8


class Net(nn.Module):
    def __init__(self, forward: Any):
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.register_buffer("warm", torch.tensor(True))
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def by_an_input(m, x):
    return torch.cond(x.sum() > 0, lambda h: m.a(h), lambda h: m.b(h).tanh(), (x,))


def by_an_activation(m, x):
    h = m.a(x)
    return cond(h.mean() > 0, lambda h: m.b(h).relu(), torch.neg, (h,))


def by_a_buffer(m, x):
    return torch.cond(m.warm, m.a, m.b, (x,))


def by_one_number(m, x):
    h = m.a(x)
    return torch.cond(
        x[:1, 0] > 0, lambda h, g: (h + g, {"both": 2 * g}), lambda h, g: (h - g, {"both": 3 * h}), (h, m.b(x))
    )


def infinite_elsewhere(m, x):
    """The root of zero has no gradient: it must not be felt where it is not taken."""
    h = m.b(x)
    return torch.cond(x.sum() > 0, lambda h: m.a(h), lambda h: (m.a(h) * 0).sqrt(), (h,))


def nested(m, x):
    def inner(h):
        return torch.cond(h.sum() > 1, torch.sin, m.a, (h,))

    return m.b(torch.cond(x.sum() > 0, inner, torch.cos, (m.a(x),)))


def counted(m, x):
    return m.b(m.a(x) * torch.cond(x.sum() > 0, lambda: torch.tensor(2), lambda: torch.tensor(3)))


CONDITIONS = [by_an_input, by_an_activation, by_a_buffer, by_one_number, nested, counted]


def rows(sign: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, SIZE) + sign


@pytest.mark.large
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("forward", CONDITIONS, ids=lambda forward: forward.__name__)
def test_the_branch_that_is_taken_is_exact(forward, sign, mesh):
    torch.manual_seed(0)
    report = autopart.verify(Net(forward), mesh, example_args=(rows(sign),))
    assert report.ok and not any("compared" in note for note in report.notes), report


@pytest.mark.large
@pytest.mark.parametrize("forward", [*CONDITIONS, infinite_elsewhere], ids=lambda forward: forward.__name__)
def test_a_program_takes_either_branch_as_eager_torch_does(forward):
    """Traced with one branch taken, and called so that each is."""
    torch.manual_seed(0)
    model = Net(forward).double()
    pm = autopart.parallelize(model, "dp1", example_args=(rows(1).double(),))
    for sign in (1, -1) if forward is not infinite_elsewhere else (1,):
        for module in (model, pm):
            module.zero_grad()
            made = module(rows(sign).double())
            (made[0] + made[1]["both"] if isinstance(made, tuple) else made).square().sum().backward()
        for name, gradient in pm.full_grads().items():
            own = model.get_parameter(name).grad
            torch.testing.assert_close(gradient, torch.zeros_like(gradient) if own is None else own, rtol=1e-10, atol=0)


def test_a_plan_says_that_both_branches_are_computed():
    plan = autopart.plan(Net(by_an_input), "tp2", example_args=(rows(1),))
    assert "both branches of torch.cond are computed, and the condition selects the result" in plan.notes


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Net(by_an_activation) for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, target)


@pytest.mark.large
@pytest.mark.parametrize("mesh", MESHES)
def test_conditions_in_blocks_that_repeat(mesh, recwarn):
    torch.manual_seed(0)
    report = autopart.verify(Blocks(), mesh, example_args=(rows(0), rows(1)))
    assert report.ok and not [w for w in recwarn if "fault of autopart" in str(w.message)], report


def trained(mesh):
    torch.manual_seed(0)
    model, given = Blocks().double(), (rows(0).double(), rows(1).double())
    zoo.assert_steps_alike(autopart.parallelize(model, mesh, example_args=given), model, *given)


@pytest.mark.large
@pytest.mark.parametrize("mesh", ["tp2", "dp2", "pp2"])
def test_conditions_over_processes(mesh):
    dist.run_ranks(trained, 2, mesh, timeout_s=120.0)


def drawing(m, x):
    return torch.cond(x.sum() > 0, lambda h: F.dropout(h, 0.5), m.a, (x,))


def unlike(m, x):
    return torch.cond(x.sum() > 0, m.a, lambda h: m.a(h)[:4], (x,))


REFUSED = {
    drawing: "a branch draws random numbers, and would draw them even if it is not selected",
    unlike: "its branches give tensors of different shapes or dtypes",
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda forward: forward.__name__)
def test_what_branches_may_not_do_is_said(forward):
    with pytest.raises(TraceError) as error:
        autopart.plan(Net(forward), "tp2", example_args=(rows(1),))
    assert error.value.refusal is Refusal.REGION and REFUSED[forward] in str(error.value), error.value
    assert "test_conditions.py" in str(error.value)


def test_a_write_in_a_branch_is_refused():
    def writing(m, x):
        h = m.a(x)
        torch.cond(x.sum() > 0, lambda h: h.mul_(2), torch.clone, (h.detach(),))
        return h

    with pytest.raises(TraceError, match="a branch writes to a tensor that it is given"):
        autopart.plan(Net(writing), "tp2", example_args=(rows(1),))
