"""Keys of calls, for caches: a key has all properties of a call on which a sharding rule can depend.

Equal calls of repeated blocks have equal keys and share results. A `CallCache` serves one pass over a graph that does
not change. It caches tensor specs by the id of the traced value, because most equal nodes share one value object.
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
    """Cache of results by the key of a call: equal calls get one result."""

    def __init__(self) -> None:
        self._specs: dict[int, Hashable] = {}
        self._results: dict[Hashable, Any] = {}

    def once(self, node: fx.Node, find: Callable[[fx.Node], T]) -> T:
        """Return `find(node)`. It is computed once for all calls with equal keys.

        `find` may depend only on the operator, arguments, shapes, strides, dtypes, `requires_grad` and `positions_of`.
        """
        key = find, self.of(node)
        if key not in self._results:
            self._results[key] = find(node)
        return self._results[key]

    def of(self, node: fx.Node) -> Hashable:
        """Return the key of a call: its operator, arguments and output, with tensors replaced by their specs."""
        position_of: dict[fx.Node, int] = {}
        args = tuple([self._argument(a, position_of) for a in node.args])
        kwargs = tuple([(name, self._argument(a, position_of)) for name, a in node.kwargs.items()])
        return node.target, args, kwargs, self.form(value(node))

    def form(self, val: Any) -> Hashable:
        """Return the spec of a value (shape, strides, dtype, `requires_grad`), as a hashable object.

        Specs are cached by object id, so the value must live as long as this cache.
        """
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
