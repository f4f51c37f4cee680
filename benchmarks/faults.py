"""Kill a random rank of a training run at random moments, resume it, and compare it with an uninterrupted run.

Processes train a GPT-2 on text over gloo, and save in the background every few steps. SIGKILL ends one rank at a random
moment: in a step, in a collective, or in a save. When the other ranks have ended, all ranks start again and continue
from the last complete save. `lost` counts the steps that they run again. The last row changes the mesh at each restart.

    python benchmarks/faults.py [--steps 60] [--kills 5] [--seed 0] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import autopart

SAVE_EVERY, TIMEOUT_S, KEEP = 5, 20, 2
MESHES = ("dp2,tp2", "pp2,tp2", "dp4 zero=3")
ALTERNATING = ("dp2,tp2", "pp2,tp2", "dp3 zero=3", "dp4 zero=3")
OWN_WORDS = re.compile(r"autopart\.errors\.\w+: ")
"""Text of an error of autopart in what a rank prints."""


@dataclass
class Found:
    """Measurements of one run that was killed and resumed.

    Attributes:
        wait_s: for each kill, seconds until the last of the other ranks ended.
        lost: for each kill, number of steps that were run again.
        unexplained: number of other ranks that ended without an error of autopart.
    """

    name: str
    kills: int = 0
    wait_s: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    unexplained: int = 0
    equal: str = ""

    def row(self) -> dict[str, Any]:
        waits = self.wait_s or [0.0]
        return {
            "run": self.name, "kills": self.kills, "wait_s_median": round(statistics.median(waits), 1),
            "wait_s_max": round(max(waits), 1), "lost_max": max(self.lost, default=0),
            "unexplained": self.unexplained, "weights": self.equal,
        }  # fmt: skip


# --- One rank


def train(folder: Path, mesh: str, steps: int, layers: int, width: int) -> None:
    """Train to `steps` from the last save in `folder`. Write each step's number and the final weights beside it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
    from text_setup import rows_of_text

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=4, vocab_size=256, n_positions=64, use_cache=False)
    model, rows = GPT2LMHeadModel(config), rows_of_text(64)
    axes, _, zero = mesh.partition(" zero=")
    batch = {"input_ids": rows[:12], "labels": rows[:12]}
    pm = autopart.parallelize(model, axes, example_kwargs=batch, zero=int(zero or 0), timeout=TIMEOUT_S)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    begun = step = pm.load(folder, "latest", optimizer=optimizer, missing_ok=True).step
    first = torch.distributed.get_rank() == 0
    for step in range(begun + 1, steps + 1):
        ids = rows[step * 12 : (step + 1) * 12]
        pm.step(input_ids=ids, labels=ids)
        optimizer.step()
        optimizer.zero_grad()
        if first:
            (folder / "progress").write_text(f"{begun} {step}")
        if step % SAVE_EVERY == 0:
            pm.save(folder, optimizer=optimizer, step=step, wait=False, keep=KEEP)
    state = pm.full_state_dict()
    pm.save(folder, optimizer=optimizer, step=step, keep=KEEP)
    if first:
        torch.save(state, folder / "weights.pt")


# --- All ranks


