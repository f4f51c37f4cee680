"""Attention strategies on an axis that shards the sequence, as the option `context=` selects them.

`"gather"`: every rank has its queries, and gathers all keys and values (Llama 3: Grattafiori et al. 2024,
arXiv:2407.21783, section 3.3.2). `"ulysses"`: a rank has the full sequence of some heads (Jacobs et al. 2023,
arXiv:2309.14509). `"ring"`: keys and values circulate around the ranks, so that no rank stores all of them (Liu et al.
2023, arXiv:2310.01889). `"auto"` chooses between `"gather"` and `"ulysses"`. It excludes `"ring"`, which moves as many
bytes as `"gather"`, and is useful only if the gathered keys and values do not fit into memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopart.errors import LayoutError
from autopart.ir.atoms import DATA_DIM, FEATURE, factor_atoms
from autopart.ir.decisions import Strategy, is_ring_strategy
from autopart.ir.facts import facts
from autopart.ir.graph import describe, dropout_probability, reads_weights, tensor_inputs
from autopart.ir.mesh import Context
from autopart.ir.pattern import Pattern
from autopart.passes.rules import rule_of


def context_options(node: fx.Node, options: Sequence[Strategy], context: Context, axis: str) -> list[Strategy]:
    """Return the strategies of an operator on a context axis that the user's option `context` allows.

    The option restricts only attention. Raises LayoutError if no strategy is left.
    """
    rings = [option for option in options if is_ring_strategy(node, option)]
    if context == "ring":
        return rings or _non_attention_options(node, options, axis)
    options = [option for option in options if option not in rings]
    pattern = facts(node)["pattern"]
    if context == "auto" or pattern is None or not _multiplies_values(node):
        return list(options)
    kind = {"gather": DATA_DIM, "ulysses": FEATURE}[context]
    fitting = [
        option for option in options if option.factor and _is_queries_or_heads(node, pattern, option.factor, kind)
    ]
    if fitting or not pattern.context:
        return fitting or list(options)
    cut = "heads" if context == "ulysses" else "queries"
    raise LayoutError(
        f"context={context!r} is not possible", why=f"the {cut} of this attention cannot be divided evenly over {axis}",
        where=describe(node), hint="context='auto', or 'gather'" if context == "ulysses" else "context='auto'",
    )  # fmt: skip


def _non_attention_options(node: fx.Node, options: Sequence[Strategy], axis: str) -> list[Strategy]:
    """Return all options: `context="ring"` does not restrict operators other than attention.

    Raises LayoutError if the operator is an attention that cannot run as a ring.
    """
    may_ring = bool(rule_of(node).context)
    if not may_ring and not _multiplies_values(node):
        return list(options)
    if not may_ring or dropout_probability(node):
        why = "ring attention needs scaled_dot_product_attention without dropout, and this is another operator"
    elif any(facts(source)["needs_grad"] for source in tensor_inputs(node)[3:]):
        why = "this attention has a learned bias, whose gradient would have to circulate too"
    else:
        why = f"queries and keys of this attention are not sharded in the same way over {axis}"
    raise LayoutError(
        f"context='ring' is not possible on {axis}", why=why, where=describe(node), hint="context='gather'"
    )


def _multiplies_values(node: fx.Node) -> bool:
    pattern = facts(node)["pattern"]
    return pattern is not None and bool(pattern.flops) and not reads_weights(node)


def _is_queries_or_heads(node: fx.Node, pattern: Pattern, factor: str, kind: str) -> bool:
    atoms = factor_atoms(node, pattern).get(factor, ())
    sides = [pattern.outputs[0], *pattern.inputs[: 2 if kind == FEATURE else 1]]
    return bool(atoms) and atoms[-1].kind == kind and all(any(factor in dim for dim in side) for side in sides)
