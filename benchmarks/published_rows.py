"""Predict published training runs, one row each, through `autopart.plan` and `autopart.simulate`.

    python benchmarks/published_rows.py [--rows FILE ...] [--sources NAME ...] [--plans FOLDER]
                                        [--whole N] [--spread FILE] [--ranking] [--list] [--quick] [--json]

**Which rows may be fitted.** A row may be used to choose a constant only if `may_fit` is true: the SHA-256 of its
source, model and settings (not of its measurement), taken as a number, is a multiple of 4. That is a quarter of the
rows. All other rows are only predicted.

**Format.** A file of rows is a CSV with the columns of `Row`. `published_runs/rows.csv` quotes rows of the sources.
`published_runs/sources.json` states for each source where its rows are from, the models' configs, and the words with
which a user predicts them: `hardware=`, `system=` and the options of `autopart.plan`.

One plan is made for each model and size of `tp`, with two samples per microbatch. `plan.cost.variant` predicts the plan
on the other meshes, microbatches and ZeRO stages. `--whole N` also makes N complete plans, and prints how far they are
from these predictions.

A row without seconds is a run that crashed. `--ranking` compares the order of predictions with the order of
measurements, and the predicted memory of crashed rows with that of rows that ran.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autopart
from autopart.cost.hardware.profile import Hardware
from autopart.cost.systems.host_time import LIMITS
from autopart.cost.systems.likely_range import kind_of_plan
from autopart.cost.systems.system import System
from autopart.ir.mesh import Mesh
from autopart.ir.run.schedules import Schedule
from autopart.plans.plan import Plan

FOLDER = Path(__file__).parent / "published_runs"
SOURCES: Mapping[str, Mapping[str, Any]] = json.loads((FOLDER / "sources.json").read_text())
FITTED_OF = 4


@dataclass(frozen=True)
class Row:
    """A published run: its settings, the measured seconds of a step (0: crashed), and GB of a rank (0: not published).

    Args:
        microbatch: samples of a microbatch on a rank.
        microbatches: microbatches of a step.
    """

    source: str
    model: str
    gpus: int
    dp: int
    tp: int
    pp: int
    zero: int
    microbatch: int
    microbatches: int
    step_s: float
    memory_gb: float

    @property
    def name(self) -> str:
        mesh = ",".join(f"{axis}{getattr(self, axis)}" for axis in ("pp", "dp", "tp"))
        return f"{self.model} {mesh} zero={self.zero} {self.microbatches}x{self.microbatch}"

    @property
    def may_fit(self) -> bool:
        """True if a constant may be chosen by this row."""
        digest = hashlib.sha256(f"{self.source} {self.name}".encode()).hexdigest()
        return int(digest, 16) % FITTED_OF == 0

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / 8)

    @property
    def cell(self) -> tuple[str, str, int]:
        """Source, model and GPUs: rows of one cell are alternatives of each other."""
        return self.source, self.model, self.gpus

    @property
    def mesh(self) -> Mesh:
        sizes = {axis: getattr(self, axis) for axis in ("pp", "dp", "tp")}
        return Mesh({axis: size for axis, size in sizes.items() if size > 1})

    @property
    def schedule(self) -> Schedule:
        """1F1B; with fewer microbatches than stages GPipe, whose actions are then those of 1F1B."""
        name = None if self.pp == 1 else "1f1b" if self.microbatches >= self.pp else "gpipe"
        return Schedule(name, self.microbatches, 1)


def read_rows(path: Path) -> list[Row]:
    """Read rows from a CSV file with the columns of `Row`."""
    with path.open() as file:
        found = csv.DictReader(line for line in file if not line.startswith("#"))
        return [Row(**{f.name: _value(f.type, row[f.name]) for f in fields(Row)}) for row in found]


def _value(kind: Any, text: str) -> Any:
    return {"int": int, "float": float, "str": str}[kind](text or 0)


class Plans:
    """Plans of the published models, stored in a folder.

    Args:
        folder: where plans are kept. A plan that is there is not made again.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.known: dict[Path, Plan] = {}

    def of(self, row: Row) -> Plan:
        """Return the plan of a row's model and `tp`. It has two samples: a batch of one has no batch dim to scale."""
        path = self.folder / f"{row.source}-{row.model}-tp{row.tp}.json"
        if path not in self.known:
            if not path.exists():
                self.make(row, {"tp": row.tp} if row.tp > 1 else {"dp": 1}, 2, 1).save(path)
            self.known[path] = Plan.load(path)
        return self.known[path]

    def whole(self, row: Row) -> float:
        """Return the seconds of a step of a complete plan for a row, as a user predicts it."""
        options: dict[str, Any] = {"schedule": row.schedule.name} if row.pp > 1 else {}
        samples = row.dp * row.microbatch * row.microbatches
        plan = self.make(row, row.mesh.sizes, samples, row.microbatches, zero=row.zero, **options)
        return autopart.simulate(plan, system=SOURCES[row.source]["system"]).step_time_s

    def make(self, row: Row, mesh: Mapping[str, int], samples: int, microbatches: int, **options: Any) -> Plan:
        """Plan a row's model as a user does.

        Args:
            samples: samples of the global batch.
        """
        source = SOURCES[row.source]
        options |= source["tensor_options"] if row.tp > 1 else {}
        config = source["models"][row.model]
        with torch.device("meta"):
            if source["kind"] == "llama":
                model, length = LlamaForCausalLM(LlamaConfig(**config, use_cache=False)), source["tokens"]
            else:
                dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), source["dropout"])
                attention = {"attn_implementation": source["attention"]}
                model, length = GPT2LMHeadModel(GPT2Config(**config, **dropout, **attention)), source["tokens"]
            model.loss_type = "ForCausalLM"
            ids = torch.zeros(samples, length, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids.clone()}
        return autopart.plan(model, mesh, example_kwargs=batch, hardware=source["hardware"],
                             microbatches=microbatches, **source["options"], **options)  # fmt: skip


