"""Numpy arrays that share memory with a tensor in eager torch, but not in a trace.

A tensor made from an array (`torch.from_numpy`) becomes a constant of the trace, with the values that the array has at
the end of the trace. An array made from a tensor (`tensor.numpy()`) is a copy in a trace. If the forward changes such
an array, eager torch can read other values than the program. The trace is then refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
        self._of_tensors: list[tuple[Tensor, np.ndarray, bytes]] = []
        """(tensor, the array that Python got for it, bytes of the array at that time)."""
        self._seen: dict[Any, tuple[np.ndarray, bytes]] = {}
        """{memory and shape: (array that a tensor shares, its bytes at that time)}."""

    def clear(self) -> None:
        """Forget all arrays, before another trace."""
        self._of_tensors.clear()
        self._seen.clear()

    def add(self, tensor: Tensor, array: np.ndarray) -> None:
        """Record the array that Python gets for the values of a tensor."""
        self._of_tensors.append((tensor, array, array.tobytes()))

    def check_read(self, tensors: Sequence[Tensor]) -> None:
        """Raise LostInTrace if Python wrote to the array that it got for one of these tensors."""
        for tensor, array, before in self._of_tensors:
            if any(memory_of(one) == memory_of(tensor) for one in tensors) and array.tobytes() != before:
                raise LostInTrace(
                    "a tensor is read after Python has written to its numpy array",
                    "in a trace, the array does not share its memory with the tensor",
                    "tensor.numpy().copy(), if the tensor shall keep its values; or write to the tensor itself",
                    Refusal.WRITE,
                )

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
        memory = array.__array_interface__["data"][0], array.shape, array.strides
        if memory not in self._seen:
            self._seen[memory] = array, array.tobytes()

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
