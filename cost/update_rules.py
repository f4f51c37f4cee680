"""Optimizers whose update is predicted: their state and memory traffic per parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopart.cost.memory_kinds import OPTIMIZER_VALUES

OPTIMIZER_TRAFFIC = 7
"""Number of values that AdamW reads or writes per parameter.

It reads parameter, gradient and two moments, and writes all but the gradient.
"""


@dataclass(frozen=True)
class UpdateRule:
    """State and work of an optimizer.

    Args:
        state_values: values that it stores per parameter, in the parameter's dtype.
        traffic_values: values that an update reads or writes per parameter, without matrix products.
        full: parameters whose update needs the full tensor: "none", "matrices" (hidden matrices; AdamW updates all
            others) or "all".
        newton_schulz_steps: iterations that orthogonalize a matrix.
    """

    state_values: float
    traffic_values: float
    full: str = "none"
    newton_schulz_steps: int = 0


ADAMW = "adamw"
UPDATES: Mapping[str, UpdateRule] = {
    ADAMW: UpdateRule(OPTIMIZER_VALUES, OPTIMIZER_TRAFFIC),
    "sgd": UpdateRule(0, 3),
    # momentum: 3 values, Nesterov: 3, cast to bf16 and norm: 3, weight decay: 2, step: 2.5
    "muon": UpdateRule(1, 13.5, "matrices", 5),
    # AdamW, of which the update is stored, and two norms
    "lamb": UpdateRule(OPTIMIZER_VALUES, OPTIMIZER_TRAFFIC + 4, "all"),
}
"""{name in the option `optimizer`: its rule}. Muon is that of `torch.optim`. SGD has no momentum."""
