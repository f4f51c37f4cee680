"""Tail of a model: the operators that run once per step, on all microbatches of the last pipeline stage.

A loss can compare samples of one batch: contrastive losses, pairs of chosen and rejected answers (DPO), `topk` over the
batch. An operator that needs samples of other microbatches, and all operators that depend on it, form the tail. The
other operators run in microbatches. Their values are merged before the tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from autopart.errors import StageError
from autopart.ir.atoms import selections_in
from autopart.ir.decisions import Strategy
from autopart.ir.facts import facts
from autopart.ir.graph import describe, display_name, is_tensor, operator_name, source_of, tensor_inputs, value

def tail_of(chosen: Mapping[fx.Node, Strategy], mixing: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Return the operators that mix samples, and all operators that depend on them.

    Args:
        chosen: {operator that depends on a parameter: its batch strategy}, in graph order.
        mixing: operators that need samples of other microbatches.
    """
    tail = set(mixing)
    while True:
        for node in chosen:
            if any(source_of(used)[0] in tail for used in tensor_inputs(node)):
                tail.add(node)
        received = {used for node in tail for used in tensor_inputs(node)}
        unequal = {source for used in received if (source := source_of(used)[0]) in chosen and _has_unequal_size(used)}
        if unequal <= tail:
            return frozenset(tail)
        tail |= unequal


def _has_unequal_size(node: fx.Node) -> bool:
    """Return True if the size of a value differs between microbatches, because a mask selects its elements."""
    return is_tensor(node) and any(map(selections_in, facts(node)["atoms"]))


def mixed_samples_error(mixed: tuple[fx.Node, fx.Node], microbatches: int, because: str, hint: str) -> StageError:
    """Return the error for an operator that mixes samples and cannot run once on all microbatches.

    Args:
        mixed: the operator, and its input of which it needs all samples.
        because: why the operator cannot run in the tail; "" if there is no pipeline.
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
