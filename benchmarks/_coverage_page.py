"""Coverage results as text: a table for the terminal, and docs/models.md."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import _others_page as others_page

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
MESHES = ("tp2", "tp4", "pp2", "dp2", "pp2,tp2", "dp2,pp2,tp2")
SEQUENCE, EXPERTS = "cp2", "ep2"
BY_OTHERS = "written by others"
MOST = 0.9  # of the FLOPs
Row = dict[str, Any]
Rows = Mapping[str, Row]

METHOD = """
Every architecture of transformers' `AutoModelForCausalLM`, `...MaskedLM`, `...Seq2SeqLM` and `...ImageClassification`
is built small, with random weights, by one recipe: width, heads, layers, vocabulary, experts, windows and images shrink
by the kind of their name, one layer of every kind stays (`benchmarks/_recipe.py`; where sizes depend on each other, a
table of field values in `benchmarks/_architectures.py`). Each is traced once, with 8 rows of 12 tokens or 8 images, and
its own loss. On each mesh all ranks run forward and backward in float64 (`autopart.verify`); *exact* means that loss,
outputs and every gradient on every rank agree with the model to 1e-10, relative. What the model casts to float32 is
computed in float64.

What this does not show: models run in eval mode (no dropout, batch norm with its running statistics); those that take
images or sound beside text run on text alone, unless they cannot; mixture of experts runs with
`experts_implementation="batched_mm"` (`grouped_mm` has no float64), which computes a product per token and expert.

