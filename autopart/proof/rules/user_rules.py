"""Sharding rules for custom operators: `rule` registers one, `check_rule` tests it on an example."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopart.common.text import ShownAsText
from autopart.compat.torch_internals import tree_map
from autopart.errors import RuleError
from autopart.ir.facts import facts
from autopart.ir.graph import operator_name, tensor_inputs
from autopart.ir.mesh import Mesh
from autopart.passes.facts.strategies import ANY_KIND, strategies
from autopart.passes.rules.notation import Rule, parse
from autopart.passes.rules.registered_rules import REGISTERED, call_text, contracted, has_rule
from autopart.proof.rules.check_rule import Proof
from autopart.proof.rules.rule_candidates import candidates
from autopart.tracing.autograd.autograd_functions import NAMESPACE as FUNCTIONS
from autopart.tracing.autograd.autograd_functions import function_name, operator_of

NOTATION = "autopart.rule('mylib::op', 'b s h, h o -> b s o', sum='h')"


def rule(
    operator: str | type[torch.autograd.Function], *lines: str, sum: str = "", whole: str = "",
    linear: Sequence[Sequence[int]] = (), flops: str = "",
) -> None:  # fmt: skip
    """Register a sharding rule for an operator in this process.

    The operator is a `torch.library` operator of the user, one of torch's that has no rule, or an autograd.Function. A
    line names the dims (factors) of every tensor input and output, such as `"b s h, h o -> b s o"`. Dims with equal
    names have equal indices. `...` means any number of dims. `(g r)` means one dim that merges two factors, the outer
    factor first. The rule states that the operator can run on shards of any one factor, with its other arguments
    unchanged. Inputs without that factor are then replicated.

    Args:
        operator: name in the dispatcher, `"mylib::op"`, without an overload; or the class of an autograd.Function. A
            rule of a Function names the tensors among the arguments of `apply`, in their order.
        lines: one line, or several for calls with different numbers of tensors or dims. The first line that fits is
            used.
        sum: factors over which the operator sums, so that an output lacks them, such as `"h"`. If such a factor is
            sharded, the output is a partial sum, which autopart reduces. All such factors must be named.
        whole: factors that must not be sharded.
        linear: sets of inputs in which the operator is jointly linear, such as `[[0], [1]]` for a product. All inputs
            of one set can then be partial sums.
        flops: factors whose product, times 2, is the FLOPs of the operator. The planner then treats it like a matrix
            product and shards it over `tp`.
    Raises:
        RuleError: an unreadable line, unknown factors, an operator that already has a rule or does not exist.

    The operator needs a fake kernel (`register_fake`) for tracing and `register_autograd` for training. `check_rule`
    tests the rule; docs/rules.md has more.

    Example:
        >>> autopart.rule("mylib::op", "b s h, h o -> b s o", sum="h")    # doctest: +SKIP
    """
    operator = _name(operator)
    if not lines:
        raise RuleError(f"the rule of {operator} is empty", hint=NOTATION)
    _check_operator(operator)
    for line in lines:
        _check_line(operator, line)
    new_rule = Rule(
        lines[0], " ".join(whole.split()), tuple(tuple(s) for s in linear), "", (flops,) if flops else (), lines[1:]
    )
    _check_factors(operator, new_rule, sum)
    _check_signature(operator, new_rule)
    if REGISTERED.get(operator, new_rule) != new_rule:
        raise RuleError(
            f"{operator} is registered with another rule already",
            why=f"the registered rule is {call_text(operator, REGISTERED[operator])}",
            hint="register one rule per operator and process; it can have a line for each form of the call",
        )
    if operator not in REGISTERED and has_rule(operator):
        raise RuleError(
            f"{operator} has a rule already", why="it is built into autopart", hint="nothing to register",
        )  # fmt: skip
    REGISTERED[operator] = new_rule


def _name(operator: str | type[torch.autograd.Function]) -> str:
    is_function = isinstance(operator, type) and issubclass(operator, torch.autograd.Function)
    return function_name(operator) if is_function else operator  # type: ignore[arg-type, return-value]


def _overloads(operator: str) -> list[Any]:
    """Return the overloads of an operator; [] if it is an autograd.Function that has not been traced yet.

    Raises AttributeError if the operator does not exist.
    """
    namespace, _, name = operator.partition("::")
    if namespace == FUNCTIONS and not hasattr(getattr(torch.ops, namespace), name):
        return []
    packet = getattr(getattr(torch.ops, namespace), name)
    return [getattr(packet, overload) for overload in packet.overloads()]


def _check_operator(operator: str) -> None:
    if not re.fullmatch(r"\w+::\w+", operator):
        raise RuleError(
            f"'{operator}' is not the name of an operator", why="a name is namespace::operator, without an overload",
            hint=NOTATION,
        )  # fmt: skip
    try:
        _overloads(operator)
    except AttributeError:
        raise RuleError(
            f"there is no operator {operator}", why="no torch.library operator of this name is registered yet",
            hint="call autopart.rule after the operator is defined (torch.library.custom_op), or after its import",
        ) from None  # fmt: skip


def _check_line(operator: str, line: str) -> None:
    """Raise RuleError for a line that does not have the form `inputs -> outputs`."""

    def wrong(why: str) -> RuleError:
        return RuleError(f"the line '{line}' of {operator} cannot be read", why=why, hint=NOTATION)

    sides = line.split("->")
    if len(sides) != 2:
        raise wrong(f"it has {len(sides) - 1} arrows; inputs -> outputs needs one")
    for operand in ",".join(sides).split(","):
        odd = re.sub(r"\(\s*\w+(\s+\w+)*\s*\)|\.\.\.|\w+|\s", "", operand)
        if odd:
            raise wrong(f"'{operand.strip()}' has '{odd}'; an operand is made of names, '...' and groups as in '(g r)'")
        names = re.findall(r"\.\.\.|\w+", operand)
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise wrong(f"'{operand.strip()}' has '{twice[0]}' twice")


def _check_factors(operator: str, new_rule: Rule, summed: str) -> None:
    """Raise RuleError if an option names an unknown factor, or `sum` does not match the lines."""
    known: dict[str, None] = {}
    made_up: list[str] = []
    for text in (new_rule.text, *new_rule.also):
        left, right = ({f: None for operand in side for dim in operand for f in dim} for side in parse(text))
        known |= left | right
        made_up += [f for f in right if f not in left and f not in new_rule.whole.split()]
    for option, text in (("sum", summed), ("whole", new_rule.whole), ("flops", " ".join(new_rule.matmul))):
        for factor in text.split():
            if factor not in known:
                raise RuleError(
                    f"{option}='{text}' of {operator}: there is no factor '{factor}'",
                    why=f"the factors are {', '.join(known)}", hint="use factor names of the rule's line",
                )  # fmt: skip
    if made_up:
        raise RuleError(
            f"factor '{made_up[0]}' of the rule of {operator} appears only in an output",
            why="it cannot be sharded", hint=f"whole='{' '.join(dict.fromkeys(made_up))}'",
        )  # fmt: skip
    lacking = contracted(new_rule)
    if sorted(summed.split()) != sorted(lacking):
        stated = f"sum='{summed}'" if summed else "no sum="
        names = f"some output lacks {', '.join(lacking)}" if lacking else "every output has all factors of the inputs"
        raise RuleError(
            f"the rule of {operator} has {stated}, which does not fit its factors",
            why=f"{names}; sharding a factor that an output lacks leaves a partial sum",
            hint=f"sum='{' '.join(lacking)}', or whole= for factors that cannot be sharded"
            if lacking
            else "leave sum out",
        )


def _check_signature(operator: str, new_rule: Rule) -> None:
    """Raise RuleError if a pattern of the rule does not match the operator's inputs and outputs.

    It is also raised if `linear`, the indices of inputs in which the operator is linear, has an invalid index.
    """
    for text in (new_rule.text, *new_rule.also):
        left, right = parse(text)
        tensors = f"{_count(len(left), 'input')} and {_count(len(right), 'output')}"
        overloads = _overloads(operator)
        if overloads and not any(_fits(overload._schema, len(left), len(right)) for overload in overloads):
            raise RuleError(
                f"the line '{text}' of {operator} has {tensors}", why=f"the operator is {overloads[0]._schema}",
                hint="one operand for every tensor, in the order of the call",
            )  # fmt: skip
        beyond = [position for positions in new_rule.linear for position in positions if not 0 <= position < len(left)]
        if beyond:
            raise RuleError(
                f"linear={[list(s) for s in new_rule.linear]} of {operator} names input {beyond[0]}",
                why=f"the line '{text}' has {tensors}; inputs are counted from 0", hint="linear=[[0]]",
            )  # fmt: skip


def _fits(schema: Any, num_inputs: int, num_outputs: int) -> bool:
    """Return True if an operator's schema accepts these numbers of input and output tensors.

    A tensor list counts as any number of tensors.
    """
    inputs, outputs = [str(a.type) for a in schema.arguments], [str(r.type) for r in schema.returns]
    many = any("List" in kind and "Tensor" in kind for kind in inputs)
    least = sum(kind == "Tensor" for kind in inputs)
    most = sum("Tensor" in kind for kind in inputs)
    returns_list = any("List" in kind for kind in outputs)
    return (least <= num_inputs and (many or num_inputs <= most)) and (returns_list or num_outputs == len(outputs))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


@dataclass(frozen=True, repr=False)
class RuleCheck(ShownAsText):
    """Result of `check_rule`; printable.

    Args:
        right: shardings that the rule allows and that give the right result, including full replication.
        wrong: shardings that the rule allows and that fail, as in `"R, S(0) -> R: output 0 on rank 1 by 0.3"`.
        missing: shardings that give the right result although the rule does not allow them.
    """

    operator: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if every sharding that the rule allows gives the right result."""
        return not self.wrong

    def __str__(self) -> str:
        kinds = (("right", self.right), ("wrong", self.wrong), ("missing", self.missing))
        lines = [f"{self.operator}: {', '.join(f'{len(texts)} {kind}' for kind, texts in kinds)}"]
        lines += [f"  {kind:<9}{text}" for kind, texts in kinds for text in texts]
        return "\n".join(lines)


