"""Calls with local batches: the call of one rank, and the global call that it is a part of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autopart.compat.torch_internals import tree_map
from autopart.ir.trace import Call


def num_rows(call: Call) -> int:
    """Return the batch size: the first dim of most inputs; 0 if none has dims."""
    sizes = [tensor.size(0) for tensor in call.tensors if tensor.dim()]
    return max(sizes, key=sizes.count, default=0)


def are_rows(call: Call) -> list[bool]:
    """Return for every input whether its first dim is the batch."""
    rows = num_rows(call)
    return [_is_rows(tensor, rows) for tensor in call.tensors]


def all_ranks_call(arguments: Mapping[str, Any], call: Call, num_data_ranks: int) -> dict[str, Any]:
    """Return arguments with the shapes of the call of all data ranks. `call` is `arguments` flattened.

    A trace reads no values, so the samples of this rank stand for those of other ranks.
    """
    rows = num_rows(call)

    def repeated(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not _is_rows(leaf, rows):
            return leaf
        whole = leaf.detach().repeat(num_data_ranks, *[1] * (leaf.dim() - 1))
        return whole.requires_grad_(leaf.requires_grad)

    return tree_map(repeated, dict(arguments)) if num_data_ranks > 1 else dict(arguments)


def _is_rows(tensor: Tensor, rows: int) -> bool:
    return tensor.dim() > 0 and tensor.size(0) == rows
