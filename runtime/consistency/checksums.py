"""Checksums of tensors: equal for equal bytes, and almost surely different for different bytes.

They are computed on the tensor's device as integer sums, which do not depend on the order of addition or the machine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

WEIGHTED_WORDS = 2**14
"""Number of 8-byte words that get individual weights in a checksum.

For a larger tensor, the checksum is a plain sum of all words and a weighted sum of a sample.
"""


def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of a tensor's bits: an int64 scalar on the tensor's device.

    Tensors that differ in a single element always have different checksums.

    Example:
        >>> bool(checksum(torch.zeros(3)) == checksum(torch.tensor([0.0, -0.0, 0.0])))
        False
    """
    values = tensor.detach()
    if values.dtype == torch.int64 and values.is_contiguous() and values.numel() > 1:  # tokens, in every step
        return _weighted(values.view(-1))
    values = values.resolve_conj().resolve_neg().contiguous()
    if values.numel() == 1:  # one element is contiguous, whatever its stride
        values = values.clone(memory_format=torch.contiguous_format)
    bits = values.reshape(-1).view(torch.uint8)
    whole = bits.numel() // 8 * 8
    words = bits[:whole].view(torch.int64) if bits.storage_offset() % 8 == 0 else bits[:whole].clone().view(torch.int64)
    if whole == bits.numel():
        return _weighted(words)
    rest = F.pad(bits[whole:], (0, 8 - (bits.numel() - whole))).view(torch.int64)
    return _weighted(words) + _weighted(rest) * 3


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Return the `checksum` of each tensor, in CPU memory."""
    numbers = [checksum(tensor) for tensor in tensors]
    if len(numbers) == 1:
        return [int(numbers[0])]
    if len({number.device for number in numbers}) > 1:
        numbers = [number.to("cpu") for number in numbers]
    return [int(number) for number in torch.stack(numbers).tolist()] if numbers else []


def _weighted(words: Tensor) -> Tensor:
    """Return the weighted sum of an int64 vector.

    Sums are modulo 2^64. Weights are odd, so a change of a single element always changes the sum.
    """
    weights = _weights(words.device)
    if words.numel() <= WEIGHTED_WORDS:
        weights = weights[: words.numel()]
        return (words * weights).sum() if words.is_cuda else torch.dot(words, weights)  # CUDA has no integer `dot`
    stride = -(-words.numel() // WEIGHTED_WORDS)
    sample = words[::stride]
    return words.sum() + (sample * (weights[: sample.numel()] - 1)).sum()


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Return odd pseudo-random numbers, from the finalizer of splitmix64 (Steele et al. 2014)."""
    x = torch.arange(1, WEIGHTED_WORDS + 1, device=device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift)) * factor
    return (x ^ (x >> 31)) | 1
