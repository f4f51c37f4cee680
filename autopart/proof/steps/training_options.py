"""Options of `verify` for training steps: number of steps, optimizer, clipping, scaler and batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopart.errors import InputError, OptionError
from autopart.runtime.optimizers.chained_optimizer import ChainedOptimizer, parts_of
from autopart.tracing.trace_model import bind_call

Named = list[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[Named], torch.optim.Optimizer]
"""Function that creates an optimizer from [(name, parameter)]. It can return a list of optimizers."""

TARGET = "target"
"""Key of a batch under which it has the target of a loss function."""

STEPS = 3
"""Default number of training steps."""

SCALER_DEFAULTS = {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
"""Default settings of a `torch.amp.GradScaler`."""


@dataclass(frozen=True)
class Training:
    """The training steps that `verify` runs and compares.

    Args:
        optimizer: function that creates an optimizer from [(name, parameter)]. It is called once with the parameters of
            the model, and once for each rank with the shards of the rank.
        example: arguments of the call that is traced.
        batches: arguments by name of the call in each step. If there are fewer than `steps`, they are repeated.
        max_norm: gradient clipping norm.
        scaler: settings of a `torch.amp.GradScaler`.
        targets: targets of a loss function, one per batch.
    """

    steps: int
    optimizer: MakeOptimizer
    example: Mapping[str, Any]
    batches: tuple[Mapping[str, Any], ...]
    max_norm: float | None = None
    scaler: Mapping[str, Any] | None = None
    targets: tuple[Any, ...] = ()

    def make_optimizer(self, named: Named) -> torch.optim.Optimizer:
        """Create the optimizer of [(name, parameter)].

        If the user's function returns several optimizers, they are combined into one.
        """
        made: Any = self.optimizer(named)
        is_chain = isinstance(made, (list, tuple)) and all(isinstance(one, torch.optim.Optimizer) for one in made)
        return ChainedOptimizer(made) if is_chain and made else made

    def batch(self, step: int) -> Mapping[str, Any]:
        """Return the arguments of the call in a step. The first step is 1."""
        return self.batches[(step - 1) % len(self.batches)]


def read_training(
    model: nn.Module, example: Mapping[str, Any], steps: int | None = None, optimizer: MakeOptimizer | None = None,
    max_norm: float | None = None, scaler: Any = None, batches: Sequence[Mapping[str, Any]] | None = None,
    has_loss_fn: bool = False,
) -> Training | None:  # fmt: skip
    """Validate the training options of `verify`. Return None if all are None.

    With a `loss_fn`, a batch can contain an entry `target`. Raises OptionError or InputError for invalid options.
    """
    if steps is None and optimizer is None and max_norm is None and not scaler and batches is None:
        return None
    if steps is None:
        steps = len(batches) if batches else STEPS
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise OptionError(f"steps={steps!r} is not a number of training steps", hint="an integer from 1")
    if max_norm is not None and not (isinstance(max_norm, (int, float)) and max_norm > 0):
        raise OptionError(f"max_norm={max_norm!r} is not a norm to clip to", hint="a number above 0, such as 1.0")
    if optimizer is not None and not callable(optimizer):
        raise OptionError(
            f"optimizer={optimizer!r} does not make optimizers", why="every rank needs a separate optimizer",
            hint="optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3)",
        )  # fmt: skip
    calls: list[Mapping[str, Any]] = []
    targets: list[Any] = []
    for batch in batches or ():
        inputs = dict(batch)
        if has_loss_fn and TARGET in inputs:
            targets.append(inputs.pop(TARGET))
        calls.append(bind_call(model, (), inputs))
    if targets and len(targets) < len(calls):
        raise InputError(
            f"{len(targets)} of {len(calls)} batches have the entry '{TARGET}' for the loss_fn",
            hint="a target in every batch, or in none",
        )
    return Training(
        steps,
        optimizer or _adamw,
        example,
        tuple(calls or [example]),
        max_norm,
        _scaler_settings(scaler),
        tuple(targets),
    )


def check_optimizer(optimizer: Any) -> None:
    """Raise OptionError if the object is not a torch optimizer, or if its step needs a closure."""
    for part in parts_of(optimizer):
        _check_one(part)


def _check_one(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"optimizer(named) returned a {name}, not a torch.optim.Optimizer",
                          hint="optimizer=lambda named: torch.optim.AdamW([p for _, p in named])")  # fmt: skip
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptionError(
            f"{name} cannot be verified in training steps",
            why="its step needs a closure that runs the model again, which verify() cannot provide",
            hint="an optimizer whose step() needs no closure, such as torch.optim.AdamW",
        )


def _adamw(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in named], lr=1e-3)


def _scaler_settings(scaler: Any) -> dict[str, Any] | None:
    """Return the settings of a GradScaler, passed as a dict, as an object, or as True for the defaults."""
    if scaler is None or scaler is False:
        return None
    if isinstance(scaler, Mapping):
        unknown = [name for name in scaler if name not in SCALER_DEFAULTS]
        if unknown:
            raise OptionError(f"scaler has no setting {unknown[0]!r}", hint=", ".join(SCALER_DEFAULTS))
        return {**SCALER_DEFAULTS, **scaler}
    if scaler is True:
        return dict(SCALER_DEFAULTS)
    if not hasattr(scaler, "get_growth_interval"):
        raise OptionError(f"scaler={scaler!r} is not a loss scaler",
                          hint='True, {"init_scale": 1024.0}, or a torch.amp.GradScaler')  # fmt: skip
    if not scaler.is_enabled():
        return None
    values = (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    return dict(zip(SCALER_DEFAULTS, values, strict=True))
