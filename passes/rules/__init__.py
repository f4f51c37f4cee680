"""Sharding rules: which dims of an operator can be sharded, and which results are partial sums."""

from __future__ import annotations

from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import is_sparse, is_tensor, tensor_inputs
from autopart.ir.pattern import Pattern
from autopart.passes.rules.local_forms import LocalForm
from autopart.passes.rules.notation import Rule
from autopart.passes.rules.operators.pointwise_rules import elementwise, is_tagged_pointwise
from autopart.passes.rules.registered_rules import has_rule, rule_of

__all__ = ["Rule", "has_rule", "local_form", "pattern_for", "rule_of"]


def pattern_for(node: fx.Node) -> Pattern | None:
    """Return the sharding rule of a call, fitted to the call's shapes (a `Pattern`).

    None if the call has no rule. Every rank then runs the full call on gathered inputs.
    """
    inputs, rule = tensor_inputs(node), rule_of(node)
    if not inputs or not all(is_tensor(n) for n in inputs):
        return None
    if any(is_sparse(n) for n in (node, *inputs)) and not rule.takes_sparse:
        return None
    if not rule.is_for_sharding and is_tagged_pointwise(node):
        return elementwise()(node)
    return rule.fit(node)


def local_form(node: fx.Node) -> LocalForm | None:
    """Return the function that writes a call into the program of one rank.

    None if the traced call gives the correct result on a rank's local operands.
    """
    pattern: Pattern | None = facts(node)["pattern"]
    return pattern.local if pattern is not None else None
