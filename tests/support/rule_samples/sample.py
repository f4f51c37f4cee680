"""One call of one operator, and tensors to call it with."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SEEDS = itertools.count()  # every sample tensor has values of its own


@dataclass(frozen=True)
class Sample:
    """One call: `torch.ops.aten.<operator>(*args, **kwargs)`. Tensors among the arguments are its inputs."""

    operator: str
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        def text(a: Any) -> str:
            return f"{str(a.dtype)[6:]}{list(a.shape)}" if isinstance(a, Tensor) else str(a)

        flat = [f"({', '.join(map(text, a))})" if isinstance(a, (list, tuple)) else text(a) for a in self.args]
        return f"{self.operator}({', '.join([*flat, *(f'{k}={text(v)}' for k, v in self.kwargs.items())])})"


def x(*shape: int, low: float = 0.1, high: float = 0.9) -> Tensor:
    """Floats without symmetry; in (0, 1) unless told, where every function of the tables is defined."""
    generator = torch.Generator().manual_seed(next(SEEDS))
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low).requires_grad_()


def z(*shape: int) -> Tensor:
    """Complex numbers."""
    return torch.complex(x(*shape).detach(), x(*shape).detach()).requires_grad_()


def data(*shape: int, low: float = 0.1, high: float = 0.9) -> Tensor:
    """Floats that no gradient is asked of."""
    return x(*shape, low=low, high=high).detach()


def ints(*shape: int, below: int = 7) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(sum(shape)))


def bools(*shape: int) -> Tensor:
    return ints(*shape, below=2).bool()


def labels(*shape: int, classes: int, ignored: int = -100) -> Tensor:
    target = ints(*shape, below=classes)
    target.view(-1)[1] = ignored
    return target


def call(name: str, *args: Any, **kwargs: Any) -> Sample:
    return Sample(name, args, kwargs)
