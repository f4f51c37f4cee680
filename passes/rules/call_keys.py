"""What of a call its rule can read, as a key: like calls of repeated blocks have the same, and share what follows.

`Kinds` serves one sweep over a graph that stays as it is: values of like nodes are mostly the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import fx

from autopart.ir.graph import value
from autopart.ir.selection import positions_of

T = TypeVar("T")


class Kinds:
    """The kinds of calls, and what is known of each."""

    def __init__(self) -> None:
        self._forms: dict[int, Hashable] = {}
        self._known: dict[Hashable, Any] = {}

    def once(self, node: fx.Node, find: Callable[[fx.Node], T]) -> T:
        """What `find` gives for calls like this one; it may read operator, arguments, shapes, dtypes and
        `positions_of` alone."""
        key = find, self.of(node)
        if key not in self._known:
            self._known[key] = find(node)
        return self._known[key]

    def of(self, node: fx.Node) -> Hashable:
        """The operator, its arguments with shapes and dtypes in place of tensors, and what it gives."""
        places: dict[fx.Node, int] = {}
        args = tuple([self._argument(a, places) for a in node.args])
        kwargs = tuple([(name, self._argument(a, places)) for name, a in node.kwargs.items()])
        return node.target, args, kwargs, self.form(value(node))

    def form(self, val: Any) -> Hashable:
        """What is read of a value. It has to live as long as this object."""
        form = self._forms.get(id(val))
        if form is None:
            form = self._forms[id(val)] = _form(val)
        return form

    def _argument(self, argument: Any, places: dict[fx.Node, int]) -> Hashable:
        if isinstance(argument, fx.Node):
            return places.setdefault(argument, len(places)), self.form(value(argument)), positions_of(argument)
        if isinstance(argument, (list, tuple)):
            return type(argument), *[self._argument(item, places) for item in argument]
        if isinstance(argument, dict):
            return dict, *[(name, self._argument(item, places)) for name, item in argument.items()]
        if isinstance(argument, (float, slice)):  # -0.0 is 0.0, and slices have no hash
            return type(argument), repr(argument)
        return type(argument), argument


def _form(val: Any) -> Hashable:
    if isinstance(val, torch.Tensor):
        return tuple(val.shape), val.stride(), val.dtype, val.requires_grad
    if isinstance(val, (list, tuple)):
        return tuple(map(_form, val))
    return type(val), repr(val)
