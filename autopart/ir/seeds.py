"""What ranks draw where it is needed: a device's generator seeded by numbers that they know, and left as it was."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def seeded(device: torch.device, seed: Tensor, salt: int | None, shard: Sequence[int]) -> Iterator[None]:
    """Inside, the device's generator draws what follows from `seed` (one number, of the microbatch), `salt` (of the
    operator; None where it is the second number of `seed`) and `shard` (which shard of the value is drawn for)."""
    numbers = seed.tolist() if salt is None else (int(seed), salt)
    packed = struct.pack(f"<{2 + len(shard)}q", *numbers, *shard)
    number = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
    generator = _default_generator(device)
    before = generator.get_state()
    generator.manual_seed(number)
    try:
        yield
    finally:
        generator.set_state(before)


def kept(like: Tensor, p: float) -> Tensor:
    """A mask of dropout for a value, true for what is kept. On the host it is drawn as integers of 32 bits, two at a
    time, which takes a third of the time of `bernoulli_`."""
    if like.device.type != "cpu":
        return torch.empty_like(like, dtype=torch.bool).bernoulli_(1 - p)
    if not 0 < p < 1 or not like.numel():
        return torch.full_like(like, p < 1, dtype=torch.bool)
    pairs = torch.empty((like.numel() + 1) // 2, dtype=torch.int64).random_(-(2**63), None)
    below = min(round((1 - p) * 2**32), 2**32 - 1) - 2**31
    mask = (pairs.view(torch.int32)[: like.numel()] < below).view(like.shape)
    return mask if like.is_contiguous() else torch.empty_like(like, dtype=torch.bool).copy_(mask)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
