"""Conditions on a call's other arguments, for rules that hold only under them (`Rule.when`)."""

from __future__ import annotations

from torch import fx

from autopart.ir.graph import argument, is_floating


def of_class_indices(node: fx.Node) -> bool:
    """A loss of every row alone whose labels are class indices."""
    return argument(node, "reduction") == 0 and not is_floating(node.args[1])


def of_class_probabilities(node: fx.Node) -> bool:
    """A loss of every row alone whose labels are probabilities of all classes."""
    return argument(node, "reduction") == 0 and is_floating(node.args[1])


def gradients_as_they_are(node: fx.Node) -> bool:
    """An embedding whose gradients are not scaled by how often a row is read in the whole batch."""
    return not argument(node, "scale_grad_by_freq")


def writes_zeros_or_tensors(node: fx.Node) -> bool:
    """A `scatter` that neither writes a number other than 0 nor multiplies."""
    return argument(node, "reduce") is None and not argument(node, "value")


def adds_to_itself(node: fx.Node) -> bool:
    """A `scatter_reduce` that adds to what is there."""
    return argument(node, "reduce") == "sum" and argument(node, "include_self")
