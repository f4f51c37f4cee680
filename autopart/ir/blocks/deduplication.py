"""Graphs in which one block of a long chain of like blocks stands for many of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from autopart.errors import AutopartError

T = TypeVar("T")


class NotFoldable(AutopartError):
    """What is asked of a folded trace can be told of the whole one alone. No user sees it: the whole one is planned."""


class Fold(NamedTuple):
    """Of the blocks `path.0`, `path.1`, ..., the one of this `number` stands for `times` of them, `number` to
    `number + times - 1`. Those behind it keep their names.

    >>> fold = Fold("model.layers", 3, 10)
    >>> fold.original("model.layers.7.mlp.up.weight"), fold.original("model.layers.13.mlp.up.weight")
    ('model.layers.3.mlp.up.weight', 'model.layers.13.mlp.up.weight')
    """

    path: str
    number: int
    times: int

    def original(self, name: str) -> str:
        """What stands for a module, parameter or operator of this name: itself, outside of the blocks left out."""
        number, rest = self._placed(name)
        if number is None or not self.number < number < self.number + self.times:
            return name
        return f"{self.path}.{self.number}{rest}"

    def later(self, name: str, blocks: int) -> str:
        """The name of the same so many blocks later, of what is in the block."""
        number, rest = self._placed(name)
        return name if number != self.number else f"{self.path}.{number + blocks}{rest}"

    def holds(self, name: str) -> bool:
        """Whether a module, parameter or operator of the graph is in the block that stands for others."""
        return self._placed(name)[0] == self.number

    def block(self, name: str) -> int | None:
        """The number of the block that a module, parameter or operator is in; None of others."""
        return self._placed(name)[0]

    def _placed(self, name: str) -> tuple[int | None, str]:
        """The block that a name is in, and what follows."""
        if not name.startswith(f"{self.path}."):
            return None, ""
        rest = name[len(self.path) + 1 :]
        digits = len(rest) - len(rest.lstrip("0123456789"))
        is_inside = digits and rest[digits : digits + 1] in ("", ".", "/")
        return (int(rest[:digits]), rest[digits:]) if is_inside else (None, "")


Folds = tuple[Fold, ...]
"""Of a trace. Two chains have no block in common."""


def original(folds: Folds, name: str) -> str:
    """The name in the graph of what stands for this one."""
    for fold in folds:
        name = fold.original(name)
    return name


def names_of(folds: Folds, name: str) -> list[str]:
    """All the names that one in the graph stands for."""
    fold = next((fold for fold in folds if fold.holds(name)), None)
    return [name] if fold is None else [fold.later(name, i) for i in range(fold.times)]


def later(folds: Folds, name: str, blocks: int) -> str:
    """The name of the same so many blocks later, of what is in a block that stands for others."""
    for fold in folds:
        name = fold.later(name, blocks)
    return name


def unrolled(folds: Folds, items: Sequence[T], name: Callable[[T], str], at: Callable[[T, int], T]) -> Iterator[T]:
    """Items in their order, those of a block that stands for others once for each of them.

    Args:
        name: of an item, in the graph.
        at: the same item so many blocks later.
    Raises NotFoldable where the items of such a block do not lie together.
    """
    place = [next((fold for fold in folds if fold.holds(name(item))), None) for item in items]
    start, seen = 0, set[Fold]()
    while start < len(items):
        fold, stop = place[start], start + 1
        while stop < len(items) and fold is not None and place[stop] == fold:
            stop += 1
        if fold is None:
            yield items[start]
        elif fold in seen:
            raise NotFoldable(f"the block {fold.path}.{fold.number} is not in one piece")
        else:
            seen.add(fold)
            yield from (at(item, i) for i in range(fold.times) for item in items[start:stop])
        start = stop