def check_rule(operator: str | type[torch.autograd.Function], *args: Any, **kwargs: Any) -> RuleCheck:
    """Test the rule of an operator by running it on an example call, in this process.

    The operator runs on two and on three ranks under every sharding that the rule allows. Outputs and gradients are
    compared with the operator on unsharded inputs. Then it runs on two ranks under every possible sharding. The result
    lists the shardings that are right although the rule does not allow them. For an operator without a rule, this list
    shows what a rule could allow.

    Args:
        operator: name in the dispatcher, `"mylib::op"` or `"mylib::op.overload"`; or the class of an autograd.Function.
        args, kwargs: the call (of a Function: the arguments of `apply`). Use small tensors with distinct values, and
            float64 if possible. Use different dim sizes, each divisible by 2 and 3 (6, 12, 24). Floating-point tensors
            get gradients.
    Raises:
        RuleError: no such operator, or a rule that does not fit the call.

    Example:
        >>> print(autopart.check_rule("mylib::op", torch.rand(6, 12), torch.rand(12, 24)))    # doctest: +SKIP
    """
    args, kwargs = tree_map(_with_gradient, (args, kwargs))
    if not isinstance(operator, str):
        target, tensors = operator_of(operator, *args)
        args = (*tensors,)
        operator = f"{_name(operator)}.{target._overloadname}"
    name, _, overload = operator.partition(".")
    _check_operator(name)
    target = next((o for o in _overloads(name) if o._overloadname == (overload or "default")), None)
    if target is None:
        names = ", ".join(f"{name}.{o._overloadname}" for o in _overloads(name))
        raise RuleError(f"{name} has no overload '{overload or 'default'}'", hint=names)
    proof = Proof.of(target, args, kwargs)
    errors: dict[str, list[str]] = {}
    missing: list[str] = []
    axis = Mesh({}).tensor_axis
    for node in proof.nodes:
        _check_fits(node, name)
        prefix = "" if operator_name(node) == name else f"{operator_name(node)} as "
        for ranks in (2, 3):
            for strategy in strategies(node, ranks, ANY_KIND):
                error = proof.error(Mesh({axis: ranks}), {axis: {node: strategy}})
                errors.setdefault(f"{prefix}{strategy}", []).extend([f"{error} (of {ranks})"] * bool(error))
        claimed = strategies(node, 2, ANY_KIND)
        missing += [f"{prefix}{c}" for c in candidates(node) if not c.is_claimed_by(claimed)]
    right = tuple(text for text, failures in errors.items() if not failures)
    wrong = tuple(f"{text}: {'; '.join(failures)}" for text, failures in errors.items() if failures)
    return RuleCheck(name, right, wrong, tuple(missing))


def _check_fits(node: fx.Node, name: str) -> None:
    """Raise RuleError if no line of the registered rule fits this call."""
    if operator_name(node) == name and name in REGISTERED and facts(node)["pattern"] is None:
        raise RuleError(
            f"the rule of {name} does not fit this call", why=call_text(name, REGISTERED[name]),
            where=", ".join(str(list(n.meta["val"].shape)) for n in tensor_inputs(node)),
            hint="add a line to the rule with as many tensors and dims as this call has",
        )  # fmt: skip


def _with_gradient(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().clone().requires_grad_() if floating else value
