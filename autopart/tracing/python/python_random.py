"""Random numbers of Python and numpy in a forward, drawn from torch's generator instead.

The program then draws new numbers in every step, equal on all ranks. This covers the functions that return one uniform
number, if they are called as attributes of their modules (`random.random()`).
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from autopart.common.scoped import attributes

DRAWN_BY_TORCH = "the random numbers of Python and numpy are drawn by torch"
"""Note of a plan whose trace draws Python's random numbers with torch."""


def drawn_by_torch(as_numbers: bool) -> AbstractContextManager[None]:
    """Let `random.random()`, `random.uniform(a, b)` and numpy's `rand()` draw from torch's generator.

    Args:
        as_numbers: return Python numbers instead of tensors, for a run of the model outside of a trace.
    """

    def draw() -> Any:
        drawn = torch.rand((), dtype=torch.float64)
        return drawn.item() if as_numbers else drawn

    def uniform(low: float = 0.0, high: float = 1.0) -> Any:
        return low + (high - low) * draw()

    return attributes({(random, "random"): draw, (random, "uniform"): uniform, (np.random, "rand"): draw,
                       (np.random, "random"): draw, (np.random, "uniform"): uniform})  # fmt: skip
