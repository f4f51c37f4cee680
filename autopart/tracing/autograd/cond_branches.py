"""`torch.cond` in a forward: both branches are computed, and the condition selects the result.

The branch that is not selected must contribute no gradient. Multiplying its gradient by zero is not enough, because the
gradient can be infinite or NaN. So the inputs of each branch receive a gradient only if the branch is selected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from autopart.compat.torch_internals import Tracing, tree_flatten, tree_map, tree_unflatten
from autopart.errors import Refusal
from autopart.ir.graph import draws_random_numbers
from autopart.tracing.trace_errors import LostInTrace

Branch = Callable[..., Any]


def both_branches(condition: Tensor, if_true: Branch, if_false: Branch, operands: Sequence[Any]) -> Any:
    """Compute both branches of a `torch.cond` call, and return the result that the condition selects.

    Raises LostInTrace for branches that draw random numbers, write in place, or return tensors of different shapes.
    """
    chosen = condition.reshape(())
    outputs = [_branch(branch, operands, partial(_where, chosen, side)) for branch, side in
               ((if_true, True), (if_false, False))]  # fmt: skip
    (ours, spec), (others, other_spec) = map(tree_flatten, outputs)
    if spec != other_spec or [_form(leaf) for leaf in ours] != [_form(leaf) for leaf in others]:
        raise _lost("its branches give tensors of different shapes or dtypes")
    pairs = zip(ours, others, strict=True)
    return tree_unflatten([torch.where(chosen, a, b) if isinstance(a, Tensor) else a for a, b in pairs], spec)


def _where(chosen: Tensor, side: bool, leaf: Any) -> Any:
    """Return a branch's input unchanged. In backward, it gets a gradient only if the branch is selected.

    `chosen`: the condition. `side`: the value of the condition for which the branch is selected.
    """
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return leaf
    taken, other = leaf, leaf.detach()
    return torch.where(chosen, taken, other) if side else torch.where(chosen, other, taken)


def _branch(branch: Branch, operands: Sequence[Any], guarded: Callable[[Any], Any]) -> Any:
    tracing = Tracing.current()
    inside = tree_map(guarded, tuple(operands))
    if tracing is None:
        return branch(*inside)
    start, operand_nodes = tracing.last, [tracing.node_of(t) for t in tree_flatten(inside)[0] if isinstance(t, Tensor)]
    output = branch(*inside)
    region = tracing.nodes_after(start)
    _check(region)
    known = {tracing.node_of(tensor): tensor for tensor in tracing.tracked()}
    outside = dict.fromkeys(n for node in region for n in node.all_input_nodes if n not in {*region, *operand_nodes})
    for node in outside:
        tensor = known.get(node)
        if tensor is None or not tensor.requires_grad:
            continue
        last = tracing.last
        guard = tracing.node_of(guarded(tensor))
        assert guard is not None
        for new_node in reversed(tracing.nodes_after(last)):
            start.append(new_node)
        for reader in region:
            reader.replace_input_with(node, guard)
    return output


def _check(region: Sequence[fx.Node]) -> None:
    """Raise LostInTrace if a branch draws random numbers or writes to a tensor that it was passed."""
    for node in region:
        if draws_random_numbers(node):
            raise _lost("a branch draws random numbers, and would draw them even if it is not selected")
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and not {*node.all_input_nodes[:1]} <= {*region}:
            raise _lost("a branch writes to a tensor that it is given")


def _form(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _lost(why: str) -> LostInTrace:
    hint = "torch.where and plain operations, or parallelize the modules inside"
    return LostInTrace("torch.cond has branches that cannot both be computed", why, hint, Refusal.REGION)
