"""Processes of benchmarks: run a function on several of them, and read the memory of this one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def of_first_rank(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> Any:
    """Run `function(rank, store, *arguments)` on `num_ranks` processes of one thread each.

    Returns the first rank's result, which must be JSON data. The function creates the process group. `store` is the
    group's `init_method`.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (folder, function, arguments), nprocs=num_ranks)
        with open(f"{folder}/found.json") as file:
            return json.load(file)


def _rank_main(rank: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    found = function(rank, f"file://{folder}/store", *arguments)
    if rank == 0:
        with open(f"{folder}/found.json", "w") as file:
            json.dump(found, file)
    dist.destroy_process_group()


def status(name: str) -> int:
    """Return a line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
