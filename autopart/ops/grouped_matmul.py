"""Grouped matrix products of a mixture of experts, and selection of the rows of local experts.

A row is one token for one of its experts. A local expert is an expert whose weights this rank stores.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopart.ir.facts import facts


def expert_counts(graph: fx.Graph) -> list[int]:
    """Return the number of experts of every grouped product in an annotated graph."""
    patterns = [facts(node).get("pattern") for node in graph.nodes]
    return [pattern.sizes[pattern.lookup] for pattern in patterns if pattern and pattern.flops and pattern.lookup]


@torch.library.custom_op("autopart::expert_linear", mutates_args=())
def expert_linear(x: Tensor, weight: Tensor, expert: Tensor, first: int = 0) -> Tensor:
    """Multiply row `i` of `x` by the matrix of expert `expert[i]`.

    Args:
        x: rows, of shape [rows, inputs].
        weight: matrices of the local experts, of shape [local experts, inputs, outputs].
        expert: index of the expert of each row. The product of a row is zero if its expert is on another rank, so the
            result is a partial sum over the ranks that shard the experts.
        first: index of the first local expert.
    Returns:
        The products, of shape [rows, outputs].
    """
    rows, counts, is_local = _by_expert(expert, first, weight.size(0))
    if _has_kernel(x, weight):
        grouped = F.grouped_mm(x[rows], weight, offs=counts.cumsum(0, dtype=torch.int32))
        # Rows after the last group are uninitialised and may be NaN, which a factor of zero would keep.
        return torch.where(is_local.unsqueeze(-1), torch.zeros_like(grouped).index_copy(0, rows, grouped), 0)
    chunks = x[rows].split(_sizes(counts, rows))
    products = [part @ matrix for part, matrix in zip(chunks, weight, strict=False)]
    products.append(x.new_zeros(chunks[-1].size(0), weight.size(2)))
    return x.new_empty(x.size(0), weight.size(2)).index_copy_(0, rows, torch.cat(products))


@torch.library.custom_op("autopart::expert_outer", mutates_args=())
def expert_outer(x: Tensor, y: Tensor, expert: Tensor, num_experts: int, first: int = 0) -> Tensor:
    """Compute the weight gradient of `expert_linear`: per local expert, a sum of outer products.

    The gradient of an expert is the sum of `outer(x[i], y[i])` over the rows i of this expert. `expert_linear` explains
    the arguments. The result has the shape [local experts, inputs, outputs].
    """
    rows, counts, _ = _by_expert(expert, first, num_experts)
    if _has_kernel(x, y):
        return F.grouped_mm(x[rows].t(), y[rows], offs=counts.cumsum(0, dtype=torch.int32))
    products = x.new_empty(num_experts, x.size(1), y.size(1))
    sizes = _sizes(counts, rows)
    for product, of_x, of_y in zip(products, x[rows].split(sizes), y[rows].split(sizes), strict=False):
        torch.mm(of_x.t(), of_y, out=product)
    return products


def _by_expert(expert: Tensor, first: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort rows by expert. Rows of experts that are not local come last.

    Returns the row indices in sorted order, the number of rows per local expert, and a mask of the rows with a local
    expert.
    """
    local = expert - first
    is_local = (local >= 0) & (local < num_experts)
    local = torch.where(is_local, local, num_experts)
    counts = (local.unsqueeze(-1) == torch.arange(num_experts, device=local.device)).sum(0)
    return local.argsort(stable=True), counts, is_local


def _sizes(counts: Tensor, rows: Tensor) -> list[int]:
    """Return the number of rows of each local expert. The last entry is the number of all other rows.

    The function waits for the GPU, because it copies these numbers to the CPU.
    """
    sizes: list[int] = counts.tolist()
    return [*sizes, rows.numel() - sum(sizes)]


def _has_kernel(x: Tensor, y: Tensor) -> bool:
    """Return True if torch's grouped kernel can run: CUDA, bfloat16, row sizes in multiples of 16 bytes."""
    return x.is_cuda and x.dtype == y.dtype == torch.bfloat16 and x.size(-1) % 8 == y.size(-1) % 8 == 0


