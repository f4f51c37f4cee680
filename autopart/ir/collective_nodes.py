"""Recognition of collectives in a partitioned graph: the operator and mesh axis of a node."""

from __future__ import annotations

from torch import fx

from autopart.ir.layout import CONVERSIONS, DISPATCH_CONVERSIONS

OPERATORS = {conversion.operator: conversion for conversion in CONVERSIONS.values()}


MOVES = OPERATORS | DISPATCH_CONVERSIONS
"""Collective operators that have a backward."""


WITHOUT_BACKWARD = ("all_reduce_max", "exchange_counts")


ROTATING = ("ring_attention",)
"""Operators that pass tensors around a ring of the ranks of an axis."""


def axis_of(node: fx.Node) -> str | None:
    """Return the mesh axis over which a collective communicates; None if the node is not a collective."""
    name = autopart_operator(node)
    if name == "axis_index":
        return str(node.args[0])
    return str(node.args[1]) if name in MOVES or name in (*WITHOUT_BACKWARD, *ROTATING) else None


def autopart_operator(node: fx.Node) -> str | None:
    """Return `all_reduce` for a node that calls `torch.ops.autopart.all_reduce`, None for any other node."""
    parts = str(node.target).split(".")
    return parts[1] if node.op == "call_function" and parts[0] == "autopart" else None
