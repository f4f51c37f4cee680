"""Nested (jagged) tensors in a trace: operators run on their values and offsets, plain tensors.

The trace uses torch's own code for jagged tensors, except for the operators below: torch's code for them calls kernels
that have no sharding rule, or reads the lengths one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopart.compat import nested_internals as internals
from autopart.errors import Refusal
from autopart.tracing.dynamic.sized_calls import largest
from autopart.tracing.python.concrete_constants import UNKNOWN
from autopart.tracing.trace_errors import LostInTrace

Read = Callable[[Callable[[Tensor], Any], Tensor], Any]
"""Function that returns a value computed from a tensor of the inputs, or UNKNOWN."""


def run_jagged(read: Read, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operator with a jagged argument; NotImplemented to run torch's own code."""
    if func is internals.UNBIND:
        return _unbind(read, *args, **kwargs)
    if func in internals.GET_VALUES:
        return args[0]._values
    if func is internals.FROM_JAGGED:
        return _from_jagged(*args, **kwargs)
    if func is internals.TO_PADDED:
        return _to_padded(*args, **kwargs)
    if func is internals.FROM_PADDED:
        return _from_padded(*args, **kwargs)
    return NotImplemented


def _unbind(read: Read, nested: Any, dim: int = 0) -> Any:
    has_holes = nested._lengths is not None
    lengths = read(Tensor.tolist, nested._lengths if has_holes else nested._offsets.diff())
    starts = read(Tensor.tolist, nested._offsets) if has_holes else []
    if dim or lengths is UNKNOWN or starts is UNKNOWN:
        return NotImplemented
    along = nested._ragged_idx - 1
    if not has_holes:
        return nested._values.split(lengths, along)
    return tuple(nested._values.narrow(along, *part) for part in zip(starts, lengths, strict=False))


def _from_jagged(
    values: Tensor, offsets: Tensor, dummy: Tensor, lengths: Tensor | None = None, ragged_dim: int = 1,
    least: Tensor | None = None, most: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return internals.jagged(values, offsets, lengths, ragged_dim, {"min_seqlen": least, "max_seqlen": most})


def _to_padded(nested: Any, padding: float, size: Any = None) -> Tensor:
    if nested._lengths is not None:
        return NotImplemented
    dim = nested._ragged_idx - 1
    values = nested._values.movedim(dim, 0)
    if size is not None:
        num_steps = size[nested._ragged_idx]
    else:
        num_steps = len(values) if nested._max_seqlen_tensor is None else nested._max_seqlen
    padded, valid = padded_values(values, nested._offsets, num_steps)
    padded = torch.where(valid.view(*valid.shape, *[1] * (values.dim() - 1)), padded, padding)
    return padded.movedim(1, dim + 1)


def _from_padded(
    padded: Tensor, offsets: Tensor, dummy: Tensor, ragged_dim: int = 1, least: Tensor | None = None,
    most: Tensor | None = None, num_values: int | None = None,
) -> Tensor:  # fmt: skip
    if num_values is None:
        return NotImplemented
    values = packed_values(padded.movedim(ragged_dim, 1), offsets, num_values)
    return internals.jagged(
        values.movedim(0, ragged_dim - 1), offsets, None, ragged_dim, {"min_seqlen": least, "max_seqlen": most}
    )


def check_outputs(tensors: Iterable[Tensor]) -> None:
    """Raise LostInTrace if the model returns a jagged tensor."""
    if any(map(internals.is_jagged, tensors)):
        raise LostInTrace(
            "forward() returns a nested tensor", "the outputs of a program are plain tensors",
            "its values() and offsets(), or torch.nested.to_padded_tensor", Refusal.OUTPUT,
        )  # fmt: skip


def padded_values(values: Tensor, offsets: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
    """Return the values of each sample, padded to `num_steps`, and a mask of the valid steps.

    Padded steps have the values of other steps.
    """
    step = torch.arange(num_steps, device=offsets.device)
    valid = step < offsets.diff().unsqueeze(1)
    index = (offsets[:-1].unsqueeze(1) + step).clamp(max=len(values) - 1)
    return values[index], valid


def packed_values(padded: Tensor, offsets: Tensor, num_values: int) -> Tensor:
    """Return the valid steps of all samples in one dim: the inverse of `padded_values`."""
    place = torch.arange(num_values, device=offsets.device)
    sample = (torch.searchsorted(offsets, place, right=True) - 1).clamp(max=len(padded) - 1)
    return padded[sample, (place - offsets[sample]).clamp(max=padded.shape[1] - 1)]


def attend(
    read: Read, query: Any, key: Any, value: Any,
    attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Compute attention of jagged tensors on padded tensors; NotImplemented to run torch's own code."""
    if attn_mask is not None or any(t._ragged_idx != 2 or t._lengths is not None for t in (query, key, value)):
        return NotImplemented

    def padded(nested: Any) -> tuple[Tensor, Tensor]:
        values = nested._values.transpose(0, 1)
        num_steps = read(largest, nested._offsets.diff())
        steps, valid = padded_values(values, nested._offsets, len(values) if num_steps is UNKNOWN else num_steps)
        return steps.transpose(1, 2), valid

    (q, is_query), (k, is_key), (v, _) = padded(query), padded(key), padded(value)
    mask = (is_key.unsqueeze(1) | ~is_query.unsqueeze(2)).unsqueeze(1)  # padded queries attend to all keys
    if is_causal:
        mask = mask & torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, **options)
    values = packed_values(output.transpose(1, 2), query._offsets, query._values.shape[1])
    return internals.jagged(values.transpose(0, 1), query._offsets, None, 2, query._metadata_cache)
