"""Numpy arrays of the user's code whose memory becomes constants of a trace.

A trace stores such a tensor once, with the values that it has at the end. In eager torch, each operator reads the
values at that moment. So a trace is refused if the forward changes an array that shares memory with a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopart.compat.torch_internals import has_values, outside_of_tracing
from autopart.errors import Refusal
from autopart.tracing.python.concrete_constants import memory_of
from autopart.tracing.trace_errors import LostInTrace

_COPYING = (torch.tensor, Tensor.new_tensor)
_SHARING = (torch.as_tensor, torch.asarray)


class NumpyMemory:
    """The arrays of one trace that share their memory with tensors."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[np.ndarray, bytes]] = {}

    def clear(self) -> None:
        self._seen.clear()

    def arguments(
        self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], tensors: Iterable[Tensor]
    ) -> tuple[tuple, dict[str, Any]]:
        """Record the arrays that a torch call reads. Return its arguments.

        `torch.tensor` copies its data in eager torch, but not in a trace. So its array is replaced by a copy.
        """
        if func in _COPYING:
            return tuple(map(_copied, args)), {name: _copied(value) for name, value in kwargs.items()}
        if func in _SHARING:
            for value in (*args, *kwargs.values()):
                if isinstance(value, np.ndarray):
                    self._see(value)
        for tensor in tensors:
            is_real = type(tensor) is Tensor and has_values(tensor) and memory_of(tensor) is not None
            if is_real and not tensor.untyped_storage().resizable():
                with outside_of_tracing():
                    self._see(tensor.detach().numpy())
        return args, kwargs

    def _see(self, array: np.ndarray) -> None:
        address = array.__array_interface__["data"][0]
        if address not in self._seen:
            self._seen[address] = array, array.tobytes()

    def check_unchanged(self) -> None:
        """Raise LostInTrace if the forward changed an array that shares memory with a tensor."""
        for array, before in self._seen.values():
            if array.tobytes() != before:
                raise LostInTrace(
                    "a numpy array that shares memory with a tensor is changed",
                    "a trace stores the values of such a tensor only once",
                    "torch.tensor(array), which copies it; or change the tensor, not the array",
                    Refusal.NUMPY,
                )


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value
