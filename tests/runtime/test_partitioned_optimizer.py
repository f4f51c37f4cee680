"""`pm.optimizer`: optimizers of full tensors are exact on every mesh, and their state is saved and loaded."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import dist
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_models import BUILD, TIMEOUT_S
from full_tensor_optimizers import Shampoo
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

import autopart
from autopart.errors import OptionError, UsageError
from autopart.ir.mesh import Mesh
from autopart.ir.run.full_tensors import hidden_matrices
from autopart.runtime.optimizers.chained_optimizer import ChainedOptimizer

KINDS = {"gpt2": ("muon", "lamb"), "tied": ("muon", "adafactor", "lamb")}
"""{model: optimizers}. GPT-2's key biases have gradients of rounding alone, which Adafactor scales to whole steps."""

VECTORS = partial(torch.optim.AdamW, lr=1e-2)


class Lamb(torch.optim.Optimizer):
    """A step is scaled by the norms of the tensor and of its update (You et al. 2020, arXiv:1904.00962).

    Its state has a tensor of another shape than the parameter's.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                norms = state.setdefault("norms", torch.zeros(3, dtype=parameter.dtype))
                momentum.lerp_(parameter.grad, 0.1)
                norms.mul_(0.5).add_(parameter.norm())
                parameter.sub_(momentum * group["lr"] * norms[0] / (momentum.norm() + 1e-3) / group["steps"])


OF_ALL: dict[str, Any] = {"adafactor": torch.optim.Adafactor, "lamb": Lamb, "shampoo": Shampoo}


def make(kind: str, module: Any) -> torch.optim.Optimizer:
    """Create an optimizer of a partitioned model, or of a model on a single device."""
    if hasattr(module, "optimizer"):
        if kind == "muon":
            return module.optimizer(torch.optim.Muon, lr=0.05, others=VECTORS)
        return module.optimizer(OF_ALL[kind], lr=0.05)
    if kind == "muon":
        names, named = hidden_matrices(module), dict(module.named_parameters())
        muon = torch.optim.Muon([p for name, p in named.items() if name in names], lr=0.05)
        return ChainedOptimizer([muon, VECTORS([p for name, p in named.items() if name not in names])])
    return OF_ALL[kind](module.parameters(), lr=0.05)


def train(module: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], steps: int) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(steps):
        if hasattr(module, "full_grads"):
            module.step(**batch)
            module.clip_grad_norm_(0.5)
        else:
            out = module(**batch)
            (out if isinstance(out, Tensor) else out.loss).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def one_process(name: str, kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Tensor]]:
    model, batch = BUILD[name]()
    optimizer = make(kind, model)
    train(model, optimizer, batch, steps)
    return model, optimizer, batch


def same(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    for key, value in expected.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-9, msg=f"{what} {key}")


def in_turn(cases: list[tuple[str, str, str, dict[str, Any]]]) -> None:
    """Train, save, load into another optimizer and go on. Compare with a single device."""
    for name, kind, mesh, options in cases:
        what = f"{name} {kind} {mesh} {options}"
        expected, one, _ = one_process(name, kind, 2)
        model, batch = BUILD[name]()
        pm = autopart.parallelize(model, mesh, example_kwargs=batch, **options)
        optimizer = make(kind, pm)
        assert not optimizer.state_dict()["state"] and not optimizer.state
        train(pm, optimizer, batch, 2)
        same(pm.full_state_dict(), expected.state_dict(), what)
        full = pm.full_optimizer_state_dict(optimizer)
        for parameter, values in get_optimizer_state_dict(expected, one)["state"].items():
            same(full["state"][parameter], values, f"{what} {parameter}")
        another = make(kind, pm)
        pm.load_full_optimizer_state_dict(another, full)
        again = make(kind, pm)
        again.load_state_dict(another.state_dict())
        train(pm, again, batch, 1)
        train(expected, one, batch, 1)
        same(pm.full_state_dict(), expected.state_dict(), f"{what}, after loading")


@pytest.mark.parametrize("cases", [
    [("gpt2", "muon", "tp2", {}), ("gpt2", "shampoo", "tp2", {}), ("tied", "lamb", "tp2", {}),
     ("tied", "adafactor", "dp2", {"zero": 3}),
     ("gpt2", "muon", "pp2", {})],
    pytest.param([
        (name, kind, mesh, options) for name, kinds in KINDS.items() for kind in kinds
        for mesh, options in (("tp2", {}), ("pp2", {}), ("dp2", {}), ("dp2", {"zero": 1}), ("dp2", {"zero": 2}),
                              ("dp2", {"zero": 3}))
    ], marks=pytest.mark.large),
], ids=["some", "all"])  # fmt: skip
def test_updates_of_full_tensors_are_those_of_one_device(cases):
    dist.run_ranks(in_turn, 2, cases, timeout_s=5 * TIMEOUT_S)


@pytest.mark.large
def test_updates_of_full_tensors_on_two_axes():
    cases = [(name, kind, mesh, options) for name in ("gpt2", "tied") for kind in ("muon", "lamb")
             for mesh, options in (("dp2,tp2", {"zero": 3}), ("pp2,tp2", {}), ("dpr2,dp2", {"zero": 3}))]  # fmt: skip
    dist.run_ranks(in_turn, 4, cases, timeout_s=5 * TIMEOUT_S)


def save(folder: str, name: str, kind: str, mesh: str, options: dict[str, Any]) -> None:
    model, batch = BUILD[name]()
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, **options)
    optimizer = make(kind, pm)
    train(pm, optimizer, batch, 2)
    weights, moments = get_state_dict(pm, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


def resume(folder: str, name: str, kind: str, mesh: str, options: dict[str, Any]) -> None:
    model, batch = BUILD[name]()
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, **options)
    optimizer = make(kind, pm)
    weights, moments = get_state_dict(pm, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(pm, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(pm, optimizer, batch, 1)
    expected, one, _ = one_process(name, kind, 2)
    train(expected, one, batch, 1)
    same(pm.full_state_dict(), expected.state_dict(), f"{kind} {mesh}")


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "kind"), [("gpt2", "shampoo"), ("gpt2", "muon"), ("gpt2", "lamb"), ("tied", "adafactor")]
)
def test_a_checkpoint_is_resumed_on_another_mesh(name, kind):
    with tempfile.TemporaryDirectory() as folder:
        dist.run_ranks(save, 2, folder, name, kind, "tp2", {}, timeout_s=TIMEOUT_S)
        dist.run_ranks(resume, 2, folder, name, kind, "dp2", {"zero": 3}, timeout_s=TIMEOUT_S)


def errors() -> list[str]:
    model, batch = BUILD["tied"]()
    pm = autopart.parallelize(model, "tp2", example_kwargs=batch)
    texts = []
    tried = [
        lambda: pm.optimizer(torch.optim.LBFGS),
        lambda: pm.optimizer(torch.optim.Muon, ["nothing.*"], lr=0.1),
        lambda: pm.optimizer(torch.optim.Muon, [torch.zeros(2, 2)], lr=0.1),
        lambda: pm.optimizer("muon"),
        lambda: pm.optimizer(torch.optim.Muon, lr=0.1),
        lambda: pm.optimizer(Lamb, lr=0.1).add_param_group({"params": []}),
    ]
    for attempt in tried:
        with pytest.raises((OptionError, UsageError, ValueError)) as caught:
            attempt()
        texts.append(str(caught.value))
    assert len(pm.optimizer(Lamb, ["up.*", "down.weight"], lr=0.1).param_groups[0]["params"]) == 3
    return texts


OF_LBFGS = """LBFGS cannot train a partitioned model
  why    its step follows from all parameters together, and its tensors are updated on different ranks
  try    torch.optim.Muon or AdamW, or a mesh of dp alone with zero=0 and the optimizer's own constructor"""