*FLOPs sharded* is measured: torch's `FlopCounterMode` counts forward and backward on one rank, and on both ranks of
`tp2`, as they run; what is not sharded is done twice. It counts matrix products (those of attention too) and
convolutions, and misses everything else: pointwise operators, softmax, norms, scans, look-ups, Fourier transforms.
""".strip()

FAMILIES_HEAD = "| family | architectures | traced | exact on all six | of these 90 % of FLOPs sharded under tp2 |"
TABLE_HEAD = "| architecture | class | exact on | cp2 | ep2 | largest error | FLOPs sharded | runs whole under tp2 |"
TRANSFORM = "torch's `tensor_parallel_transformation`, with transformers' plan"
PIPELINE = "`torch.distributed.pipelining.pipeline()` splits the model at its middle layer and gives the right output"


# What a row says


def is_exact(row: Row) -> bool:
    if row.get("family") == BY_OTHERS:
        return (
            "error" not in row and bool(row["meshes"]) and all(found.get("exact") for found in row["meshes"].values())
        )
    return "error" not in row and all(row["meshes"].get(mesh, {}).get("exact") for mesh in MESHES)


def was_traced(row: Row) -> bool:
    return "no_rule" in row


def share(row: Row) -> float | None:
    return (row.get("flops") or {}).get("share")


def is_mostly_sharded(row: Row) -> bool:
    return (share(row) or 0.0) >= MOST


def exact_on(row: Row) -> str:
    if not was_traced(row):
        return "not traced"
    if is_exact(row):
        return "all four" if row.get("family") == BY_OTHERS else "all six"
    exact = (mesh for mesh, found in row["meshes"].items() if found.get("exact") and mesh not in (SEQUENCE, EXPERTS))
    return "; ".join(exact) or "none"


def exact_on_axis(row: Row, mesh: str) -> str:
    """Whether it is exact where this axis cuts something; "-" where there is nothing to cut."""
    found = row.get("meshes", {}).get(mesh, {})
    if has_nothing_to_cut(found):
        return "-"
    return "" if not found else "yes" if found.get("exact") else "no"


def has_nothing_to_cut(found: Row) -> bool:
    said = found.get("error", {}).get("text", "")
    # Records keep the words of the version that wrote them: "cut" became "shard".
    return re.search(r"has nothing to (cut|shard)|(cut|shard)s nothing of the model", said) is not None


def runs_whole(row: Row) -> str:
    """Operators that every rank of tp2 runs on whole inputs: those with FLOPs, and those that no rule covers."""
    flops = [f"{plain(op)} {part:.0%}" for op, part in (row.get("flops") or {}).get("unsharded", {}).items()]
    return ", ".join([*flops, *(plain(op) for op in row.get("no_rule", {}) if not any(plain(op) in f for f in flops))])


def plain(operator: str) -> str:
    """`bmm` for `aten.bmm.default` and `aten::bmm`."""
    return re.sub(r"^aten(\.|::)", "", operator).split(".")[0]


def is_listed(row: Row) -> bool:
    """Of one of the four task families."""
    return row.get("family") not in ("plain", "diffusers", "peft")


# Terminal


def table(rows: Rows) -> str:
    lines = [f"{'architecture':<26} {'exact on':<34} {'sharded':>8}  runs whole under tp2"]
    for name, row in rows.items():
        lines.append(f"{name:<26} {exact_on(row):<34} {percent(share(row)):>8}  {runs_whole(row)[:60]}")
    return "\n".join(lines)


def summary(rows: Rows) -> str:
    counts = numbers(rows.values())
    return (
        f"{counts['all']} architectures: {counts['traced']} traced, {counts['exact']} exact on all meshes, "
        f"{counts['sharded']} of these with at least {MOST:.0%} of their FLOPs sharded under tp2"
    )


def numbers(rows: Iterable[Row]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in rows:
        counts["all"] += 1
        counts["traced"] += was_traced(row)
        counts["exact"] += is_exact(row)
        counts["sharded"] += is_exact(row) and is_mostly_sharded(row)
    return counts


def percent(part: float | None) -> str:
    return "" if part is None else f"{max(part, 0.0):.1%}"


# The page


def write_page(rows: Rows, left_out: Mapping[str, str], others: Rows, first: Rows, second: Rows) -> None:
    PAGE.write_text(page(rows, left_out, others, first, second))


def page(
    rows: Rows, left_out: Mapping[str, str], others: Rows, first: Rows | None = None, second: Rows | None = None
) -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "diffusers", "peft"))
    parts = [
        "# Models",
        f"Written by `python benchmarks/coverage.py --page` from `benchmarks/coverage.jsonl` and `by_others.jsonl`: "
        f"{packages}.",
        "## Summary",
        families(rows),
        beside([row for row in rows.values() if is_listed(row)]),
        "## How it is measured",
        METHOD,
        "## Architectures",
        table_of(rows),
        "## Where something falls short",
        short(rows, left_out),
        "## Models that others wrote",
        "" if not others else by_others(others, first or {}, second),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def by_others(rows: Rows, first: Rows, second: Rows | None = None) -> str:
    parts = [
        others_page.METHOD,
        others_page.counts(rows),
        others_page.first_counts(first, second),
        grouped("What is not exact, by cause", others_page.causes(rows, reason)),
        "### Model by model",
        others_page.table(rows, percent),
    ]
    return "\n\n".join(part for part in parts if part)


def families(rows: Rows) -> str:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows.values():
        groups[row.get("family", "not built") if is_listed(row) else "others: plain PyTorch, diffusers, peft"].append(
            row
        )
    groups["**all of transformers' four families**"] = [row for row in rows.values() if is_listed(row)]
    lines = [FAMILIES_HEAD, "|---|---:|---:|---:|---:|"]
    for name, found in groups.items():
        counts = numbers(found)
        lines.append(f"| {name} | {counts['all']} | {counts['traced']} | {counts['exact']} | {counts['sharded']} |")
    cut = [[exact_on_axis(row, mesh) for row in rows.values()] for mesh in (SEQUENCE, EXPERTS)]
    (long, of_long), (mixtures, of_mixtures) = ((a.count("yes"), a.count("yes") + a.count("no")) for a in cut)
    lines += [
        "",
        f"With the sequence of every value cut in two (`cp2`) {long} of {of_long} are exact, with their",
        f"experts on two ranks (`ep2`) {mixtures} of {of_mixtures}; the others have nothing there to cut.",
    ]
    return "\n".join(lines)


def beside(rows: list[Row]) -> str:
    """The same list with what there is today."""
    asked = [row for row in rows if row.get("peers")]
    if not asked:
        return ""
    by = {key: Counter(_kind(row["peers"][key]) for row in asked) for key in ("pipeline", "transform")}
    shipped = {key: sum(row["peers"][key] for row in asked) for key in ("tp_plan", "pp_plan")}
    with_plan = len(asked) - by["transform"]["no plan is shipped"]
    lines = [
        f"What there is today, tried on {len(asked)} of them; told where to cut, forward only:",
        "",
        "| | architectures |",
        "|---|---:|",
        f"| transformers ships a tensor-parallel plan (`base_model_tp_plan`) | {shipped['tp_plan']} |",
        f"| transformers ships a pipeline plan (`base_model_pp_plan`) | {shipped['pp_plan']} |",
        f"| {PIPELINE} | {by['pipeline']['right']} |",
        f"| {TRANSFORM} ({with_plan} have one for linear layers), gives it on 2 ranks | {by['transform']['right']} |",
        f"| autopart: exact on all six meshes, gradients too, told nothing | {sum(map(is_exact, asked))} |",
    ]
    return "\n".join(lines)


def _kind(answer: str) -> str:
    return answer.split(":")[0] if not answer.startswith("wrong") else "wrong"


def table_of(rows: Rows) -> str:
    lines = [TABLE_HEAD, "|---|---|---|---|---|---:|---:|---|"]
    for name, row in rows.items():
        errors = [found["max_error"] for found in row["meshes"].values() if found.get("exact")]
        error = f"{max(errors):.0e}" if errors else ""
        axes = (exact_on_axis(row, mesh) for mesh in (SEQUENCE, EXPERTS))
        cells = (name, row.get("class", ""), exact_on(row), *axes, error, percent(share(row)), runs_whole(row))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def short(rows: Rows, left_out: Mapping[str, str]) -> str:
    failed = [(reason(r["error"]), n) for n, r in rows.items() if not was_traced(r) and "error" in r]
    parts = [
        grouped("Not built", ((why, name) for name, why in left_out.items())),
        grouped("Not traced", failed),
        grouped("Not exact on every mesh", not_exact(rows)),
        grouped("Less than 90 % of the FLOPs sharded under tp2, by the operator that is not", not_sharded(rows)),
    ]
    without = Counter(op for row in rows.values() for op in row.get("no_rule", {}))
    if without:
        head = ["### Operators without a rule", "", "They run on whole inputs: exact, not faster.", ""]
        counted = [f"| `{op}` | {count} |" for op, count in without.most_common()]
        parts.append("\n".join([*head, "| operator | architectures |", "|---|---:|", *counted]))
    return "\n\n".join(part for part in parts if part)


def not_exact(rows: Rows) -> Iterable[tuple[str, str]]:
    for name, row in rows.items():
        if not was_traced(row):
            continue
        if "error" in row:
            yield reason(row["error"]), name
        causes: dict[str, list[str]] = defaultdict(list)
        for mesh, found in row["meshes"].items():
            if not found.get("exact") and not has_nothing_to_cut(found):
                off = f"off by {found.get('max_error', 0):.1g}: {first(found)}"
                causes[reason(found["error"]) if "error" in found else off].append(mesh)
        for cause, meshes in causes.items():
            yield cause, f"{name} ({'; '.join(meshes)})"


def not_sharded(rows: Rows) -> Iterable[tuple[str, str]]:
    for name, row in rows.items():
        if share(row) is not None and not is_mostly_sharded(row):
            unsharded = row["flops"]["unsharded"] or {"in the backward alone": 0.0}
            yield plain(max(unsharded, key=lambda op: unsharded[op])), f"{name} ({percent(share(row))})"


def first(found: Row) -> str:
    return found.get("first", "").split("\n")[0][:160]


def reason(error: Row) -> str:
    """One line: what an exception says, without what differs from model to model."""
    lines = [text.strip() for text in error["text"].splitlines() if text.strip()] or [error["type"]]
    why = next((text.removeprefix("why").strip() for text in lines if text.startswith("why")), "")
    text = why if lines[0].endswith("cannot be traced") else ": ".join(filter(None, [lines[0], why]))
    text = re.sub(r"\[[\d, ]+\]", "[...]", text)
    return f"{error['type']}: {text}"[:260]


def grouped(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    groups: dict[str, list[str]] = defaultdict(list)
    for cause, name in pairs:
        groups[cause].append(name)
    if not groups:
        return ""
    most_first = sorted(groups.items(), key=lambda group: -len(group[1]))
    lines = [f"- {cause} ({len(names)}): {', '.join(names)}" for cause, names in most_first]
    return "\n".join([f"### {title}", "", *lines])
