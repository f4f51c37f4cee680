"""Terms that plans and reports use: kinds of memory, kinds of time, and collectives."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_KINDS = (
    "parameters", "gradients", "optimizer", "buffers", "inputs", "activations", "temporary", "communication",
    "gathered",
)  # fmt: skip
"""Kinds of memory (in bytes) in the rows of `Plan.memory`.

`autopart.cost.memory_kinds.RankMemory` defines each kind.
"""


MEASURED_STEP = "autopart step"
"""Name of each measured training step in the traces of `pm.profile`."""

TIMING_PARTS = ("forward", "input_backward", "weight_backward", "recompute")
"""Kinds of work in `Plan.timing`, in seconds per stage."""


@dataclass(frozen=True)
class Collective:
    """Totals of one kind of collective in one module, added up over all repeated blocks.

    Args:
        count: number of calls.
        bytes: bytes that one rank sends in all of these calls.
        per: `"microbatch"` if they run for every microbatch, `"step"` if they run once a step.
    """

    where: str
    axis: str
    forward: str
    backward: str
    count: int
    bytes: int
    per: str = "microbatch"
