"""The cases of `test_errors.py` about sharding rules: the call, and the exact text it must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from custom_ops import custom_model

import autopart
from autopart.passes.rules.registered_rules import REGISTERED

MATMUL, SUMS = "autopart_test::scaled_mm", "autopart_test::running_sums"
NOTATION = "autopart.rule('mylib::op', 'b s h, h o -> b s o', sum='h')"


def rule(*lines: str, operator: str = MATMUL, **options: Any) -> Callable[[], None]:
    """A case: register this rule."""
    return lambda: autopart.rule(operator, *lines, **options)


def registered(use: Callable[[], Any]) -> Callable[[], Any]:
    """A case: with a rule of `running_sums`, which is forgotten afterwards."""

    def case() -> Any:
        autopart.rule(SUMS, "a -> a, a")
        try:
            return use()
        finally:
            del REGISTERED[SUMS]

    return case


def plan_with_a_rule() -> Any:
    autopart.rule(MATMUL, "... h, h o -> ... o", sum="h")
    model, batch = custom_model()
    made = autopart.plan(model, "tp2", example_kwargs=batch)
    del REGISTERED[MATMUL]
    return autopart.verify(model, "tp2", example_kwargs=batch, plan=made)


def mixing_rows() -> Any:
    model, batch = custom_model(mixes=True)
    return autopart.plan(model, "pp2", example_kwargs=batch, microbatches=2)


RULE_CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "rule: no line": (rule(),
        f"RuleError: the rule of {MATMUL} is empty\n  try    {NOTATION}"),
    "rule: name": (rule("a -> a", operator="mylib.op"),
        "RuleError: 'mylib.op' is not the name of an operator\n  why    a name is namespace::operator, without an "
        f"overload\n  try    {NOTATION}"),
    "rule: no such operator": (rule("a -> a", operator="mylib::op"),
        "RuleError: there is no operator mylib::op\n  why    no torch.library operator of this name is registered yet"
        "\n  try    call autopart.rule after the operator is defined (torch.library.custom_op), or after its import"),
    "rule: arrows": (rule("a b, b c"),
        f"RuleError: the line 'a b, b c' of {MATMUL} cannot be read\n  why    it has 0 arrows; inputs -> outputs needs "
        f"one\n  try    {NOTATION}"),
    "rule: brackets": (rule("(a b, b c -> a c"),
        f"RuleError: the line '(a b, b c -> a c' of {MATMUL} cannot be read\n  why    '(a b' has '('; an operand is "
        f"made of names, '...' and groups as in '(g r)'\n  try    {NOTATION}"),
    "rule: twice": (rule("a a, a c -> a c"),
        f"RuleError: the line 'a a, a c -> a c' of {MATMUL} cannot be read\n  why    'a a' has 'a' twice\n  try    "
        f"{NOTATION}"),
    "rule: unknown factor": (rule("a b, b c -> a c", sum="b", whole="d"),
        f"RuleError: whole='d' of {MATMUL}: there is no factor 'd'\n  why    the factors are a, b, c\n  try    use "
        "factor names of the rule's line"),
    "rule: sum not said": (rule("a b, b c -> a c"),
        f"RuleError: the rule of {MATMUL} has no sum=, which does not fit its factors\n  why    some output lacks b; "
        f"sharding "
        "a factor that an output lacks leaves a partial sum\n  try    sum='b', or whole= for factors that cannot be "
        "sharded"),
    "rule: sum of what is kept": (rule("a b, b c -> a c", sum="c", whole="b"),
        f"RuleError: the rule of {MATMUL} has sum='c', which does not fit its factors\n  why    every output has all "
        f"factors of the "
        "inputs; sharding a factor that an output lacks leaves a partial sum\n  try    leave sum out"),
    "rule: made in an output": (rule("a b, b c -> a d", sum="b c"),
        f"RuleError: factor 'd' of the rule of {MATMUL} appears only in an output\n  why    it cannot be sharded"
        "\n  try    whole='d'"),
    "rule: number of tensors": (rule("a b -> a b"),
        f"RuleError: the line 'a b -> a b' of {MATMUL} has 1 input and 1 output\n  why    the operator is "
        f"{MATMUL}(Tensor x, Tensor weight) -> Tensor\n  try    one operand for every tensor, in the order of the "
        "call"),
    "rule: linear": (rule("a b, b c -> a c", sum="b", linear=[[2]]),
        f"RuleError: linear=[[2]] of {MATMUL} names input 2\n  why    the line 'a b, b c -> a c' has 2 inputs and 1 "
        "output; inputs are counted from 0\n  try    linear=[[0]]"),
    "rule: autopart's own": (rule("a, a -> a", operator="aten::mul"),
        "RuleError: aten::mul has a rule already\n  why    it is built into autopart\n  try    nothing to register"),
    "rule: another": (registered(rule("a b -> a b, b", operator=SUMS, sum="a")),
        f"RuleError: {SUMS} is registered with another rule already\n  why    the registered rule is "
        f"autopart.rule(\"{SUMS}\", \"a -> "
        f"a, a\")\n  try"
        "    register one rule per operator and process; it can have a line for each form of the call"),
    "rule: does not fit": (registered(lambda: autopart.check_rule(SUMS, [torch.ones(2, 3)], 1)),
        f"RuleError: the rule of {SUMS} does not fit this call\n  why    autopart.rule(\"{SUMS}\", \"a -> a, a\")\n  "
        "where  [2, 3]\n  try    add a line to the rule with as many tensors and dims as this call has"),
    "rule: overload": (lambda: autopart.check_rule(f"{MATMUL}.out"),
        f"RuleError: {MATMUL} has no overload 'out'\n  try    {MATMUL}.default"),
    "plan: rules": (plan_with_a_rule,
        f"PlanError: the plan needs a sharding rule for {MATMUL} that this process does not have\n  why    it has no "
        f"rule for it\n  try    autopart.rule(\"{MATMUL}\", \"... h, h o -> ... o\", sum=\"h\") before parallelize, "
        "or a new plan"),
    "microbatches: no rule": (mixing_rows,
        "StageError: the batch cannot be split into 2 microbatches\n  why    scaled_mm needs all samples of a value of "
        "shape [8, 3, 16] at once: it has no sharding rule, and too much of the model depends on it to run once on all "
        "microbatches\n  where  scaled_mm at custom_ops.py:{custom_line}\n  try    microbatches=1"),
}  # fmt: skip
