"""Parameters whose optimizer update needs the full tensor, and the rank that updates each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn


def hidden_matrices(model: nn.Module) -> set[str]:
    """Return the names of a model's two-dimensional parameters, without embeddings and output layer.

    A parameter that is tied to one of these is left out, too.
    """
    output: Any = getattr(model, "get_output_embeddings", lambda: None)()
    outer = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    left_out = {id(p) for module in [*outer, output] if module is not None for p in module.parameters(recurse=False)}
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, p in named if p.ndim == 2 and id(p) not in left_out}


def balanced_owners(sizes: Sequence[float], num_ranks: int) -> list[int]:
    """Return the owner rank of each tensor, so that ranks own about equally many elements.

    The largest tensors are assigned first, each to the rank that owns the fewest elements so far. Equal tensors are
    assigned in the order of `sizes`.
    """
    loads, owners = [0.0] * num_ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


def position_of(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of a rank on axes of these sizes, outer axis first.

    >>> position_of(5, (2, 4))
    (1, 1)
    """
    return tuple(rank // math.prod(sizes[i + 1 :]) % size for i, size in enumerate(sizes))
