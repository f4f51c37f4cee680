"""Keys of calls: everything that a rule can read. Equal calls of repeated blocks share results.

`CallCache` serves one pass over a graph that does not change: values of equal nodes are mostly the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import fx

from autopart.ir.graph import value
from autopart.ir.selection import positions_of

T = TypeVar("T")


class CallCache:
    """Cache of results by the key of a call."""

    def __init__(self) -> None:
        self._specs: dict[int, Hashable] = {}
        self._results: dict[Hashable, Any] = {}

    def once(self, node: fx.Node, find: Callable[[fx.Node], T]) -> T:
        """Return `find(node)`, computed once for equal calls.

        `find` may only read the operator, arguments, shapes, dtypes and `positions_of`.
        """
        key = find, self.of(node)
        if key not in self._results:
            self._results[key] = find(node)
        return self._results[key]

    def of(self, node: fx.Node) -> Hashable:
        """Return the key: the operator, its arguments with tensor specs instead of tensors, and its output."""
        position_of: dict[fx.Node, int] = {}
        args = tuple([self._argument(a, position_of) for a in node.args])
        kwargs = tuple([(name, self._argument(a, position_of)) for name, a in node.kwargs.items()])
        return node.target, args, kwargs, self.form(value(node))

    def form(self, val: Any) -> Hashable:
        """Return the spec of a value. The value must live as long as this object."""
        form = self._specs.get(id(val))
        if form is None:
            form = self._specs[id(val)] = _spec_of(val)
        return form

    def _argument(self, argument: Any, position_of: dict[fx.Node, int]) -> Hashable:
        if isinstance(argument, fx.Node):
            return (
                position_of.setdefault(argument, len(position_of)),
                self.form(value(argument)),
                positions_of(argument),
            )
        if isinstance(argument, (list, tuple)):
            return type(argument), *[self._argument(item, position_of) for item in argument]
        if isinstance(argument, dict):
            return dict, *[(name, self._argument(item, position_of)) for name, item in argument.items()]
        if isinstance(argument, (float, slice)):  # -0.0 equals 0.0, and slices are not hashable
            return type(argument), repr(argument)
        return type(argument), argument


def _spec_of(val: Any) -> Hashable:
    if isinstance(val, torch.Tensor):
        return tuple(val.shape), val.stride(), val.dtype, val.requires_grad
    if isinstance(val, (list, tuple)):
        return tuple(map(_spec_of, val))
    return type(val), repr(val)
