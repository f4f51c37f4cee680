"""Outputs of calls with `local_batch=True`, for losses that users compute from them.

An output has one of three kinds:

- `ROWS`: this rank's samples.
- `VALUE`: replicated, and independent of the samples, such as a parameter that the model returns.
- `SUM`: replicated, and computed from the samples of all ranks, such as a loss or a count.

A loss that uses a `ROWS` or `VALUE` output counts as this rank's term of the total loss. Backward then sums the
gradients of replicated outputs over all ranks. A loss that uses only `SUM` outputs counts as the total loss, which is
equal on all ranks. The gradients of the outputs then need no reduction.

The total loss is the sum of the terms. Training libraries expect the mean, as in DistributedDataParallel: their
integrations set `Process.averages_losses`, and gradients of terms are then divided by the number of data ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.ir.program import Output, Program
from autopart.runtime.comm.collectives import all_reduce_once_more

OutputKind = Enum("OutputKind", ["ROWS", "VALUE", "SUM"])


def kind_of(output: Output, program: Program, axes: Sequence[str]) -> OutputKind:
    """Return the kind of an output: `ROWS`, `VALUE` or `SUM`.

    `axes`: the mesh axes over which samples are split.
    """
    if any(axis in output.layout and output.layout[axis].is_shard for axis in axes):
        return OutputKind.ROWS
    return OutputKind.SUM if output.made_of & (program.row_inputs or frozenset()) else OutputKind.VALUE


def as_loss_terms(
    outputs: Sequence[Tensor], kinds: Sequence[OutputKind], groups: Sequence[dist.ProcessGroup], weight: float = 1.0
) -> list[Tensor]:
    """Adapt outputs so that each rank can compute one term of the loss from them, for its own samples.

    The backward of the returned outputs sums the gradients of replicated outputs over the ranks in `groups`, unless
    only `SUM` outputs have gradients. A term has this weight in the total loss.
    """
    differentiable = [i for i, output in enumerate(outputs) if output.requires_grad]
    if weight == 1.0 and all(kinds[i] is OutputKind.ROWS for i in differentiable):
        return list(outputs)
    terms = _Terms.apply([kinds[i] for i in differentiable], groups, weight, *(outputs[i] for i in differentiable))
    by_index = dict(zip(differentiable, terms, strict=True))
    return [by_index.get(i, output) for i, output in enumerate(outputs)]


class _Terms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kinds: Sequence[OutputKind], groups: Sequence[dist.ProcessGroup], weight: float, *outputs: Tensor
    ) -> Any:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.kinds, ctx.groups, ctx.weight = kinds, groups, weight
        # A view cannot be modified in place, and users scale losses in place.
        return tuple(output.view_as(output) if output.dim() else output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = list(zip(ctx.kinds, grads, strict=True))
        is_term = any(kind is not OutputKind.SUM and grad is not None for kind, grad in pairs)
        if not is_term:
            return None, None, None, *grads
        weighted = [(kind, None if grad is None else grad * ctx.weight) for kind, grad in pairs]
        return None, None, None, *(grad if kind is OutputKind.ROWS else _all_reduce(grad, ctx.groups)
                                   for kind, grad in weighted)  # fmt: skip


def _all_reduce(grad: Tensor | None, groups: Sequence[dist.ProcessGroup]) -> Tensor | None:
    for group in groups:
        grad = None if grad is None else all_reduce_once_more(grad, group)
    return grad
