"""Magnitude of the terms of sums, to which the rounding of the sums is relative.

A mean of values of size 255 can be zero up to the rounding of 255. An error of that mean is therefore relative to the
mean of the absolute values, not to the mean itself (Higham, Accuracy and Stability of Numerical Algorithms, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopart.compat.torch_internals import tree_map
from autopart.ir.graph import operator_name

_DIFFERENCES = {"aten::add", "aten::sub"}
_SUMS = {"aten::sum", "aten::mean", *_DIFFERENCES}
_VIEWS = {"aten::reshape", "aten::view", "aten::squeeze", "aten::unsqueeze", "aten::permute", "aten::expand"}
_COPIES = {"aten::detach", "aten::to", "aten::_to_copy", "aten::clone", "aten::alias"}
_PRODUCTS = {"aten::mul", "aten::div"}
"""Followed if the other factor is a number."""


def summed_magnitude(node: fx.Node, values: Mapping[fx.Node, Any]) -> Tensor:
    """Recompute a node with every term of its sums replaced by the absolute value of the term.

    For a mean, it returns the mean of the absolute values. The recomputation goes back from `node` through sums, views,
    copies and products with numbers. The results of all other operators are the terms.

    Args:
        values: the value of every node.
    """
    known: dict[fx.Node, Tensor] = {}

    def magnitude(node: fx.Node) -> Tensor:
        if node not in known:
            known[node] = _sum_of_magnitudes(node, magnitude) if _is_followed(node) else _magnitude(values[node])
        return known[node]

    return magnitude(node)


def _is_followed(node: fx.Node) -> bool:
    name = operator_name(node) if node.op == "call_function" else ""
    return name in _SUMS | _VIEWS | _COPIES or (name in _PRODUCTS and not isinstance(node.args[1], fx.Node))


def _sum_of_magnitudes(node: fx.Node, magnitude: Callable[[fx.Node], Tensor]) -> Tensor:
    args, kwargs = fx.map_arg((node.args, node.kwargs), magnitude)
    name = operator_name(node)
    if name in _PRODUCTS | _DIFFERENCES:
        args, kwargs = tree_map(_magnitude, (args, kwargs))
    result: Tensor = torch.add(*args, **kwargs) if name in _DIFFERENCES else node.target(*args, **kwargs)
    return result


def _magnitude(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().abs() if value.is_floating_point() or value.is_complex() else value
    return abs(value) if isinstance(value, (int, float)) else value
