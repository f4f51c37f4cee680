"""Compare loss curves of `examples/train_text.py` on four processes and one: float32, bfloat16, and the optimizer Muon.

The script runs as users start it. Its TensorBoard output is compared: the loss of every step, over the same samples
in the same order.

    python benchmarks/curves.py [--steps 200] [--settings fp32,bf16,muon] [--quick] [--json] [--picture FILE.svg]
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
SETTINGS = {"fp32": [], "bf16": ["--precision", "bf16"], "muon": ["--optimizer", "muon"]}
LAST = 20
"""Over so many last steps losses are averaged."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="[default: 200]")
    parser.add_argument("--settings", type=lambda text: text.split(","), default=[*SETTINGS],
                        help=f"some of {','.join(SETTINGS)} [default: all]")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="five steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--picture", help="draw the curves to this SVG file")
    arguments = parser.parse_args()
    steps = 5 if arguments.quick else arguments.steps
    curves = {}
    print(f"{'mesh':<18}{'setting':<11}{'last loss':>12}{'furthest from one process':>28}{'from the first row':>20}")
    for setting in arguments.settings:
        for title, mesh in MESHES.items():
            curve = losses(mesh, [*SETTINGS[setting], *(["--zero", "1"] if "ZeRO" in title else [])], steps)
            curves[f"{title}, {setting}"] = curve
            alone, first = curves[f"one process, {setting}"], next(iter(curves.values()))
            ends = [sum(row[-LAST:]) / len(row[-LAST:]) for row in (curve, first)]
            print(
                f"{title:<18}{setting:<11}{ends[0]:>12.4f}{furthest(curve, alone):>28.2g}{ends[0] - ends[1]:>20.4f}",
                flush=True,
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
