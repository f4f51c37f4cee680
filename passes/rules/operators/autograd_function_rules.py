"""Test for a user's `torch.autograd.Function`: is its backward linear in the output gradients?"""

from __future__ import annotations

import operator

from torch import fx

from autopart.ir.graph import operator_name, tensor_inputs
from autopart.passes.rules import pattern_for
from autopart.tracing.autograd.autograd_functions import made_for

_OF_SHAPES = frozenset(f"aten::{name}" for name in ["zeros_like", "ones_like", "full_like", "new_zeros", "new_ones"])
"""Operators that use only the shapes of their inputs, not the values."""
_LINEAR = {
    **{
        f"aten::{name}": ({0},)
        for name in ["view", "_unsafe_view", "reshape", "expand", "clone", "alias", "sum", "mean"]
    },
    **{f"aten::{name}": ({0}, {1}) for name in ("mm", "bmm", "matmul")},
}
"""{operator that a backward can contain: sets of tensor inputs in which it is linear}.

The rules in `tables.py` have further sets.
"""


def backward_is_linear(node: fx.Node) -> bool:
    """Return True if an operator's backward is linear in the output gradients.

    A linear backward turns partial sums of output gradients into partial sums of input gradients. The backward of a
    user's autograd Function may be nonlinear, because it may clip or normalize gradients. It counts as linear if every
    operator in the traced backward is linear in the gradients. The backward of all other operators is linear.
    """
    user_function = made_for(node)
    backward = user_function.examined.backward if user_function is not None else None
    if backward is None:
        return True
    placeholders = backward.graph.find_nodes(op="placeholder")
    reached = set(placeholders[len(tensor_inputs(node)) :])
    for call in backward.graph.nodes:
        inputs = tensor_inputs(call)
        positions = {i for i, source in enumerate(inputs) if source in reached}
        if call.op != "call_function" or not positions:
            continue
        if call.target is not operator.getitem:
            if operator_name(call) in _OF_SHAPES:
                continue
            pattern = pattern_for(call)
            by_rule = map(set, pattern.linear) if pattern is not None else ()
            if positions not in (*by_rule, *_LINEAR.get(operator_name(call), ())):
                return False
        reached.add(call)
    return True
