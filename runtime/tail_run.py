"""Run of the tail: operators that combine samples of all microbatches, such as a contrastive loss.

The last pipeline stage runs its forward for each microbatch, and stores the values that the tail uses. After the last
forward, the values of all microbatches are merged, and the tail runs forward and backward on them. The backward of the
stage for a microbatch then begins with this microbatch's part of the gradients. The schedule must run all forwards
before the first backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autopart.runtime.batch.batch_split import merge_for_tail, split_for_stage
from autopart.runtime.training.step_options import scaled

if TYPE_CHECKING:
    from autopart.runtime.pipeline_stages import StageModule


class TailRun:
    """Runs the tail of a program on one rank, with the values that it receives in the current step."""

    def __init__(self, module: StageModule):
        self.module, self.program = module, module.program
        self.begin(1.0)

    def begin(self, loss_scale: float) -> None:
        """Begin a step, in which the tail differentiates `loss_scale` times the loss."""
        self.loss_scale = loss_scale
        self.received: list[tuple[Tensor, ...]] = []
        self.gradients: list[Tensor | None] = []
        """Gradients of the merged values."""
        self.outputs: tuple[Tensor, ...] = ()

    def receive(self, values: tuple[Tensor, ...]) -> Tensor:
        """Receive the values of the next microbatch. After the last microbatch, run the tail.

        Returns a scalar from which the stage's backward of this microbatch starts.
        """
        start = _StartBackward.apply(self, len(self.received), *values)
        self.received.append(tuple(value.detach() for value in values))
        need_grad = [value.requires_grad for value in values]
        del values  # drop references, so that merging frees the values
        if len(self.received) == self.program.microbatches:
            self._forward_and_backward(need_grad)
        return start

    def _forward_and_backward(self, need_grad: Sequence[bool]) -> None:
        merged = merge_for_tail(self.program, self.received)
        self.received = []
        inputs = [value.requires_grad_(needs) for value, needs in zip(merged, need_grad, strict=True)]
        loss, *other_outputs = self.module.run(inputs, 0)
        self.outputs = (loss.detach(), *(value.detach() for value in other_outputs))
        scaled(loss, self.loss_scale).backward()
        self.module.reducer.after_backward()
        self.gradients = [value.grad for value in inputs]

    def gradients_of(self, microbatch: int) -> list[Tensor | None]:
        """Return the gradients of the values that a microbatch sent to the tail.

        After the last microbatch, release all gradients.
        """
        gradients = split_for_stage(self.program, self.gradients, microbatch)
        if microbatch == self.program.microbatches - 1:
            self.gradients = []
        return gradients


class _StartBackward(torch.autograd.Function):
    """Autograd function: return zero. Its backward returns the gradients that the tail has computed."""

    @staticmethod
    def forward(ctx: Any, tail: TailRun, microbatch: int, *values: Tensor) -> Tensor:
        ctx.tail, ctx.microbatch = tail, microbatch
        return torch.zeros((), device=tail.module.process.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.tail.gradients_of(ctx.microbatch)
