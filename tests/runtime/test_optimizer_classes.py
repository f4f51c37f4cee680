"""Every optimizer class of the guide's table: updates on all ranks equal those of one device, or are refused."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dist
import precision_models
import pytest
import torch
import zoo
from checkpoint_models import BUILD
from full_tensor_optimizers import GlobalScale, Shampoo, TrustRatio, WithClosure
from test_partitioned_optimizer import Lamb
from torch import nn
from traced import run_of

import autopart
from autopart.errors import OptionError
from autopart.options import Options
from autopart.proof.steps.training_options import Training
from autopart.runtime.optimizers import optimizer_checks

Named = list[tuple[str, nn.Parameter]]
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "optimizers.md"

MESHES: list[tuple[str, dict[str, Any]]] = [
    ("dp2,tp2", {"zero": 3}), ("pp2", {}), ("tp2", {}), ("dp2", {}), ("dp2", {"zero": 1}), ("dp2", {"zero": 2}),
    ("dp2", {"zero": 3}), ("dpr2,dp2", {"zero": 3}), ("ep2", {}),
]  # fmt: skip
SMALL = {"num_layers": 1, "hidden": 16, "vocab": 32, "seq": 6}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: run_of(zoo.gpt2, heads=4, **SMALL),
    "llama": lambda: run_of(zoo.llama, **SMALL),
    "mixtral": lambda: run_of(precision_models.mixtral),
    "conv_net": lambda: run_of(zoo.conv_net),
    "skip_mlp": lambda: run_of(zoo.skip_mlp, num_layers=2, hidden=8, rows=64),
}


def all_with(kind: Any, **options: Any) -> Callable[[Named], Any]:
    return lambda named: kind([parameter for _, parameter in named], **options)


def matrices_with(kind: Any, without: str = "emb|wte|wpe|lm_head", **options: Any) -> Callable[[Named], Any]:
    """The optimizer for matrices, except those with a name that matches `without`; AdamW for the rest."""

    def make(named: Named) -> list[torch.optim.Optimizer]:
        matrices = [p for name, p in named if p.ndim == 2 and not re.search(without, name)]
        chosen = {id(p) for p in matrices}
        return [kind(matrices, **options), torch.optim.AdamW([p for _, p in named if id(p) not in chosen], lr=1e-2)]

    return make


KINDS = {
    "Muon": matrices_with(torch.optim.Muon, lr=0.05),
    "Adafactor": all_with(torch.optim.Adafactor, lr=0.05),
    "Lamb": all_with(Lamb, lr=0.05),
    "Shampoo": all_with(Shampoo, lr=0.05),
    "TrustRatio": all_with(TrustRatio, lr=0.05),
    **{name: all_with(getattr(torch.optim, name), lr=1e-3)
       for name in optimizer_checks.ELEMENTWISE if name != "SparseAdam"},
}  # fmt: skip


def prove(model: str, mesh: str, options: dict[str, Any], kinds: dict[str, Any], steps: int = 3) -> None:
    """All ranks train in lock step beside one device: weights and state of each step are equal to 1e-10."""
    run = MODELS[model]()
    arranged = run.arrange(mesh, None, Options(rng="exact", **options))
    for name, make in kinds.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the package's own
            found = run.check(arranged, training=Training(steps, make, run.arguments, (run.arguments,)))
        assert found.ok, f"{name} {model} {mesh} {options}: {found}"


CASES = [(model, *mesh) for model in MODELS for mesh in MESHES if (mesh[0] == "ep2") <= (model == "mixtral")]


@pytest.mark.few
@pytest.mark.parametrize(("model", "mesh", "options"), CASES)
def test_updates_are_those_of_one_device(model, mesh, options):
    # GPT-2's key biases have gradients of rounding alone, which some optimizers scale to whole steps.
    few = model == "gpt2" or (model, mesh) not in (("llama", "dp2,tp2"), ("conv_net", "tp2"))
    names = ("Muon", "Adafactor", "Lamb", "Shampoo", "TrustRatio") if few else tuple(KINDS)
    prove(model, mesh, options, {name: KINDS[name] for name in names})


@pytest.mark.large
@pytest.mark.parametrize(("model", "mesh", "options"), CASES)
def test_updates_of_pytorch_optimizer_are_those_of_one_device(model, mesh, options):
    package = pytest.importorskip("pytorch_optimizer")

    def muon(named: Named) -> Any:
        matrices, rest = ([p for _, p in named if (p.ndim == 2) is is_matrix] for is_matrix in (True, False))
        return package.Muon([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}])

    kinds = {
        "Shampoo": all_with(package.Shampoo, lr=1e-2),
        "ScalableShampoo": all_with(package.ScalableShampoo, lr=1e-2, start_preconditioning_step=2),
        "AdaFactor": all_with(package.AdaFactor, lr=1e-2), "Lamb": all_with(package.Lamb, lr=1e-2),
        "LARS": all_with(package.LARS, lr=1e-1), "Muon": muon,
    }  # fmt: skip
    if model == "skip_mlp":  # SOAP amplifies rounding of gradients without full rank, also on one device
        kinds["SOAP"] = matrices_with(package.SOAP, "head", lr=1e-2, precondition_frequency=2)
    prove(model, mesh, options, kinds)


def test_every_class_of_torch_is_in_the_table_of_the_guide():
    kinds = [kind for kind in vars(torch.optim).values() if inspect.isclass(kind)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, torch.optim.Optimizer)} - {"Optimizer"}
    rows = [line.split("|")[1:4] for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    listed = {name: how for names_, how, _ in rows for name in re.findall(r"`torch\.optim\.(\w+)`", names_)}
    assert names == set(listed)
    for name, how in listed.items():
        kind = getattr(torch.optim, name)
        if optimizer_checks.is_elementwise_class(kind):
            assert "pm.parameters()" in how
        elif optimizer_checks.reason_of(kind, optimizer_checks.OF_THE_MODEL):
            assert "refused" in how
        else:
            assert "pm.optimizer" in how


def errors() -> list[str]:
    model, batch = BUILD["tied"]()
    pm = autopart.parallelize(model, "tp2", example_kwargs=batch)
    texts = []
    for kind in (GlobalScale, WithClosure):
        with pytest.raises(OptionError) as caught:
            pm.optimizer(kind, lr=0.1)
        texts.append(str(caught.value))
    assert pm.optimizer(partial(TrustRatio, lr=0.1)).class_name == "TrustRatio"
    return texts


def line_of(kind: type, text: str) -> int:
    lines, start = inspect.getsourcelines(kind)
    return start + next(i for i, line in enumerate(lines) if text in line)


def test_optimizers_that_combine_tensors_or_call_closures_are_refused_with_their_line():
    combines, closure = dist.run_ranks(errors, 2, timeout_s=120.0)[0]
    file = inspect.getsourcefile(Shampoo)
    assert (
        combines
        == f"""GlobalScale cannot train a partitioned model
  why    its update of a matrix depends on other matrices, and these are updated on different ranks
  where  item() reads the value of a tensor: {file}:{line_of(GlobalScale, "float(parameter.grad.norm())")}
  try    an optimizer that updates each tensor by itself, such as torch.optim.Muon"""
    )
    assert (
        closure
        == f"""WithClosure cannot train a partitioned model
  why    its step calls a closure that runs the model, and pm.optimizer calls the step after the backward
  where  step(): {file}:{line_of(WithClosure, "closure()")}
  try    an optimizer whose step() needs no closure, such as torch.optim.Muon or AdamW"""
    )
