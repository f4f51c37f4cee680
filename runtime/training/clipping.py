"""Gradient norm of a partitioned model, and gradient clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.comm.watchdog import watched
from autopart.runtime.training import gradient_norms


class ClippingMethods:
    """Methods of a partitioned model: gradient norm and gradient clipping."""

    _process: Process
    _local_parameters: Mapping[str, nn.Parameter]
    _traced: Callable[[str], Any]

    @watched
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the full model's gradients: a detached scalar, equal on every rank. Collective.

        The result equals that of `torch.nn.utils.get_total_norm` on one device. Every shard of a parameter counts once,
        even if several ranks store it.

        Args:
            norm_type: order p of the norm; `math.inf` gives the largest element. Raises OptionError for 0.
        """
        self._traced("grad_norm")
        return gradient_norms.grad_norm(self._local_parameters.values(), self._process, norm_type)

    @watched
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients so that the norm of the full model is at most `max_norm`. A collective call.

        Returns the norm before scaling, as `torch.nn.utils.clip_grad_norm_` does: a detached scalar, equal on every
        rank. If `error_if_nonfinite` is set and the norm is not finite, raises RuntimeError on every rank and scales
        nothing.

        Example: `pm.step(**batch); pm.clip_grad_norm_(1.0); optimizer.step()`
        """
        gradient_norms.check_max_norm(max_norm)
        total = self.grad_norm(norm_type)
        gradient_norms.check_finite(total, error_if_nonfinite)
        torch.nn.utils.clip_grads_with_norm_(self._local_parameters.values(), max_norm, total)
        return total
