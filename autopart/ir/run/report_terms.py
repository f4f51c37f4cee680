"""Kinds of memory, kinds of time and collectives that plans and reports list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


MEMORY_KINDS = (
    "parameters", "gradients", "optimizer", "buffers", "inputs", "activations", "temporary", "communication",
    "gathered",
)  # fmt: skip
"""What the rows of `Plan.memory` count, each in bytes; `autopart.cost.memory_kinds.RankMemory` says what each is."""


TIMING_PARTS = ("forward", "input_backward", "weight_backward", "recompute")
"""What the stages of `Plan.timing` count, each in seconds by kind of work."""


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in one module: `count` of them in all repeated blocks, `bytes` sent by one rank in all.

    `microbatch`: once a microbatch, or (gradients of parameters) once a step.
    """

    where: str
    axis: str
    forward: str
    backward: str
    count: int
    bytes: int
    per: str = "microbatch"
