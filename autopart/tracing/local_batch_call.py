"""Conversion of a call with `local_batch=True` (each data rank has its own samples) to a global call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autopart.compat.torch_internals import tree_map
from autopart.errors import InputError
from autopart.ir.run.value_guards import ValueGuards
from autopart.ir.trace import Call


def num_rows(call: Call) -> int:
    """Return the batch size: the most frequent first dim of the inputs; 0 if no input has dims."""
    sizes = [tensor.size(0) for tensor in call.tensors if tensor.dim()]
    return max(sizes, key=sizes.count, default=0)


def are_rows(call: Call) -> list[bool]:
    """Return, for each input tensor, True if its first dim is the batch."""
    rows = num_rows(call)
    return [_is_rows(tensor, rows) for tensor in call.tensors]


def all_ranks_call(arguments: Mapping[str, Any], call: Call, num_data_ranks: int) -> dict[str, Any]:
    """Return the arguments of the global call: this rank's samples, repeated once per data rank.

    A trace reads only shapes, so the repeated samples can represent the samples of other ranks. `call` is `arguments`
    flattened.
    """
    rows = num_rows(call)

    def repeated(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not _is_rows(leaf, rows):
            return leaf
        whole = leaf.detach().repeat(num_data_ranks, *[1] * (leaf.dim() - 1))
        return whole.requires_grad_(leaf.requires_grad)

    return tree_map(repeated, dict(arguments)) if num_data_ranks > 1 else dict(arguments)


def check_global(guards: ValueGuards) -> None:
    """Raise InputError if the model reads values of inputs, which differ between the data ranks."""
    for guard in [guard for guard in guards if guard.call.of_inputs]:
        raise InputError(
            f"the model reads `{guard.text}`, and local_batch=True gives every data rank other samples",
            why="a size or a branch of the program depends on the value for the global batch, which no rank has",
            where=guard.where, hint="the global batch on every rank (without local_batch); or a fixed size",
        )  # fmt: skip


def _is_rows(tensor: Tensor, rows: int) -> bool:
    return tensor.dim() > 0 and tensor.size(0) == rows
