"""A model that others wrote, with the call it is run on, and small inputs for such calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, LENGTH, VOCAB, CLASSES, WIDTH, D = 8, 12, 160, 12, 32, 8


@dataclass(frozen=True)
class Case:
    """`loss_fn(output, target)` is for a model that returns no loss; without it every output counts."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., Tensor] | None = None
    target: Any = None


def classified(model: nn.Module, *args: Any) -> Case:
    """A model that gives each row a number for every class."""
    return Case(model, args, loss_fn=F.cross_entropy, target=torch.randint(CLASSES, (ROWS,)))


def predicts_tokens(model: nn.Module, ids: Tensor) -> Case:
    """A model that gives each token a number for every word."""
    return Case(model, (ids,), loss_fn=token_loss, target=torch.randint(VOCAB, ids.shape))


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def squared(model: nn.Module, *args: Any, **kwargs: Any) -> Case:
    """A model that is trained towards numbers, here zeros."""
    return Case(model, args, kwargs, loss_fn=mean_square, target=torch.zeros(ROWS))


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.view(-1, *[1] * (output.dim() - 1))).square().mean()


def images(size: int, channels: int = 3) -> Tensor:
    return torch.randn(ROWS, channels, size, size)


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(VOCAB, (ROWS, length))


def states(length: int = LENGTH, width: int = WIDTH) -> Tensor:
    return torch.randn(ROWS, length, width)


def written(forward: Callable[..., Any], *args: Any, **parts: Any) -> Case:
    """A module with these parts and this forward, called with a batch of rows unless `args` say more."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)

    Net.forward = forward  # type: ignore[assignment]
    return Case(Net(), args or (rows(),))


def rows() -> Tensor:
    return torch.randn(ROWS, D)


def linear() -> nn.Linear:
    return nn.Linear(D, D)
