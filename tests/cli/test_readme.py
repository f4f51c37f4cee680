"""README and the guides are run as a reader would run them, document by document, and their output is compared.

A document runs in a folder of its own, with `tiny.py` and `wrong_rule.py` of the folder `examples`. Its blocks run in
order:

- `python`: if the first line is `# name.py`, the block is written to that file; else it runs, and all such blocks of
  the document share their names.
- `pycon`: a session, compared as a doctest.
- `bash`: every line but those of `make`. A line that ends in `# exits with 2` has to end with that code.
- `text`: output. Every line must occur in what the blocks before it printed; figures may differ. A line `...` stands
  for lines that are left out, and ` ...` at the end of a line for the rest of the line.
"""

import contextlib
import doctest
import io
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
GUIDES = ROOT / "docs" / "guides"
TESTED_ELSEWHERE = ("example-scripts.md",)
"""Documents whose blocks are diffs (`tests/integrations/test_example_scripts.py`)."""
DOCUMENTS = [ROOT / "README.md", *sorted(path for path in GUIDES.glob("*.md") if path.name not in TESTED_ELSEWHERE)]
LINE_LIMIT_S = 400
NEEDED = {"lightning": "lightning"}
"""{document: package of the target `setup-integrations` that its blocks import}."""
KINDS = ("python", "pycon", "bash", "text")
README_LINES = 150
FIGURE = re.compile(r"[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")


@dataclass(frozen=True)
class Step:
    """A block, or one line of a block of shell commands. `line`: line number in the document."""

    kind: str
    text: str
    document: str
    line: int

    @property
    def place(self):
        return f"{self.document}:{self.line}"

    @property
    def script(self):
        """The file that the block is written to, or None."""
        match = re.match(r"# (\w+\.py)\n", self.text)
        return match[1] if match and self.kind == "python" else None


def steps_of(text, document):
    assert not re.search(r"^[ >]+```", text, re.MULTILINE), f"{document}: an indented block is not run"
    steps = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        kind, body, line = match[1], match[2], text.count("\n", 0, match.start()) + 2
        assert kind in KINDS, f"{document}:{line} is a block of '{kind}': use one of {', '.join(KINDS)}"
        lines = enumerate(body.splitlines(), line) if kind == "bash" else [(line, body)]
        steps += [Step(kind, text, document, at) for at, text in lines if text.strip() and not text.startswith("make ")]
    return steps


def steps_of_document(path):
    return steps_of(path.read_text(), path.relative_to(ROOT).as_posix())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder as `examples`, with `autopart`, `torchrun` and `python` first on the path."""
    for name in ("tiny.py", "wrong_rule.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, arguments in (("autopart", "-m autopart"), ("torchrun", "-m torch.distributed.run"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run_step(step, names, folder):
    """Run a block that is no output, and return what it printed. Python blocks share `names`."""
    if step.kind == "bash":
        return run_line(step)
    if step.kind == "pycon":
        return run_session(step, names)
    printed = io.StringIO()
    if step.script:
        (folder / step.script).write_text(step.text)
    else:
        with contextlib.redirect_stdout(printed):
            exec(compile(step.text, step.place, "exec"), names)
    return printed.getvalue()


def run_line(step):
    command, _, code = step.text.partition("# exits with ")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=LINE_LIMIT_S)
    printed = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == int(code or 0), f"{step.place}: {step.text}\nexit code {done.returncode}\n{printed}"
    assert printed.strip(), f"{step.place}: {step.text} prints nothing"
    return printed


def run_session(step, names):
    test = doctest.DocTestParser().get_doctest(step.text + "\n", names, step.place, step.document, step.line)
    assert test.examples, step.place
    report = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF).run(test, out=report.append, clear_globs=False)
    assert not failed, "".join(report)
    names.update(test.globs)
    return ""


def without_figures(line):
    return " ".join(FIGURE.sub("#", line).split())


def check_output(step, printed):
    """Each line of a `text` block must be among the lines printed so far, but for figures."""
    lines = {without_figures(line) for line in printed.replace(f"{Path.cwd()}/", "").splitlines()}
    for number, text in enumerate(step.text.splitlines(), step.line):
        line = without_figures(text)
        if line in ("", "..."):
            continue
        start = line.removesuffix(" ...")
        is_there = any(one.startswith(start) for one in lines) if start != line else line in lines
        assert is_there, f"{step.document}:{number}: not printed: {text}\nprinted was\n{printed}"


def cases():
    """The documents; those that start processes, or plan a large model in a session, are of the large tier."""
    for path in DOCUMENTS:
        is_long = any(step.kind in ("bash", "pycon") for step in steps_of_document(path))
        yield pytest.param(path, marks=pytest.mark.large if is_long else (), id=path.stem)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", cases())
def test_document_runs(path, folder):
    if path.stem in NEEDED:
        pytest.importorskip(NEEDED[path.stem])
    names, printed = {"__name__": "document"}, ""
    for step in steps_of_document(path):
        if step.kind == "text":
            check_output(step, printed)
        else:
            printed += run_step(step, names, folder)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("bash", "autopart explain missing.json"),
        ("bash", "autopart --help # exits with 2"),
        ("bash", "true"),
        ("python", "assert 1 == 2"),
        ("pycon", ">>> 1 + 1\n3\n"),
    ],
)
def test_a_step_can_fail(kind, text, folder):
    with pytest.raises(AssertionError):
        run_step(Step(kind, text, "guide.md", 1), {}, folder)


def test_a_line_of_shell_can_expect_an_error(folder):
    printed = run_step(Step("bash", "autopart explain missing.json  # exits with 2", "guide.md", 1), {}, folder)
    assert "missing.json" in printed


@pytest.mark.parametrize("shown", ["loss 5.25", "loss 1.00\n...\nnorm ...", ""])
def test_output_may_have_other_figures(shown):
    check_output(Step("text", shown, "guide.md", 1), "loss 4.10\nother\nnorm 1 of 2\n")


@pytest.mark.parametrize("shown", ["los 5.25", "loss", "norm 1\n", "other ..."])
def test_output_that_was_not_printed_is_found(shown):
    with pytest.raises(AssertionError):
        check_output(Step("text", shown, "guide.md", 1), "loss 4.10\nnorm 1 of 2\n")


def test_readme_has_blocks_of_each_kind():
    steps = steps_of_document(DOCUMENTS[0])
    assert {step.kind for step in steps} >= {"python", "bash", "text"}
    assert len(DOCUMENTS[0].read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_python_of_a_document_parses(path):
    for step in steps_of_document(path):
        if step.kind == "python":
            compile(step.text, step.place, "exec")


def test_a_guide_names_every_config():
    text = (GUIDES / "command-line.md").read_text()
    assert [name for name in config_names() if f"`{name}`" not in text] == []


def anchors_of(path):
    """The anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "docs" / "index.md"], ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", path.read_text())
    assert links, path
    missing = []
    for link, anchor in links:
        target = (path.parent / link).resolve() if link else path
        if "://" in link:
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            missing.append(f"{link}#{anchor}")
    assert missing == []


def test_every_guide_is_in_the_index():
    text = (ROOT / "docs" / "index.md").read_text()
    assert [path.name for path in DOCUMENTS[1:] if f"guides/{path.name}" not in text] == []
