"""A call with one rank's own rows, and the call of all ranks together that it is a part of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autopart.compat.torch_internals import tree_map
from autopart.ir.trace import Call


def num_rows(call: Call) -> int:
    """How many rows a batch has: the first dim of most of its inputs; 0 where none has dims."""
    sizes = [tensor.size(0) for tensor in call.tensors if tensor.dim()]
    return max(sizes, key=sizes.count, default=0)


def are_rows(call: Call) -> list[bool]:
    """Of every input, whether it is rows of the batch: its first dim has as many entries as the batch has rows."""
    rows = num_rows(call)
    return [_is_rows(tensor, rows) for tensor in call.tensors]


def all_ranks_call(arguments: Mapping[str, Any], call: Call, num_data_ranks: int) -> dict[str, Any]:
    """Arguments of the shapes that the call of all data ranks has; `call` is `arguments` flattened.

    A trace reads no values, so each rank's rows stand for those of the others.
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
