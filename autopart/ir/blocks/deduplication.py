"""Block deduplication: one block of a chain of equal blocks represents several of them in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from autopart.errors import AutopartError

T = TypeVar("T")


class NotDeduplicable(AutopartError):
    """Raised for a request that a deduplicated trace cannot serve. The planner then uses the full trace."""


class DeduplicatedBlock(NamedTuple):
    """Block `number` of a chain, which represents the blocks `number` to `number + times - 1`.

    The blocks of the chain are `path.0`, `path.1`, ... Later blocks keep their names.

    >>> chain = DeduplicatedBlock("model.layers", 3, 10)
    >>> chain.original("model.layers.7.mlp.up.weight"), chain.original("model.layers.13.mlp.up.weight")
    ('model.layers.3.mlp.up.weight', 'model.layers.13.mlp.up.weight')
    """

    path: str
    number: int
    times: int

    def original(self, name: str) -> str:
        """Return the name in the graph that represents a module, parameter or operator of the model."""
        number, rest = self._placed(name)
        if number is None or not self.number < number < self.number + self.times:
            return name
        return f"{self.path}.{self.number}{rest}"

    def later(self, name: str, blocks: int) -> str:
        """Return the name that corresponds to `name` in the block `blocks` later."""
        number, rest = self._placed(name)
        return name if number != self.number else f"{self.path}.{number + blocks}{rest}"

    def holds(self, name: str) -> bool:
        """Return True if a module, parameter or operator is in the block that represents all."""
        return self._placed(name)[0] == self.number

    def block(self, name: str) -> int | None:
        """Return the block number of a module, parameter or operator, None outside the chain."""
        return self._placed(name)[0]

    def _placed(self, name: str) -> tuple[int | None, str]:
        """Split a name into its block number and the rest."""
        if not name.startswith(f"{self.path}."):
            return None, ""
        rest = name[len(self.path) + 1 :]
        digits = len(rest) - len(rest.lstrip("0123456789"))
        is_inside = digits and rest[digits : digits + 1] in ("", ".", "/")
        return (int(rest[:digits]), rest[digits:]) if is_inside else (None, "")


DeduplicatedBlocks = tuple[DeduplicatedBlock, ...]
"""Deduplicated blocks of a trace. Two chains have no block in common."""


def original(folds: DeduplicatedBlocks, name: str) -> str:
    """Return the name in the graph that represents this name."""
    for fold in folds:
        name = fold.original(name)
    return name


def names_of(folds: DeduplicatedBlocks, name: str) -> list[str]:
    """Return all names that a name in the graph represents."""
    fold = next((fold for fold in folds if fold.holds(name)), None)
    return [name] if fold is None else [fold.later(name, i) for i in range(fold.times)]


def later(folds: DeduplicatedBlocks, name: str, blocks: int) -> str:
    """Return the name that corresponds to `name` in the block `blocks` later.

    A name outside of representing blocks is returned unchanged.
    """
    for fold in folds:
        name = fold.later(name, blocks)
    return name


def expand_blocks(
    folds: DeduplicatedBlocks, items: Sequence[T], name: Callable[[T], str], at: Callable[[T, int], T]
) -> Iterator[T]:
    """Yield the items in order. Repeat those of a representing block for each block that it represents.

    Args:
        items: objects that each belong to a name in the graph.
        name: returns the name of an item.
        at: returns the corresponding item in the block that many blocks later.

    Raises NotDeduplicable if the items of such a block are not consecutive.
    """
    fold_of_item = [next((fold for fold in folds if fold.holds(name(item))), None) for item in items]
    start, yielded = 0, set[DeduplicatedBlock]()
    while start < len(items):
        fold, stop = fold_of_item[start], start + 1
        while stop < len(items) and fold is not None and fold_of_item[stop] == fold:
            stop += 1
        if fold is None:
            yield items[start]
        elif fold in yielded:
            raise NotDeduplicable(f"the operators of block {fold.path}.{fold.number} are not consecutive")
        else:
            yielded.add(fold)
            yield from (at(item, i) for i in range(fold.times) for item in items[start:stop])
        start = stop