OF_PATTERN = """no trainable parameter matches 'nothing.*'
  try    a pattern of names such as 'embed.weight', as of pm.named_parameters()"""


def test_wrong_arguments_are_named():
    said = dist.run_ranks(errors, 2, timeout_s=TIMEOUT_S)
    assert said[0] == said[1]
    assert said[0][:2] == [OF_LBFGS, OF_PATTERN]
    assert "not those of the unpartitioned model" in said[0][2]
    assert "'muon' is no optimizer class" in said[0][3]
    assert "others=" in said[0][4]
    assert "takes no further parameter groups" in said[0][5]


def chain(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    vectors = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [torch.optim.Muon(matrices, lr=0.05), VECTORS(vectors)]


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "options"), [("dp2,tp2", {"zero": 3}), ("pp2,tp2", {}), ("tp2", {})])
def test_verify_proves_steps_of_several_optimizers(mesh, options):
    model, batch = BUILD["tied"]()
    assert Mesh.parse(mesh).num_ranks <= 4
    result = autopart.verify(model, mesh, example_kwargs=batch, steps=2, optimizer=chain, **options)
    assert result.ok, str(result)
    lamb = autopart.verify(model, mesh, example_kwargs=batch, steps=2, optimizer=lambda n: Lamb([p for _, p in n], 0.1))
    assert lamb.ok, str(lamb)
