"""Compare loss curves of `examples/train_text.py` on four processes and one, in float32 and bfloat16.

The script runs as users start it. Its TensorBoard output is compared: the loss of every step, over the same samples
in the same order.

    python benchmarks/curves.py [--steps 200] [--quick] [--json] [--picture FILE.svg]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _curves_picture import draw
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPT = Path(__file__).parent.parent / "examples" / "train_text.py"
MESHES = {"one process": "dp1", "dp2,tp2": "dp2,tp2", "pp2,dp2, ZeRO 1": "pp2,dp2"}
PRECISIONS = {"fp32": [], "bf16": ["--precision", "bf16"]}
LAST = 20
"""Over so many last steps losses are averaged."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="[default: 200]")
    parser.add_argument("--quick", action="store_true", help="five steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--picture", help="draw the curves to this SVG file")
    arguments = parser.parse_args()
    steps = 5 if arguments.quick else arguments.steps
    curves = {}
    print(f"{'mesh':<18}{'precision':<11}{'loss at the end':>16}{'furthest from one process':>28}{'from fp32':>12}")
    for precision, options in PRECISIONS.items():
        for title, mesh in MESHES.items():
            curve = losses(mesh, [*options, *(["--zero", "1"] if "ZeRO" in title else [])], steps)
            curves[f"{title}, {precision}"] = curve
            alone, exact = curves[f"one process, {precision}"], curves["one process, fp32"]
            ends = [sum(row[-LAST:]) / len(row[-LAST:]) for row in (curve, exact)]
            print(
                f"{title:<18}{precision:<11}{ends[0]:>16.4f}{furthest(curve, alone):>28.2g}{ends[0] - ends[1]:>12.4f}"
            )
    if arguments.picture:
        draw(curves, arguments.picture)
    if arguments.json:
        print(json.dumps({"steps": steps, "losses": curves}))


def losses(mesh: str, options: list[str], steps: int) -> list[float]:
    """The loss of every step on a mesh."""
    ranks = 1 if mesh == "dp1" else 4
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        command = [*start, str(SCRIPT), "--mesh", mesh, "--steps", str(steps), "--tensorboard", folder, *options]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, capture_output=True, text=True, timeout=300 + 20 * steps)
        events = EventAccumulator(folder).Reload()
        return [event.value for event in events.Scalars("loss")]


def furthest(curve: list[float], other: list[float]) -> float:
    """The largest difference between two curves, relative to the second."""
    return max(abs(a / b - 1) for a, b in zip(curve, other, strict=True))


if __name__ == "__main__":
    main()
