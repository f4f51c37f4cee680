"""Lazy tensors, whose values stay in files until rectangular slices of them are read.

A model library converts a checkpoint to its model by calling functions of torch. For example, it stacks experts,
concatenates gate and up projections, splits a fused projection, or transposes. A `LazyTensor` implements these
functions: each returns another `LazyTensor`, which refers to elements of the files. The library's own code thus
determines which element of the files becomes which element of the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopart.ir.sharding import Box


class UnsupportedByLazyTensor(Exception):
    """Raised if code calls a torch function that lazy tensors do not implement."""


class LazyTensor:
    """A tensor in a file, or a tensor computed from several such tensors.

    It has the attributes `shape` and `dtype`. Torch functions that it does not implement raise UnsupportedByLazyTensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read_box(self, offsets: Sequence[int], out: Tensor) -> None:
        """Read into `out` the rectangular slice that starts at the index `offsets` and has the shape of `out`."""
        raise NotImplementedError

    def read(self, boxes: Sequence[Box], out: Tensor) -> None:
        """Read the shard that consists of the slices `boxes` into `out`. Convert it to the dtype of `out`."""
        for box in boxes:
            index = tuple(slice(start, start + size) for start, size in zip(box.local_offsets, box.sizes, strict=True))
            self.read_box(box.offsets, out[index])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in _IMPLEMENTED:
            raise UnsupportedByLazyTensor(name)
        return _IMPLEMENTED[name](*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        raise UnsupportedByLazyTensor(name)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> LazyTensor:
        return self

    def narrow(self, dim: int, start: int, length: int) -> LazyTensor:
        return _Narrowed(self, dim % self.ndim, start, length)

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[LazyTensor, ...]:
        total = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
        if sum(sizes) != total:
            raise UnsupportedByLazyTensor(f"split of {total} into {list(sizes)}")
        starts = itertools.accumulate(sizes, initial=0)
        return tuple(self.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[LazyTensor, ...]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    def transpose(self, dim0: int, dim1: int) -> LazyTensor:
        return _Transposed(self, dim0 % self.ndim, dim1 % self.ndim)

    def squeeze(self, dim: int) -> LazyTensor:
        return _Squeezed(self, dim % self.ndim) if self.shape[dim] == 1 else self


class _Narrowed(LazyTensor):
    def __init__(self, of: LazyTensor, dim: int, start: int, length: int):
        self.of, self.at, self.start, self.dtype = of, dim, start, of.dtype
        self.shape = (*of.shape[:dim], length, *of.shape[dim + 1 :])

    def read_box(self, offsets: Sequence[int], out: Tensor) -> None:
        offsets = [offset + (self.start if dim == self.at else 0) for dim, offset in enumerate(offsets)]
        self.of.read_box(offsets, out)


class _Transposed(LazyTensor):
    def __init__(self, of: LazyTensor, dim0: int, dim1: int):
        self.of, self.dims, self.dtype = of, (dim0, dim1), of.dtype
        self.shape = tuple(self._swapped(of.shape))

    def read_box(self, offsets: Sequence[int], out: Tensor) -> None:
        self.of.read_box(self._swapped(offsets), out.transpose(*self.dims))

    def _swapped(self, sizes: Sequence[int]) -> list[int]:
        swapped, (dim0, dim1) = list(sizes), self.dims
        swapped[dim0], swapped[dim1] = sizes[dim1], sizes[dim0]
        return swapped


class _Squeezed(LazyTensor):
    def __init__(self, of: LazyTensor, dim: int):
        self.of, self.at, self.dtype = of, dim, of.dtype
        self.shape = (*of.shape[:dim], *of.shape[dim + 1 :])

    def read_box(self, offsets: Sequence[int], out: Tensor) -> None:
        self.of.read_box([*offsets[: self.at], 0, *offsets[self.at :]], out.unsqueeze(self.at))


class _Joined(LazyTensor):
    """Concatenation of several tensors along a dim."""

    def __init__(self, parts: Sequence[LazyTensor], dim: int):
        self.parts, self.at, self.dtype = parts, dim, _common([part.dtype for part in parts])
        self.starts = list(itertools.accumulate((part.shape[dim] for part in parts), initial=0))
        rest = _common([(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts])
        self.shape = (*rest[:dim], self.starts[-1], *rest[dim:])

    def read_box(self, offsets: Sequence[int], out: Tensor) -> None:
        first, last = offsets[self.at], offsets[self.at] + out.shape[self.at]
        for part, start in zip(self.parts, self.starts, strict=False):
            begin, end = max(first, start), min(last, start + part.shape[self.at])
            if begin < end:
                inner = [*offsets[: self.at], begin - start, *offsets[self.at + 1 :]]
                part.read_box(inner, out.narrow(self.at, begin - first, end - begin))


class _Stacked(LazyTensor):
    """Stack of several tensors of one shape along a new dim."""

    def __init__(self, parts: Sequence[LazyTensor], dim: int):
        self.parts, self.at, self.dtype = parts, dim, _common([part.dtype for part in parts])
        shape = _common([part.shape for part in parts])
        self.shape = (*shape[:dim], len(parts), *shape[dim:])

    def read_box(self, offsets: Sequence[int], out: Tensor) -> None:
        inner = [*offsets[: self.at], *offsets[self.at + 1 :]]
        for number, target in enumerate(out.unbind(self.at)):
            self.parts[offsets[self.at] + number].read_box(inner, target)


def _common(values: Sequence[Any]) -> Any:
    if not values or any(value != values[0] for value in values):
        raise UnsupportedByLazyTensor(f"a join of {', '.join(map(str, dict.fromkeys(values)))}")
    return values[0]


def _cat(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    return tensors[0] if len(tensors) == 1 else _Joined(tensors, dim % tensors[0].ndim)


def _stack(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    return _Stacked(tensors, dim % (tensors[0].ndim + 1))


_IMPLEMENTED: dict[str, Callable[..., Any]] = {
    "cat": _cat, "stack": _stack, "split": LazyTensor.split, "chunk": LazyTensor.chunk, "narrow": LazyTensor.narrow,
    "transpose": LazyTensor.transpose, "squeeze": LazyTensor.squeeze,
}  # fmt: skip
"""Functions of torch that lazy tensors implement."""
