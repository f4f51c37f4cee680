"""Tail of a model: the operators that run once per step, for all microbatches together.

A loss can compare samples of one batch: contrastive losses, pairs of chosen and rejected answers (DPO), `topk` over the
batch. An operator that needs samples of other microbatches, and all operators that depend on it, form the tail. The
other operators run once per microbatch. The last stage merges their values for the tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from torch import fx

from autopart.errors import StageError
from autopart.ir.atoms import selections_in
from autopart.ir.decisions import Strategy
from autopart.ir.facts import facts
from autopart.ir.graph import describe, display_name, operator_name, short_name, source_of, tensor_inputs, value

_VIEWS = frozenset({"t", "transpose", "permute", "view", "reshape", "unsqueeze", "squeeze"})


def tail_of(chosen: Mapping[fx.Node, Strategy], mixing: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Return the tail: the operators that must run once for all microbatches.

    These are the operators in `mixing`, and all operators that depend on them.

    Args:
        chosen: {operator that depends on a parameter: its batch strategy}, in graph order.
        mixing: operators that need samples of other microbatches.
    """
    tail = set(mixing)
    while True:
        for node in chosen:
            if any(source_of(used)[0] in tail for used in tensor_inputs(node)):
                tail.add(node)
        received = {used for node in tail for used in tensor_inputs(node) if source_of(used)[0] in chosen}
        moved = {source for used in received if (source := source_of(used)[0]) not in tail
                 and _runs_in_tail(used, chosen[source], tail)}  # fmt: skip
        if not moved:
            return frozenset(tail)
        tail |= moved


def _runs_in_tail(node: fx.Node, strategy: Strategy, tail: Set[fx.Node]) -> bool:
    """Return True if an operator that computes an input of the tail runs in the tail too.

    The tail runs once for all microbatches. The result is True for a value whose size differs between microbatches,
    because a mask selects its elements. If only the tail uses the value, the result is also True for views, and for
    values that are equal in all microbatches (`logit_scale.exp()`).
    """
    if any(map(selections_in, facts(node)["atoms"])):
        return True
    is_equal = all(place.is_replicated for place in strategy.places)
    return (is_equal or short_name(node) in _VIEWS) and all(user in tail for user in node.users)


def mixed_samples_error(mixed: tuple[fx.Node, fx.Node], microbatches: int, because: str, hint: str) -> StageError:
    """Return the error for an operator that combines samples of microbatches and cannot run in the tail.

    The tail is the set of operators that run once for all microbatches.

    Args:
        mixed: the operator, and its input that is needed for the full batch.
        because: the reason why the operator cannot run in the tail; "" without a pipeline.
    """
    node, source = mixed
    reason = "it computes a statistic of the batch"
    if "split" in operator_name(node) or "chunk" in operator_name(node):
        reason = "it splits the full batch, and a microbatch has only some samples"
    reason = reason if facts(node)["pattern"] is not None else "it has no sharding rule"
    return StageError(
        f"the batch cannot be split into {microbatches} microbatches",
        why=f"{display_name(node)} needs all samples of a value of shape {list(value(source).shape)} at once: "
        f"{reason}{because}",
        where=describe(node),
        hint=hint,
    )
