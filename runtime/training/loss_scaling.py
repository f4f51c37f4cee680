"""Dynamic loss scaling in `step`, because the smallest positive float16 value is only 6e-8.

The loss is multiplied by a scale before it is differentiated, and the gradients are divided by the scale. If a gradient
of any rank is not finite, all gradients are dropped and the scale is halved. After many finite steps the scale is
doubled (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2). The constants are those of `torch.amp.GradScaler`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopart.errors import RuntimeSetupError
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.training.nonfinite import all_finite

STATE = "loss_scaling"
"""Key under which a state dict stores the scale."""


@dataclass
class LossScaling:
    """Loss scale of the next step, with its update rule. It is equal on every rank.

    The scale is a power of two, so that division by it is exact.

    Attributes:
        steps: number of steps since the scale changed.
        skipped_steps: number of steps whose gradients were dropped.
        overflowed: True if the gradients of the last step were dropped.
    """

    scale: float = 2.0**16
    steps: int = 0
    skipped_steps: int = 0
    overflowed: bool = False

    growth_factor = 2.0
    backoff_factor = 0.5
    growth_interval = 2000

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor], process: Process) -> None:
        """Divide the gradients of a step by the scale, then update the scale. A collective call.

        If any gradient is not finite, all gradients of every rank become None.
        """
        with_grad = [parameter for parameter in parameters if parameter.grad is not None]
        grads = [parameter.grad for parameter in with_grad if parameter.grad is not None]
        self.overflowed = not all_finite(grads, process)
        for parameter in with_grad:
            if self.overflowed:
                parameter.grad = None
        for grad in () if self.overflowed else grads:
            grad.mul_(1 / self.scale)
        self._update()

    def _update(self) -> None:
        self.steps += 1
        if self.overflowed:
            self.scale, self.steps = self.scale * self.backoff_factor, 0
            self.skipped_steps += 1
        elif self.steps == self.growth_interval:
            self.scale, self.steps = self.scale * self.growth_factor, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "steps": self.steps, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self.steps = float(state["scale"]), int(state["steps"])
        self.skipped_steps = int(state["skipped_steps"])


class LossScalingMethods:
    """Methods of a partitioned model that concern loss scaling (`precision="fp16"`)."""

    _loss_scaling: LossScaling | None = None
    _process: Process

    @property
    def loss_scale(self) -> float:
        """Factor by which the next `step` multiplies the loss, and then divides the gradients.

        It is 1 without `precision="fp16"`.
        """
        return 1.0 if self._loss_scaling is None else self._loss_scaling.scale

    @property
    def skipped_steps(self) -> int:
        """Number of steps whose gradients were dropped, because the loss or a gradient was not finite.

        With `precision="fp16"` these include steps that only needed a smaller loss scale.
        """
        overflows = 0 if self._loss_scaling is None else self._loss_scaling.skipped_steps
        return overflows + self._process.skipped_steps

    def _save_loss_scaling(self, state_dict: MutableMapping[str, Any], prefix: str) -> None:
        if self._loss_scaling is not None:
            state_dict[prefix + STATE] = self._loss_scaling.state_dict()

    def _load_loss_scaling(self, state_dict: MutableMapping[str, Any], prefix: str) -> None:
        """Remove the loss scale from a state dict, and load it if this module has loss scaling."""
        state = state_dict.pop(prefix + STATE, None)
        if state is not None and self._loss_scaling is not None:
            self._loss_scaling.load_state_dict(state)


@contextmanager
def explain_missing_operators() -> Iterator[None]:
    """Context manager that raises RuntimeSetupError if an operator in it lacks a 16-bit kernel.

    The error replaces torch's error, and recommends another precision.
    """
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        match = re.search(r"\"(\w+)\" not implemented for '(Half|BFloat16)'", str(error))
        if match is None:
            raise
        precision = {"Half": "fp16", "BFloat16": "bf16"}[match[2]]
        raise RuntimeSetupError(
            f"this device has no operator '{match[1]}' in {precision}",
            why=f"precision='{precision}' makes the model compute it in this dtype",
            hint=f"precision='{'bf16' if precision == 'fp16' else 'fp32'}', a GPU, or x.float() before it in the model",
        ) from error  # fmt: skip
