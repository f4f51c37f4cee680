"""Operator that writes new keys or values of attention to a cache, and returns the full cache.

Text generation runs the model once per token. The cache has a fixed length and stores the keys and values of earlier
tokens on the rank that computed them. Each rank therefore caches its own heads (`tp`), samples (`dp`) and layers
(`pp`), and the operator needs no collective.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar

from torch import Tensor, fx

from autopart.errors import UsageError
from autopart.ir.collective_nodes import autopart_operator


class CacheStore:
    """Key/value caches of one text generation: the shards on one rank.

    `tensors`: {name of the operator that writes the cache: cache of shape [..., length, width]}.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def write(self, x: Tensor, positions: Tensor, name: str, length: int) -> Tensor:
        """Write `x` at `positions` of the cache `name`, and return the cache."""
        shape = (*x.shape[:-2], length, x.shape[-1])
        cache = self.tensors.get(name)
        if cache is None:
            cache = self.tensors[name] = x.new_zeros(shape)
        assert cache.shape == shape, f"{name} has a cache of {list(cache.shape)}, and writes to {list(shape)}"
        return cache.index_copy_(-2, positions, x)


STORE: ContextVar[CacheStore | None] = ContextVar("caches of the running generation", default=None)
"""The caches that `update_cache` writes to. One process that runs several ranks sets it for each rank."""


def update_cache(x: Tensor, positions: Tensor, name: str, length: int) -> Tensor:
    """Write new keys or values to the cache of the running generation, and return the full cache.

    The result is the cache itself, so a program must not write to it.

    Args:
        x: keys or values of the new tokens, of shape [..., tokens, width].
        positions: index of each new token in the cache, of shape [tokens].
        name: name of the cache.
        length: number of tokens that the cache can hold.
    Returns:
        Tensor of shape [..., length, width]. Tokens that were not written are zeros.
    """
    store = STORE.get()
    if store is None:
        raise UsageError(
            "a call with a cache of autopart runs outside of generate()",
            why="the cache belongs to one generate() call", hint="pm.generate(...)",
        )  # fmt: skip
    return store.write(x, positions, name, length)


def full_cache(x: Tensor, positions: Tensor, name: str, length: int) -> Tensor:
    """Return the fake result of `update_cache`: an uninitialised tensor with the shape of the full cache."""
    return x.new_empty((*x.shape[:-2], length, x.shape[-1]))


OPERATORS = ("update_cache",)


def has_caches(nodes: Iterable[fx.Node]) -> bool:
    """Return True if an operator in a graph writes to a cache of keys or values."""
    return any(autopart_operator(node) == "update_cache" for node in nodes)
