"""Compressors: encode a vector to the bytes that are sent, and decode these bytes.

A compressor is deterministic, except for random numbers that the caller passes. The predicted communication of a plan
counts the bytes that `Compressor.size_bytes` returns (`method_costs.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autopart.extras.dp_sync.method_costs import sent_bytes, sent_elements
from autopart.extras.dp_sync.sync_options import Method

Draw = Callable[[int], Tensor]
"""Function that returns a given number of random numbers from [0, 1), as float64."""


@dataclass(frozen=True)
class Compressor(ABC):
    """Encoding of vectors of length d as bytes, lossy or lossless."""

    method: Method

    @abstractmethod
    def encode(self, x: Tensor, draw: Draw) -> Tensor:
        """Encode a vector as a uint8 vector. `draw(count)` returns `count` random numbers."""

    @abstractmethod
    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """Decode the bytes `sent` to a vector with the dtype and length of `like`."""

    def size_bytes(self, like: Tensor) -> int:
        """Return the number of bytes that are sent for a vector of the dtype and length of `like`."""
        return sent_bytes(self.method, like.numel(), like.dtype.itemsize)


class Uncompressed(Compressor):
    """Compressor without loss: sends every element unchanged."""

    def encode(self, x: Tensor, draw: Draw) -> Tensor:
        return _bytes(x)

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        return _read(sent, like.dtype)


class TopK(Compressor):
    """Send the k = max(1, round(ratio d)) elements with the largest magnitudes, and their indices.

    Of equal magnitudes, the first is sent.
    """

    def encode(self, x: Tensor, draw: Draw) -> Tensor:
        indices = _largest(x.abs(), sent_elements(self.method, x.numel()))
        return torch.cat([_bytes(x[indices]), _bytes(indices.to(torch.int32))])

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        split = sent_elements(self.method, like.numel()) * like.dtype.itemsize
        values, indices = _read(sent[:split], like.dtype), _read(sent[split:], torch.int32)
        return like.new_zeros(like.numel()).index_copy_(0, indices.long(), values)


def _largest(sizes: Tensor, count: int) -> Tensor:
    """Return the sorted indices of the `count` largest elements of a vector.

    Of equal elements, the first are chosen.
    """
    if count >= sizes.numel():
        return torch.arange(sizes.numel(), device=sizes.device)
    least = sizes.topk(count).values[-1]
    above, equal = sizes > least, sizes == least
    indices = (above | (equal & (equal.cumsum(0) <= count - above.sum()))).nonzero().view(-1)
    if indices.numel() != count:  # if some are NaN
        indices = sizes.argsort(descending=True, stable=True)[:count]
    return indices


class Sign(Compressor):
    """Send the signs and one scale: x is decoded as sign(x) |x|_2 / sqrt(d). The sign of zero is +."""

    def encode(self, x: Tensor, draw: Draw) -> Tensor:
        scale = torch.linalg.vector_norm(x) / math.sqrt(x.numel())
        return torch.cat([_bytes(scale.view(1)), _packed((x < 0).to(torch.uint8), 1)])

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        scale, bits = _read(sent[: like.dtype.itemsize], like.dtype), sent[like.dtype.itemsize :]
        return scale * (1 - 2 * _unpacked(bits, 1, like.numel()).to(like.dtype))


class Qsgd(Compressor):
    """Send a sign and a level l per element, and one scale: x is decoded as |x|_2 sign(x) l / s.

    There are s = 2^(bits-1) - 1 levels. The level l is s |x| / |x|_2, rounded stochastically to an integer so that its
    mean is exact (Alistarh et al. 2017, arXiv:1610.02132, section 3.1, without the Elias code).
    """

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
class RepeatedCompressor(Compressor):
    """Compress a vector, then repeatedly compress the part that the compressions so far have lost.

    There are `rounds` compressions (Huang et al. 2022, arXiv:2206.03665, section 4).
    """

    once: Compressor

    def encode(self, x: Tensor, draw: Draw) -> Tensor:
        residual, sent = x, []
        for _ in range(self.method.rounds):
            sent.append(self.once.encode(residual, draw))
            residual = residual - self.once.decode(sent[-1], x)
        return torch.cat(sent)

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        parts = [self.once.decode(part, like) for part in sent.split(self.once.size_bytes(like))]
        return torch.stack(parts).sum(0)


def compressor_of(method: Method) -> Compressor:
    """Create the compressor of a `dp_sync` method."""
    if method.name == "double_squeeze":
        return compressor_of(method.compressor)
    if method.name == "neolithic":
        return RepeatedCompressor(method, TopK(Method.parse({"strategy": "top_k", "ratio": method.ratio})))
    if method.name in ("top_k", "ef21", "ef21_sgdm"):
        return TopK(method)
    return {"sign": Sign, "qsgd": Qsgd}.get(method.name, Uncompressed)(method)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _read(sent: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret bytes as elements of a dtype.

    The bytes are copied, because elements must be aligned and the bytes may start anywhere in a buffer.
    """
    return sent.clone().view(dtype)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Pack integers below 2^bits, which are stored one per byte, into `bits` bits each."""
    each = (codes.unsqueeze(-1) >> torch.arange(bits, dtype=torch.uint8, device=codes.device)) & 1
    flat = torch.nn.functional.pad(each.view(-1), (0, -each.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(1, dtype=torch.uint8)


def _unpacked(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack `count` integers of `bits` bits each: the inverse of `_packed`."""
    flat = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    each = flat.view(-1)[: count * bits].view(count, bits)
    return (each << torch.arange(bits, dtype=torch.uint8, device=packed.device)).sum(1, dtype=torch.uint8)
