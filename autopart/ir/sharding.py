"""Arithmetic of shards: split a tensor into shards, and join shards to a tensor again.

A dim is a concatenation of one or more sections. Each section is split as by `torch.chunk`: into equal shards if
possible, else the last ones are smaller. Shard i of the dim is the concatenation of shard i of every section.

In zigzag, each section is split into twice as many chunks as there are shards. Shard i has the i-th chunk from the
front and the i-th from the back.
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
class DimSharding:
    """Split of one tensor dim into shards.

    The dim can be a concatenation of sections, such as q, k and v of a fused projection. Each shard then has a part of
    every section. In the example, elements 0 to 7 are one section, and 8 and 9 another:

    >>> sharding = DimSharding(dim=0, size=10, sections=(8, 2), num_shards=2)
    >>> [sharding.take(torch.arange(10), index).tolist() for index in range(2)]
    [[0, 1, 2, 3, 8], [4, 5, 6, 7, 9]]

    Args:
        dim: index of the dim.
        size: number of elements of the full dim.
        sections: the sections of the dim, as defined by `ir.layout.Sections`; `()` if it is no concatenation.
        num_shards: number of shards.
    """

    dim: int
    size: int
    sections: Sections
    num_shards: int

    def lengths(self, index: int) -> list[int]:
        """Return the length of each contiguous span of the full dim that shard `index` concatenates."""
        return [length for _, length in self.spans(index)]

    def length(self, index: int) -> int:
        """Return the number of elements in shard `index`."""
        return sum(self.lengths(index))

    @property
    def longest(self) -> int:
        """Number of elements in the longest shard."""
        return max(map(self.length, range(self.num_shards))) if is_zigzag(self.sections) else self.length(0)

    @property
    def is_contiguous(self) -> bool:
        """True if shards have equal lengths and their concatenation along dim 0 is the full tensor."""
        return self.dim == 0 and not self.sections and self.size % self.num_shards == 0

    def spans(self, index: int) -> list[tuple[int, int]]:
        """Return (start, length) of each contiguous span of the full dim that is in shard `index`.

        There is one span per section, in zigzag two per section.

        >>> DimSharding(0, 10, (8, 2), 2).spans(1), DimSharding(0, 9, (-1,), 2).spans(0)
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
        """Return shard `index` of `full` as a contiguous tensor."""
        windows = [window for _, window in self._windows(full, index)]
        return windows[0].contiguous() if len(windows) == 1 else torch.cat(windows, self.dim)

    def place(self, shard: Tensor, index: int) -> Tensor:
        """Return zeros of the full size, with `shard` copied to the elements of shard `index`."""
        shape = list(shard.shape)
        shape[self.dim] = self.size
        full = shard.new_zeros(shape)
        chunks = shard.split(self.lengths(index), self.dim)
        for number, window in self._windows(full, index):
            window.copy_(chunks[number])
        return full

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the full tensor, given all shards in order of their index."""
        rows = [shard.split(self.lengths(index), self.dim) for index, shard in enumerate(shards)]
        sections = list(zip(*rows, strict=True))
        if is_zigzag(self.sections):  # every other section contains the chunks from the back
            sections = [section[::-1] if i % 2 else section for i, section in enumerate(sections)]
        return torch.cat([piece for section in sections for piece in section], self.dim)

    def padded(self, shard: Tensor) -> Tensor:
        """Return `shard` padded with zeros to the length of the longest shard, for collectives of equal sizes."""
        padding = self.longest - shard.size(self.dim)
        if not padding:
            return shard.contiguous()
        shape = list(shard.shape)
        shape[self.dim] = padding
        return torch.cat([shard, shard.new_zeros(shape)], self.dim)

    def trimmed(self, shard: Tensor, index: int) -> Tensor:
        """Return shard `index` without its padding: the inverse of `padded`."""
        return shard.narrow(self.dim, 0, self.length(index))

    def _windows(self, full: Tensor, index: int) -> list[tuple[int, Tensor]]:
        spans = self.spans(index)
        return [(number, full.narrow(self.dim, *span)) for number, span in enumerate(spans)]


def local_shard_of(full: Tensor, cuts: Iterable[tuple[DimSharding, int]]) -> Tensor:
    """Return the local shard of a tensor that is split several times.

    Args:
        full: the full tensor.
        cuts: the splits in order, each with the index of the shard to take.
    """
    for cut, index in cuts:
        full = cut.take(full, index)
    return full


def _piece(start: int, size: int, number: int, index: int) -> tuple[int, int]:
    """Return (start, length) of chunk `index` of `number` chunks. The first chunks get the remainder."""
    length, rest = divmod(size, number)
    return start + index * length + min(index, rest), length + (index < rest)


Span = tuple[int, int]
"""A contiguous range of a dim: index of the first element, and number of elements."""


class Box(NamedTuple):
    """Rectangular block of a shard: offsets in the full tensor, offsets in the shard, and sizes."""

    offsets: tuple[int, ...]
    local_offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def spans_of(shape: Sequence[int], cuts: Sequence[tuple[DimSharding, int]]) -> tuple[tuple[Span, ...], ...]:
    """Return, for each dim, the spans of the full tensor that a shard contains, in the shard's order.

    Args:
        shape: global shape.
        cuts: the splits in order, each with the index of the shard.

    >>> spans_of((8, 3), [(DimSharding(0, 8, (4, 4), 2), 1)])
    (((2, 2), (6, 2)), ((0, 3),))
    """
    spans: list[list[Span]] = [[(0, size)] for size in shape]
    for cut, index in cuts:
        spans[cut.dim] = _within(spans[cut.dim], cut.spans(index))
    return tuple(map(tuple, spans))


def boxes(spans: Sequence[Sequence[Span]]) -> list[Box]:
    """Return the rectangular blocks of the full tensor that a shard contains.

    Args:
        spans: the spans of each dim that the shard contains (`spans_of`).
    """
    dims = []
    for row in spans:
        positions = itertools.accumulate((length for _, length in row), initial=0)
        dims.append([(start, position, length) for (start, length), position in zip(row, positions, strict=False)])
    return [
        Box(tuple(s for s, _, _ in box), tuple(p for _, p, _ in box), tuple(n for _, _, n in box))
        for box in itertools.product(*dims)
    ]


def _within(outer: Sequence[Span], inner: Sequence[Span]) -> list[Span]:
    """Convert spans of a shard to spans of the full dim.

    Args:
        outer: the spans of the full dim that the shard concatenates.
        inner: spans of the shard.

    >>> _within([(0, 4), (8, 4)], [(2, 4)])
    [(2, 2), (8, 2)]
    """
    spans = []
    for start, length in inner:
        position = 0
        for outer_start, outer_length in outer:
            first, last = max(start, position), min(start + length, position + outer_length)
            if first < last:
                spans.append((outer_start + first - position, last - first))
            position += outer_length
    return spans
