"""Conversions of a partitioned model: nothing for the dtype and device that it has, else an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopart.errors import UsageError

CONVERT = "convert the model before: parallelize(model.bfloat16().cuda(), ...)"


def spelled_as(device: torch.device, args: tuple, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of `to` with `device` for each spelling of it.

    A device without an index is the current one: "cuda" may be "cuda:0", and "cpu:0" is "cpu".
    """
    named = {name: device if _is_device(given, device) else given for name, given in kwargs.items()}
    return [device if _is_device(given, device) else given for given in args], named


def _is_device(given: Any, device: torch.device) -> bool:
    if not isinstance(given, (str, int, torch.device)) or isinstance(given, bool):
        return False
    asked = torch.device(device.type, given) if isinstance(given, int) else torch.device(given)
    current = torch.cuda.current_device() if device.type == "cuda" else 0
    return asked.type == device.type and _index(asked, current) == _index(device, current)


def _index(device: torch.device, current: int) -> int:
    return current if device.index is None else device.index


def refuse_conversion(fn: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Raises UsageError where `fn` gives another tensor for one of this dtype and device."""
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
