"""Optimizers that need whole tensors are refused where they are given parts, by name, and no other."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import dist
import pytest
import torch
import zoo
from torch import Tensor, nn

import autopart
from autopart.errors import OptionError, UsageError
from autopart.ir.mesh import Mesh
from autopart.runtime.optimizers import optimizer_checks

TIMEOUT_S = 120.0
CPU = torch.device("cpu")


class Signs(torch.optim.Optimizer):
    """Sign descent with momentum: each element by itself."""

    def __init__(self, params: Iterable[Any], lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.mul_(group["beta"]).add_(parameter.grad)
                    parameter.data.add_(momentum.sign(), alpha=-group["lr"])


class Centred(Signs):
    """Takes the mean of each gradient away first (Yong et al. 2020, arXiv:2004.01461)."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.sub_(parameter.grad.mean())
        super().step()


class Sealed(Signs):
    """Cannot be made in another place."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, 0.1)
        if self.param_groups[0]["params"][0].numel() == 24:
            raise RuntimeError("no")


class LAMB(Signs):
    """By its name alone."""


class Mine(torch.optim.AdamW):
    """Torch's step under another name."""


def one(values: int = 4) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(values, values))]


class Adaptive(Signs):
    """Its step follows from a sum over all parameters, as of Prodigy and D-Adaptation."""

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        with torch.no_grad():
            size = sum(p.grad.abs().sum() for p in parameters)
            for parameter in parameters:
                parameter.sub_(parameter.grad / size)


def test_optimizers_of_single_tensors_are_told_from_others():
    for name in optimizer_checks.ELEMENTWISE:
        if name != "SparseAdam":  # which takes sparse gradients alone
            optimizer = getattr(torch.optim, name)(one(), lr=0.1)
            assert optimizer_checks.is_separable(optimizer, CPU) is True, name
            assert optimizer_checks.is_elementwise_class(type(optimizer))
    for kind in (torch.optim.Muon, torch.optim.Adafactor, Centred):
        assert optimizer_checks.is_separable(kind(one(), lr=0.1), CPU) is True, kind
    assert optimizer_checks.is_separable(Adaptive(one(), lr=0.1), CPU) is False
    assert optimizer_checks.is_separable(Signs(one(), lr=0.0), CPU) is True  # a warm-up begins at 0
    assert optimizer_checks.is_separable(Sealed(one()), CPU) is None
    assert optimizer_checks.is_separable(torch.optim.LBFGS(one()), CPU) is None  # wants a closure
    assert optimizer_checks.is_elementwise_class(type(Mine(one()))) and not optimizer_checks.is_elementwise_class(
        type(Signs(one(), 0.1))
    )


def test_trying_an_optimizer_draws_no_number():
    class Noisy(Signs):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(torch.randn_like(parameter))

    before = torch.get_rng_state()
    assert optimizer_checks.is_separable(Noisy(one(), 0.1), CPU) is False
    assert torch.equal(torch.get_rng_state(), before)


def test_every_optimizer_of_torch_is_judged():
    """A new one has to be looked at."""
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, torch.optim.Optimizer)} - {"Optimizer"}
    assert names == {*optimizer_checks.ELEMENTWISE, "Muon", "Adafactor", "LBFGS"}


# --- on processes ----------------------------------------------------------------------------------------------------


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.dim() == 2]


def first_steps(mesh: str, zero: int) -> dict[str, str]:
    """What the first step of each says: "" where it runs, and then ends where one device ends."""
    model, batch = zoo.skip_mlp(num_layers=2, hidden=8)
    makers: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
        "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
        "Mine": lambda m: Mine(m.parameters(), lr=0.1),
        "Signs": lambda m: Signs(m.parameters(), lr=0.1),
        "Muon": lambda m: torch.optim.Muon(matrices(m), lr=0.1),
        "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1),
        "LAMB": lambda m: LAMB(m.parameters(), lr=0.1),
        "LBFGS": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=4),
        "Centred": lambda m: Centred(m.parameters(), lr=0.1),
        "Adaptive": lambda m: Adaptive(m.parameters(), lr=0.1),
    }
    said = {}
    for name, make in makers.items():
        one, fresh = copy.deepcopy(model), copy.deepcopy(model)
        pm = autopart.parallelize(fresh, mesh, example_kwargs=batch, **({"zero": zero} if zero else {}))
        try:
            train(make(pm), lambda pm=pm: pm.step(**batch))
        except OptionError as error:
            said[name] = str(error)
            continue
        said[name] = ""
        train(make(one), lambda one=one: backward(one, batch))
        found = pm.full_state_dict()
        for key, value in one.state_dict().items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-10, msg=f"{name} {key}")
    return said


