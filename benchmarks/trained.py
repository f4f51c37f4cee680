"""Train third-party models on two gloo processes and compare their weights with one process.

Each runs three AdamW steps in float64.

    python benchmarks/trained.py [--meshes dp2,tp2,pp2] [--only 'timm: resnet18;...'] [--lists second,third]
                                 [--number 20] [--quick] [--json]

Models use the meshes in turn. A model that does not run entirely in float64 is replaced by the next one.
An element whose gradient is only rounding error (a bias before a normalization) is not compared, since AdamW
normalises it to full steps.
With `--json` the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _coverage_page import is_exact
from _ranks import of_first_rank
from by_others import MODELS, build_case
from by_others.case import Case
from coverage import load
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import autopart

STEPS, RANKS, RATE = 3, 2, 1e-3
CHOSEN = 30
ROUNDING = 1e-6
"""Of the model's largest gradient: an element with smaller ones, in all steps, is not compared."""
RESULTS = Path(__file__).parent / "by_others.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--meshes", type=lambda text: text.split(","), default=["dp2", "tp2", "pp2"])
    parser.add_argument("--only", type=lambda text: text.split(";"), help="these models")
    parser.add_argument(
        "--lists", type=lambda text: text.split(","), default=[], help="of these lists: first,second,third"
    )
    parser.add_argument("--number", type=int, default=CHOSEN, help="number of models")
    parser.add_argument("--quick", action="store_true", help="two models")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    number = len(arguments.only) if arguments.only else 2 if arguments.quick else arguments.number
    rows = of_first_rank(train_all, RANKS, arguments.only or spread(number, arguments.lists), arguments.meshes, number)
    exact = sum(row["exact"] for row in rows)
    print(f"{exact} of {len(rows)} have the weights of one process" if rows else "none is installed: make setup-models")
    if arguments.json:
        print(json.dumps({"benchmark": "trained", "rows": rows}))


def spread(number: int, lists: list[str]) -> list[str]:
    """So many models of those that `coverage.py --by-others` found exact; behind them the others, to take their places.

    Of as many packages as there are, or of the lists of first results (`by_others_third.jsonl`).
    """
    packages: dict[str, list[str]] = {}
    for path in [RESULTS.with_name(f"by_others_{name}.jsonl") for name in lists] or [RESULTS]:
        exact = {name for name, row in load(path).items() if is_exact(row)}
        for name in MODELS:
            if name in exact and (lists or not name.startswith("plain:")):
                packages.setdefault(name if lists else name.partition(":")[0], []).append(name)
    firsts = [names[-1] for names in packages.values()]
    chosen = [firsts[i * len(firsts) // number] for i in range(min(number, len(firsts)))]
    return [*chosen, *(name for name in firsts if name not in chosen)]


def train_all(rank: int, store: str, names: list[str], meshes: list[str], number: int) -> list[dict[str, Any]]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    cases = {name: case for name in names if (case := built(name))}  # before: some look for a process group
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    rows: list[dict[str, Any]] = []
    for name, case in cases.items():
        mesh = meshes[len(rows) % len(meshes)]
        if len(rows) == number:
            break
        try:
            if (own := in_double(case)) is None:
                continue
            row = {"name": name, "mesh": mesh, **trained(*own, mesh)}
        except (autopart.AutopartError, RuntimeError, TypeError) as error:
            row = {"name": name, "mesh": mesh, "exact": False, "text": " ".join(str(error).split())[:300]}
        rows.append(row)
        if rank == 0:
            print(f"{name:<44} {mesh:<5} {row.get('text', row.get('error'))}", flush=True)
    return rows


def built(name: str) -> Case | None:
    """A model; None where its package is not installed (`make setup-models`)."""
    try:
        return build_case(name)
    except ModuleNotFoundError:
        return None


def in_double(case: Case) -> tuple[nn.Module, tuple, dict[str, Any], dict[str, Any]] | None:
    """The model, its call and its loss in float64; None where it does not run in that, or in less here and there."""
    model = case.model.double()
    args, kwargs, target = (pytree.tree_map(_double, given) for given in (case.args, case.kwargs, case.target))
    loss = {"loss_fn": case.loss_fn or summed, "target": torch.zeros(()) if case.loss_fn is None else target}
    try:
        with CastsDown() as casts:
            loss["loss_fn"](copy.deepcopy(model)(*args, **kwargs), loss["target"])
    except (RuntimeError, TypeError, ValueError):
        return None
    return None if casts.found else (model, args, kwargs, loss)


class CastsDown(TorchFunctionMode):
    """Notes whether a value with a gradient is in less than float64: LitGPT's norms are always in float32."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad)
        self.found |= any(leaf.dtype in (torch.float32, torch.complex64) for leaf in leaves)
        return result


def trained(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], loss: dict[str, Any], mesh: str
) -> dict[str, Any]:  # fmt: skip
    """The largest relative difference of a weight after some steps."""
    own, steepest = copy.deepcopy(model), {}
    pm = autopart.parallelize(model, mesh, rng="exact")
    optimizers = torch.optim.AdamW(own.parameters(), RATE), None
    for step in range(STEPS):
        torch.manual_seed(step)
        pm.step(*args, **kwargs, **loss)
        if optimizers[1] is None:
            optimizers = optimizers[0], torch.optim.AdamW(pm.parameters(), RATE)
        torch.manual_seed(step)
        loss["loss_fn"](own(*args, **kwargs), loss["target"]).backward()
        for name, parameter in own.named_parameters():
            if parameter.grad is not None:
                size = parameter.grad.abs()
                steepest[name] = size.maximum(steepest.get(name, size))
        for optimizer in optimizers:
            assert optimizer is not None
            optimizer.step()
            optimizer.zero_grad()
    error = distance(pm.full_state_dict(), own, steepest)
    return {"error": error, "exact": error < 1e-8}


def summed(output: Any, target: Tensor) -> Tensor:
    """A loss of every floating-point output."""
    parts = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([part.square().mean() for part in parts]).sum()


def distance(found: dict[str, Tensor], own: nn.Module, steepest: dict[str, Tensor]) -> float:
    """Relative to a weight's largest element, or to what a step changes where that is more."""
    least = ROUNDING * max(float(size.max()) for size in steepest.values() if size.numel())
    apart = [0.0]
    for name, parameter in own.named_parameters():
        if name in found and parameter.numel():
            difference = (found[name] - parameter.detach()).abs()
            if name in steepest:
                difference = difference.where(steepest[name] > least, 0.0)
            apart.append(float(difference.max() / parameter.detach().abs().max().clamp(min=RATE)))
    return max(apart)


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


if __name__ == "__main__":
    main()
