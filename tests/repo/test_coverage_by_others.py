"""The benchmark of models that others wrote: its lists are well formed, and its table says what happened."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import _coverage_page  # noqa: E402
import _coverage_row as measuring  # noqa: E402
import _others_page as page  # noqa: E402
import by_others  # noqa: E402
import coverage as benchmark  # noqa: E402
from by_others.case import Case, classified, images  # noqa: E402

PACKAGES = {name.partition(":")[0] for name in by_others.MODELS} - {page.IDIOMS}


def canonical(package):
    return re.sub(r"[-_.]+", "-", package).lower()


def test_there_are_80_models_of_25_packages():
    idioms = [name for name in by_others.MODELS if name.startswith(f"{page.IDIOMS}: ")]
    assert len(by_others.MODELS) - len(idioms) >= 80 and len(PACKAGES) >= 25 and len(idioms) >= 40
    assert all(re.fullmatch(r"[\w.-]+: \S.*", name) for name in by_others.MODELS)


def test_every_package_is_installed_with_them():
    """`make setup-models` installs a list of its own; `make setup` installs some already, another index torchaudio."""
    lines = (BENCHMARKS / "by_others" / "requirements.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    missing = {canonical(p) for p in PACKAGES} - {canonical(p) for p in pinned}
    assert missing == {"diffusers", "peft", "sentence-transformers", "transformers", "torchaudio"}
    assert not {"torch", "transformers", "numpy"} & {canonical(p) for p in pinned}, "those of `make setup` count"


# One model


class Branch(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        while y.sum() > 0:
            y = y - 1
        return y


class Nothing(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 0


def not_installed():
    import no_such_package  # noqa: F401


def measured(monkeypatch, build, meshes=("dp2", "tp2")):
    monkeypatch.setitem(by_others.MODELS, "package: model", build)
    found = []
    measuring.measure_by_others("package: model", list(meshes), lambda row: found.append(dict(row)))
    return found[-1]


def test_a_model_that_is_exact(monkeypatch):
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 12))
    row = measured(monkeypatch, lambda: classified(net, images(4)))
    assert page.outcome(row) == "exact" and page.outcomes(row) == {"dp2": "exact", "tp2": "exact"}
    assert row["class"] == "Sequential" and row["flops"]["share"] == 1 and row["family"] == _coverage_page.BY_OTHERS
    assert row["parameters"] == sum(p.numel() for p in net.parameters())


def test_a_model_that_is_refused(monkeypatch):
    row = measured(monkeypatch, lambda: Case(Branch(4, 4), (torch.randn(8, 4),)))
    assert page.outcome(row) == "refused" and row["step"] == "trace"
    assert _coverage_page.reason(row["error"]).startswith("TraceError: this line decides what to run")


def test_a_model_that_is_not_finite(monkeypatch):
    row = measured(monkeypatch, lambda: Case(Nothing(4, 4), (torch.zeros(8, 4),)))
    assert page.outcome(row) == "not finite"
    assert all("model" in cause or "output" in cause for cause, _ in page.causes({"m": row}, _coverage_page.reason))


def test_a_package_that_is_not_installed_is_left_out(monkeypatch, tmp_path, capsys):
    row = measured(monkeypatch, not_installed)
    assert benchmark.is_missing(row) and row["error"]["text"] == "No module named 'no_such_package'"
    monkeypatch.setattr(benchmark, "run", lambda *_: dict(row))
    results = tmp_path / "rows.jsonl"
    monkeypatch.setattr(
        sys, "argv", ["coverage.py", "--by-others", "--only", "package: model", "--results", str(results)]
    )
    benchmark.main()
    assert not results.exists() and "left out: No module named 'no_such_package'" in capsys.readouterr().out


def test_an_error_of_a_model_that_is_installed_is_kept(monkeypatch):
    row = measured(monkeypatch, lambda: Case(nn.Linear(4, 4), (torch.zeros(8, 5),)))
    assert not benchmark.is_missing(row) and "error" in row


def test_what_torch_makes_of_a_model(monkeypatch):
    monkeypatch.setitem(by_others.MODELS, "package: model", lambda: Case(Branch(4, 4), (torch.randn(8, 4),)))
    found = []
    measuring.measure_torch("package: model", [], found.append)
    answers = found[-1]["torch"]
    assert answers["runs"] == "yes" and answers["export"].startswith("GuardOnDataDependentSymNode")
    assert answers["compile"].startswith("Unsupported")


# The table


def row(name, torch_says=None, error=None, **meshes):
    exact = {"exact": True, "max_error": 1e-15}
    found = dict.fromkeys(page.OTHER_MESHES, exact) | {m.replace("_", ","): f for m, f in meshes.items()}
    found = {
        "name": name,
        "step": "done",
        "class": "C",
        "family": _coverage_page.BY_OTHERS,
        "meshes": found,
        "no_rule": {},
    }
    if torch_says is not None:
        found["torch"] = dict.fromkeys(("runs", "export", "compile"), torch_says)
    return found if error is None else found | {"error": error, "meshes": {}}


REFUSED = {"type": "StageError", "text": "the batch cannot be cut\n  why    it mixes", "stack": "", "refused": True}
CRASH = {"type": "IndexError", "text": "list index out of range", "stack": "", "refused": False}
LATE = {"type": "TimeLimit", "text": "over 90 s in step tp2", "stack": ""}
ROWS = {
    found["name"]: found
    for found in (
        row("a: exact"),
        row("a: half", "yes", dp2={"exact": False, "error": REFUSED}),
        row("b: crash", "yes", dp2={"exact": False, "error": REFUSED}, tp2={"exact": False, "error": CRASH}),
        row("b: wrong", "yes", dp2_tp2={"exact": False, "max_error": 0.1, "worst": {"a.weight": 0.1, "b": 0.01}}),
        row("b: late", "Unsupported: no", error=LATE),
        row("plain: refused", "TypeError: x", error=REFUSED),
    )
}


def test_the_worst_mesh_counts():
    assert {name: page.outcome(found) for name, found in ROWS.items()} == {
        "a: exact": "exact", "a: half": "refused", "b: crash": "crash", "b: wrong": "wrong", "b: late": "time limit",
        "plain: refused": "refused",
    }  # fmt: skip
    assert [_coverage_page.is_exact(found) for found in ROWS.values()] == [True] + 5 * [False]


def test_every_refusal_counts_against_what_torch_takes():
    counts = page.counts(ROWS)
    assert "| | models of 2 packages | coding patterns |" in counts and "| all | 5 | 1 |" in counts
    assert "| torch can export them, or compile them without a graph break | 4 | 0 |" in counts
    assert "| of these, exact on all four meshes | 1 (25%) | 0 |" in counts


def test_the_page_says_what_is_not_exact_and_where():
    text = _coverage_page.by_others(
        ROWS, {name: ROWS[name] for name in ("a: exact", "b: crash", "b: late", "plain: refused")}
    )
    assert (
        "chosen by popularity, before any of them was tried. In their first run, 1 (33%) of the models and 0 (0%) of"
        in text
    )
    assert "1 (50%) of the 2 that torch can export" in text
    first = {name: ROWS[name] for name in ("a: exact", "plain: refused")}
    assert "dp2 and tp2: 0 (0%) of 1 coding patterns and 1 (100%) of 1 models were exact" in page.first_counts(
        first, first
    )
    assert (
        "- refused: StageError: the batch cannot be cut: it mixes (3): a: half (dp2), b: crash (dp2), plain: refused"
        in text
    )
    assert page.common("how much index gives depends on u0; they come from the input x") == (
        "how much an operator gives depends on u"
    )
    assert "- crash: IndexError: list index out of range (1): b: crash (tp2)" in text
    assert "- wrong: a.weight is off by 0.1 (1): b: wrong (dp2,tp2)" in text
    assert "- time limit: TimeLimit: over 90 s in step tp2 (1): b: late" in text
    table = [line for line in text.split("### Model by model")[1].splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1 and len(table) == 2 + len(ROWS)
    assert "| b: crash | C | refused | crash | exact | exact | 1e-15 |  | yes | yes |" in table


@pytest.mark.parametrize("found", benchmark.load(benchmark.OTHERS.results).values(), ids=lambda found: found["name"])
def test_rows_that_are_kept(found):
    assert found["name"] in by_others.MODELS and found["family"] == _coverage_page.BY_OTHERS
    assert set(found["meshes"]) <= set(page.OTHER_MESHES) and page.outcome(found) in page.OUTCOMES
    assert page.outcome(found) == "exact" or found["torch"]["runs"] == "yes", "a model that cannot run says nothing"


def test_first_results_are_of_listed_models():
    for path in benchmark.FIRSTS:
        assert set(benchmark.load(path)) <= set(by_others.MODELS)
