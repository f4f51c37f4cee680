"""Find which models partition exactly.

The models are small versions of all architectures of four transformers task families and some others. `--by-others`
runs models of many third-party packages, and coding patterns.

Each model is built with random weights by one recipe (`_recipe.py`), traced once, and run forward and backward on eight
meshes in float64 against itself (`autopart.verify`, tolerance 1e-10). Each has a separate process and a time limit.
Results are stored in `coverage.jsonl` (`by_others.jsonl`), one line per model. An interrupted run resumes.
A model whose package is not installed is left out.

    python benchmarks/coverage.py [--by-others] [--quick] [--json] [--shard 1/4] [--only llama,t5] [--meshes tp2,tp4]
                                  [--rerun-failed] [--rerun] [--page]

`--page` only writes `docs/models.md` from the results. With `--json` the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _coverage_page import EXPERTS, MESHES, SEQUENCE, is_exact, is_mostly_sharded, summary, table, write_page
from _others_page import OTHER_MESHES

HERE = Path(__file__).parent
Row = dict[str, Any]


@dataclass(frozen=True)
class List:
    """A list of models: the function of `_coverage_row` that measures one, on which meshes, and where rows are kept."""

    measure: str
    meshes: tuple[str, ...]
    results: Path
    quick: tuple[str, ...]
    limit_s: float


ARCHITECTURES = List("measure", (*MESHES, SEQUENCE, EXPERTS), HERE / "coverage.jsonl", ("gpt2", "resnet"), 300)
FIRST_RESULTS = HERE / "by_others_first.jsonl"
"""First results of the models of `by_others/unseen/`. This file is never written again."""
SECOND_RESULTS = HERE / "by_others_second.jsonl"
"""First results of the models of `by_others/later/`, on dp2 and tp2."""
THIRD_RESULTS = HERE / "by_others_third.jsonl"
"""First results of the models of `by_others/unseen/further_*.py`, on dp2 and tp2."""
FIRSTS = FIRST_RESULTS, SECOND_RESULTS, THIRD_RESULTS
OTHERS = List("measure_by_others", OTHER_MESHES, HERE / "by_others.jsonl", ("diffusers: SD3",), 180)


def main() -> None:
    arguments = parse()
    listed = OTHERS if arguments.by_others else ARCHITECTURES
    results = Path(arguments.results) if arguments.results else listed.results
    arguments.meshes = arguments.meshes or list(listed.meshes)
    if arguments.quick:
        results = Path(tempfile.mkdtemp()) / "coverage.jsonl"
        arguments.only = arguments.only or list(listed.quick)
    if arguments.page:
        from _architectures import LEFT_OUT

        write_page(load(ARCHITECTURES.results), LEFT_OUT, load(OTHERS.results), *map(load, FIRSTS))
        return
    names, limit_s = chosen(arguments), arguments.limit_s or listed.limit_s
    for name in names:
        row = load(results).get(name)
        meshes = open_meshes(row, arguments)
        if meshes:
            row = merged(row, run(name, listed.measure, meshes, limit_s))
            if is_missing(row):
                print(f"{name:<40} left out: {row['error']['text']}", flush=True)
                continue
            if arguments.by_others and not is_exact(row):
                row["torch"] = run(name, "measure_torch", [], limit_s).get("torch", {})
            print(line(row), flush=True)
        if arguments.peers and "peers" not in row:
            row["peers"] = run(name, "measure_peers", [], limit_s).get("peers")
            print(f"{name:<24} peers: {row['peers']}", flush=True)
        if meshes or arguments.peers:
            keep(results, row)
    rows = {name: row for name, row in load(results).items() if name in names}
    print(table(rows))
    print(summary(rows))
    if arguments.json:
        print(json.dumps({"benchmark": "coverage", "rows": rows}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--by-others", action="store_true", help="the models of other packages instead")
    parser.add_argument("--quick", action="store_true", help="only one or two models, results thrown away")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--only", type=lambda text: text.split(","), help="these architectures: llama,t5,...")
    parser.add_argument("--shard", default="1/1", help="the i-th of n parts of the list: i/n")
    parser.add_argument("--meshes", type=split_meshes, help="tp2;pp2,tp2;...")
    parser.add_argument(
        "--rerun-failed", action="store_true", help="again what is not exact on every mesh, or little sharded"
    )
    parser.add_argument("--rerun", action="store_true", help="again whatever the results hold")
    parser.add_argument("--peers", action="store_true", help="also what other tools give")
    parser.add_argument("--results", help="another file than the list's own")
    parser.add_argument("--limit-s", type=float, help="time limit of a model in seconds")
    parser.add_argument("--page", action="store_true", help="write docs/models.md from the results and stop")
    return parser.parse_args()


def split_meshes(text: str) -> list[str]:
    """`tp2;pp2,tp2`; commas alone separate meshes too where every part is one of one axis: `tp2,tp4`."""
    if ";" not in text and text not in MESHES:
        return text.split(",")
    return text.split(";")


def chosen(arguments: argparse.Namespace) -> list[str]:
    if arguments.by_others:
        from by_others import MODELS as names
    else:
        from _architectures import ARCHITECTURES as names
    part, parts = map(int, arguments.shard.split("/"))
    unknown = set(arguments.only or ()) - set(names)
    if unknown:
        sys.exit(f"no model is called {', '.join(sorted(unknown))}")
    return [n for i, n in enumerate(names) if i % parts == part - 1 and (not arguments.only or n in arguments.only)]


def is_missing(row: Row) -> bool:
    """Whether a model could not be built as its package is not installed."""
    return row["step"] == "build" and row.get("error", {}).get("type") == "ModuleNotFoundError"


def open_meshes(row: Row | None, arguments: argparse.Namespace) -> list[str]:
    """The meshes on which an architecture is still to be run."""
    falls_short = row is None or not is_exact(row) or not is_mostly_sharded(row)
    if row is None or arguments.rerun or (arguments.rerun_failed and falls_short):
        return list(arguments.meshes)
    return [] if "error" in row else [m for m in arguments.meshes if m not in row["meshes"]]


def merged(before: Row | None, row: Row) -> Row:
    """What is new, and what was known of other meshes."""
    if before is None or "error" in row:
        return row
    meshes = {**before["meshes"], **row["meshes"]}
    kept = {name: before[name] for name in ("flops", "peers") if name in before}
    return {**kept, **row, "meshes": meshes}


def run(name: str, what: str, meshes: list[str], limit_s: float) -> Row:
    """What the function `what` of `_coverage_row` reports last, from a process that is ended at the time limit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["_coverage_row", "by_others" if "others" in what else "_architectures"])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(what, name, meshes, send))
    process.start()
    send.close()
    row: Row = {"name": name, "step": "start", "meshes": {}}
    end_s = time.monotonic() + limit_s
    try:
        while receive.poll(max(0.0, end_s - time.monotonic())):
            row = receive.recv()
        row["error"] = {"type": "TimeLimit", "text": f"over {limit_s:.0f} s in step {row['step']}", "stack": ""}
    except EOFError:  # it ended
        process.join()
        if process.exitcode:
            text = f"the process ended with {process.exitcode} in step {row['step']}"
            row["error"] = {"type": "Crash", "text": text, "stack": ""}
    process.kill()
    process.join()
    return row


def _measure(what: str, name: str, meshes: list[str], send: Any) -> None:
    import _coverage_row

    getattr(_coverage_row, what)(name, meshes, send.send)


def load(path: Path) -> dict[str, Row]:
    """Rows by name; the last line of a name counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(text) for text in lines]
    return {row["name"]: row for row in rows}


def keep(path: Path, row: Row) -> None:
    """Add or replace a row; the file stays in the order of the names."""
    rows = load(path)
    rows[row["name"]] = row
    path.with_suffix(".new").write_text("".join(json.dumps(rows[n]) + "\n" for n in sorted(rows)))
    path.with_suffix(".new").replace(path)


def line(row: Row) -> str:
    wrong = [m for m, found in row["meshes"].items() if not found["exact"]]
    said = row.get("error", {}).get("text", "") or (f"not exact on {'; '.join(wrong)}" if wrong else "exact")
    return f"{row['name']:<40} {row.get('time_s', 0):>6.1f} s  {said.splitlines()[0][:90]}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
