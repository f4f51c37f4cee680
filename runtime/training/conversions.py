"""Dtype and device conversions of a partitioned model, which raise UsageError if they change a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopart.errors import UsageError

CONVERT = "convert the model before: parallelize(model.bfloat16().cuda(), ...)"


def spelled_as(device: torch.device, args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of `Module.to`, with every other spelling of `device` replaced by `device`.

    For example, "cuda" is another spelling of "cuda:0" if this is the current device, and "cpu:1" of "cpu".
    """
    named = {name: device if _is_device(value, device) else value for name, value in kwargs.items()}
    return [device if _is_device(value, device) else value for value in args], named


def _is_device(value: Any, device: torch.device) -> bool:
    if not isinstance(value, (str, int, torch.device)) or isinstance(value, bool):
        return False
    requested = torch.device(device.type, value) if isinstance(value, int) else torch.device(value)
    if requested.type == device.type == "cpu":
        return True  # torch has one CPU device: "cpu:1", which accelerate passes to rank 1, has the tensors of "cpu"
    current = torch.cuda.current_device() if device.type == "cuda" else 0
    return requested.type == device.type and _index(requested, current) == _index(device, current)


def _index(device: torch.device, current: int) -> int:
    return current if device.index is None else device.index


def refuse_conversion(fn: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Raise UsageError if `fn` would convert a tensor of this dtype and device to another dtype or device."""
    probe = torch.empty(0, dtype=dtype, device=device)
    converted = fn(probe)
    if converted is not probe:
        had, asked = (device.type, converted.device.type)
        if had == asked:
            had, asked = str(device), str(converted.device)
        raise UsageError(
            "a partitioned model keeps the dtype and device it was made with",
            why=f"its programs were traced for {str(dtype).removeprefix('torch.')} on {had}, not "
            f"{str(converted.dtype).removeprefix('torch.')} on {asked}",
            hint=CONVERT,
        )
