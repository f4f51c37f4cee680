"""Selections: how many elements they have depends on values, and is known when the program runs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, fx

from autopart.ir.facts import facts
from autopart.ir.graph import is_tensor, operator_name, shape, source_of, value


def positions(mask: Tensor, number: int | None = None) -> list[Tensor]:
    """Where a mask is true.

    Args:
        mask: bool, of any shape with at least one dim.
        number: how many elements are true, where that is known.
    Returns:
        For each dim of the mask an int64 tensor [selected]: the indices of the true elements in the order of memory,
        as `torch.where(mask)` gives them. In a trace `selected` is `number`, or that of the mask's elements, the most
        that there can be.
    """
    return list(torch.where(mask))


def most_positions(mask: Tensor, number: int | None = None) -> list[Tensor]:
    return [mask.new_empty(mask.numel() if number is None else number, dtype=torch.int64) for _ in mask.shape]


def _define() -> torch.library.Library:
    library = torch.library.Library("autopart", "FRAGMENT")
    library.define("positions(Tensor mask, int? number=None) -> Tensor[]")
    library.impl("positions", positions, "CompositeExplicitAutograd")
    torch.library.register_fake("autopart::positions", most_positions, lib=library)
    return library


LIBRARY = _define()  # the operator lives as long as this object
OPERATORS = ("positions",)
POSITIONS = torch.ops.autopart.positions.default


def is_selection(node: fx.Node) -> bool:
    """Whether a node says where a mask is true, and nobody knows for how many elements it is."""
    return node.target is POSITIONS and len(node.args) == 1


def is_counted(node: fx.Node) -> bool:
    """Whether the size of a traced value depends on values."""
    return facts(node).get("counted", False)


class Positions(NamedTuple):
    """The indices of selected elements along dim `dim` of a mask of shape `mask`."""

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
    """Of which selected elements a value holds the indices; None where it holds something else."""
    while node.op == "call_function" and is_tensor(node) and value(node).dtype == torch.int64:
        source, dim = source_of(node)
        if is_selection(source):
            return Positions(source.name, dim, shape(source.args[0]))
        if operator_name(node) not in _MOVES:
            return None
        node = node.args[0]
    return None
