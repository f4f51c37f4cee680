"""Compare the import time of autopart, and commands without computation, with `import torch`.

Every variant is a fresh process. Variants are interleaved, round after round, so that noise affects all equally.
Figures are medians of the ratios within a round.

    torch             import torch
    autopart          import autopart
    torch, autopart   import torch, autopart
    parallelize       from autopart import parallelize, which imports torch
    help              autopart --help
    explain           autopart explain plan.json

    python benchmarks/imports.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS, QUICK_ROUNDS = 9, 1
BASE = "torch"


def variants(plan: Path) -> dict[str, list[str]]:
    """The arguments of Python for each."""
    return {
        BASE: ["-c", "import torch"],
        "autopart": ["-c", "import autopart"],
        "torch, autopart": ["-c", "import torch, autopart"],
        "parallelize": ["-c", "from autopart import parallelize"],
        "help": ["-m", "autopart", "--help"],
        "explain": ["-m", "autopart", "explain", str(plan)],
    }


def write_plan(path: Path) -> None:
    """A plan of a small model, made by another process."""
    code = (
        "import sys, torch, autopart\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))\n"
        "autopart.plan(model, 'pp2,tp2', example_args=(torch.randn(4, 8),)).save(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def run(arguments: list[str]) -> tuple[float, float]:
    """Seconds of a fresh process: by the clock, and of the processor."""
    before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    wall_s, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(rounds: int, plan: Path) -> dict[str, list[tuple[float, float]]]:
    commands = variants(plan)
    for arguments in commands.values():  # files are read, and bytecode written, before anything counts
        run(arguments)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, arguments in commands.items():
            found[name].append(run(arguments))
    return found


def figures(found: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Median seconds of each, and the medians of the ratios to `import torch` within a round."""
    rows = {}
    for name, times in found.items():
        wall, processor = ([time_s[column] for time_s in times] for column in (0, 1))
        base_wall, base_processor = ([time_s[column] for time_s in found[BASE]] for column in (0, 1))
        rows[name] = {
            "wall_s": statistics.median(wall), "processor_s": statistics.median(processor),
            "ratio": statistics.median(a / b for a, b in zip(wall, base_wall, strict=True)),
            "processor_ratio": statistics.median(a / b for a, b in zip(processor, base_processor, strict=True)),
        }  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.json")
        write_plan(plan)
        rows = figures(measured(QUICK_ROUNDS if arguments.quick else ROUNDS, plan))
    print(f"{'':<16} {'seconds':>8} {'of torch':>9} {'processor':>10} {'of torch':>9}")
    for name, row in rows.items():
        times = f"{row['wall_s']:>8.2f} {row['ratio']:>9.2f} {row['processor_s']:>10.2f} {row['processor_ratio']:>9.2f}"
        print(f"{name:<16} {times}")
    if arguments.json:
        print(json.dumps({"variants": rows}))


if __name__ == "__main__":
    main()
