"""Programs as Python packages: the package runs without autopart, with autopart's losses."""

from __future__ import annotations

import ast
import copy
import importlib
import sys
from pathlib import Path

import pytest
import torch
import zoo
from click.testing import CliRunner
from dist import run_ranks
from torch import nn

import autopart
from autopart.cli.main import main
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
    "tp2-t5": ({}, "t5"),
    "dp2-bf16": ({"precision": "bf16", "zero": 3}, "gpt2"),
    "dp2-zero2": ({"zero": 2, "recompute": "full"}, "phi3"),
    "pp2-skip": ({"microbatches": 2}, "skip_mlp"),
    "dp2,tp2": ({"zero": 3}, "gpt2"),
    "pp2,tp2": ({"microbatches": 2, "sequence_parallel": True}, "llama"),
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
            expected = losses_of(lambda pm=pm, batch=batch: pm.step(**batch), pm.parameters(), optimizer)
            losses = losses_of_package(folder, optimizer)
            assert all(abs(a - b) <= WITHIN * abs(b) for a, b in zip(losses, expected, strict=True)), (
                f"{name} with {optimizer}: {losses}, not {expected}"
            )
            assert expected[0] > expected[-1]
    pm.export(folder / "again")
    assert (folder / "again" / "settings.py").exists() and not (folder / "again" / "batch.pt").exists()


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


def test_the_command_writes_a_package(tmp_path):
    """`autopart export` writes the weights of all ranks; the package's code equals that of `Plan.export_code`."""
    model, batch = small()
    plan = autopart.plan(model, "pp2,dp2", example_kwargs=batch, microbatches=2, zero=3)
    plan.save(tmp_path / "plan.json")
    arguments = ["export", tmp_path / "plan.json", "--model", "test_code_export:small", "-o", tmp_path / "a"]
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    assert result.output == f"wrote {tmp_path}/a: torchrun --nproc-per-node 4 {tmp_path}/a/run.py\n"
    plan.export_code(tmp_path / "b", model, example_kwargs=batch)
    for file in (tmp_path / "b").glob("*.py"):
        assert (tmp_path / "a" / file.name).read_text() == file.read_text()
    ranks = [torch.load(tmp_path / "a" / "weights" / f"rank_{rank}.pt")["parameters"] for rank in range(4)]
    assert ranks[0].keys() == ranks[1].keys() and not ranks[0].keys() & ranks[2].keys()
    halves = [rank["layers.0.weight"] for rank in ranks[:2]]
    full = model.get_parameter("layers.0.weight")
    assert any(torch.equal(torch.cat(halves, dim), full) for dim in (0, 1))


def small():
    torch.manual_seed(0)
    return zoo.SkipMLP(4, 32), {"x": torch.randn(8, 32), "y": torch.randn(8, 32)}


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.up(x)).square().mean()


def normed():
    return Normed(), {"x": torch.randn(8, 8)}


REFUSED = {
    "batch norm": ("dp2", normed, {}, "the buffer norm.running_mean cannot be exported as code"),
    "ring": ("cp2", zoo.llama, {"context": "ring"}, "the operator ring_attention"),
    "dp_sync": ("dp2", zoo.gpt2, {"dp_sync": "powersgd:2"}, "dp_sync cannot be exported as code"),
    "stages": ("pp2", zoo.gpt2, {"schedule": "interleaved_1f1b", "microbatches": 2}, "4 stages on pp=2 cannot be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named(name, tmp_path):
    mesh, build, options, text = REFUSED[name]
    model, batch = build()
    plan = autopart.plan(model, mesh, example_kwargs=batch, **options)
    with pytest.raises(PlanError) as error:
        plan.export_code(tmp_path / "package", model, example_kwargs=batch)
    assert text in str(error.value)


def test_other_folders_are_not_overwritten(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    model, batch = small()
    plan = autopart.plan(model, "tp2", example_kwargs=batch)
    with pytest.raises(PlanError, match="exists and is not an exported package"):
        plan.export_code(tmp_path, model, example_kwargs=batch)
