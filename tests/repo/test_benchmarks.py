"""Every benchmark script runs in its quick mode, and its last line is JSON."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TIME_LIMIT_S = 600
SCRIPTS = [
    path.relative_to(BENCHMARKS).as_posix() for path in [*BENCHMARKS.glob("[!_]*.py"), *BENCHMARKS.glob("gpu/*.py")]
]
ON_CPU = "--quick --device cpu"
H200_STEPS = BENCHMARKS / "gpu" / "h200" / "steps.json"
OPTIONS = {  # in place of --quick
    "against.py": "--quick --base HEAD",
    "beside_torch.py": "--quick --links sleep --only zero3-bf16 pp2",
    "coverage.py": "--quick --only gpt2 --meshes tp2",
    "gpu/kernels.py": ON_CPU,
    "gpu/probe.py": "--device cpu",
    "gpu/sharing.py": f"{ON_CPU} --ranks 2",
    "gpu/steps.py": f"predict {H200_STEPS} --only gpt2-medium",
    "host_memory.py": "--quick --only 2-tp2-folder 2-pp2-folder",
    "memory.py": "--quick --zero 0 3 --recompute none full",
    "overhead.py": "--quick --only llama",
}
"""Scripts that need other options to be quick."""


@pytest.mark.large
@pytest.mark.timeout(TIME_LIMIT_S + 60)
@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_a_benchmark_runs_and_prints_json(script):
    options = OPTIONS.get(script, "--quick").split()
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, str(BENCHMARKS / script), *options, "--json"]
    answer = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert json.loads(answer.stdout.splitlines()[-1])


def test_options_name_existing_scripts():
    assert len(SCRIPTS) > 20 and set(OPTIONS) <= set(SCRIPTS)


@pytest.mark.parametrize(("gpu", "profile", "only", "count"), [
    ("h200", "h200-141gb-sxm", ("gpt2-medium",), 1),
    pytest.param("h200", "h200-141gb-sxm", (), 15, marks=pytest.mark.large),
    pytest.param("h100", "h100-80gb-sxm-measured", (), 8, marks=pytest.mark.large),
], ids=str)  # fmt: skip
def test_steps_measured_on_a_gpu_are_predicted(gpu, profile, only, count, monkeypatch, capsys):
    """By a profile of which no number is fitted to a step."""
    chosen = ("--only", *only) if only else ()
    asked = ("predict", str(BENCHMARKS / "gpu" / gpu / "steps.json"), "--hardware", profile, *chosen)
    path = BENCHMARKS / "gpu" / "steps.py"
    monkeypatch.setattr(sys, "argv", [str(path), *asked, "--json"])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    runpy.run_path(str(path), run_name="__main__")
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert len(rows) == count
    errors = [abs(row["error"]) for row in rows]
    assert sum(errors) / len(errors) < 0.06 and max(errors) < 0.15
    for row in rows:
        assert -0.012 < row["memory_error"] < 0, row["step"]  # what is missing is what cuBLAS keeps for itself