@dataclass(frozen=True)
class Predicted:
    """A row with its prediction.

    Args:
        share: seconds of the fastest row of the cell, divided by those of this row; 0 if the row crashed.
    """

    row: Row
    step_s: float
    memory_gb: float
    parts_s: Mapping[str, float]
    share: float

    @property
    def best(self) -> bool:
        """True if the row reaches half of the best of its cell."""
        return self.share >= 0.5

    @cached_property
    def error(self) -> float:
        return self.step_s / self.row.step_s - 1

    @property
    def groups(self) -> Iterator[str]:
        row = self.row
        yield "all"
        yield "one node" if row.nodes == 1 else "several nodes"
        if self.best:
            yield "half of the best"
            yield f"half of the best, {'one node' if row.nodes == 1 else 'several nodes'}"
        if row.pp == 1 and row.tp <= 8:
            yield "pp=1, tp<=8"
        if row.tp > 8:
            yield "tp over nodes"


def predict_rows(rows: Iterable[Row], plans: Plans) -> list[Predicted]:
    """Predict rows. Raises the errors of `autopart.plan`."""
    rows = list(rows)
    fastest: dict[tuple[str, str, int], float] = {}
    for row in rows:
        if row.step_s:
            fastest[row.cell] = min(fastest.get(row.cell, math.inf), row.step_s)
    systems = {name: System.load(source["system"]) if "system" in source else None for name, source in SOURCES.items()}
    found = []
    for row in rows:
        plan = plans.of(row)
        samples = row.dp * row.microbatch * row.microbatches
        figures = plan.cost.variant(row.mesh, row.schedule, row.zero, samples, systems[row.source])
        share = fastest[row.cell] / row.step_s if row.step_s else 0.0
        found.append(Predicted(row, figures.step_time_s, figures.memory_bytes / 1e9, figures.parts_s, share))
    return found


