"""Rules of elementwise operators, whose inputs broadcast against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from autopart.ir.graph import is_floating, is_tensor, operator_name, shape, tensor_inputs
from autopart.ir.pattern import Pattern
from autopart.passes.rules.notation import Rule
from autopart.tracing.autograd.autograd_functions import NAMESPACE


def is_tagged_pointwise(node: fx.Node) -> bool:
    """Return True if the operator is a user's autograd.Function that tracing found to be elementwise."""
    return operator_name(node).startswith(f"{NAMESPACE}::") and torch.Tag.pointwise in node.target.tags


def elementwise(*linear: tuple[int, ...]) -> Callable[[fx.Node], Pattern | None]:
    """Return a function that derives the sharding rule (`Pattern`) of an elementwise call.

    The function returns None for overloads that reduce (`max(x)`).

    Args:
        linear: sets of argument positions. If all arguments of a set are partial sums, so is the result: `(0, 1)` for
            `x + y`. A Python number at such a position must be 0: `x + 1` is not linear.
    """

    def rule(node: fx.Node) -> Pattern | None:
        shapes = [shape(n) for n in tensor_inputs(node)]
        if not is_tensor(node) or torch.broadcast_shapes(*shapes) != shape(node):
            return None
        text = ", ".join(["..."] * len(shapes)) + " -> ..."
        return Rule(text, linear=_linear_inputs(node, linear)).instantiate(shapes, [shape(node)])

    return rule


def _linear_inputs(node: fx.Node, linear: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Convert sets of argument positions to sets of indices among the call's tensor inputs.

    A set is dropped if one of its arguments is a Python number other than 0.
    """
    if not is_floating(node) or node.kwargs.get("rounding_mode"):
        return ()
    tensors = {i: argument for i, argument in enumerate(node.args) if isinstance(argument, fx.Node)}
    input_of = {position: k for k, position in enumerate(tensors)}
    sets = []
    for positions in linear:
        numbers = [node.args[i] for i in positions if i not in tensors]
        if all(number == 0 for number in numbers) and len(numbers) < len(positions):
            sets.append(tuple(input_of[i] for i in positions if i in tensors))
    return tuple(sets)
