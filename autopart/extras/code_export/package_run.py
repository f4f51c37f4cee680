"""Train this package: `torchrun --nproc-per-node RANKS run.py`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from autopart.extras.code_export.package_collectives import COORDINATES, connect, device
from autopart.extras.code_export.package_training import Trainer

FOLDER = Path(__file__).parent


def load() -> Trainer:
    """Connect the ranks, and return the program of this rank with its weights."""
    settings = importlib.import_module("settings")
    connect(settings.MESH, settings.GROUPS)
    stage = importlib.import_module(f"stage_{COORDINATES.get('pp', 0)}")
    saved = torch.load(FOLDER / "weights" / f"rank_{dist.get_rank()}.pt", map_location=device())
    weights = {name: torch.nn.Parameter(value) for name, value in saved["parameters"].items()}
    for name in saved["frozen"]:
        weights[name].requires_grad_(False)
    return Trainer(settings, stage, {**saved["buffers"], **weights})


def main() -> None:
    """Run some steps on one batch, and print the loss of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--optimizer", choices=("AdamW", "SGD"), default="AdamW")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=Path, default=FOLDER / "batch.pt", help="file of {input: tensor}")
    options = parser.parse_args()
    if not options.batch.exists():
        parser.error(f"there is no {options.batch}: write it with torch.save({{name of an input: tensor}}, path)")
    use_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if use_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if use_gpus else "gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = load()
    batch = torch.load(options.batch, map_location=device())
    optimizer = getattr(torch.optim, options.optimizer)(trainer.parameters(), lr=options.lr)
    for step in range(options.steps):
        loss = trainer.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            sys.stdout.write(f"step {step}: loss {loss:.12f}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
