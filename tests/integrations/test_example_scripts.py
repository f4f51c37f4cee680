"""Scripts of other libraries: the diffs of the guide make them run on two processes, with the losses of one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDE, SCRIPTS = ROOT / "docs" / "guides" / "example-scripts.md", ROOT / "examples" / "libraries"
DIFFS = {match[1]: match[2] for match in re.finditer(r"```diff\n--- (\S+)\n(.*?)```", GUIDE.read_text(), re.DOTALL)}
NEEDS = {"sft_packing.py": "trl", "preferences.py": "trl", "vision_lightning.py": "lightning",
         "diffusion_lora.py": "diffusers"}  # fmt: skip
TIMEOUT_S = 280.0


def applied(diff: str, script: str) -> tuple[str, int]:
    """Apply a diff without line numbers. Return the new script, and the number of lines that were added."""
    added = 0
    for part in diff.split("@@\n"):
        lines = part.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        assert script.count(old) == 1, old
        script = script.replace(old, "".join(line[1:] for line in lines if line[0] in " +"))
        added += sum(line[0] == "+" for line in lines)
    return script, added


def run(script: str, name: str, folder: Path, launcher: list[str]) -> str:
    """Run a script in a folder, and return its line with the results."""
    (folder / name).write_text(script)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, *launcher, name], cwd=folder, env=environ, capture_output=True, text=True,
                         timeout=TIMEOUT_S)  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    (line,) = re.findall(r"^result: .*$", ran.stdout, re.MULTILINE)
    return line


def test_each_script_has_a_short_diff():
    assert set(DIFFS) == {path.name for path in SCRIPTS.glob("*.py")}
    for name, diff in DIFFS.items():
        _, added = applied(diff, (SCRIPTS / name).read_text())
        assert 1 <= added <= 3, name


@pytest.mark.large
@pytest.mark.whole
@pytest.mark.parametrize("name", DIFFS)
def test_scripts_print_the_losses_of_one_process(name, tmp_path):
    pytest.importorskip(NEEDS.get(name, "transformers"))
    script = (SCRIPTS / name).read_text()
    alone = run(script, name, tmp_path, [])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert run(applied(DIFFS[name], script)[0], name, tmp_path, launcher) == alone
