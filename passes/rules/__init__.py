"""Sharding rules: what each operator may do on one mesh axis, as tables, and how a call finds its rule."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from autopart.graph import is_floating, is_tensor, operator_name, shape, tensor_inputs, value

from .notation import Pattern, Rule
from .shapes import BUILDERS
from .tables import ALTERNATIVES, LINEAR_POINTWISE, LINES, POINTWISE, SCALAR_LINEAR

__all__ = ["Pattern", "Rule", "pattern_for"]


def pattern_for(node: fx.Node) -> Pattern | None:
    """The rule of this call fitted to its shapes, or None: then it runs on whole inputs on every rank."""
    inputs = tensor_inputs(node)
    if not all(is_tensor(n) for n in inputs):
        return None
    name = operator_name(node)
    if name in BUILDERS:
        return BUILDERS[name](node) if inputs else None
    shapes = [shape(n) for n in inputs]
    if name in LINES:
        return _from_line(name, node, shapes)
    if name in POINTWISE and is_tensor(node) and inputs:
        return _pointwise(name, node, shapes)
    return None


def _from_line(name: str, node: fx.Node, shapes: list) -> Pattern | None:
    rule = LINES[name]
    outputs = value(node)
    out_shapes = [tuple(t.shape) for t in (outputs if isinstance(outputs, (tuple, list)) else [outputs])]
    if not _arguments_fit(name, node):
        return None
    for text in (rule.text, *ALTERNATIVES.get(name, ())):
        pattern = replace(rule, text=text).instantiate(shapes, out_shapes)
        if pattern is not None:
            return pattern
    return None


def _arguments_fit(name: str, node: fx.Node) -> bool:
    """Whether the call's other arguments are the ones the line was written for."""
    args = dict(enumerate(node.args))
    if name in ("aten::conv1d", "aten::conv2d"):
        return node.kwargs.get("groups", args.get(6, 1)) == 1
    if name in ("aten::cross_entropy_loss", "aten::nll_loss_nd"):
        return (
            args.get(2) is None and args.get(3, node.kwargs.get("reduction", 1)) == 0 and not is_floating(node.args[1])
        )
    if name == "aten::gather":  # along the last dim, and without the cut of other dims that gather allows
        last = node.args[1] in (-1, len(shape(node)) - 1)
        return last and shape(node.args[0])[:-1] == shape(node.args[2])[:-1]
    if name in ("aten::layer_norm", "aten::rms_norm"):
        return len(node.args[1]) == 1
    if name == "aten::embedding":  # gradients scaled by how often a row is read in the whole batch
        return not (len(node.args) > 3 and node.args[3])
    return True


def _pointwise(name: str, node: fx.Node, shapes: list) -> Pattern | None:
    if torch.broadcast_shapes(*shapes) != value(node).shape:  # `max(x)` reduces, `max(x, y)` is pointwise
        return None
    text = ", ".join(["..."] * len(shapes)) + " -> ..."
    linear = LINEAR_POINTWISE.get(name, ())
    if len(shapes) == 1 and linear:
        linear = ((0,),) if name in SCALAR_LINEAR and isinstance(node.args[0], fx.Node) else ()
    if not is_floating(node) or (name == "aten::where" and len(shapes) < 3):
        linear = ()
    if name == "aten::div" and node.kwargs.get("rounding_mode"):
        linear = ()
    if name in ("aten::tril", "aten::triu"):
        text = "... q k -> ... q k"
        return Rule(text, whole="q k", linear=((0,),)).instantiate(shapes, [shape(node)])
    return Rule(text, linear=linear).instantiate(shapes, [shape(node)])
