"""Random numbers of Python and numpy in a forward.

`drawn_by_torch` draws them from torch's generator instead. The program then draws new numbers in every step, equal on
all ranks. This covers the functions that return one uniform number, if they are called as attributes of their modules
(`random.random()`). `OwnGenerators` finds all other generators.
"""

from __future__ import annotations

import gc
import pickle
import random
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import sympy.core.random as sympy_random
import torch
from torch import nn

from autopart.common.scoped import attributes

DRAWN_BY_TORCH = "the random numbers of Python and numpy are drawn by torch"
"""Note of a plan whose trace draws Python's random numbers with torch."""


def drawn_by_torch(as_numbers: bool) -> AbstractContextManager[None]:
    """Let `random.random`, `random.uniform`, and numpy's `rand`, `random` and `uniform` draw from torch.

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
    """Random generators of the process, except the global ones of Python and numpy.

    A forward can hold its generator anywhere: in an attribute, a closure, a list or another object. So the garbage
    collector lists all generators. It omits objects from before `gc.freeze()`, so attributes of the model, and globals
    of the files that define its classes, are added.
    """

    def __init__(self, model: nn.Module) -> None:
        files = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
        holders = [*model.modules(), *(sys.modules[name] for name in files if name in sys.modules)]
        kinds = {kind for kind in _subclasses_of(_KINDS) if _has_state(kind)}
        ignored = {id(random.random.__self__), id(np.random.rand.__self__)}  # type: ignore[attr-defined]
        ignored |= set(map(id, vars(sympy_random).values()))  # torch draws from them for symbolic sizes
        listed = [one for one in gc.get_objects() if type(one) in kinds]  # of all objects of the process: must be cheap
        direct = [value for holder in holders for value in list(vars(holder).values()) if type(value) in kinds]
        self.generators = [*{id(one): one for one in (*listed, *direct) if id(one) not in ignored}.values()]

    def states(self) -> dict[int, Any]:
        """Return {number of a generator: its state as bytes}. Bytes can be compared, arrays in a state cannot."""
        return {place: pickle.dumps(_state(generator)) for place, generator in enumerate(self.generators)}

    def restore(self, states: dict[int, Any]) -> None:
        """Restore the states of the generators that have drawn since `states()`."""
        for place, state in states.items():
            if pickle.dumps(_state(self.generators[place])) != state:
                _set_state(self.generators[place], pickle.loads(state))

    def reseed(self, places: Iterable[int], seed: int) -> None:
        """Set the states of these generators to those of new generators with this seed."""
        for place in places:
            generator = self.generators[place]
            if isinstance(generator, np.random.Generator):
                _set_state(generator, type(generator.bit_generator)(seed).state)
            elif isinstance(generator, random.Random):
                _set_state(generator, random.Random(seed).getstate())
            else:
                _set_state(generator, np.random.RandomState(seed).get_state(legacy=False))

    def name_of(self, place: int, model: nn.Module) -> str:
        """Return the name of a generator: the attribute or variable in which it is stored, if there is one."""
        generator = self.generators[place]
        paths = {id(vars(module)): f"{path or 'self'}." for path, module in model.named_modules()}
        files = [vars(sys.modules[type(module).__module__]) for module in model.modules()]
        holders = [*files, *(one for one in gc.get_referrers(generator) if isinstance(one, dict))]
        names = [f"{paths.get(id(holder), '')}{name}" for holder in holders for name, value in holder.items()
                 if value is generator and isinstance(name, str)]  # fmt: skip
        kind = f"a {type(generator).__module__.partition('.')[0]} {type(generator).__name__}"
        return min(names, key=lambda name: "." not in name, default=f"{kind} of its own")


def _subclasses_of(kinds: Iterable[type]) -> set[type]:
    found, pending = set[type](), [*kinds]
    while pending:
        kind = pending.pop()
        found.add(kind)
        pending += type.__subclasses__(kind)
    return found


def _has_state(kind: type) -> bool:
    return not issubclass(kind, random.Random) or kind.getstate is random.Random.getstate


_KINDS = (np.random.Generator, np.random.RandomState, random.Random)


class Entropy:
    """Context manager that records when code reads the operating system's random bytes.

    For example, `numpy.random.default_rng()` without a seed reads them.
    """

    def __enter__(self) -> Entropy:
        self.is_read = False
        read: Any = vars(random)["_urandom"]
        seed = random.Random.seed

        def bytes_of(size: int) -> bytes:
            self.is_read = True
            return bytes(read(size))

        def seeded(generator: random.Random, a: Any = None, version: int = 2) -> None:
            self.is_read |= a is None
            seed(generator, a, version)

        self._patches = attributes({(random, "_urandom"): bytes_of, (random.Random, "seed"): seeded})
        self._patches.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self._patches.__exit__(None, None, None)


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
