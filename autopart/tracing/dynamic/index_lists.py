"""`places.tolist()` of a selection, as code of mixtures has it: `x[None, top_x.tolist()]`, for the speed of indexing.

How many places there are is known when the program runs, so no trace has such a list. It has one in its place that
only indexing reads, which takes the tensor itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopart.compat.torch_internals import tree_map
from autopart.errors import Refusal
from autopart.tracing.trace_errors import Lost

_INDEXING = frozenset({Tensor.__getitem__, Tensor.__setitem__, torch.tensor, torch.as_tensor})


class Places:
    """Stands for the list of a tensor's integers. It is no list, as C code reads one of these without a call: whatever
    else is asked of it raises Lost."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def lost(self, *_: Any) -> Any:
        raise Lost(
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


def as_places(tensor: Tensor) -> Places | None:
    """What `tolist()` gives of integers in a row of which nobody knows how many there are; None for other tensors."""
    is_open = tensor.ndim == 1 and not isinstance(tensor.shape[0], int)
    return Places(tensor) if is_open and not tensor.is_floating_point() else None


def indexed(func: Callable[..., Any], args: tuple) -> tuple:
    """The arguments of a call, with tensors in the place of their lists where it indexes. Raises Lost for another call
    that is given such a list."""
    if func in _INDEXING:
        return tree_map(lambda leaf: leaf.tensor if isinstance(leaf, Places) else leaf, args)
    for argument in args:
        if isinstance(argument, Places):
            argument.lost()
    return args
