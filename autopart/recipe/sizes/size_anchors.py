"""Sizes to trace in advance, so that programs for sizes in between can be derived without a trace."""

from __future__ import annotations

from collections.abc import Collection

from autopart.recipe.sizes.size_formula import Sizes

_MAX_FAILURES = 3
_SMALLEST = 4
_DOUBLED = 512
"""Sizes up to this number are doubled, because tracing a much longer sequence takes much more memory."""


class SizeAnchors:
    """Choice of anchors: calls that are traced so that programs for other sizes can be derived from them.

    If a call is larger than all traced calls, the anchor is a still larger call, and is traced in its place. If a call
    is smaller than all traced calls, the anchor is still smaller. When sequences grow during a run, most calls can then
    be derived. Without anchors, each sequence that is longer than all earlier ones would be traced.
    """

    def __init__(self) -> None:
        self._too_large: dict[int, int] = {}  # {dim: size at which a trace failed}
        self._num_failures = 0

    def of(self, sizes: Sizes, calls: Collection[Sizes], num_shards: Sizes) -> Sizes | None:
        """Return the sizes of an anchor for a call; None if an anchor would not help.

        If a size is larger than in all traced calls, it is increased. If it is smaller than in all, it is decreased. A
        dim that has one size in all traced calls is not changed.

        Args:
            calls: sizes of the traced calls.
            num_shards: for each dim, the number of shards. Sizes keep their remainders modulo these numbers.

        >>> SizeAnchors().of((8, 100), [(8, 16), (8, 64)], (2, 4))
        (8, 200)
        """
        if self._num_failures >= _MAX_FAILURES:
            return None
        anchor = list(sizes)
        for dim, (size, shards, *known) in enumerate(zip(sizes, num_shards, *calls, strict=True)):
            if len({*known}) > 1 and size > max(known):
                anchor[dim] = self._larger(size, shards, dim)
            elif len({*known}) > 1 and size < min(known):
                anchor[dim] = _smaller(size, shards)
        return tuple(anchor) if tuple(anchor) != sizes else None

    def _larger(self, size: int, shards: int, dim: int) -> int:
        added = max(size // 4, min(size, _DOUBLED))
        if dim in self._too_large:
            added = min(added, (self._too_large[dim] - size) // 2)
        return size + max(added // shards, 0) * shards

    def fail(self, sizes: Sizes, anchor: Sizes) -> None:
        """Record that an anchor could not be traced, or that the call with `sizes` was not derivable from it."""
        self._num_failures += 1
        self._too_large |= {dim: new for dim, (old, new) in enumerate(zip(sizes, anchor, strict=True)) if new > old}


def _smaller(size: int, shards: int) -> int:
    removed = size // 2 // shards * shards
    return size - removed if size - removed >= _SMALLEST else size
