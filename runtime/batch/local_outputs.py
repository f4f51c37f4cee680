"""Outputs where every rank has its own rows (`local_batch=True`), and what a loss of a rank on them is part of.

Outputs are of three kinds. *Rows* are this rank's own. A *value* is made of no rows, as a parameter that the model
returns: it is the same on every rank. A *sum* is made of the rows of all ranks, as a loss or a count: it is the same on
every rank too. A loss that reads rows or values is this rank's term of the loss, so gradients of what is the same on
every rank are those of all terms together. A loss that reads sums alone is the loss of the global batch, which every
rank has computed: it counts once.
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

Kind = Enum("Kind", ["ROWS", "VALUE", "SUM"])


def kind_of(output: Output, program: Program, axes: Sequence[str]) -> Kind:
    """What an output is where these axes cut rows."""
    if any(axis in output.layout and output.layout[axis].is_shard for axis in axes):
        return Kind.ROWS
    return Kind.SUM if output.made_of & (program.row_inputs or frozenset()) else Kind.VALUE


def as_terms(outputs: Sequence[Tensor], kinds: Sequence[Kind], groups: Sequence[dist.ProcessGroup]) -> list[Tensor]:
    """The outputs, whose gradients are those of the terms of all ranks in these groups."""
    trained = [i for i, output in enumerate(outputs) if output.requires_grad]
    if all(kinds[i] is Kind.ROWS for i in trained):
        return list(outputs)
    terms = _Terms.apply([kinds[i] for i in trained], groups, *(outputs[i] for i in trained))
    named = dict(zip(trained, terms, strict=True))
    return [named.get(i, output) for i, output in enumerate(outputs)]


class _Terms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kinds: Sequence[Kind], groups: Sequence[dist.ProcessGroup], *outputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.kinds, ctx.groups = kinds, groups
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = list(zip(ctx.kinds, grads, strict=True))
        is_term = any(kind is not Kind.SUM and grad is not None for kind, grad in given)
        return None, None, *(_of_all(grad, ctx.groups) if kind is not Kind.ROWS and is_term else grad
                             for kind, grad in given)  # fmt: skip


def _of_all(grad: Tensor | None, groups: Sequence[dist.ProcessGroup]) -> Tensor | None:
    for group in groups:
        grad = None if grad is None else all_reduce_once_more(grad, group)
    return grad
