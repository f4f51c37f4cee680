"""Compressors: a vector as the bytes that are sent of it, and what is read from them.

Each is deterministic but for the numbers that it is given to draw with. Of `d` elements of `b` bytes they send
`Compressor.size_bytes(d, b)` bytes, which the plan's figures count too (`autopart.ir.run.dp_sync.sent_bytes`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autopart.ir.run.dp_sync import Method, sent_bytes, sent_elements

Draw = Callable[[int], Tensor]
"""So many numbers from [0, 1), float64."""


@dataclass(frozen=True)
class Compressor(ABC):
    """A map of vectors [d] of which less is sent than of the vector."""

    method: Method

    @abstractmethod
    def encode(self, x: Tensor, draw: Draw) -> Tensor:
        """[d] -> uint8 [bytes]."""

    @abstractmethod
    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """uint8 [bytes] -> [d], of the dtype and length of `like`."""

    def size_bytes(self, like: Tensor) -> int:
        """How many bytes are sent of a vector like this one."""
        return sent_bytes(self.method, like.numel(), like.dtype.itemsize)


class Whole(Compressor):
    """All of it."""

    def encode(self, x: Tensor, draw: Draw) -> Tensor:
        return _bytes(x)

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        return _read(sent, like.dtype)


class TopK(Compressor):
    """The largest k = max(1, round(ratio d)) elements by magnitude with their places; of equal ones the first."""

    def encode(self, x: Tensor, draw: Draw) -> Tensor:
        places = _largest(x.abs(), sent_elements(self.method, x.numel()))
        return torch.cat([_bytes(x[places]), _bytes(places.to(torch.int32))])

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        split = sent_elements(self.method, like.numel()) * like.dtype.itemsize
        values, places = _read(sent[:split], like.dtype), _read(sent[split:], torch.int32)
        return like.new_zeros(like.numel()).index_copy_(0, places.long(), values)


def _largest(sizes: Tensor, count: int) -> Tensor:
    """The places of the `count` largest of [d], in order; of equal ones the first."""
    if count >= sizes.numel():
        return torch.arange(sizes.numel(), device=sizes.device)
    least = sizes.topk(count).values[-1]
    above, equal = sizes > least, sizes == least
    places = (above | (equal & (equal.cumsum(0) <= count - above.sum()))).nonzero().view(-1)
    if places.numel() != count:  # where some are not numbers
        places = sizes.argsort(descending=True, stable=True)[:count]
    return places


class Sign(Compressor):
    """The signs times |x|_2 / sqrt(d); that of zero is +."""

    def encode(self, x: Tensor, draw: Draw) -> Tensor:
        scale = torch.linalg.vector_norm(x) / math.sqrt(x.numel())
        return torch.cat([_bytes(scale.view(1)), _packed((x < 0).to(torch.uint8), 1)])

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        scale, bits = _read(sent[: like.dtype.itemsize], like.dtype), sent[like.dtype.itemsize :]
        return scale * (1 - 2 * _unpacked(bits, 1, like.numel()).to(like.dtype))


class Qsgd(Compressor):
    """|x|_2 sign(x) l / s with s = 2^(bits-1) - 1 levels, l = s |x| / |x|_2 rounded at random to a whole number, so
    that its mean is x (Alistarh et al. 2017, arXiv:1610.02132, section 3.1, without the Elias code)."""

    def encode(self, x: Tensor, draw: Draw) -> Tensor:
        bits: int = self.method.bits
        levels, norm = 2 ** (bits - 1) - 1, torch.linalg.vector_norm(x)
        exact = torch.where(norm > 0, levels * x.abs() / norm, torch.zeros_like(x)).to(torch.float64)
        level = exact.floor() + (draw(x.numel()).to(x.device) < exact - exact.floor())
        codes = level.clamp_(max=levels).to(torch.uint8) + ((x < 0).to(torch.uint8) << (bits - 1))
        return torch.cat([_bytes(norm.view(1)), _packed(codes, bits)])

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        bits: int = self.method.bits
        norm = _read(sent[: like.dtype.itemsize], like.dtype)
        codes = _unpacked(sent[like.dtype.itemsize :], bits, like.numel())
        sign, level = 1 - 2 * (codes >> (bits - 1)).to(like.dtype), (codes & (2 ** (bits - 1) - 1)).to(like.dtype)
        return norm * sign * level / (2 ** (bits - 1) - 1)


@dataclass(frozen=True)
class Repeated(Compressor):
    """What is left out is compressed again, `rounds` times in all (Huang et al. 2022, arXiv:2206.03665, section 4)."""

    once: Compressor

    def encode(self, x: Tensor, draw: Draw) -> Tensor:
        left, sent = x, []
        for _ in range(self.method.rounds):
            sent.append(self.once.encode(left, draw))
            left = left - self.once.decode(sent[-1], x)
        return torch.cat(sent)

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        parts = [self.once.decode(part, like) for part in sent.split(self.once.size_bytes(like))]
        return torch.stack(parts).sum(0)


def compressor_of(method: Method) -> Compressor:
    """What a method sends of a vector."""
    if method.name == "double_squeeze":
        return compressor_of(method.compressor)
    if method.name == "neolithic":
        return Repeated(method, TopK(Method.parse({"strategy": "top_k", "ratio": method.ratio})))
    if method.name in ("top_k", "ef21", "ef21_sgdm"):
        return TopK(method)
    return {"sign": Sign, "qsgd": Qsgd}.get(method.name, Whole)(method)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _read(sent: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements that bytes are; these may begin anywhere in what was received."""
    return sent.clone().view(dtype)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 [d] below 2^bits -> uint8 [ceil(d bits / 8)]."""
    each = (codes.unsqueeze(-1) >> torch.arange(bits, dtype=torch.uint8, device=codes.device)) & 1
    flat = torch.nn.functional.pad(each.view(-1), (0, -each.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(1, dtype=torch.uint8)


def _unpacked(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `_packed`, of `count` codes."""
    flat = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    each = flat.view(-1)[: count * bits].view(count, bits)
    return (each << torch.arange(bits, dtype=torch.uint8, device=packed.device)).sum(1, dtype=torch.uint8)
