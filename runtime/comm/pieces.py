"""How a tensor is cut into shards and joined again: the arithmetic that every kind of run shares.

A dim is a row of sections (one, where none are named). Each section is cut into shards as `torch.chunk` does, equal
where possible and the last ones smaller, and shard i of the dim is the i-th shards of all sections, joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopart.ir.layout import Sections, section_sizes, shard_sizes


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
        """How many elements of each section shard `index` holds."""
        return [shard_sizes(size, self.num_shards)[index] for size in section_sizes(self.size, self.sections)]

    def length(self, index: int) -> int:
        """How many elements shard `index` holds."""
        return sum(self.lengths(index))

    @property
    def is_in_order(self) -> bool:
        """Whether the full tensor is its shards one behind the other in memory, all of one length."""
        return self.dim == 0 and not self.sections and self.size % self.num_shards == 0

    def spans(self, index: int) -> list[tuple[int, int]]:
        """(start, length) in the full dim of shard `index` of each section.

        >>> Cut(0, 10, (8, 2), 2).spans(1)
        [(4, 4), (9, 1)]
        """
        spans = []
        start = 0
        for size in section_sizes(self.size, self.sections):
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
        return torch.cat([piece for section in zip(*rows, strict=True) for piece in section], self.dim)

    def padded(self, shard: Tensor) -> Tensor:
        """`shard` with zeros at the end of the dim, as long as the longest shard: what goes over the wire."""
        missing = self.length(0) - shard.size(self.dim)
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
