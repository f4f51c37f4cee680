"""Random numbers that a rank draws while torch's generator has a temporary seed."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_CHUNK = 2**17
"""Number of mask elements that are drawn at a time: they fit into a core's cache."""


@contextmanager
def seeded(device: torch.device, seed: Tensor, salt: int | None, shard: Sequence[int]) -> Iterator[None]:
    """Seed the device's generator within a `with` block, and restore its state afterwards.

    Args:
        device: device of the generator.
        seed: one number, the microbatch's seed; or two numbers, seed and salt.
        salt: number of the operator in the model. None: `seed` contains the salt.
        shard: coordinates of the local shard.
    """
    generator = _default_generator(device)
    before = generator.get_state()
    generator.manual_seed(_generator_seed(seed, salt, shard))
    try:
        yield
    finally:
        generator.set_state(before)


class DropoutMasks:
    """Source of a dropout mask on a CPU, true for elements to keep, drawn chunk by chunk.

    Every `draw` returns the next chunk of one mask, so a large mask is never allocated in full. A 32-bit integer from
    the seeded generator decides each element. Two integers are drawn at a time, which takes a third of the time of
    `bernoulli_`.
    """

    def __init__(self, p: float, seed: Tensor, salt: int | None, shard: Sequence[int]):
        self.p = p
        self.below = min(round((1 - p) * 2**32), 2**32 - 1) - 2**31
        self.generator = torch.Generator().manual_seed(_generator_seed(seed, salt, shard))
        self.pairs = torch.empty(0, dtype=torch.int64)
        self.spare: int | None = None
        """Second number of the last pair, if only the first has been used."""

    def draw(self, out: Tensor) -> Tensor:
        """Write the next elements of the mask into `out`."""
        if not 0 < self.p < 1:
            return out.fill_(self.p < 1)
        num_drawn, has_spare = out.numel(), self.spare is not None
        num_pairs = (num_drawn + 1 - has_spare) // 2
        if self.pairs.numel() <= num_pairs:
            self.pairs = torch.empty(num_pairs + 1, dtype=torch.int64)
        self.pairs[1 : num_pairs + 1].random_(-(2**63), None, generator=self.generator)
        numbers = self.pairs.view(torch.int32)
        if self.spare is not None:
            numbers[1] = self.spare
        start = 2 - has_spare
        stop = start + num_drawn
        self.spare = int(numbers[stop]) if stop < 2 * num_pairs + 2 else None
        return torch.lt(numbers[start:stop].view(out.shape), self.below, out=out)


def dropout_mask(like: Tensor, p: float, seed: Tensor, salt: int | None, shard: Sequence[int]) -> Tensor:
    """Return a dropout mask of the shape of `like` on a CPU; true for elements to keep."""
    masks = DropoutMasks(p, seed, salt, shard)
    mask = torch.empty(like.shape, dtype=torch.bool)
    for part in mask.view(-1).split(_CHUNK):
        masks.draw(part)
    return mask if like.is_contiguous() else torch.empty_like(like, dtype=torch.bool).copy_(mask)


def _generator_seed(seed: Tensor, salt: int | None, shard: Sequence[int]) -> int:
    """Hash the seed, the salt and the shard's coordinates to one seed of a generator."""
    numbers = seed.tolist() if salt is None else (int(seed), salt)
    packed = struct.pack(f"<{2 + len(shard)}q", *numbers, *shard)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