def backward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = model(**batch)
    loss.backward()
    return loss


def train(optimizer: torch.optim.Optimizer, backward: Callable[[], Tensor]) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward()

    closure()
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        optimizer.step()


OF_MUON = """Muon cannot train a shard of 'layers.0.weight'
  why    it orthogonalises full matrices
  where  it is sharded over tp
  try    pm.optimizer(Muon, ...), or dp with zero=0, or pp"""
OF_ADAPTIVE = """Adaptive cannot train the stages of a pipeline separately
  why    its update of a matrix depends on matrices of other stages
  where  pp: a stage's parameters on each rank
  try    torch.optim.AdamW, or a mesh without pp"""
OF_LBFGS = """LBFGS cannot train a shard of a model
  why    its step follows from all parameters together, and a rank has a shard
  where  'layers.0.weight', sharded over tp
  try    torch.optim.AdamW, or a mesh of dp alone with zero=0"""


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "zero", "refused"), [
    ("tp2", 0, {"Muon", "Adafactor", "LAMB", "LBFGS"}),
    ("dp2", 3, {"Muon", "Adafactor", "LAMB", "LBFGS"}),
    ("dp2", 0, set()),
    ("pp2", 0, {"LBFGS", "Adaptive"}),
])  # fmt: skip
def test_optimizers_are_right_or_refused(mesh, zero, refused):
    said = dist.run_ranks(first_steps, Mesh.parse(mesh).num_ranks, mesh, zero, timeout_s=TIMEOUT_S)
    assert all({name for name, text in rank.items() if text} == refused for rank in said)
    assert all(len(line) <= 80 for rank in said for text in rank.values() for line in text.splitlines())
    if mesh == "tp2":
        assert said[0] == said[1]
        assert said[0]["Muon"] == OF_MUON and said[0]["LBFGS"] == OF_LBFGS
    if mesh == "pp2":
        assert "where  pp: a stage's parameters on each rank" in said[0]["LBFGS"]
        assert said[0]["Adaptive"] == OF_ADAPTIVE
    if zero:
        assert "pm.optimizer(LAMB, ...), or zero=0" in said[0]["LAMB"]


class Halves(torch.optim.Optimizer):
    """A class of its own: what is patched on it stays with it."""

    on_shards = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        assert (optimizer_checks.__file__ in files()) is self.on_shards
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(0.5)


def files() -> set[str]:
    return {frame.filename for frame in traceback.extract_stack()}


def test_hooks_run_outside_of_local_values_of_an_optimizer_that_was_made_before():
    parameter = nn.Parameter(torch.ones(2))
    optimizer, hooks = Halves([parameter]), []
    optimizer.register_step_pre_hook(lambda *_: hooks.append(optimizer_checks.__file__ in files()))
    optimizer.register_step_post_hook(lambda *_: hooks.append(optimizer_checks.__file__ in files()))
    optimizer.step()
    optimizer_checks.step_on_shards(Halves)
    Halves.on_shards = True
    optimizer.step()
    Halves([parameter]).step()
    assert hooks == [False] * 4 and parameter[0] == 0.125


class Squares(nn.Module):
    """A model that returns its loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8)).double()

    def forward(self, x):
        return self.layers(x).square().mean()


def steps_of_closures(options):
    """SGD and Adagrad with closures, also inside no_sync(): weights equal those of one process."""
    model, batches = (
        Squares(),
        [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).double() for i in range(4)],
    )
    plain = copy.deepcopy(model)
    pm = autopart.parallelize(model, "dp2", example_args=(batches[0],), **options)
    for kind in (torch.optim.SGD, torch.optim.Adagrad):
        for trained in (plain, pm):
            optimizer = kind(trained.parameters(), lr=0.1)
            for x in batches:

                def closure(trained=trained, optimizer=optimizer, x=x):
                    optimizer.zero_grad()
                    loss = trained(x)
                    loss.backward()
                    return loss

                loss = optimizer.step(closure)
            assert float(loss) > 0
    full = pm.full_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=1e-10, atol=1e-10)
    if options:
        return ""
    with pm.no_sync():
        pm(batches[0]).backward()

    def in_no_sync():
        with pm.no_sync():
            loss = pm(batches[0])
            loss.backward()
        return loss

    with pytest.raises(UsageError) as error:
        optimizer.step(in_no_sync)
    return str(error.value).splitlines()[0]


@pytest.mark.parametrize("options", [{}, pytest.param({"zero": 3}, marks=pytest.mark.large)])
def test_steps_with_a_closure(options):
    texts = dist.run_ranks(steps_of_closures, 2, options)
    expected = "Adagrad.step() needs gradients that are reduced over the ranks"
    assert texts == [expected if not options else ""] * 2
