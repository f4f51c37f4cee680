"""`autopart doctor`, and how an error is reported where several processes meet it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from autopart import doctor
from autopart.cli import main


def test_doctor_on_this_machine():
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    for name, value in (
        ("torch", torch.__version__),
        ("gloo", "available"),
        ("cores", "process"),
        ("memory", "GB free"),
    ):
        assert any(line.startswith(f"ok       {name} ") and value in line for line in result.output.splitlines()), name
    found = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    assert found["ok"] and {"name": "gloo", "value": "available", "ok": True, "hint": ""} in found["findings"]


def test_doctor_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.4.1+cu121")
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "MISSING  torch         2.4.1+cu121 is too old\n" in result.output
    assert "pip install 'torch>=2.11'" in result.output and "MISSING  gloo" in result.output
    assert "ok       transformers  not installed: --hf-config needs it" in result.output


@pytest.mark.large
@pytest.mark.timeout(400)
def test_under_torchrun_one_rank_tells_the_error():
    """Both meet it; torchrun's own lines are beside it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "autopart", "run", "--hf-config", "gpt2", "--mesh", "tp3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert done.stderr.count("mesh tp3 needs 3 processes") == 1, done.stderr
    assert "autopart.errors" not in done.stderr and "rank 1:" not in done.stderr
