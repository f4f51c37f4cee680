"""Slices that begin at a number known only at run time, such as `queue[pointer : pointer + n]`.

In eager torch such a slice is a view. A program gathers the elements with index tensors, so the slice is a copy. A
write to the copy is therefore also written to the sliced tensor, and a copy is rejected after a later write to the
sliced tensor, because it has the old values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopart.compat.symbolic_shape_internals import expression
from autopart.errors import Refusal
from autopart.tracing.python.concrete_constants import memory_of
from autopart.tracing.trace_errors import LostInTrace


def with_positions(index: Any) -> Any:
    """Replace a slice that begins at a symbolic number by index tensors, if its length is known."""
    if type(index) is tuple:
        changed = tuple(map(with_positions, index))
        is_one = sum(isinstance(part, Tensor) for part in changed) == 1
        return changed if is_one and not any(isinstance(part, Tensor) for part in index) else index
    if not isinstance(index, slice) or index.step not in (None, 1) or not isinstance(index.start, torch.SymInt):
        return index
    length = expression(index.stop - index.start) if index.stop is not None else None
    return torch.arange(length) + index.start if isinstance(length, int) else index


@dataclass
class _Copy:
    """A copy that stands in for the slice `sliced[index]`.

    `is_outdated`: the sliced tensor was written later.
    """

    sliced: Tensor
    index: Any
    values: Tensor
    is_outdated: bool = False


class PointerSlices:
    """The copies of one trace that stand in for slices at run-time positions."""

    def __init__(self) -> None:
        self._copies: dict[int | None, _Copy] = {}  # {memory of the copy: copy}

    def clear(self) -> None:
        """Forget all copies, before another trace."""
        self._copies.clear()

    def add(self, sliced: Tensor, index: Any, values: Tensor) -> None:
        """Record that `values` is a copy of `sliced[index]`."""
        self._copies[memory_of(values)] = _Copy(sliced, index, values)

    def check_current(self, tensors: Iterable[Tensor]) -> None:
        """Raise LostInTrace if the sliced tensor of one of these copies was written after the copy was made."""
        if self._copies and any(self._is_outdated(memory_of(tensor)) for tensor in tensors):
            raise LostInTrace(
                "a slice that begins at a number which the model computes is used after its tensor was written",
                "the slice is a copy in the program, so it has the values from before the write",
                "slice the tensor again after the write; or slice.clone() if the old values are meant",
                Refusal.WRITE,
            )

    def _is_outdated(self, memory: int | None) -> bool:
        copy = self._copies.get(memory)
        return copy is not None and (copy.is_outdated or self._is_outdated(memory_of(copy.sliced)))

    def note_writes(self, written: Iterable[Tensor], write: Callable[[Tensor, Any, Tensor], Any]) -> None:
        """Record in-place writes that have run. Repeat a write to a copy on the sliced tensor.

        Args:
            write: called as `write(tensor, index, values)`. Must assign values to `tensor[index]`.
        """
        memories = {memory_of(tensor) for tensor in written} if self._copies else set()
        for memory in memories:
            for copy in self._copies.values():
                copy.is_outdated |= memory_of(copy.sliced) == memory
            if copy_written := self._copies.get(memory):
                write(copy_written.sliced, copy_written.index, copy_written.values)
                copy_written.is_outdated = False
