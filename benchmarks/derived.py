"""Count for how many models the programs of new sequence lengths are derived, without another trace.

Small versions of the language models of transformers (`_architectures.py`) are traced with three lengths, then called
with new ones in between. Each derived program is compared with a traced one, node by node. A model counts as derived
on a mesh if every new call is derived. Each model has a separate process and a time limit.

The models run in a random order (`--seed`). With `--results`, each row is appended to a file, and models that the file
has are not run again.

    python benchmarks/derived.py [--meshes tp2,pp2,dp2,cp2] [--only gpt2,llama] [--shard 1/4] [--seed 49] [--first 50]
                                 [--results derived.jsonl] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

LIMIT_S = 900
TRACED = (16, 56, 36)
NEW = [length for length in range(17, 56) if length not in TRACED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--meshes", default="tp2,pp2,dp2,cp2", help="meshes of one axis, separated by commas")
    parser.add_argument("--only", type=lambda text: text.split(","), help="these architectures: gpt2,llama,...")
    parser.add_argument("--shard", default="1/1", help="the i-th of n parts of the list: i/n")
    parser.add_argument("--seed", type=int, default=49, help="seed of the order")
    parser.add_argument("--first", type=int, help="only the first models in this order")
    parser.add_argument("--results", type=Path, help="file of rows, one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="only gpt2 on tp2")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    asked = parser.parse_args()
    meshes, only = (["tp2"], ["gpt2"]) if asked.quick else (asked.meshes.split(","), asked.only)
    part, parts = map(int, asked.shard.split("/"))
    names = only or language_models()
    names = random.Random(asked.seed).sample(names, len(names))[part - 1 :: parts][: asked.first]
    rows = read_rows(asked.results)
    for name in names:
        missing = [mesh for mesh in meshes if mesh not in rows.get(name, {})]
        if missing:
            found = isolated(name, missing)
            rows[name] = rows.get(name, {}) | found
            print(f"{name:<32} " + "   ".join(f"{mesh} {text}" for mesh, text in found.items()), flush=True)
            if asked.results is not None:
                with asked.results.open("a") as file:
                    file.write(json.dumps({"name": name, **found}) + "\n")
    print()
    for mesh in meshes:
        counts = Counter(rows[name][mesh].partition(":")[0] for name in names)
        print(f"{mesh:<6} " + ", ".join(f"{number} {kind}" for kind, number in counts.most_common()))
    if asked.json:
        print(json.dumps({"benchmark": "derived", "rows": rows}))


def read_rows(path: Path | None) -> dict[str, dict[str, str]]:
    """Return {model: {mesh: result}} of the rows in a file."""
    rows: dict[str, dict[str, str]] = {}
    for line in path.read_text().splitlines() if path is not None and path.exists() else ():
        row = json.loads(line)
        rows.setdefault(row.pop("name"), {}).update(row)
    return rows


def language_models() -> list[str]:
    from _architectures import ARCHITECTURES

    return [
        name for name, (family, _) in ARCHITECTURES.items() if family in ("causal", "masked", "sequence to sequence")
    ]


def isolated(name: str, meshes: list[str]) -> dict[str, str]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=measure, args=(name, meshes, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(LIMIT_S) else dict.fromkeys(meshes, f"not finished in {LIMIT_S} s")
    except EOFError:
        return dict.fromkeys(meshes, "crashed")
    finally:
        process.kill()


def measure(name: str, meshes: list[str], results: Connection) -> None:
    warnings.simplefilter("ignore")
    results.send({mesh: on_mesh(name, mesh) for mesh in meshes})


def on_mesh(name: str, mesh: str) -> str:
    """Return `derived`, or the reason for which a call was traced."""
    try:
        return compared(name, mesh)
    except Exception as error:
        return f"fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0]:.80}"


def compared(name: str, mesh: str) -> str:
    import _architectures

    from autopart.common.flags import environment
    from autopart.errors import AutopartError
    from autopart.ir.mesh import Mesh
    from autopart.options import Options
    from autopart.recipe import compiler
    from autopart.recipe.sizes.program_template import check_derived

    model, _ = _architectures.build(name)
    compiled = compiler.Compiler(model, Mesh.parse(mesh), Options(microbatches=2 if mesh.startswith("pp") else None))
    multiple = 4 if mesh.startswith("cp") else 2
    new = random.Random(name).sample([length for length in NEW if length % multiple == 0], 2)

    def call(length: int) -> None:
        with mock.patch.object(_architectures, "SEQUENCE", length):
            batch = _architectures.batch(model, name, _architectures.ARCHITECTURES[name][0])
        compiled.program((), batch, purpose="step", training=False)

    try:
        for length in TRACED:
            call(length)
        with environment(check=True), mock.patch.object(compiler, "check_derived", wraps=check_derived) as checks:
            for number, length in enumerate(new):
                call(length)
                if checks.call_count <= number:
                    return f"traced: {reason(compiled, length)}"
    except AutopartError as error:
        return f"refused: {str(error).splitlines()[0]:.60}"
    except AssertionError as error:
        return f"WRONG: {error}"
    return "derived"


def reason(compiled: Any, length: int) -> str:
    found = [family.reason for family in compiled._families.values() if family.reason]
    return f"{found[-1]:.90} (length {length})" if found else "values or state are read"


if __name__ == "__main__":
    main()
