"""Conditions on the arguments of a call, for rules that hold only for some calls (`Rule.when`)."""

from __future__ import annotations

from torch import fx

from autopart.ir.graph import argument, is_floating


def of_class_indices(node: fx.Node) -> bool:
    """Return True for a loss without reduction whose labels are class indices."""
    return argument(node, "reduction") == 0 and not is_floating(node.args[1])


def of_class_probabilities(node: fx.Node) -> bool:
    """Return True for a loss without reduction whose labels are class probabilities."""
    return argument(node, "reduction") == 0 and is_floating(node.args[1])


def has_unscaled_gradients(node: fx.Node) -> bool:
    """Return True for an embedding without `scale_grad_by_freq`."""
    return not argument(node, "scale_grad_by_freq")


def writes_zeros_or_tensors(node: fx.Node) -> bool:
    """Return True for a `scatter` that writes a tensor or zeros, and does not add or multiply (`reduce`)."""
    return argument(node, "reduce") is None and not argument(node, "value")


def adds_to_itself(node: fx.Node) -> bool:
    """Return True for a `scatter_reduce` that adds to the existing values of its target."""
    return argument(node, "reduce") == "sum" and argument(node, "include_self")
