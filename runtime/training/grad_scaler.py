"""Gradient scaling over all ranks: an infinity in one rank's shard of a gradient counts on every rank.

`torch.amp.GradScaler` checks only the gradients of its rank. With torch's class, only ranks without infinities would
take a step, and the scales of ranks would differ. (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2, describe
loss scaling.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.compat.torch_function_internals import on_local_values
from autopart.compat.training_internals import redirect_unscale
from autopart.errors import InputError
from autopart.runtime.comm.process_mesh import Process, reduce_over_all
from autopart.runtime.gradients.no_sync import check_reduced
from autopart.runtime.shards.shard_owners import parameters_of, process_among
from autopart.runtime.shards.shared_parameters import check_not_originals
from autopart.runtime.training.gradient_norms import inside


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a partitioned model, with the same methods, arguments and `state_dict`.

    It detects infinite gradients over all ranks. Either all ranks take a step or none does, and the scale stays equal.
    When a model is partitioned, torch's class is patched to do this too. Unlike torch's class, this class also
    works if `scale(loss)` is never called. Its default `device` is "cuda", or "cpu" without GPUs.

    Example:
        scaler = autopart.GradScaler()
        pm.step(**batch, loss_scale=scaler.get_scale())    # or scaler.scale(loss).backward(), without pp
        scaler.unscale_(optimizer)
        pm.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ):
        self.where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(self.where, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def get_scale(self) -> float:
        """Return the factor for the loss, a number that is equal on every rank; 1 if the scaler is disabled."""
        if self.is_enabled():
            self.scale(torch.zeros((), device=self.where))  # create the scale tensor, as scaling the first loss would
        return super().get_scale()


def patch_grad_scaler() -> None:
    """Patch `torch.amp.GradScaler` to detect infinite gradients of a partitioned model on all ranks."""
    redirect_unscale(_unscale)


@on_local_values
def _unscale(
    original: Callable[..., dict[torch.device, Tensor]], scaler: Any, optimizer: torch.optim.Optimizer, *args: Any
) -> dict[torch.device, Tensor]:
    """Divide an optimizer's gradients by the scale, in place of torch's function `original`.

    Returns {device: 1.0 if a gradient was not finite on any rank, else 0.0}. A collective call if the optimizer has
    parameters of a partitioned model.
    """
    process = process_among(parameters_of(optimizer))
    if process is not None:
        check_reduced(process, "unscaling")
    else:
        check_not_originals(parameters_of(optimizer), "unscaling")
    by_device = original(scaler, optimizer, *args)
    if process is None or not process.groups:
        return by_device
    _check_scaled(process, scaler)
    local = max((value.item() for value in by_device.values()), default=0.0)
    flags = torch.tensor([local, len(by_device)])  # [any infinity, any gradient]
    with inside(process, "unscaling of gradients"):
        reduce_over_all(flags, dist.ReduceOp.MAX, process)
    infinite, any_gradient = flags.tolist()
    if not by_device and any_gradient:  # gradients exist on other ranks
        return {process.device: torch.tensor(infinite, device=process.device)}
    for value in by_device.values():
        value.fill_(infinite)
    return by_device


def _check_scaled(process: Process, scaler: torch.amp.GradScaler) -> None:
    """Raise InputError if the gradients will be divided by a scale by which the loss was not multiplied."""
    if process.step_scale == 1.0 != scaler.get_scale():
        raise InputError(
            f"the gradients were not multiplied by the scaler's {scaler.get_scale():g}",
            why="step() got no loss_scale=, so dividing by the scale would make them too small",
            hint="pm.step(..., loss_scale=scaler.get_scale()); with precision='fp16' step() needs no scaler",
        )
