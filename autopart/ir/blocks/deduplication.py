"""Block deduplication: of a chain of equal blocks, a graph contains one block that represents several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from autopart.errors import AutopartError

T = TypeVar("T")


class NotDeduplicable(AutopartError):
    """Raised if a deduplicated trace cannot serve a request. The planner then uses the full trace."""


class DeduplicatedBlock(NamedTuple):
    """Block `path.number`, which represents the `times` blocks from `path.number` on.

    The chain consists of the blocks `path.0`, `path.1`, ... The graph contains block `number` of the represented
    blocks. Blocks after the represented ones keep their names.

    >>> chain = DeduplicatedBlock("model.layers", 3, 10)
    >>> chain.original("model.layers.7.mlp.up.weight"), chain.original("model.layers.13.mlp.up.weight")
    ('model.layers.3.mlp.up.weight', 'model.layers.13.mlp.up.weight')
    """

    path: str
    number: int
    times: int

    def original(self, name: str) -> str:
        """Return the name in the graph that represents this name of a module, parameter or operator."""
        number, rest = self._placed(name)
        if number is None or not self.number < number < self.number + self.times:
            return name
        return f"{self.path}.{self.number}{rest}"

    def later(self, name: str, blocks: int) -> str:
        """Return `name` with its block number increased by `blocks`; unchanged outside the representing block."""
        number, rest = self._placed(name)
        return name if number != self.number else f"{self.path}.{number + blocks}{rest}"

    def holds(self, name: str) -> bool:
        """Return True if a module, parameter or operator is in the representing block."""
        return self._placed(name)[0] == self.number

    def block(self, name: str) -> int | None:
        """Return the block number of a module, parameter or operator; None if it is outside the chain."""
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
"""Deduplicated blocks of a trace, with at most one chain per model block."""


def original(folds: DeduplicatedBlocks, name: str) -> str:
    """Return the name in the graph that represents this name of a module, parameter or operator."""
    for fold in folds:
        name = fold.original(name)
    return name


def names_of(folds: DeduplicatedBlocks, name: str) -> list[str]:
    """Return the names of the model that a name in the graph represents, one per represented block."""
    fold = next((fold for fold in folds if fold.holds(name)), None)
    return [name] if fold is None else [fold.later(name, i) for i in range(fold.times)]


def later(folds: DeduplicatedBlocks, name: str, blocks: int) -> str:
    """Return `name` with its block number increased by `blocks`.

    A name outside of representing blocks is returned unchanged.
    """
    for fold in folds:
        name = fold.later(name, blocks)
    return name


def expand_blocks(
    folds: DeduplicatedBlocks, items: Sequence[T], name: Callable[[T], str], at: Callable[[T, int], T]
) -> Iterator[T]:
    """Yield all items in order. Yield the items of a representing block once per represented block.

    Args:
        items: objects that each belong to a name in the graph.
        name: returns the name of an item.
        at: `at(item, i)` returns the item that corresponds to `item` in the i-th block after the representing one.

    Raises NotDeduplicable if the items of a representing block are not consecutive.
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
