"""Several optimizers as one, such as Muon for hidden matrices and AdamW for all other parameters."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class _ChainedState(ChainMap[Any, Any]):
    """State of several optimizers. A look-up adds no entry to their dicts, which are `defaultdict`."""

    def __getitem__(self, key: Any) -> Any:
        for mapping in self.maps:
            if key in mapping:
                return mapping[key]
        return self.__missing__(key)


class ChainedOptimizer(Optimizer):
    """Optimizer that combines several optimizers of different parameters, which step together.

    `param_groups` has the group objects of all optimizers, so a scheduler changes their learning rates.

    Example:
        ChainedOptimizer([torch.optim.Muon(matrices), torch.optim.AdamW(vectors)])
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.state = _ChainedState(*(optimizer.state for optimizer in optimizers))  # type: ignore[assignment]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run a step of each optimizer. If there is a closure, it is called once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers of a `ChainedOptimizer`; for any other optimizer, the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
