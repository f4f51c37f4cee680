"""Estimates of the memory and time of a verification."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from autopart.ir.graph import is_floating, operators, short_name
from autopart.ir.mesh import Mesh
from autopart.ir.trace import Trace

DOUBLE = 8
"""Bytes of a float64 number."""

VIEWS = (
    "reshape", "view", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "alias", "detach",
    "split_with_sizes", "t",
)  # fmt: skip
"""View operators, whose outputs mostly share the memory of their inputs."""

SHARE_FULL_SIZE = 0.75
"""Maximum share of the free memory that a verification of the full-size model may use."""

SHARE_COPY, MOST_FOR_COPY = 0.25, 6e9
"""Memory limits for verifying a reduced copy: a share of the free memory, and a number of bytes."""


@dataclass(frozen=True)
class Estimate:
    """Estimated memory in bytes, and time in seconds, of a verification.

    Args:
        weights: bytes of weights, gradients and optimizer state, of the single device and of all ranks together.
        values: bytes of activations.
    """

    weights: int
    values: int
    time_s: float = 0.0

    @property
    def total(self) -> int:
        return self.weights + self.values

    def __str__(self) -> str:
        took = f" and {self.time_s:.0f} s" if self.time_s >= 1 else ""
        return f"about {self.total / 1e9:.2g} GB{took}"


def weights_bytes(parameters: Iterable[Tensor], mesh: Mesh | None, trains: bool) -> int:
    """Return the bytes of weights, gradients and optimizer state during a verification in float64.

    The single device has weights and gradients. The ranks share one copy of the weight shards, and each data-parallel
    replica has gradients. With training steps, the single device and each replica have three more values per weight:
    the state of Adam and a copy.
    """
    number = sum(p.numel() for p in parameters)
    replicas = 1 if mesh is None else mesh.data_parallel_size
    copies = 3 + replicas + (3 + 3 * replicas if trains else 0)
    return DOUBLE * number * copies


def values_bytes(traced: Trace, mesh: Mesh | None) -> int:
    """Return the bytes of the activations of one forward in float64.

    The estimate assumes that all activations are saved for backward. It also assumes that half of them are sharded over
    tensor-parallel ranks, and half are replicated.
    """
    nodes = [node for node in operators(traced.graph) if is_floating(node) and short_name(node) not in VIEWS]
    computed = DOUBLE * sum(node.meta["val"].numel() for node in nodes)
    largest = DOUBLE * max((node.meta["val"].numel() for node in nodes), default=0)
    ranks = 1 if mesh is None else mesh.tensor_parallel_size
    return int(computed * (1 + ranks) / 2 + 3 * largest)


def seconds(parameters: Iterable[Tensor], tokens: int, steps: int) -> float:
    """Return the seconds that the matrix products of a verification take on this machine.

    The single device runs three forwards and one backward, and per training step one more forward and backward. All
    ranks together run as many. A forward takes 2 FLOPs per weight and token, a backward 4 (Kaplan et al. 2020,
    arXiv:2001.08361, table 1).
    """
    number = sum(p.numel() for p in parameters)
    return number * tokens * (20 + 12 * steps) / _rate()


def _rate() -> float:
    """Measure the float64 FLOP/s of this machine with a small matrix product."""
    a = torch.ones(384, 384, dtype=torch.float64)
    a @ a
    start_s = time.perf_counter()
    for _ in range(4):
        a @ a
    return 4 * 2 * 384**3 / max(time.perf_counter() - start_s, 1e-9)


# Free memory


def available_bytes(device: torch.device | None = None) -> int:
    """Return the bytes of memory that this process can allocate now.

    On the CPU: the free memory, limited by the cgroups of the process. On a GPU: the free memory, plus memory that
    torch has reserved and does not use.
    """
    if device is not None and device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + kept)
    meminfo = Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    machine = int(match[1]) * 1024 if match else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(machine, cgroup_free_bytes()))


def cgroup_free_bytes(groups: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")) -> float:
    """Return the bytes that a process can allocate within the memory limits of its cgroups.

    Returns infinity without a limit.
    """
    room = math.inf
    for line in process.read_text().splitlines() if process.exists() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, limit, usage, idle = groups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage = groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            idle = "total_inactive_file"
        else:
            continue
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if root in (folder, *folder.parents):
                room = min(room, _room_of(folder, limit, usage, idle))
    return room


def _room_of(folder: Path, limit: str, usage: str, idle: str) -> float:
    most, used = _number(folder / limit), _number(folder / usage)
    if most is None or used is None:
        return math.inf
    stat = folder / "memory.stat"
    match = re.search(rf"^{idle} (\d+)$", stat.read_text(), re.MULTILINE) if stat.exists() else None
    return max(most - used + (int(match[1]) if match else 0), 0)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
