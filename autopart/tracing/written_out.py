"""Functions of torch in another form, which a trace can take: written out in operators that have rules.

What torch's own operator hides (which rows belong to which bag) or decides by values (how large a table is, how many
values are distinct) is in the graph then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from autopart.ir.ctc import ctc_loss


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Bags as rows of a table, added up: torch's own operator hides which rows belong to which bag. The gradient of the
    table is dense."""
    if scale_grad_by_freq or mode not in ("sum", "mean"):
        return F.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, False, per_sample_weights,
            include_last_offset, padding_idx,
        )  # fmt: skip
    rows = F.embedding(input, weight, max_norm=max_norm, norm_type=norm_type)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    counts = torch.ones_like(input)
    if padding_idx is not None:
        counts = input != padding_idx % len(weight)
        rows = rows * counts.unsqueeze(-1)
    if offsets is not None:
        return _bags(rows, counts, offsets[:-1] if include_last_offset else offsets, mode)
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1)
    total = rows.sum(1)
    return total if mode == "sum" else total / counts.sum(1, keepdim=True).clamp(min=1)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """The loss of all rows by an operator of our own: torch's makes tables as large as the values of the lengths."""
    if log_probs.ndim == 2:
        lengths = torch.as_tensor(input_lengths).reshape(1), torch.as_tensor(target_lengths).reshape(1)
        row = _ctc_loss(log_probs.unsqueeze(1), targets.unsqueeze(0), *lengths, blank, reduction, zero_infinity)
        return row.squeeze(0) if reduction == "none" else row
    of_input, of_target = (torch.as_tensor(t, device=log_probs.device) for t in (input_lengths, target_lengths))
    rows: Tensor = ctc_loss(log_probs, targets, of_input, of_target, blank, zero_infinity)
    if reduction == "mean":
        return (rows / of_target.clamp(min=1).to(rows.dtype)).mean()
    return rows.sum() if reduction == "sum" else rows


def _bags(rows: Tensor, counted: Tensor, starts: Tensor, mode: str) -> Tensor:
    """Bags that lie one after the other, from their starts: every row is added to the bag that it is in. `counted`:
    whether a row counts for a mean."""
    places = torch.arange(len(rows), device=starts.device, dtype=starts.dtype)
    bag = torch.searchsorted(starts, places, right=True) - 1
    total = rows.new_zeros(len(starts), rows.shape[1]).index_add(0, bag, rows)
    if mode == "sum":
        return total
    counts = torch.zeros_like(starts).index_add(0, bag, counted.to(starts.dtype))
    return total / counts.clamp(min=1).unsqueeze(-1)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows of a table whose gradient is dense, also where a sparse one is asked for: ranks add up dense ones."""
    return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:  # fmt: skip
    """As torch's, which decides by values whether a variance is negative, and bounds a copy of it in place."""
    if not isinstance(var, Tensor):
        var = var * torch.ones_like(input)
    if input.shape != var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()  # its gradient is that of the variance, also at the bound
    loss = 0.5 * (var.log() + (input - target) ** 2 / var) + (0.5 * math.log(2 * math.pi) if full else 0.0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.mean()


def _where(condition: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Bytes as a condition, which torch takes and its trace does not."""
    return torch.where(condition.bool() if condition.dtype == torch.uint8 else condition, *args, **kwargs)


def _where_method(chosen: Tensor, condition: Tensor, other: Any) -> Tensor:
    return cast(Tensor, _where(condition, chosen, other))


def _unique(
    input: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False,
    dim: int | None = None,
) -> Any:  # fmt: skip
    """The first of each of the sorted values, in a form whose size a trace knows to be open: a selection by a mask."""
    if dim is not None:
        return torch.unique(input, sorted, return_inverse, return_counts, dim)
    values, order = input.detach().flatten().sort()
    distinct, number = _runs(values)
    inverse = torch.zeros_like(number).scatter(0, order, number).view(input.shape) if return_inverse else None
    return _asked_for(distinct, inverse, _lengths(distinct, number) if return_counts else None)


def _unique_consecutive(
    input: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """The first of every run of values that are the same."""
    if dim is not None and input.ndim > 1:
        return torch.unique_consecutive(input, return_inverse, return_counts, dim)
    distinct, number = _runs(input.detach().flatten())
    inverse = number.view(input.shape) if return_inverse else None
    return _asked_for(distinct, inverse, _lengths(distinct, number) if return_counts else None)


def _runs(values: Tensor) -> tuple[Tensor, Tensor]:
    """The value of each run of values that are the same, and the number of the run that every value is in."""
    first = torch.cat([torch.ones_like(values[:1], dtype=torch.bool), values[1:] != values[:-1]])
    return values[first], first.to(torch.int64).cumsum(0) - 1


def _lengths(distinct: Tensor, number: Tensor) -> Tensor:
    return torch.zeros_like(distinct, dtype=torch.int64).index_add(0, number, torch.ones_like(number))


def _asked_for(distinct: Tensor, *more: Tensor | None) -> Any:
    asked = [tensor for tensor in more if tensor is not None]
    return (distinct, *asked) if asked else distinct


WRITTEN_OUT: Mapping[Any, Callable[..., Any]] = {
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    F.ctc_loss: _ctc_loss,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    torch.where: _where,
    Tensor.where: _where_method,
    torch.unique: _unique,
    Tensor.unique: _unique,
    torch.unique_consecutive: _unique_consecutive,
    Tensor.unique_consecutive: _unique_consecutive,
}
"""Functions that a trace takes in another form."""
