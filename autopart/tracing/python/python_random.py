"""Random numbers of Python and numpy in a forward.

`drawn_by_torch` draws them from torch's generator instead. The program then draws new numbers in every step, equal on
all ranks. This covers the functions that return one uniform number, if they are called as attributes of their modules
(`random.random()`). `OwnGenerators` finds generators of the model.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import nn

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


class OwnGenerators:
    """Random generators that a model creates.

    They are attributes of its modules, or globals of the files that define its classes.

    >>> class Noisy(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.rng = np.random.default_rng(0)
    >>> list(OwnGenerators([("", Noisy())]).generators)[0]
    'self.rng'
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]):
        self.generators: dict[str, Any] = {}
        files: dict[str, Any] = {}
        for path, module in modules:
            self._add(path or "self", vars(module))
            for kind in type(module).__mro__:
                if kind.__module__ in sys.modules and not kind.__module__.startswith("torch."):
                    files[kind.__module__] = sys.modules[kind.__module__]
        for name, file in files.items():
            self._add(name, vars(file))

    def _add(self, owner: str, values: dict[str, Any]) -> None:
        for name, value in list(values.items()):
            if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random)):
                self.generators[f"{owner}.{name}"] = value

    def states(self) -> dict[str, Any]:
        """Return {name: state} of all generators."""
        return {name: _state(generator) for name, generator in self.generators.items()}

    def restore(self, states: dict[str, Any]) -> None:
        for name, state in states.items():
            _set_state(self.generators[name], state)

    def reseed(self, seed: int) -> None:
        """Set the state of every generator to that of a new generator with this seed."""
        for generator in self.generators.values():
            if isinstance(generator, np.random.Generator):
                _set_state(generator, type(generator.bit_generator)(seed).state)
            else:
                _set_state(generator, _state(type(generator)(seed)))


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
