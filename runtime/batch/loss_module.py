"""Parameters and buffers of a loss module (`loss_fn`), which the program of a step uses as buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopart.tracing.with_loss import criterion_tensors, loss_name

SMALL = 2**16
"""Maximum number of elements of a CPU tensor whose values are compared to detect a change.

A larger tensor counts as changed if its version counter has changed.
"""


def named_criterion(loss_fn: Any, model: nn.Module) -> dict[str, Tensor]:
    """Return a loss module's parameters and buffers, as {name in the program: tensor}.

    The dict is empty if `loss_fn` is not a module.
    """
    name = loss_name(model)
    return {f"{name}.{inside}": tensor.detach() for inside, tensor in criterion_tensors(loss_fn, model).items()}


class Criterion:
    """Copies of a loss module's parameters and buffers on this rank's device."""

    def __init__(self, given: Mapping[str, Tensor], device: torch.device):
        with torch.inference_mode(False):
            self.local = {name: tensor.to(device, copy=True) for name, tensor in given.items()}
        self._marks = {name: _mark(tensor) for name, tensor in given.items()}

    def follow(self, given: Mapping[str, Tensor], before_change: Callable[[], Any]) -> None:
        """Update the copies: copy each tensor of the loss module that has changed since the last call.

        `before_change` is called before the first copy. It must finish a step in flight, which can still use the old
        values.
        """
        changed = [name for name, tensor in given.items() if self._differs(name, tensor)]
        if changed:
            before_change()
        for name in changed:
            with torch.no_grad():
                self.local[name].copy_(given[name])
            self._marks[name] = _mark(given[name])

    def _differs(self, name: str, tensor: Tensor) -> bool:
        if self._marks[name] != _mark(tensor):
            return True
        local = self.local[name]
        on_host = tensor.device.type == local.device.type == "cpu" and tensor.numel() <= SMALL
        return on_host and not torch.equal(tensor, local)


def _mark(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version
