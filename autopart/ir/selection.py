"""Boolean indexing, `x[mask]`, whose number of selected elements depends on data."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, fx

from autopart.ir.facts import facts
from autopart.ir.graph import is_tensor, operator_name, shape, source_of, value


def positions(mask: Tensor, number: int | None = None) -> list[Tensor]:
    """Return the indices of the true elements of a mask.

    Args:
        mask: boolean tensor with at least one dim.
        number: number of true elements, if it is known.
    Returns:
        One int64 tensor of indices for each dim of the mask, as `torch.where(mask)` returns them. In a trace their
        length is `number`, or, without a number, the number of elements of the mask as an upper bound.
    """
    return list(torch.where(mask))


def positions_upper_bound(mask: Tensor, number: int | None = None) -> list[Tensor]:
    return [mask.new_empty(mask.numel() if number is None else number, dtype=torch.int64) for _ in mask.shape]


def _define() -> torch.library.Library:
    library = torch.library.Library("autopart", "FRAGMENT")
    library.define("positions(Tensor mask, int? number=None) -> Tensor[]")
    library.impl("positions", positions, "CompositeExplicitAutograd")
    torch.library.register_fake("autopart::positions", positions_upper_bound, lib=library)
    return library


LIBRARY = _define()  # keep this object: torch unregisters the operator when it is freed
OPERATORS = ("positions",)
POSITIONS = torch.ops.autopart.positions.default


def is_selection(node: fx.Node) -> bool:
    """Return True for a node that computes the indices of a mask's true elements."""
    return node.target is POSITIONS and len(node.args) == 1


def is_data_dependent(node: fx.Node) -> bool:
    """Return True if the size of a traced value depends on the values of inputs."""
    return facts(node).get("counted", False)


class Positions(NamedTuple):
    """Indices, along dim `dim` of a mask, of the elements that the mask selects.

    `selection`: name of the node that computes the indices. `mask`: shape of the mask.
    """

    selection: str
    dim: int
    mask: tuple[int, ...]


_MOVES = {
    "aten::reshape",
    "aten::view",
    "aten::unsqueeze",
    "aten::squeeze",
    "aten::clone",
    "aten::to",
    "aten::_to_copy",
}


def positions_of(node: fx.Node) -> Positions | None:
    """Return the `Positions` that a node computes, reshapes or copies; None for any other node."""
    while node.op == "call_function" and is_tensor(node) and value(node).dtype == torch.int64:
        source, dim = source_of(node)
        if is_selection(source):
            return Positions(source.name, dim, shape(source.args[0]))
        if operator_name(node) not in _MOVES:
            return None
        node = node.args[0]
    return None