@torch.library.custom_op("autopart::to_experts", mutates_args=())
def to_experts(
    x: Tensor, expert: Tensor, times: int, num_experts: int, first: int = 0, count: int = -1, rows: int = -1
) -> Tensor:
    """Repeat each token for each of its experts, and select the rows of the local experts.

    Args:
        x: tokens; dim 0 is the token.
        expert: index of the expert of each row. It lists all experts of the first token, then all experts of the second
            token, and so on.
        times: number of experts per token.
        num_experts: number of experts of the model.
        first, count: index of the first local expert, and number of local experts, clamped to `num_experts`. If `count`
            is -1, all experts are local.
        rows: expected number of local rows, used for meta tensors.
    Returns:
        The rows whose expert is local, in the order of `expert`.
    """
    if expert.size(0) != x.size(0) * times:
        raise ValueError(f"{expert.size(0)} expert indices for {x.size(0)} rows with {times} experts each")
    if count < 0:
        return x.repeat_interleave(times, 0)
    return x[_local_rows(expert, first, count, num_experts) // times]


@torch.library.custom_op("autopart::from_experts", mutates_args=())
def from_experts(
    x: Tensor, expert: Tensor, times: int, num_experts: int, first: int = 0, count: int = -1
) -> Tensor:  # fmt: skip
    """Sum the rows of each token: the inverse of `to_experts`.

    If only some experts are local, the result is a partial sum over the ranks that shard the experts.

    Args:
        x: the output of `to_experts`, after the experts have processed it.
        expert, times, num_experts, first, count: as in `to_experts`.
    Returns:
        One value per token; dim 0 is the token.
    """
    tokens = expert.size(0) // times
    if count < 0:
        return x.unflatten(0, (tokens, times)).sum(1)
    return x.new_zeros(tokens, *x.shape[1:]).index_add_(0, _local_rows(expert, first, count, num_experts) // times, x)


def _local_rows(expert: Tensor, first: int, count: int, num_experts: int) -> Tensor:
    """Return the indices of the rows whose expert is local."""
    return ((expert >= first) & (expert < min(first + count, num_experts))).nonzero().squeeze(-1)


@to_experts.register_fake
def _(
    x: Tensor, expert: Tensor, times: int, num_experts: int, first: int = 0, count: int = -1, rows: int = -1
) -> Tensor:
    return x.new_empty(expert.size(0) if count < 0 else rows, *x.shape[1:])


@from_experts.register_fake
def _(x: Tensor, expert: Tensor, times: int, num_experts: int, first: int = 0, count: int = -1) -> Tensor:
    return x.new_empty(expert.size(0) // times, *x.shape[1:])


def _save_dispatch(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, expert, *ctx.way = inputs
    ctx.set_materialize_grads(False)
    ctx.rows = x.size(0)
    ctx.save_for_backward(expert)


def _back_from_experts(ctx: Any, grad: Tensor | None) -> tuple:
    if grad is None:
        return (None,) * 7
    (expert,), (times, num_experts, first, count, *_) = ctx.saved_tensors, ctx.way
    return (from_experts(grad.contiguous(), expert, times, num_experts, first, count), *[None] * 6)


def _back_to_experts(ctx: Any, grad: Tensor | None) -> tuple:
    if grad is None:
        return (None,) * 6
    (expert,), (times, num_experts, first, count) = ctx.saved_tensors, ctx.way
    return (to_experts(grad.contiguous(), expert, times, num_experts, first, count, ctx.rows), *[None] * 5)


to_experts.register_autograd(_back_from_experts, setup_context=_save_dispatch)
from_experts.register_autograd(_back_to_experts, setup_context=_save_dispatch)


@expert_linear.register_fake
def _(x: Tensor, weight: Tensor, expert: Tensor, first: int = 0) -> Tensor:
    return x.new_empty(x.size(0), weight.size(2))


@expert_outer.register_fake
def _(x: Tensor, y: Tensor, expert: Tensor, num_experts: int, first: int = 0) -> Tensor:
    return x.new_empty(num_experts, x.size(1), y.size(1))


def _save_operands(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, expert, ctx.first = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, expert)


def _backward(ctx: Any, grad: Tensor | None) -> tuple:
    if grad is None:
        return (None,) * 4
    x, weight, expert = ctx.saved_tensors
    needs_x, needs_weight, *_ = ctx.needs_input_grad
    of_x = expert_linear(grad.contiguous(), weight.transpose(1, 2), expert, ctx.first) if needs_x else None
    of_weight = expert_outer(x, grad.contiguous(), expert, weight.size(0), ctx.first) if needs_weight else None
    return of_x, of_weight, None, None


def _save_sides(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, y, expert, _, ctx.first = inputs
    ctx.save_for_backward(x, y, expert)


def _outer_backward(ctx: Any, grad: Tensor) -> tuple:
    x, y, expert = ctx.saved_tensors
    needs_x, needs_y, *_ = ctx.needs_input_grad
    of_x = expert_linear(y, grad.transpose(1, 2), expert, ctx.first) if needs_x else None
    of_y = expert_linear(x, grad, expert, ctx.first) if needs_y else None
    return of_x, of_y, None, None, None


OPERATORS = ("expert_linear", "expert_outer", "to_experts", "from_experts")
expert_linear.register_autograd(_backward, setup_context=_save_operands)
expert_outer.register_autograd(_outer_backward, setup_context=_save_sides)
