"""Sharding rules that users registered for custom operators in this process (`autopart.rule`).

Only calls of `autopart.rule` add rules. A plan lists the registered rules that it uses (`Plan.rules`), so that a
process without such a rule reports an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from autopart.ir.graph import operator_name
from autopart.passes.rules.notation import Rule, parse
from autopart.passes.rules.tables import RULES

REGISTERED: dict[str, Rule] = {}


NO_RULE = Rule()


def rule_of(node: fx.Node) -> Rule:
    return row_of(operator_name(node))


def row_of(name: str) -> Rule:
    return REGISTERED.get(name) or RULES.get(name, NO_RULE)


def has_rule(name: str) -> bool:
    """Return True if an operator has a sharding rule, built-in or registered.

    The rule may still not fit every call (`Rule.when`).
    """
    return row_of(name).is_for_sharding


def contracted(rule: Rule) -> list[str]:
    """Return the factors (letters of the rule) that a call sums over and that can be sharded.

    Sharding one makes the output a partial sum.
    """
    lacking: dict[str, None] = {}
    for text in (rule.text, *rule.also):
        left, right = parse(text)
        in_inputs = {factor for operand in left for dim in operand for factor in dim}
        for operand in right:
            in_output = {factor for dim in operand for factor in dim}
            lacking |= dict.fromkeys(sorted(in_inputs - in_output - set(rule.whole.split())))
    return list(lacking)


def call_text(name: str, rule: Rule) -> str:
    """Return, as text, the call of `autopart.rule` that registers this rule."""
    texts = [f'"{text}"' for text in (name, rule.text, *rule.also)]
    options = [f'{key}="{text}"' for key, text in (("sum", " ".join(contracted(rule))), ("whole", rule.whole)) if text]
    options += [f"linear={rule.linear}"] * bool(rule.linear)
    options += [f'flops="{factors}"' for factors in rule.matmul]
    return f"autopart.rule({', '.join(texts + options)})"


def as_data(rule: Rule) -> dict[str, Any]:
    """Return a rule as a dict that can be stored in a plan. `from_data` is the inverse."""
    data = {"lines": [rule.text, *rule.also], "whole": rule.whole, "linear": [list(s) for s in rule.linear],
            "flops": list(rule.matmul)}  # fmt: skip
    return {key: value for key, value in data.items() if value}


def from_data(data: Mapping[str, Any]) -> Rule:
    text, *also = data["lines"]
    linear = tuple(tuple(positions) for positions in data.get("linear", ()))
    return Rule(text, data.get("whole", ""), linear, "", tuple(data.get("flops", ())), tuple(also))