@dataclass(frozen=True)
class Ranking:
    """Order of the predictions of one cell.

    Args:
        rows: number of rows that reach a quarter of the best.
        tau: Kendall's rank correlation of predicted and measured seconds of these rows; 1: same order, 0: no relation.
        gap: how much longer the row with the shortest prediction took than the fastest row, of all rows that ran.
        choice: the same row by predictions alone: of all rows that are predicted to fit, crashed ones included. Its
            gap is infinite if the row crashed, and None if no row is predicted to fit.
    """

    rows: int
    tau: float
    gap: float
    choice: float | None


def rank(found: Iterable[Predicted], memory_gb: Mapping[str, float]) -> dict[tuple[str, str, int], Ranking]:
    """Return the ranking of each cell that has at least three rows that reach a quarter of the best.

    Args:
        memory_gb: {source: GB of a device}.
    """
    cells: dict[tuple[str, str, int], list[Predicted]] = {}
    for one in found:
        cells.setdefault(one.row.cell, []).append(one)
    rankings = {}
    for cell, rows in sorted(cells.items()):
        near = [one for one in rows if one.share >= 0.25]
        fitting = [one for one in rows if one.memory_gb <= memory_gb[one.row.source]]
        if len(near) >= 3:
            shortest = min((one for one in rows if one.share), key=lambda one: one.step_s)
            chosen = min(fitting, key=lambda one: one.step_s, default=None)
            rankings[cell] = Ranking(len(near), kendall([(one.step_s, one.row.step_s) for one in near]),
                                     _gap(shortest), None if chosen is None else _gap(chosen))  # fmt: skip
    return rankings


