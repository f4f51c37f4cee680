"""Compare a bfloat16 step over processes with the same policy on one device.

One device is the model itself with its parameters and inputs cast, outputs cast back, and gradients that flow to the
float32 parameters. Differences are of gradients, relative to the largest one; `rounding` is how far one device in
bfloat16 is from one device in float32. 0 means bitwise identical.

    python benchmarks/precision.py [--quick] [--json]

With `--json` the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from dist import run_ranks
from precision_models import apart, build, on_one_device

import autopart

MODELS = ("gpt2", "llama", "bert", "vit", "mixtral", "regions", "tied", "in_bfloat16")
MESHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tp1", {}), ("dp2", {}), ("dp2", {"zero": 3}), ("dp2", {"zero": 3, "reduce_dtype": "bf16"}), ("tp2", {}),
    ("pp2", {"microbatches": 2}), ("dp2,tp2", {"zero": 3}),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one model on three meshes")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    meshes = MESHES[:3] if arguments.quick else MESHES
    names = [" ".join([mesh, *(f"{key}={value}" for key, value in options.items())]) for mesh, options in meshes]
    print(f"{'model':<12}{'rounding':>10}", *(f"{name:>{max(11, len(name) + 2)}}" for name in names), sep="")
    rows = []
    for model in MODELS[1:2] if arguments.quick else MODELS:
        row: dict[str, Any] = {"model": model, "rounding": rounding(model), "differences": {}}
        for name, (mesh, options) in zip(names, meshes, strict=True):
            ranks = 4 if "," in mesh else int(mesh[-1])
            row["differences"][name] = max(run_ranks(difference, ranks, model, mesh, options, timeout_s=300))
        rows.append(row)
        cells = (f"{value:>{max(11, len(name) + 2)}.2g}" for name, value in row["differences"].items())
        print(f"{model:<12}{row['rounding']:>10.2g}", *cells, sep="", flush=True)
    if arguments.json:
        print(json.dumps({"benchmark": "precision", "rows": rows}))


def rounding(name: str) -> float:
    """Of one device in bfloat16, against float32."""
    model, batch = build(name)
    (_, rounded), (_, exact) = (on_one_device(model, batch, dtype) for dtype in (torch.bfloat16, torch.float32))
    return apart(rounded, exact)


def difference(name: str, mesh: str, options: dict[str, Any]) -> float:
    """Of a step's gradients on this rank, from one device in bfloat16."""
    model, batch = build(name)
    _, expected = on_one_device(model, batch)
    pm = autopart.parallelize(model, mesh, example_kwargs=batch, precision="bf16", **options)
    pm.step(**batch)
    return apart(pm.full_grads(), expected)


if __name__ == "__main__":
    main()
