"""Lists of indices from `tolist()` that MoE code uses as an index: `x[None, top_x.tolist()]`.

The length of such a list is data-dependent, so a trace has no Python list. `tolist()` returns a stand-in that can only
be used as an index. The indexing call then uses the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopart.compat.symbolic_shape_internals import expression
from autopart.compat.torch_internals import tree_map
from autopart.errors import Refusal
from autopart.tracing.trace_errors import LostInTrace

_INDEXING = frozenset({Tensor.__getitem__, Tensor.__setitem__, torch.tensor, torch.as_tensor})


class IndexList:
    """Stand-in for the list that `tensor.tolist()` returns for a tensor of integers.

    It is not a subclass of list, because C code would read the list's storage directly. Any use except indexing raises
    LostInTrace.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def lost(self, *_: Any) -> Any:
        raise LostInTrace(
            "the length of the list that tolist() returns depends on tensor values",
            "a trace has neither its length nor its entries, so it can only be used as an index",
            "the tensor itself instead of the list",
            Refusal.SIZE,
        )

    __len__ = __iter__ = __getitem__ = __contains__ = __reversed__ = __eq__ = __ne__ = __add__ = __radd__ = lost

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return self.lost()


def as_places(tensor: Tensor) -> IndexList | None:
    """Return a stand-in for `tolist()` of a 1-d integer tensor of data-dependent length; else None."""
    is_open = tensor.ndim == 1 and not isinstance(expression(tensor.shape[0]), int)
    return IndexList(tensor) if is_open and not tensor.is_floating_point() else None


def indexed(func: Callable[..., Any], args: tuple) -> tuple:
    """Return the arguments of an indexing call, with each stand-in list replaced by its tensor.

    Raises LostInTrace for any other call with a stand-in.
    """
    if func in _INDEXING:
        return tree_map(lambda leaf: leaf.tensor if isinstance(leaf, IndexList) else leaf, args)
    for argument in args:
        if isinstance(argument, IndexList):
            argument.lost()
    return args
