"""Run a function on several processes and return the first one's result."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def of_first_rank(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> Any:
    """Runs `function(rank, store, *arguments)` on so many processes of one thread each; returns what the first one's
    gives, through JSON. `store`: the URL of a file in which a process group can meet; the function makes the group."""
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
