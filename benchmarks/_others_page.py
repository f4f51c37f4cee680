"""Results of third-party models as text: exact, rejected, and the results of torch itself."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

Row = dict[str, Any]
Rows = Mapping[str, Row]

OTHER_MESHES = ("dp2", "tp2", "pp2", "dp2,tp2")
OUTCOMES = ("wrong", "crash", "not finite", "time limit", "refused", "exact")
"""Worst first: that of a model is its worst on any mesh."""
IDIOMS = "plain"

METHOD = """
This section tests models of other packages, and coding patterns that are harder to trace than those of most models
(`benchmarks/by_others/`; `make setup-models` installs the packages). Each model is small, has random weights and is in
training mode. `autopart.verify` checks it on four meshes: dp2, tp2, pp2 and dp2,tp2. On pp2 the batch has four
microbatches, or one if the model combines samples of the batch.

*Refused* means that autopart raises an error of its own, and *crash* any other exception. *Wrong* means that results of
the ranks differ from the model's. *Not finite* means that the model itself gives NaN. If a model is not exact on every
mesh, torch is tested too: `torch.export.export(strict=False)` and `torch.compile(fullgraph=True)`.
""".strip()


def package(row: Row) -> str:
    return row["name"].partition(":")[0]


def outcomes(row: Row) -> dict[str, str]:
    """By mesh. What fails before any mesh is asked fails on all."""
    if "error" in row:
        return dict.fromkeys(OTHER_MESHES, outcome_of(row["error"]))
    return {mesh: on_mesh(found) for mesh, found in row["meshes"].items()}


def on_mesh(found: Row) -> str:
    if "error" in found and not found["exact"]:
        return outcome_of(found["error"])
    return "exact" if found["exact"] else "not finite" if "not_finite" in found else "wrong"


def outcome_of(error: Row) -> str:
    if error["type"] == "TimeLimit":
        return "time limit"
    return "refused" if error.get("refused") else "crash"


def outcome(row: Row) -> str:
    return min(outcomes(row).values(), key=OUTCOMES.index)


def torch_takes(row: Row) -> bool:
    """Whether torch.export traces the model or torch.compile runs it without a break; what is exact was traced."""
    found = row.get("torch", {})
    return outcome(row) == "exact" or "yes" in (found.get("export"), found.get("compile"))


def counts(rows: Rows) -> str:
    """How many of the packages' models and of the idioms come to what."""
    groups: dict[bool, list[Row]] = {False: [], True: []}
    for row in rows.values():
        groups[package(row) == IDIOMS].append(row)
    found = [Counter(map(outcome, group)) for group in groups.values()]
    taken = [[row for row in group if torch_takes(row)] for group in groups.values()]
    exact = [sum(outcome(row) == "exact" for row in group) for group in taken]
    packages = len({package(row) for row in groups[False]})
    lines = [
        f"| | models of {packages} packages | coding patterns |",
        "|---|---:|---:|",
        f"| all | {len(groups[False])} | {len(groups[True])} |",
        *(f"| {name} | {found[0][name]} | {found[1][name]} |" for name in reversed(OUTCOMES)),
        f"| torch can export them, or compile them without a graph break | {len(taken[0])} | {len(taken[1])} |",
        f"| of these, exact on all four meshes | {share(exact[0], taken[0])} | {share(exact[1], taken[1])} |",
    ]
    return "\n".join(lines)


def first_counts(first: Rows, second: Rows | None = None, third: Rows | None = None) -> str:
    """Return how many models that were chosen before any was tried were exact on all meshes when they first ran.

    Args:
        first: results of the models of `unseen/`, on four meshes.
        second: results of the models of `later/`, on dp2 and tp2. They were chosen after faults of the first were
            repaired.
        third: results of the models of `unseen/further_*.py`, chosen later still.
    """
    if not first:
        return ""
    models, idioms, taken, exact = _groups(first)
    text = (
        f"{len(models)} of the models and {len(idioms)} of the coding patterns were chosen by popularity, before any "
        f"of them was tried. In their first run, {share(_exact(models), models)} of the models and "
        f"{share(_exact(idioms), idioms)} of the patterns were exact on all four meshes. Together these are "
        f"{share(exact, taken)} of the {len(taken)} that torch can export, or compile without a graph break "
        "(`benchmarks/by_others_first.jsonl`)."
    )
    if not second:
        return text
    for file, later in (("second", second), ("third", third)):
        text += _later_counts(file, later) if later else ""
    return text + " Some of the faults found have been repaired since."


