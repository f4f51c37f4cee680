"""Sum of the absolute values of summands: the number to which a sum's rounding error is relative.

A mean of values of size 255 can be zero up to the rounding of 255. An error of that mean is therefore relative to the
mean of the absolute values, not to the mean itself (Higham, Accuracy and Stability of Numerical Algorithms, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
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
"""Products. If one factor is a number, the search for summands continues in the other factor."""


def summed_magnitude(node: fx.Node, values: Mapping[fx.Node, Any]) -> Tensor:
    """Recompute the value of a node, with every summand of its sums replaced by the absolute value.

    For a mean, it returns the mean of the absolute values. The recomputation goes back from `node` through sums, views,
    copies and products with numbers. The results of all other operators are the summands.

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


_LINEAR = {"aten::mul", "aten::linear", "aten::matmul", "aten::mm", "aten::bmm", "aten::addmm", "aten::conv1d",
           "aten::conv2d", "aten::conv3d", "aten::convolution", *_SUMS, *_VIEWS, *_COPIES}  # fmt: skip
"""Operators that are linear in each of their tensors.

The gradient of an input is a sum of products of other inputs and output gradients.
"""


def gradient_magnitudes(loss: Tensor, values: Mapping[fx.Node, Any], names: Collection[str]) -> dict[str, Tensor]:
    """Return {name of a parameter: sum of the absolute values of the summands of its gradient}.

    The gradient of a gain before a normalization is a sum of large terms that cancel. Its rounding is relative to these
    terms. `.grad` fields are not written.

    Args:
        loss: the scalar that is differentiated.
        values: the value of every node of the graph that computed the loss.
        names: names of parameters.
    """
    nodes = [node for node in values if node.op == "get_attr" and str(node.target) in names]
    outputs = {user: values[user] for node in nodes for user in _linear_users(node) if values[user].requires_grad}
    grads = torch.autograd.grad(loss, [*outputs.values()], allow_unused=True) if outputs else ()
    of_outputs = {user: grad.abs() for user, grad in zip(outputs, grads, strict=True) if grad is not None}

    def magnitude(node: fx.Node) -> Tensor:
        total = torch.zeros_like(values[node])
        for user in of_outputs.keys() & node.users.keys():
            of_output = magnitude(user) if operator_name(user) in _VIEWS | _COPIES else of_outputs[user]
            total += _terms(user, node, values, of_output)
        return total.detach()

    totals: dict[str, Tensor] = {}
    for node in nodes:
        name = str(node.target)
        totals[name] = magnitude(node) + totals.get(name, 0.0)
    return totals


def _linear_users(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the linear operators that use a node, also through views and copies."""
    for user in node.users:
        if user.op == "call_function" and operator_name(user) in _LINEAR:
            yield user
            if operator_name(user) in _VIEWS | _COPIES:
                yield from _linear_users(user)


def _terms(user: fx.Node, node: fx.Node, values: Mapping[fx.Node, Any], of_output: Tensor) -> Tensor:
    """Return the sum of absolute summands in the gradient of one input of a linear operator.

    Args:
        user: the linear operator.
        node: the input.
        of_output: absolute values of the gradient of the operator's output.
    """
    leaf = values[node].detach().clone().requires_grad_()
    with torch.enable_grad():
        args, kwargs = fx.map_arg((user.args, user.kwargs), lambda n: leaf if n is node else _magnitude(values[n]))
        (terms,) = torch.autograd.grad(user.target(*args, **kwargs), leaf, of_output)
    return terms.abs()
