"""`tensor.tolist()` of a selection, which mixtures use as an index: `x[None, top_x.tolist()]`.

The length of the list is data-dependent, so a trace has no such list. A stand-in replaces it, which only indexing
accepts; indexing then uses the tensor itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopart.compat.torch_internals import tree_map
from autopart.errors import Refusal
from autopart.tracing.trace_errors import LostInTrace

_INDEXING = frozenset({Tensor.__getitem__, Tensor.__setitem__, torch.tensor, torch.as_tensor})


class IndexList:
    """Stand-in for the list of a tensor's integers.

    It is not a subclass of list, because C code reads lists without a call. Any use but indexing raises LostInTrace.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def lost(self, *_: Any) -> Any:
        raise LostInTrace(
            "tolist() makes a list that is as long as the values in a tensor say",
            "a trace knows neither how many places there are nor which, and can only index by them",
            "the tensor itself in the place of its list",
            Refusal.SIZE,
        )

    __len__ = __iter__ = __getitem__ = __contains__ = __reversed__ = __eq__ = __ne__ = __add__ = __radd__ = lost

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.lost()


def as_places(tensor: Tensor) -> IndexList | None:
    """Return the stand-in for `tolist()` of 1-d integers of data-dependent length, or None."""
    is_open = tensor.ndim == 1 and not isinstance(tensor.shape[0], int)
    return IndexList(tensor) if is_open and not tensor.is_floating_point() else None


def indexed(func: Callable[..., Any], args: tuple) -> tuple:
    """Return the arguments of an indexing call with tensors in place of stand-ins.

    Raises LostInTrace for another call with one.
    """
    if func in _INDEXING:
        return tree_map(lambda leaf: leaf.tensor if isinstance(leaf, IndexList) else leaf, args)
    for argument in args:
        if isinstance(argument, IndexList):
            argument.lost()
    return args
