"""Decompositions of torch functions that torch.export cannot trace, or that have no sharding rule.

For example, `embedding_bag` becomes a look-up and a sum, which have sharding rules. The output size of `unique` depends
on values; its decomposition selects the distinct values by a mask.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from autopart.ops.ctc_loss import ctc_loss
from autopart.tracing.python.concrete_constants import tensors_in


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
    """Decompose `F.embedding_bag` into an embedding look-up and a sum per bag.

    Torch's operator does not show which rows belong to which bag. The gradient of the table is dense.
    """
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
    """Compute the CTC loss with autopart's operator.

    Torch's operator allocates tensors of data-dependent size.
    """
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
    """Sum or average the looked-up rows of each bag.

    Args:
        counted: boolean per row: True if a mean counts the row in its divisor (False for padding).
        starts: index of the first row of each bag.
    """
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
    """Look up rows of an embedding table. The table's gradient is dense, even with `sparse=True`."""
    return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:  # fmt: skip
    """Compute `F.gaussian_nll_loss` without its data-dependent check and its in-place clamp."""
    if not isinstance(var, Tensor):
        var = var * torch.ones_like(input)
    if input.shape != var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    # The clamped value has the gradient of the variance, also at the bound.
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (var.log() + (input - target) ** 2 / var) + (0.5 * math.log(2 * math.pi) if full else 0.0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.mean()


def _multi_margin_loss(
    input: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, weight: Tensor | None = None,
    size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Compute `F.multi_margin_loss`, with a zero gradient if a sample is exactly at the margin.

    Torch's decomposition uses `clamp_min`, whose gradient is not zero there.
    """
    if size_average is not None or reduce is not None:
        return F.multi_margin_loss(input, target, p, margin, weight, size_average, reduce, reduction)
    rows, labels = torch.atleast_2d(input), torch.atleast_1d(target).unsqueeze(1)
    margins = (margin - rows.gather(1, labels) + rows).relu() ** p
    if weight is not None:
        margins = margins * weight[labels]
    others = torch.arange(rows.shape[1], device=rows.device) != labels
    loss = torch.where(others, margins, 0).sum(1) / rows.shape[1]
    if reduction == "none":
        return loss if input.dim() > 1 else loss.squeeze(0)
    return loss.sum() if reduction == "sum" else loss.mean()


def _where(condition: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute `torch.where`. Accepts a uint8 condition, as eager torch does and torch.export does not."""
    return torch.where(condition.bool() if condition.dtype == torch.uint8 else condition, *args, **kwargs)


def _where_method(chosen: Tensor, condition: Tensor, other: Any) -> Tensor:
    return cast(Tensor, _where(condition, chosen, other))


_LARGEST_ROW = 64
"""Maximum row length for `unique`'s decomposition, which sorts rows by one column after another."""


def _unique(
    input: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False,
    dim: int | None = None,
) -> Any:  # fmt: skip
    """Compute `torch.unique`: sort, then select by a mask the first element of each run of equal values."""
    rows = _rows(input, dim)
    if not 0 < math.prod(rows.shape[1:]) <= _LARGEST_ROW:
        return torch.unique(input, sorted, return_inverse, return_counts, dim)
    order = _order(rows)
    distinct, number = _runs(rows[order])
    inverse = torch.zeros_like(number).scatter(0, order, number) if return_inverse else None
    return _asked_for(input, dim, distinct, number, inverse, return_counts)


def _unique_consecutive(
    input: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Compute `torch.unique_consecutive`: select by a mask the first element of each run of equal values."""
    distinct, number = _runs(_rows(input, dim))
    return _asked_for(input, dim, distinct, number, number if return_inverse else None, return_counts)


def _rows(input: Tensor, dim: int | None) -> Tensor:
    """Return the items that `unique` compares, one per row: single elements, or slices along `dim`."""
    return input.detach().flatten() if dim is None else input.detach().movedim(dim, 0)


def _order(rows: Tensor) -> Tensor:
    """Return the indices that sort the rows lexicographically."""
    if rows.ndim == 1:
        return rows.sort().indices
    flat = rows.flatten(1)
    order = torch.arange(len(flat), device=flat.device)
    for column in reversed(flat.unbind(1)):
        order = order[column[order].sort(stable=True).indices]
    return order


def _runs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Find runs of equal consecutive rows.

    Return the first row of each run, and the run index of every row.
    """
    differs = rows[1:] != rows[:-1]
    first = torch.cat([torch.ones_like(rows[:1], dtype=torch.bool), differs])
    first = first if rows.ndim == 1 else first.flatten(1).any(1)
    return rows[first], first.to(torch.int64).cumsum(0) - 1


def _asked_for(
    input: Tensor, dim: int | None, distinct: Tensor, number: Tensor, inverse: Tensor | None, counts: bool
) -> Any:
    answer = [distinct if dim is None else distinct.movedim(0, dim)]
    if inverse is not None:
        answer += [inverse.view(input.shape) if dim is None else inverse]
    if counts:
        # The size of the last dim may be data-dependent.
        of_each = distinct if distinct.ndim == 1 else distinct.flatten(1)[:, 0]
        none = torch.zeros_like(of_each, dtype=torch.int64)
        answer += [none.index_add(0, number, torch.ones_like(number))]
    return tuple(answer) if len(answer) > 1 else answer[0]


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Count the values below `minlength`; larger values raise an error at run time.

    Calls `torch.bincount` if `minlength` is 0 or the weights need a gradient.
    """
    if not minlength or (weights is not None and weights.requires_grad):  # torch has no derivative of it
        return torch.bincount(input, weights, minlength)
    if weights is None:
        added = torch.ones_like(input, dtype=torch.int64)
    else:
        added = weights if weights.dtype == torch.float32 else weights.to(torch.float64)
    return added.new_zeros(minlength).index_add(0, input, added)


def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Compute torch's covariance without its data-dependent check of the number of observations."""
    rows = torch.atleast_2d(input)
    weights = [w for w in (fweights, aweights) if w is not None]
    if not weights:
        count: Any = rows.shape[1]
        away = rows - rows.mean(1, keepdim=True)
        return (away @ away.mH / max(count - correction, 0)).squeeze()
    weight = math.prod(weights[1:], start=weights[0])
    count = weight.sum()
    lost = correction if aweights is None else correction * (weight * aweights).sum() / count
    away = rows - ((rows * weight).sum(1) / count).unsqueeze(1)
    return ((away * weight) @ away.mH / (count - lost).clamp(min=0)).squeeze()


def _corrcoef(input: Tensor) -> Tensor:
    """Compute torch's correlation coefficients of real numbers. Complex numbers use torch's own function."""
    if input.is_complex():
        return torch.corrcoef(input)
    covariance = _cov(input)
    if covariance.ndim == 0:
        return covariance / covariance
    deviation = covariance.diagonal().sqrt()
    return (covariance / deviation.unsqueeze(1) / deviation.unsqueeze(0)).clamp(-1, 1)


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """Compute `torch.combinations` with indices that depend only on sizes.

    Torch's own code selects the indices by a mask, so its result has a data-dependent size.
    """
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = list(choose(range(len(input)), r))
    return input[torch.tensor(places, dtype=torch.int64, device=input.device).view(len(places), r)]


def _tensor(data: Any, **options: Any) -> Tensor:
    """Build a tensor from a list that contains 0-d tensors. `torch.tensor` would read their values."""
    if not isinstance(data, (list, tuple)) or not any(True for _ in tensors_in(data)):
        return torch.tensor(data, **options)
    entries = [entry.detach() if isinstance(entry, Tensor) else _tensor(entry) for entry in data]
    kinds = [torch.get_default_dtype() if entry.is_floating_point() else entry.dtype for entry in entries]
    dtype = options.get("dtype") or functools.reduce(torch.promote_types, kinds)
    made = torch.stack([entry.to(dtype) for entry in entries]).to(options.get("device") or entries[0].device)
    return made.requires_grad_(options.get("requires_grad", False))


def _with_zero_gradient(result: Tensor, source: Tensor) -> Tensor:
    """Return `result` with a gradient of zero for `source`. A trace would leave this gradient out.

    The difference matters to optimizers: they apply weight decay to a zero gradient, but not to a missing one.
    """
    if not source.requires_grad:
        return result
    return torch.where(torch.zeros_like(source, dtype=torch.bool), source, result)


def _bernoulli(input: Tensor, p: float | None = None, **options: Any) -> Tensor:
    """Draw from a Bernoulli distribution. The gradient of its probabilities is zero."""
    if p is not None:
        return torch.bernoulli(input, p, **options)  # torch has no derivative of it
    return _with_zero_gradient(torch.bernoulli(input.detach(), **options), input)


def _matrix_power(input: Tensor, n: int, **options: Any) -> Tensor:
    """Compute powers of matrices. The gradient of the power 0, the unit matrix, is zero."""
    power = torch.linalg.matrix_power(input, n, **options)
    return power if n else _with_zero_gradient(power, input)


def _tensor_split(input: Tensor, indices_or_sections: Any, dim: int = 0) -> Any:
    """Split a tensor at positions that are given as integers or as a tensor."""
    if isinstance(indices_or_sections, Tensor):
        indices_or_sections = indices_or_sections.tolist()
    return torch.tensor_split(input, indices_or_sections, dim)


TRACE_DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    F.ctc_loss: _ctc_loss,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.multi_margin_loss: _multi_margin_loss,
    torch.where: _where,
    Tensor.where: _where_method,
    torch.unique: _unique,
    Tensor.unique: _unique,
    torch.unique_consecutive: _unique_consecutive,
    Tensor.unique_consecutive: _unique_consecutive,
    torch.bincount: _bincount,
    Tensor.bincount: _bincount,
    torch.cov: _cov,
    Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    Tensor.corrcoef: _corrcoef,
    torch.combinations: _combinations,
    torch.tensor: _tensor,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    torch.matrix_power: _matrix_power,
    Tensor.matrix_power: _matrix_power,
    torch.linalg.matrix_power: _matrix_power,
    torch.tensor_split: _tensor_split,
    Tensor.tensor_split: _tensor_split,
}
"""{torch function: its decomposition in a trace}."""
