"""Sharding rules: tables of what each operator allows on one mesh axis, and their look-up."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import is_floating, is_sparse, is_tensor, operator_name, shape, tensor_inputs
from autopart.ir.pattern import Pattern
from autopart.passes.rules.factors import output_shapes
from autopart.passes.rules.local_forms import LocalForm
from autopart.passes.rules.notation import Rule
from autopart.passes.rules.operators.pointwise_rules import POINTWISE, is_tagged_pointwise, pointwise
from autopart.passes.rules.registered_rules import REGISTERED, has_rule
from autopart.passes.rules.tables import LINES, OF_SPARSE, SHAPED

__all__ = ["Rule", "dispatches_rows", "has_rule", "local_form", "pattern_for"]


def pattern_for(node: fx.Node) -> Pattern | None:
    """Return the rule of this call fitted to its shapes.

    None if it has no rule: then the call runs replicated on gathered inputs.
    """
    inputs = tensor_inputs(node)
    if not inputs or not all(is_tensor(n) for n in inputs):
        return None
    name = operator_name(node)
    if any(is_sparse(n) for n in (node, *inputs)) and name not in OF_SPARSE:
        return None
    if name in SHAPED:
        shaped = SHAPED[name](node)
        if shaped is not None or name not in POINTWISE:
            return shaped
    if name in LINES or name in REGISTERED:
        rules = REGISTERED[name] if name in REGISTERED else LINES[name]
        patterns = (_by_line(rule, node) for rule in (rules if isinstance(rules, tuple) else (rules,)))
        return next((pattern for pattern in patterns if pattern is not None), None)
    return pointwise(node) if name in POINTWISE or is_tagged_pointwise(node) else None


def dispatches_rows(node: fx.Node) -> bool:
    """Return True if a call dispatches rows to their experts.

    Such a call belongs to a stage, even if it only reads values of the inputs (experts chosen by token id).
    """
    rule = LINES.get(operator_name(node)) if node.op == "call_function" else None
    return isinstance(rule, Rule) and rule.routes == "out"


def local_form(node: fx.Node) -> LocalForm | None:
    """Return the function that writes a call for one rank.

    None if the traced call on local operands is right.
    """
    pattern: Pattern | None = facts(node)["pattern"]
    return pattern.local if pattern is not None else None


def _by_line(rule: Rule, node: fx.Node) -> Pattern | None:
    if not rule.when(node):
        return None
    if not is_floating(node):
        rule = replace(rule, linear=())
    return rule.instantiate([shape(n) for n in tensor_inputs(node)], output_shapes(node))
