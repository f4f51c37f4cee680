"""Who calls a partitioned model: transforms of torch.func, several threads, steps without anything to train."""

from __future__ import annotations

import copy
import threading
from typing import Any

import dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import autopart
from autopart.errors import UsageError

TIMEOUT_S = 120.0
X, Y = torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8), torch.arange(8) % 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def partitioned(mesh: str = "tp1") -> Any:
    return autopart.parallelize(model(), mesh, example_kwargs={"input": X})


def forward_mode(pm: nn.Module) -> Tensor:
    with forward_ad.dual_level():
        return pm(forward_ad.make_dual(X, X))


TRANSFORMS = {
    "grad": lambda pm: grad(lambda x: pm(x).sum())(X),
    "vmap": lambda pm: vmap(pm)(X[:, None].expand(8, 8, 8)),
    "grad, by jacrev": lambda pm: jacrev(pm)(X),
    "grad, by vjp": lambda pm: vjp(pm, X),
    "jvp, by jacfwd": lambda pm: jacfwd(pm)(X),
    "jvp": lambda pm: jvp(pm, (X,), (X,)),
    "grad, by hessian": lambda pm: hessian(lambda x: pm(x).sum())(X),
    "forward-mode AD": forward_mode,
    "grad, of step": lambda pm: grad(lambda x: pm.step(x, loss_fn=F.cross_entropy, target=Y))(X),
}
TEXT = """{method}() is called inside of a transform of torch.func ({transform})
  why    a partitioned model sends tensors between ranks, which torch.func cannot transform
  try    loss.backward() or torch.autograd.grad(..., create_graph=True) of pm(...); or torch.func in the model's own \
forward()"""


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused(name):
    pm = partitioned()
    with pytest.raises(UsageError) as error:
        TRANSFORMS[name](pm)
    method, transform = "step" if "step" in name else "forward", name.partition(",")[0]
    transform = "jvp|vmap" if "jac" in name and transform == "jvp" else transform
    assert str(error.value) in [TEXT.format(method=method, transform=t) for t in transform.split("|")]
    assert pm.step(X, loss_fn=F.cross_entropy, target=Y).isfinite()  # nothing is left of the call


@pytest.mark.parametrize("vectorize", [False, True])
def test_jacobians_by_autograd_are_right(vectorize):
    actual, expected = (torch.autograd.functional.jacobian(m, X, vectorize=vectorize) for m in (partitioned(), model()))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# --- Threads


def test_a_second_thread_is_refused_at_once_and_one_after_the_other_is_fine():
    pm, inside, go = partitioned(), threading.Event(), threading.Event()
    first = pm.step(X, loss_fn=F.cross_entropy, target=Y)

    def stay(parameter: Tensor) -> None:
        inside.set()
        go.wait(10)

    handle = pm[0].weight.register_post_accumulate_grad_hook(stay)
    losses: list[Tensor] = []

    def step() -> None:
        losses.append(pm.step(X, loss_fn=F.cross_entropy, target=Y))

    thread = threading.Thread(target=step)
    thread.start()
    assert inside.wait(10)
    for name, call in {"step": step, "full_state_dict": pm.full_state_dict, "forward": lambda: pm(X)}.items():
        with pytest.raises(UsageError) as error:
            call()
        assert str(error.value) == (
            f"{name}() is called while another thread runs step()\n"
            "  why    ranks match their collectives by order, which two threads do not preserve\n"
            "  try    make all calls of pm from one thread, or one after the other (a queue, or a lock around each "
            "call)"
        )
    go.set()
    thread.join()
    handle.remove()
    for each in [threading.Thread(target=step) for _ in range(2)]:
        each.start()
        each.join()
    step()
    assert len(losses) == 4 and all(torch.equal(loss, first) for loss in losses)


def both_threads() -> list[str]:
    pm, said = partitioned("dp2"), []
    pm.step(X, loss_fn=F.cross_entropy, target=Y)
    inside, go = threading.Event(), threading.Event()
    pm[0].weight.register_post_accumulate_grad_hook(lambda p: (inside.set(), go.wait(10)))
    thread = threading.Thread(target=lambda: said.append(str(pm.step(X, loss_fn=F.cross_entropy, target=Y).item())))
    thread.start()
    inside.wait(10)
    try:
        pm.step(X, loss_fn=F.cross_entropy, target=Y)
    except UsageError as error:
        said.append(str(error).splitlines()[0])
    go.set()
    thread.join()
    return said


def test_two_threads_on_two_ranks_hang_nobody():
    said = dist.run_ranks(both_threads, 2, timeout_s=TIMEOUT_S)
    assert said[0] == said[1] and said[0][0] == "step() is called while another thread runs step()"


# --- Nothing to train


def frozen_later(mesh: str) -> list[str]:
    plain, pm, said = model(), partitioned(mesh), []
    pm.step(X, loss_fn=F.cross_entropy, target=Y)
    for each in (pm, plain):
        each[0].requires_grad_(False)  # a stage may have nothing to train
        each.zero_grad()
    pm.step(X, loss_fn=F.cross_entropy, target=Y)
    F.cross_entropy(plain(X), Y).backward()
    grads = pm.full_grads()
    assert sorted(grads) == ["2.bias", "2.weight"]
    for name, value in grads.items():
        torch.testing.assert_close(value, plain.get_parameter(name).grad, rtol=1e-10, atol=1e-10)
    for p in pm.parameters():
        p.requires_grad_(False)
    try:
        pm.step(X, loss_fn=F.cross_entropy, target=Y)
    except UsageError as error:
        said.append(str(error))
    for p in pm.parameters():
        p.requires_grad_(True)
    pm.step(X, loss_fn=F.cross_entropy, target=Y)
    return [*said, str(len(pm.full_grads()))]


@pytest.mark.parametrize("mesh", ["pp2", "tp2"])
def test_a_step_of_frozen_parameters_is_refused_on_every_rank(mesh):
    text = """step() has nothing to train
  why    every parameter of pm is frozen now
  try    pm(...) for the loss alone, under torch.no_grad(); or p.requires_grad_(True) on what is trained"""
    assert dist.run_ranks(frozen_later, 2, mesh, timeout_s=TIMEOUT_S) == [[text, "4"]] * 2


# --- Gradients through a pipeline


def gradient_through_a_pipeline() -> str:
    pm = partitioned("pp2")
    try:
        torch.autograd.grad(F.cross_entropy(pm(X), Y), list(pm.parameters()))
    except UsageError as error:
        return str(error)
    return ""


def test_autograd_grad_through_a_pipeline_names_step():
    text = """backward() does not go through a pipeline
  why    pm(...) runs the stages forward only
  try    loss = pm.step(**batch); with outputs=True it returns both"""
    assert dist.run_ranks(gradient_through_a_pipeline, 2, timeout_s=TIMEOUT_S) == [text] * 2


def test_a_copy_shares_the_caller():
    pm = partitioned()
    twin = copy.deepcopy(pm)
    assert twin._process.caller is None and torch.equal(twin(X), pm(X))
