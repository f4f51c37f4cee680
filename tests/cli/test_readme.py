"""README is run: every block of Python and every line of shell but `make`, in order, as a reader would.

All runs in one folder that has what the folder `examples` has. What takes long is of the large tier.
"""

import doctest
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from autopart.recipe.model_source import config_names

ROOT = Path(__file__).resolve().parents[2]
LINE_LIMIT_S = 400
KINDS = ("python", "pycon", "bash", "text")
LONG = re.compile("llama|autopart search", re.IGNORECASE)


@dataclass(frozen=True)
class Step:
    """A block of Python, or a line of shell. `line`: where it stands in the file."""

    kind: str
    text: str
    line: int

    @property
    def is_long(self):
        return bool(LONG.search(self.text))


def blocks(text):
    """(kind, text, line) of every fenced block."""
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        found.append((match[1], match[2], text.count("\n", 0, match.start()) + 2))
    return found


def steps(text):
    for kind, body, line in blocks(text):
        assert kind in KINDS, f"README:{line} is a block of '{kind}': one of {', '.join(KINDS)}"
        if kind == "bash":
            lines = enumerate(body.splitlines(), line)
            yield from (Step(kind, text, at) for at, text in lines if text.strip() and not text.startswith("make "))
        elif kind != "text":
            yield Step(kind, body, line)


README = list(steps((ROOT / "README.md").read_text()))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder as `examples`, with `autopart`, `torchrun` and `python` first on the path."""
    shutil.copy(ROOT / "examples" / "tiny.py", tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in (("autopart", "autopart"), ("torchrun", "torch.distributed.run")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run_step(step, names, folder):
    """Runs a step; the Python of all steps shares `names`."""
    where = f"README.md:{step.line}"
    if step.kind == "bash":
        done = subprocess.run(["bash", "-c", step.text], capture_output=True, text=True, timeout=LINE_LIMIT_S)
        assert done.returncode == 0, f"{where}: {step.text}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip(), f"{where}: {step.text} says nothing"
        return done.stdout
    if step.kind == "pycon":
        return run_session(step, names, where)
    script = re.match(r"# (\w+\.py)\n", step.text)
    if script:
        (folder / script[1]).write_text(step.text)
    else:
        exec(compile(step.text, where, "exec"), names)
    return ""


def run_session(step, names, where):
    test = doctest.DocTestParser().get_doctest(step.text + "\n", names, where, "README.md", step.line)
    assert test.examples, where
    said = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF).run(test, out=said.append, clear_globs=False)
    assert not failed, "".join(said)
    names.update(test.globs)
    return ""


@pytest.mark.large
@pytest.mark.timeout(900)
def test_readme_runs(folder):
    names = {"__name__": "readme"}
    said = "".join(run_step(step, names, folder) for step in README if not step.is_long)
    assert re.search(r"loss \d\.\d+, \d+ tensors", said) and "exact on pp2,dp2,tp2" in said
    assert names["result"].ok


@pytest.mark.large
@pytest.mark.timeout(1800)
def test_the_long_part_of_readme_runs(folder):
    names = {"__name__": "readme"}
    for step in README:
        if step.is_long:
            run_step(step, names, folder)
    assert (folder / "best.json").exists() and (folder / "llama.html").exists()


def test_readme_has_blocks_of_each_kind():
    kinds = {(step.kind, step.is_long) for step in README}
    assert kinds >= {("python", False), ("bash", False), ("bash", True), ("pycon", True), ("python", True)}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("bash", "autopart explain missing.json"),
        ("bash", "true"),
        ("python", "assert 1 == 2"),
        ("pycon", ">>> 1 + 1\n3\n"),
    ],
)
def test_a_step_can_fail(kind, text, folder):
    with pytest.raises(AssertionError):
        run_step(Step(kind, text, 1), {}, folder)


def test_readme_names_every_config():
    text = (ROOT / "README.md").read_text()
    assert [name for name in config_names() if f"`{name}`" not in text] == []


def test_readme_links_to_what_is_there():
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text())
    assert links and [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
