"""Copies of tensors without their values: on the meta device, or with empty storage."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def without_values(tensor: Tensor) -> Tensor:
    """Return a tensor on the meta device with the shape, strides and dtype of `tensor`.

    For an `nn.Parameter`, return an `nn.Parameter` with the same Python attributes.
    """
    form = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return _as(tensor, form)


def emptied(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a tensor with the shape, strides and dtype of `tensor`, but empty storage.

    The values of the new tensor must not be read. For an `nn.Parameter`, return an `nn.Parameter` with the same Python
    attributes.

    Args:
        device: device of the new tensor; None for the device of `tensor`.
    """
    form = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)
    form.untyped_storage().resize_(0)
    return _as(tensor, form)


def _as(tensor: Tensor, form: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return form.requires_grad_(tensor.requires_grad)
    twin = nn.Parameter(form, requires_grad=tensor.requires_grad)
    vars(twin).update(vars(tensor))
    return twin
