"""Block deduplication: a graph contains only one of several consecutive identical blocks.

For example, layer 3 of a trace represents the layers 3 to 12 of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from autopart.errors import AutopartError

T = TypeVar("T")


class NotDeduplicable(AutopartError):
    """Error: the full trace is needed, because a block of the trace cannot represent other blocks."""


class DeduplicatedBlock(NamedTuple):
    """The block `path.number` of a graph, which represents `times` identical blocks of the model.

    It represents the blocks `number` to `number + times - 1` of the module list `path`. All other blocks of the list
    are in the graph under their own names.

    >>> block = DeduplicatedBlock("model.layers", 3, 10)
    >>> block.original("model.layers.7.mlp.up.weight"), block.original("model.layers.13.mlp.up.weight")
    ('model.layers.3.mlp.up.weight', 'model.layers.13.mlp.up.weight')
    """

    path: str
    number: int
    times: int

    def original(self, name: str) -> str:
        """Map a name of the model to the name that represents it in the deduplicated graph.

        A name of a represented block, such as `layers.7.mlp`, becomes `layers.3.mlp` of this block. Other names do not
        change.
        """
        number, rest = self._placed(name)
        if number is None or not self.number < number < self.number + self.times:
            return name
        return f"{self.path}.{self.number}{rest}"

    def later(self, name: str, blocks: int) -> str:
        """Return `name` with its block number increased by `blocks`.

        Names outside of this block do not change.
        """
        number, rest = self._placed(name)
        return name if number != self.number else f"{self.path}.{number + blocks}{rest}"

    def holds(self, name: str) -> bool:
        """Return True if a module, parameter or operator of the graph is in this block."""
        return self._placed(name)[0] == self.number

    def block(self, name: str) -> int | None:
        """Return the block number in a name of a module, parameter or operator; None outside of list `path`."""
        return self._placed(name)[0]

    def _placed(self, name: str) -> tuple[int | None, str]:
        """Split `path.3.mlp` into 3 and `.mlp`. The number is None for a name outside of `path`."""
        if not name.startswith(f"{self.path}."):
            return None, ""
        rest = name[len(self.path) + 1 :]
        digits = len(rest) - len(rest.lstrip("0123456789"))
        is_inside = digits and rest[digits : digits + 1] in ("", ".", "/")
        return (int(rest[:digits]), rest[digits:]) if is_inside else (None, "")


DeduplicatedBlocks = tuple[DeduplicatedBlock, ...]
"""All deduplicated blocks of a trace. At most one of them represents a given block of the model."""


def original(folds: DeduplicatedBlocks, name: str) -> str:
    """Map a name of the model to the name that represents it in the deduplicated graph."""
    for fold in folds:
        name = fold.original(name)
    return name


def names_of(folds: DeduplicatedBlocks, name: str) -> list[str]:
    """Return all names of the model that a name in the deduplicated graph represents.

    There is one name for each represented block. A name outside of deduplicated blocks represents only itself.
    """
    fold = next((fold for fold in folds if fold.holds(name)), None)
    return [name] if fold is None else [fold.later(name, i) for i in range(fold.times)]


def later(folds: DeduplicatedBlocks, name: str, blocks: int) -> str:
    """Return `name` with its block number increased by `blocks`. Names outside of `folds` do not change."""
    for fold in folds:
        name = fold.later(name, blocks)
    return name


def expand_blocks(
    folds: DeduplicatedBlocks, items: Sequence[T], name: Callable[[T], str], at: Callable[[T, int], T]
) -> Iterator[T]:
    """Yield the items of a deduplicated graph as if the graph contained all blocks of the model.

    The function repeats the items of a deduplicated block for each block that it represents.

    Args:
        items: objects with names in the graph, such as operators in graph order.
        name: function that returns the name of an item.
        at: function that returns the copy of an item for the i-th represented block: `at(item, i)`.

    Raises NotDeduplicable if items of other blocks are between the items of a deduplicated block.
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
