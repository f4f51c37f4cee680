"""Rules of normalizations. Dims over which statistics are computed cannot be sharded."""

from __future__ import annotations

from torch import fx

from autopart.ir.graph import argument, shape, tensor_inputs
from autopart.ir.pattern import Pattern
from autopart.passes.rules.factors import names, pattern
from autopart.passes.rules.local_forms import group_argument


def layer_norm(node: fx.Node) -> Pattern:
    """Return the rule of `layer_norm`, `rms_norm`: the dims in `normalized_shape` cannot be sharded."""
    inputs = tensor_inputs(node)
    dims = names(len(shape(inputs[0])))
    normalized = dims[len(dims) - len(node.args[1]) :]
    return pattern(node, [dims, *([normalized] * (len(inputs) - 1))], [dims], [d[0] for d in normalized])


def group_norm(node: fx.Node) -> Pattern:
    """Return the rule of `group_norm`: the channel dim has the factors (groups, channels per group).

    Groups can be sharded.
    """
    batch, channels, *rest = shape(node.args[0])
    inner = names(len(rest))
    dims = [("b",), ("g", "r"), *inner]
    sizes = {"b": batch, "g": node.args[1], "r": channels // node.args[1]}
    sizes |= {d[0]: size for d, size in zip(inner, rest, strict=True)}
    weights = [(("g", "r"),)] * (len(tensor_inputs(node)) - 1)
    unshardable = frozenset({"r", *(d[0] for d in inner)})
    return Pattern((tuple(dims), *weights), (tuple(dims),), sizes, unshardable, local=group_argument)


def batch_norm(node: fx.Node) -> Pattern | None:
    """Return the rule of `batch_norm` in eval mode: all dims can be sharded.

    None in training mode, because a pass decomposes the operator, and for an empty input without channels.
    """
    inputs = tensor_inputs(node)
    dims = names(len(shape(inputs[0])))
    if argument(node, "training") or len(dims) < 2:
        return None
    return pattern(node, [dims, *([[dims[1]]] * (len(inputs) - 1))], [dims])
