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
is built in a small size with random weights. One recipe reduces the config entries of all architectures: width, heads,
layers, vocabulary, experts, windows and images. At least one layer of every kind stays (`benchmarks/_recipe.py`; if
entries depend on each other, `benchmarks/_architectures.py` has their values). Each model is traced once with its own
loss, on 8 samples of 12 tokens or on 8 images. On each mesh, all ranks run forward and backward in float64
(`autopart.verify`). *Exact* means that loss, outputs and all gradients of every rank agree with the model to a relative
error of 1e-10. Casts of the model to float32 are replaced by float64.

The table leaves out three things. Models run in eval mode: without dropout, and with the running statistics of batch
norm. Multimodal models run on text only, unless they require images or sound. Mixtures of experts run with
`experts_implementation="batched_mm"`, because `grouped_mm` does not support float64.

*FLOPs sharded* is measured with torch's `FlopCounterMode`: it counts forward and backward on one rank, and on both
ranks of `tp2`. An operator that is not sharded is counted on both ranks. The counter includes matrix products,
attention and convolutions. It leaves out all other operators, such as pointwise operators, softmax and norms.
""".strip()

FAMILIES_HEAD = (
    "| family | architectures | traced | exact on all six meshes | exact, and at least 90 % of FLOPs sharded on tp2 |"
)
TABLE_HEAD = "| architecture | class | exact on | cp2 | ep2 | largest error | FLOPs sharded | replicated on tp2 |"
TRANSFORM = "torch's `tensor_parallel_transformation` with transformers' plan"
PIPELINE = "`torch.distributed.pipelining.pipeline()` splits the model at its middle layer, with the right output"


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


def write_page(rows: Rows, left_out: Mapping[str, str], others: Rows, *first: Rows) -> None:
    PAGE.write_text(page(rows, left_out, others, *first))


def page(rows: Rows, left_out: Mapping[str, str], others: Rows, *first: Rows) -> str:
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
        "## Exceptions",
        short(rows, left_out),
        "## Models of other packages",
        "" if not others else by_others(others, *first),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def by_others(rows: Rows, *first: Rows) -> str:
    parts = [
        others_page.METHOD,
        others_page.counts(rows),
        others_page.first_counts(*first) if first else "",
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
        f"On `cp2`, which shards the sequence, {long} of {of_long} architectures with a sequence are exact.",
        f"On `ep2`, which shards experts, {mixtures} of {of_mixtures} architectures with experts are exact.",
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
        f"The next table compares with other tools, on {len(asked)} of the architectures. The tools get the points at "
        "which to split, and run the forward only:",
        "",
        "| | architectures |",
        "|---|---:|",
        f"| transformers ships a tensor-parallel plan (`base_model_tp_plan`) | {shipped['tp_plan']} |",
        f"| transformers ships a pipeline plan (`base_model_pp_plan`) | {shipped['pp_plan']} |",
        f"| {PIPELINE} | {by['pipeline']['right']} |",
        f"| {TRANSFORM} ({with_plan} have one for linear layers) gives the right output on 2 ranks | "
        f"{by['transform']['right']} |",
        "| autopart is exact on all six meshes, gradients included, without a plan or split points | "
        f"{sum(map(is_exact, asked))} |",
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
        grouped("Less than 90 % of the FLOPs sharded on tp2, by the operator that is not sharded", not_sharded(rows)),
    ]
    without = Counter(op for row in rows.values() for op in row.get("no_rule", {}))
    if without:
        text = "Every rank runs these operators on full tensors: exact, but no faster."
        head = ["### Operators without a rule", "", text, ""]
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