def _later_counts(file: str, rows: Rows) -> str:
    models, idioms, taken, exact = _groups(rows)
    chosen = {"coding patterns": idioms, "models": models}
    counted = [f"{share(_exact(found), found)} of {len(found)} {name}" for name, found in chosen.items() if found]
    return (
        f"\n\nLater, more were chosen by popularity and run once, on dp2 and tp2: {' and '.join(counted)} were exact. "
        f"These are {share(exact, taken)} of the {len(taken)} that torch can export or compile "
        f"(`benchmarks/by_others_{file}.jsonl`)."
    )


def _groups(rows: Rows) -> tuple[list[Row], list[Row], list[Row], int]:
    """Return the models of packages, the idioms, the rows that torch takes, and how many of these are exact."""
    idioms = [row for row in rows.values() if package(row) == IDIOMS]
    models = [row for row in rows.values() if package(row) != IDIOMS]
    taken = [row for row in rows.values() if torch_takes(row)]
    return models, idioms, taken, _exact(taken)


def _exact(rows: Iterable[Row]) -> int:
    return sum(outcome(row) == "exact" for row in rows)


def share(part: int, whole: list[Row]) -> str:
    return f"{part} ({part / len(whole):.0%})" if whole else "0"


def table(rows: Rows, percent: Any) -> str:
    lines = [
        "| model | class | dp2 | tp2 | pp2 | dp2,tp2 | largest error | FLOPs sharded | torch.export | torch.compile |",
        "|---|---|---|---|---|---|---:|---:|---|---|",
    ]
    for name, row in rows.items():
        errors = [found["max_error"] for found in row["meshes"].values() if found.get("exact")]
        cells = [name, row.get("class", ""), *(outcomes(row).get(mesh, "") for mesh in OTHER_MESHES)]
        cells += [f"{max(errors):.0e}" if errors else "", percent((row.get("flops") or {}).get("share"))]
        cells += [row.get("torch", {}).get(way, "").partition(":")[0] for way in ("export", "compile")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def causes(rows: Rows, reason: Any) -> Iterable[tuple[str, str]]:
    """Why a model is not exact, and which, with the meshes where it is on others."""
    for name, row in rows.items():
        if "error" in row:
            yield f"{outcome_of(row['error'])}: {common(reason(row['error']))}", name
            continue
        found: dict[str, list[str]] = defaultdict(list)
        for mesh, result in row["meshes"].items():
            kind = on_mesh(result)
            if kind in ("refused", "crash"):
                found[f"{kind}: {common(reason(result['error']))}"].append(mesh)
            elif kind != "exact":
                found[f"{kind}: {first_line(result)}"].append(mesh)
        for cause, meshes in found.items():
            yield cause, name if len(meshes) == len(row["meshes"]) else f"{name} ({'; '.join(meshes)})"


def common(text: str) -> str:
    """A reason without what differs from model to model: operators, where a value comes from, symbols, addresses."""
    text = re.sub(r"; they come from .*", "", text)
    text = re.sub(r"how much \S+ gives", "how much an operator gives", text)
    return re.sub(r"\bu\d+\b", "u", re.sub(r" at 0x\w+", "", text))


def first_line(result: Row) -> str:
    if "not_finite" in result:
        return result["not_finite"].partition("\n")[0][:160]
    worst = max(result.get("worst", {"": 0.0}).items(), key=lambda entry: entry[1])
    return f"{worst[0]} is off by {worst[1]:.1g}"