def start(folder: Path, mesh: str, sizes: list[str]) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of a mesh. Their errors are written to files in `folder`."""
    count = autopart.Mesh.parse(mesh.partition(" ")[0]).num_ranks
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    (folder / "progress").unlink(missing_ok=True)
    common = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, "--rank-of", mesh, str(folder), *sizes]
    ranks = []
    for rank in range(count):
        environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        with open(folder / f"errors.{rank}", "wb") as errors:
            ranks.append(subprocess.Popen(command, env=environment, stderr=errors, stdout=errors))
    return ranks


def progress(folder: Path) -> tuple[int, int]:
    """Return (step from which the current processes began, last step that rank 0 has finished); zeros before."""
    try:
        begun, step = (folder / "progress").read_text().split()
    except (OSError, ValueError):
        return 0, 0
    return int(begun), int(step)


def killed_run(name: str, meshes: tuple[str, ...], folder: Path, sizes: list[str], kills: int, seed: int) -> Found:
    """Train in `folder` with `kills` kills. Each start uses the next of `meshes`."""
    chosen, found, steps = random.Random(seed), Found(name), int(sizes[0])
    reached = 0
    for number in range(kills + 1):
        ranks = start(folder, meshes[number % len(meshes)], sizes)
        spread = max(1, (steps - reached) // (kills + 1 - number))
        target = reached + chosen.randint(1, spread)
        while progress(folder)[1] < target or number == kills:
            if all(rank.poll() is not None for rank in ranks):
                break
            time.sleep(0.02)
        begun, _ = progress(folder)
        if number:
            found.lost.append(reached - begun)
        if all(rank.poll() is not None for rank in ranks):
            break
        time.sleep(chosen.uniform(0, 0.5))
        victim = chosen.choice(ranks)
        victim.send_signal(signal.SIGKILL)
        found.kills, start_s = found.kills + 1, time.perf_counter()
        for index, rank in enumerate(ranks):
            rank.wait(10 * TIMEOUT_S)
            errors = (folder / f"errors.{index}").read_text(errors="replace")
            found.unexplained += rank is not victim and rank.returncode != 0 and not OWN_WORDS.search(errors)
        found.wait_s.append(time.perf_counter() - start_s)
        reached = progress(folder)[1]
    failed = [rank.returncode for rank in ranks if rank.returncode]
    if failed:
        raise SystemExit(f"{name}: the last run failed\n" + (folder / "errors.0").read_text()[-2000:])
    return found


def difference(one: Path, other: Path) -> str:
    """Compare the final weights of two runs: "equal bit for bit", or the largest relative difference."""
    left, right = torch.load(one / "weights.pt"), torch.load(other / "weights.pt")
    if left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left):
        return "equal bit for bit"
    worst = max(float((left[key] - right[key]).norm() / right[key].norm()) for key in left)
    return f"differ by {worst:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for option, default in {"steps": 60, "kills": 5, "seed": 0, "layers": 6, "width": 256}.items():
        parser.add_argument(f"--{option}", type=int, default=default, help=f"[default: {default}]")
    parser.add_argument("--quick", action="store_true", help="one mesh of two ranks, one kill")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--rank-of", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        mesh, folder, *sizes = options.rank_of
        train(Path(folder), mesh, *map(int, sizes))
        return
    runs = [(mesh, (mesh,)) for mesh in MESHES] + [("meshes in turn", ALTERNATING)]
    sizes = [str(size) for size in (options.steps, options.layers, options.width)]
    kills = options.kills
    if options.quick:
        runs, sizes, kills = [("dp2", ("dp2",))], ["12", "2", "32"], 1
    rows, start_s = [], time.perf_counter()
    for name, meshes in runs:
        with tempfile.TemporaryDirectory() as parent:
            whole, broken = Path(parent) / "whole", Path(parent) / "broken"
            whole.mkdir()
            broken.mkdir()
            if any([rank.wait() for rank in start(whole, meshes[0], sizes)]):
                raise SystemExit((whole / "errors.0").read_text()[-2000:])
            found = killed_run(name, meshes, broken, sizes, kills, options.seed)
            found.equal = difference(broken, whole)
        rows.append(found.row())
        print(f"{name:<15} {found.kills} kills: the other ranks end after {rows[-1]['wait_s_median']} s (median), "
              f"{rows[-1]['wait_s_max']} s (most); at most {rows[-1]['lost_max']} steps lost; "
              f"{found.unexplained} ranks without a clear error; weights {found.equal}", flush=True)  # fmt: skip
    if options.json:
        took_s = round(time.perf_counter() - start_s)
        print(json.dumps({"benchmark": "faults", "save_every": SAVE_EVERY, "took_s": took_s, "rows": rows}))


if __name__ == "__main__":
    main()
