"""Connectionist temporal classification (Graves et al., 2006) as an operator with static sizes.

Torch's operator saves a tensor that is as long as the longest target. That size is data-dependent, so torch's operator
cannot be traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopart.ops.differentiate_once import check_differentiated_once

aten = torch.ops.aten


@torch.library.custom_op("autopart::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """Return the negative log-likelihood of each sample's target, a tensor of shape [samples].

    Args:
        log_probs: log-probability of each class at each time, of shape [time, samples, classes].
        targets: classes, of shape [samples, longest target], or all targets concatenated in one dim.
        input_lengths, target_lengths: valid length of each sample, of shape [samples].
        blank: index of the blank class.
        zero_infinity: replace inf by 0, without a gradient, if a target is longer than its input.
    """
    arguments = log_probs, targets, input_lengths, target_lengths
    loss: Tensor = aten._ctc_loss.Tensor(*arguments, blank, zero_infinity)[0]
    return torch.where(loss == torch.inf, 0, loss) if zero_infinity else loss


@torch.library.custom_op("autopart::ctc_loss_grad", mutates_args=())
def ctc_loss_grad(
    grad: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int,
    zero_infinity: bool,
) -> Tensor:  # fmt: skip
    """Return the gradient of `log_probs`. `grad` is the gradient of the output of `ctc_loss`."""
    arguments = log_probs, targets, input_lengths, target_lengths
    loss, table = aten._ctc_loss.Tensor(*arguments, blank, zero_infinity)
    gradient: Tensor = aten._ctc_loss_backward.Tensor(grad, *arguments, loss, table, blank, zero_infinity)
    return gradient


@ctc_loss.register_fake
def _like_rows(log_probs: Tensor, *others: Any) -> Tensor:
    return log_probs.new_empty(log_probs.size(1))


@ctc_loss_grad.register_fake
def _like_log_probs(grad: Tensor, log_probs: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    check_differentiated_once("a CTC loss", "its backward is not differentiable, as on one device", "another loss")
    return ctc_loss_grad(grad.contiguous(), *ctx.saved_tensors, ctx.blank, ctx.zero_infinity), *(None,) * 5


OPERATORS = ("ctc_loss", "ctc_loss_grad")
ctc_loss.register_autograd(_backward, setup_context=_save_operands)
