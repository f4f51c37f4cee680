"""What ranks draw where it is needed: a device's generator seeded by numbers that they know, and left as it was."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_CHUNK = 2**17
"""Elements of a mask that are drawn at a time, few enough for a core's cache."""


@contextmanager
def seeded(device: torch.device, seed: Tensor, salt: int | None, shard: Sequence[int]) -> Iterator[None]:
    """Inside, the device's generator draws what follows from `seed` (one number, of the microbatch), `salt` (of the
    operator; None where it is the second number of `seed`) and `shard` (which shard of the value is drawn for)."""
    generator = _default_generator(device)
    before = generator.get_state()
    generator.manual_seed(_joined(seed, salt, shard))
    try:
        yield
    finally:
        generator.set_state(before)


class Masks:
    """Masks of dropout on the host, true for what is kept: the next part of one mask at every `draw`, so that a large
    one is never there as a whole. Every element is decided by an integer of 32 bits of those that follow from the seed.
    They are drawn two at a time, which takes a third of the time of `bernoulli_`."""

    def __init__(self, p: float, seed: Tensor, salt: int | None, shard: Sequence[int]):
        self.p = p
        self.below = min(round((1 - p) * 2**32), 2**32 - 1) - 2**31
        self.generator = torch.Generator().manual_seed(_joined(seed, salt, shard))
        self.pairs = torch.empty(0, dtype=torch.int64)
        self.spare: int | None = None
        """The second of a pair whose first was the last one read."""

    def draw(self, out: Tensor) -> Tensor:
        """Write the next elements of the mask into `out`."""
        if not 0 < self.p < 1:
            return out.fill_(self.p < 1)
        number, has_spare = out.numel(), self.spare is not None
        num_pairs = (number + 1 - has_spare) // 2
        if self.pairs.numel() <= num_pairs:
            self.pairs = torch.empty(num_pairs + 1, dtype=torch.int64)
        self.pairs[1 : num_pairs + 1].random_(-(2**63), None, generator=self.generator)
        numbers = self.pairs.view(torch.int32)
        if self.spare is not None:
            numbers[1] = self.spare
        start = 2 - has_spare
        stop = start + number
        self.spare = int(numbers[stop]) if stop < 2 * num_pairs + 2 else None
        return torch.lt(numbers[start:stop].view(out.shape), self.below, out=out)


def kept(like: Tensor, p: float, seed: Tensor, salt: int | None, shard: Sequence[int]) -> Tensor:
    """The mask of dropout for a value on the host, true for what is kept."""
    masks = Masks(p, seed, salt, shard)
    mask = torch.empty(like.shape, dtype=torch.bool)
    for part in mask.view(-1).split(_CHUNK):
        masks.draw(part)
    return mask if like.is_contiguous() else torch.empty_like(like, dtype=torch.bool).copy_(mask)


def _joined(seed: Tensor, salt: int | None, shard: Sequence[int]) -> int:
    """The number that a generator is seeded by."""
    numbers = seed.tolist() if salt is None else (int(seed), salt)
    packed = struct.pack(f"<{2 + len(shard)}q", *numbers, *shard)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
