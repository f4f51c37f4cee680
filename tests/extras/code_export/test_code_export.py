"""Programs as Python packages: the package runs without autopart, with autopart's losses."""

from __future__ import annotations

import ast
import copy
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import zoo
from dist import run_ranks
from torch import nn

import autopart
from autopart.errors import PlanError

WITHIN = 1e-10
STEPS = 3
OPTIMIZERS = {"AdamW": {"lr": 1e-2}, "SGD": {"lr": 1e-1}}
CASES = {
    "tp2": ({}, "llama"),
    "dp2": ({"zero": 0}, "llama"),
    "dp2-zero1": ({"zero": 1}, "gpt2"),
    "dp2-zero3": ({"zero": 3, "microbatches": 2}, "llama"),
    "cp2": ({"context": "gather"}, "llama"),
    "cp2-ulysses": ({"context": "ulysses"}, "llama"),
    "pp2": ({"microbatches": 4}, "llama"),
    "pp2-tied": ({"microbatches": 2}, "gpt2"),
    "tp2-recompute": ({"recompute": "full"}, "llama"),
    "dp2,tp2": ({"zero": 3}, "gpt2"),
    "pp2,tp2": ({"microbatches": 2, "sequence_parallel": "sharded"}, "llama"),
    "dp2,pp2": ({"zero": 3, "microbatches": 2}, "bert"),
}
MODULES = ("collectives", "local_operators", "run", "settings", "sharding", "training", "stage_0", "stage_1")


def losses_of(step, parameters, optimizer):
    optimizer = getattr(torch.optim, optimizer)(parameters, **OPTIMIZERS[optimizer])
    losses = []
    for _ in range(STEPS):
        losses.append(float(step()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def losses_of_package(folder, optimizer):
    """Train an exported package in this process, as its `run.py` does."""
    sys.path.insert(0, str(folder))
    try:
        trainer = importlib.import_module("run").load()
        batch = torch.load(Path(folder) / "batch.pt")
        return losses_of(lambda: trainer.step(batch), trainer.parameters(), optimizer)
    finally:
        sys.path.remove(str(folder))
        for name in MODULES:
            sys.modules.pop(name, None)


def export_and_train(names, root):
    """Export cases with `pm.export`, and compare losses of the packages with losses of autopart."""
    for name in names:
        options, build = CASES[name]
        mesh, folder = name.partition("-")[0], Path(root) / name
        model, batch = getattr(zoo, build)()
        for optimizer in OPTIMIZERS:
            pm = autopart.parallelize(copy.deepcopy(model), mesh, example_kwargs=batch, **options)
            pm.export(folder, example_kwargs=batch)
            dist.barrier()
            expected = losses_of(lambda pm=pm: pm.step(**batch), pm.parameters(), optimizer)
            losses = losses_of_package(folder, optimizer)
            assert all(abs(a - b) <= WITHIN * abs(b) for a, b in zip(losses, expected, strict=True)), (
                f"{name} with {optimizer}: {losses}, not {expected}"
            )
            assert expected[0] > expected[-1]


def test_a_package_has_the_losses_of_autopart(tmp_path):
    run_ranks(export_and_train, 2, ["tp2"], str(tmp_path))
    code = (tmp_path / "tp2" / "stage_0.py").read_text()
    assert code.count("def llama_decoder_layer(") == 1
    assert "for index in range(0, 2):" in code
    assert "# tp (2 ranks): P -> R, forward all-reduce of 24.6 kB in" in code
    for file in (tmp_path / "tp2").glob("*.py"):
        compile(file.read_text(), str(file), "exec")
        assert not imports_of(file) - sys.stdlib_module_names - {"torch", *MODULES}, file


def imports_of(file):
    nodes = list(ast.walk(ast.parse(file.read_text())))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in modules}


@pytest.mark.large
@pytest.mark.whole
@pytest.mark.parametrize("ranks", [2, 4])
def test_packages_of_every_axis_have_the_losses_of_autopart(ranks, tmp_path):
    names = [name for name in CASES if ("," in name) == (ranks == 4)]
    run_ranks(export_and_train, ranks, names, str(tmp_path), timeout_s=500)