def _gap(one: Predicted) -> float:
    return 1 / one.share - 1 if one.share else math.inf


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's tau of pairs of numbers: (concordant - discordant) / all pairs of pairs.

    >>> kendall([(1, 10), (2, 20), (3, 30)]), kendall([(1, 30), (2, 20), (3, 10)])
    (1.0, -1.0)
    """
    signs = [(a - c) * (b - d) for (a, b), (c, d) in combinations(pairs, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def separation(lower: Sequence[float], upper: Sequence[float]) -> float:
    """Return the area under the ROC curve: the probability that a number of `upper` exceeds one of `lower`.

    >>> separation([1, 2], [2, 3])
    0.875
    """
    wins = sum((high > low) + 0.5 * (high == low) for low in lower for high in upper)
    return wins / (len(lower) * len(upper))


def print_ranking(found: Sequence[Predicted]) -> dict[str, Any]:
    """Print the ranking of each cell, and return the totals by source."""
    memory_gb = {name: Hardware.load(source["hardware"]).memory_bytes / 1e9 for name, source in SOURCES.items()}
    rankings = rank(found, memory_gb)
    print(f"{'cell':<44}{'rows':>5}{'tau':>8}{'gap':>8}{'choice':>9}")
    for (source, model, gpus), one in rankings.items():
        choice = "none" if one.choice is None else "crashed" if math.isinf(one.choice) else f"{one.choice:.1%}"
        print(f"{f'{source}, {model}, {gpus} GPUs':<44}{one.rows:>5}{one.tau:>8.2f}{one.gap:>8.1%}{choice:>9}")
    totals = {}
    for source in dict.fromkeys(one.row.source for one in found):
        cells = [one for (name, _, _), one in rankings.items() if name == source]
        ran, crashed = ([one.memory_gb for one in found if one.row.source == source and bool(one.share) == known]
                        for known in (True, False))  # fmt: skip
        if cells:
            taus = sorted(one.tau for one in cells)
            totals[source] = {
                "cells": len(cells), "tau": sum(taus) / len(taus), "lowest_tau": taus[0],
                "within_5_percent": sum(one.gap <= 0.05 for one in cells),
                "choices_within_5_percent": sum(one.choice is not None and one.choice <= 0.05 for one in cells),
                "crashed": len(crashed), "auc": separation(ran, crashed) if crashed else None,
            }  # fmt: skip
            print(f"{source}: " + ", ".join(f"{name} {_short(value)}" for name, value in totals[source].items()))
    return totals


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def spread(found: Sequence[Predicted]) -> dict[str, Any]:
    """Return {kind of plan: [rows, 10th, 90th percentile of measured / predicted seconds]} of rows that are not fitted.

    Rows of a sweep that are below half of the best of their cell are left out: many of them are far below what the
    hardware can do.
    """
    ratios: dict[str, list[float]] = {}
    for one in found:
        if one.share and not one.row.may_fit and (one.best or one.row.source != "ultrascale"):
            waits = one.parts_s.get("host", 0.0) > LIMITS * one.step_s
            kind = kind_of_plan(one.row.mesh.num_ranks, one.row.pp, waits)
            ratios.setdefault(kind, []).append(one.row.step_s / one.step_s)
    return {kind: [len(of), *(round(sorted(of)[round(share * (len(of) - 1))], 3) for share in (0.1, 0.9))]
            for kind, of in sorted(ratios.items())}  # fmt: skip


def summary(found: Sequence[Predicted]) -> dict[str, dict[str, Any]]:
    """Return {group: errors of the step times, as mean, median, 90th percentile, signed mean and number of rows}."""
    groups: dict[str, list[float]] = {}
    for one in found:
        for group in one.groups if one.share else ():
            kind = "may be fitted" if one.row.may_fit else "not fitted"
            groups.setdefault(f"{one.row.source}, {group}, {kind}", []).append(one.error)
    return {name: statistics_of(errors) for name, errors in sorted(groups.items())}


def statistics_of(errors: Sequence[float]) -> dict[str, Any]:
    sizes = sorted(map(abs, errors))
    n = len(sizes)
    middle = (sizes[(n - 1) // 2] + sizes[n // 2]) / 2
    return {"rows": n, "mean": sum(sizes) / n, "median": middle, "p90": sizes[min(n - 1, math.ceil(0.9 * n) - 1)],
            "signed": sum(errors) / n}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, nargs="*", default=[FOLDER / "rows.csv"], help="CSV files of rows")
    parser.add_argument("--sources", nargs="*", default=list(SOURCES), help="sources whose rows are predicted")
    parser.add_argument("--plans", type=Path, help="folder in which plans are kept")
    parser.add_argument("--quick", action="store_true", help="only the rows that share the first row's plan")
    parser.add_argument("--whole", type=int, default=0, metavar="N", help="make complete plans of N rows as well")
    parser.add_argument("--spread", type=Path, help="write the errors by kind of plan to this JSON file")
    parser.add_argument("--ranking", action="store_true", help="compare the order of predictions and measurements")
    parser.add_argument("--list", action="store_true", help="print every row that ran")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    rows = [row for path in arguments.rows for row in read_rows(path) if row.source in arguments.sources]
    if arguments.quick:
        rows = [row for row in rows if (row.source, row.model, row.tp) == (rows[0].source, rows[0].model, rows[0].tp)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.plans or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        plans = Plans(folder)
        found = predict_rows(rows, plans)
        for one in [one for one in found if one.share and not one.row.may_fit][: arguments.whole]:
            print(f"{one.row.name}: {plans.whole(one.row) / one.step_s - 1:+.2%} from a complete plan")
    if arguments.spread:
        arguments.spread.write_text(json.dumps(spread(found), indent=2) + "\n")
    if arguments.list:
        for one in (one for one in found if one.share):
            print(f"{one.row.gpus:>4} {one.row.name:<44}{one.row.step_s:>10.4g}{one.step_s:>10.4g}{one.error:>8.1%}")
    groups = summary(found)
    print(f"{'group':<64}{'rows':>5}{'mean':>8}{'median':>8}{'p90':>8}{'signed':>8}")
    for name, one in groups.items():
        print(
            f"{name:<64}{one['rows']:>5}{one['mean']:>8.1%}{one['median']:>8.1%}{one['p90']:>8.1%}{one['signed']:>+8.1%}"
        )
    ranking = print_ranking(found) if arguments.ranking else {}
    if arguments.json:
        print(json.dumps({"benchmark": "published_rows", "groups": groups, "ranking": ranking}))


if __name__ == "__main__":
    main()
