"""Peak memory of a rank by kind (parameters, gradients, activations, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopart.ir.run.report_terms import MEMORY_KINDS

OPTIMIZER_VALUES = 2
"""Values per parameter that the optimizer stores, in the parameter's dtype.

AdamW stores two moments (Loshchilov & Hutter 2019). Plain SGD stores no values. An optimizer with master weights of
higher precision stores more.
"""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Peak memory of one rank during a training step, by kind, in bytes.

    One object represents all ranks with the same `pp` coordinate. The prediction assumes that a step begins without
    gradients (`optimizer.zero_grad()`, whose default frees them). It assumes that AdamW updates without copies
    (`fused=True`). torch's default on GPUs, `foreach`, needs additional memory, up to the bytes of all trained
    parameters.

    Args:
        stages: indices of the pipeline stages that the rank runs.
        parameters, optimizer, buffers: persistent state.
        gradients: gradients of all the rank's weights.
        inputs: the batch, and values that are computed from the batch alone.
        activations: peak of the tensors saved for backward.
        temporary: peak memory of one forward or backward in addition to the saved tensors.
        communication: receive buffers of pipelining, and the largest bucket of gradients of tied parameters.
        gathered: unsharded parameters under ZeRO 1 and 2, in addition to the rank's shards. Under ZeRO 1, unsharded
            gradients are included.
        total: peak of the sum. It can be below the sum of all kinds, because they do not all peak at the same time.
        in_flight: {stage: microbatches whose activations are saved when `activations` peaks}.
    """

    stages: tuple[int, ...]
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    inputs: int
    activations: int
    temporary: int
    communication: int
    gathered: int
    total: int
    in_flight: Mapping[int, int]

    def as_row(self) -> dict[str, Any]:
        """Return this rank's row of `Plan.memory`, as JSON data."""
        in_flight = [self.in_flight[stage] for stage in self.stages]
        sizes = {kind: getattr(self, kind) for kind in MEMORY_KINDS}
        return {"stages": list(self.stages), **sizes, "total": self.total, "in_flight": in_flight}
