"""How a tensor is cut into shards and joined again: the arithmetic that every kind of run shares.

A dim is a row of sections (one, where none are named). Each section is cut into shards as `torch.chunk` does, equal
where possible and the last ones smaller, and shard i of the dim is the i-th shards of all sections, joined. In zigzag
each section is cut into twice as many pieces, of which shard i has the i-th from the front and the i-th from the back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from autopart.ir.layout import Sections, is_zigzag, section_sizes, shard_sizes


@dataclass(frozen=True)
class Cut:
    """Dim `dim`, of `size` elements in `sections`, cut into `num_shards` shards.

    >>> Cut(0, 10, (8, 2), 2).length(0)
    5
    """

    dim: int
    size: int
    sections: Sections
    num_shards: int

    def lengths(self, index: int) -> list[int]:
        """How many elements of each section shard `index` holds; in zigzag of each half of a section."""
        return [length for _, length in self.spans(index)]

    def length(self, index: int) -> int:
        """How many elements shard `index` holds."""
        return sum(self.lengths(index))

    @property
    def longest(self) -> int:
        """How many the longest shard holds."""
        return max(map(self.length, range(self.num_shards))) if is_zigzag(self.sections) else self.length(0)

    @property
    def is_in_order(self) -> bool:
        """Whether the full tensor is its shards one behind the other in memory, all of one length."""
        return self.dim == 0 and not self.sections and self.size % self.num_shards == 0

    def spans(self, index: int) -> list[tuple[int, int]]:
        """(start, length) in the full dim of shard `index` of each section; in zigzag of both of its pieces.

        >>> Cut(0, 10, (8, 2), 2).spans(1), Cut(0, 9, (-1,), 2).spans(0)
        ([(4, 4), (9, 1)], [(0, 3), (7, 2)])
        """
        spans = []
        start = 0
        for size in section_sizes(self.size, self.sections):
            if is_zigzag(self.sections):
                spans += [_piece(start, size, 2 * self.num_shards, i) for i in (index, 2 * self.num_shards - 1 - index)]
            else:
                lengths = shard_sizes(size, self.num_shards)
                spans.append((start + sum(lengths[:index]), lengths[index]))
            start += size
        return spans

    def take(self, full: Tensor, index: int) -> Tensor:
        """Shard `index` of `full`, contiguous."""
        pieces = [window for _, window in self._windows(full, index)]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def place(self, shard: Tensor, index: int) -> Tensor:
        """Zeros of the full size with `shard` where `take` would read it."""
        shape = list(shard.shape)
        shape[self.dim] = self.size
        full = shard.new_zeros(shape)
        pieces = shard.split(self.lengths(index), self.dim)
        for number, window in self._windows(full, index):
            window.copy_(pieces[number])
        return full

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor from all its shards, in order."""
        rows = [shard.split(self.lengths(index), self.dim) for index, shard in enumerate(shards)]
        sections = list(zip(*rows, strict=True))
        if is_zigzag(self.sections):  # every other one is the pieces from the back
            sections = [section[::-1] if i % 2 else section for i, section in enumerate(sections)]
        return torch.cat([piece for section in sections for piece in section], self.dim)

    def padded(self, shard: Tensor) -> Tensor:
        """`shard` with zeros at the end of the dim, as long as the longest shard: what goes over the wire."""
        missing = self.longest - shard.size(self.dim)
        if not missing:
            return shard.contiguous()
        shape = list(shard.shape)
        shape[self.dim] = missing
        return torch.cat([shard, shard.new_zeros(shape)], self.dim)

    def trimmed(self, shard: Tensor, index: int) -> Tensor:
        """The inverse of `padded`."""
        return shard.narrow(self.dim, 0, self.length(index))

    def _windows(self, full: Tensor, index: int) -> list[tuple[int, Tensor]]:
        """Shard `index` of each section of `full`, as views."""
        spans = self.spans(index)
        return [(number, full.narrow(self.dim, *span)) for number, span in enumerate(spans)]


def part_of(full: Tensor, cuts: Iterable[tuple[Cut, int]]) -> Tensor:
    """What is left of a tensor after these cuts, each with the index of the shard that is taken."""
    for cut, index in cuts:
        full = cut.take(full, index)
    return full


def _piece(start: int, size: int, number: int, index: int) -> tuple[int, int]:
    """(start, length) of one of so many pieces, of which the first ones are one longer where they have to be."""
    length, rest = divmod(size, number)
    return start + index * length + min(index, rest), length + (index < rest)


Span = tuple[int, int]
"""Elements of a dim: the first, and how many."""


class Box(NamedTuple):
    """A box of the full tensor that a shard holds: where it starts there and in the shard, and its sizes."""

    offsets: tuple[int, ...]
    local_offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def spans_of(shape: Sequence[int], cuts: Sequence[tuple[Cut, int]]) -> tuple[tuple[Span, ...], ...]:
    """For each dim of a tensor, the runs of elements that a shard is made of, in its order.

    `cuts`: each with the index of the shard, in the order in which they are made.

    >>> spans_of((8, 3), [(Cut(0, 8, (4, 4), 2), 1)])
    (((2, 2), (6, 2)), ((0, 3),))
    """
    spans: list[list[Span]] = [[(0, size)] for size in shape]
    for cut, index in cuts:
        spans[cut.dim] = _within(spans[cut.dim], cut.spans(index))
    return tuple(map(tuple, spans))


def boxes(spans: Sequence[Sequence[Span]]) -> list[Box]:
    """The boxes that a shard of these spans is made of."""
    dims = []
    for row in spans:
        positions = itertools.accumulate((length for _, length in row), initial=0)
        dims.append([(start, position, length) for (start, length), position in zip(row, positions, strict=False)])
    return [
        Box(tuple(s for s, _, _ in box), tuple(p for _, p, _ in box), tuple(n for _, _, n in box))
        for box in itertools.product(*dims)
    ]


def _within(outer: Sequence[Span], inner: Sequence[Span]) -> list[Span]:
    """The parts `inner` of a row that is made of the spans `outer`, one behind the other.

    >>> _within([(0, 4), (8, 4)], [(2, 4)])
    [(2, 2), (8, 2)]
    """
    parts = []
    for start, length in inner:
        position = 0
        for outer_start, outer_length in outer:
            first, last = max(start, position), min(start + length, position + outer_length)
            if first < last:
                parts.append((outer_start + first - position, last - first))
            position += outer_length
    return parts
