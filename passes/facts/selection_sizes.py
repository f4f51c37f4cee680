"""Assumed share of elements that a boolean mask selects, for the memory and FLOPs of a plan.

The true number depends on the data. If the mask depends only on inputs, the share is that of the example call. If
several masks split the elements of one value between them, such as tokens by expert, each mask is assumed to select an
equal share. For all other masks, all elements are assumed to be selected.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import replace

from torch import fx

from autopart.ir.atoms import selections_in
from autopart.ir.facts import DATA, INPUT, facts, weighted
from autopart.ir.graph import is_tensor, operator_name, shape
from autopart.ir.pattern import Pattern
from autopart.ir.selection import is_selection
from autopart.ir.trace import Trace
from autopart.passes.facts.mask_facts import values_in_call
from autopart.passes.pass_pipeline import driven
from autopart.passes.rules import rule_of


def share_notes(node: fx.Node) -> Iterator[str]:
    """Yield a text for each dim of selected elements, with the assumed share, for the graph dump."""
    for dim, share in facts(node).get("shares", {}).items():
        yield f"dim {dim} {share * 100:.3g} %"


@driven(notes=lambda _: share_notes)
def share_selections(trace: Trace) -> None:
    """Write `shares` ({dim: assumed share}) on values of selected elements, and scale FLOPs by the shares."""
    selections = [node for node in trace.graph.nodes if is_selection(node)]
    if not selections:
        return
    groups = {node: _partition_key(node.args[0]) for node in selections}
    sizes = Counter(groups.values())
    kinds: dict[str, float] = {}
    for node in trace.graph.nodes:
        if is_selection(node):
            mask = node.args[0]
            within = math.prod(facts(mask).get("shares", {}).values())
            (kind,) = selections_in(facts(node)["atoms"][0][0])
            kinds[kind] = (_in_call(trace, mask) or 1 / sizes[groups[node]]) * within
        if node.op == "output" or not is_tensor(node):
            continue
        dims = {dim: selections_in(atoms) for dim, atoms in enumerate(facts(node)["atoms"])}
        facts(node)["shares"] = {
            dim: min(kinds.get(kind, 1.0) for kind in dim_kinds) for dim, dim_kinds in dims.items() if dim_kinds
        }
    known: dict[int, Pattern] = {}
    for node in trace.graph.nodes:
        pattern = facts(node).get("pattern")
        if pattern is not None and pattern.flops and (share := _share(node)) < 1:
            counted = known.setdefault(id(pattern), replace(pattern, flops=round(pattern.flops * share)))
            facts(node)["pattern"] = counted


def selection_notes(trace: Trace) -> list[str]:
    """Return notes such as `2 selections by values (...) assumed to select 25 % of the elements`."""
    shares = Counter[float]()
    for node, weight in weighted(filter(is_selection, trace.graph.nodes)):
        for part in list(node.users)[:1]:
            if part.target is operator.getitem:
                shares[facts(part)["shares"][0]] += weight
    return [
        f"{count} selection{'s' * (count > 1)} by values (a mask, nonzero) assumed to select {share * 100:.3g} % of "
        "the elements"
        for share, count in shares.items()
    ]


def _share(node: fx.Node) -> float:
    """Return the number by which the FLOPs of a matrix product of selected elements are multiplied.

    It is the share of the elements that masks are assumed to select; 1 without masks.
    """
    values = [node, *node.all_input_nodes]
    return min((math.prod(facts(n).get("shares", {}).values()) for n in values), default=1.0)


def _in_call(trace: Trace, mask: fx.Node) -> float | None:
    """Return the fraction of elements that are True in a mask, in the traced call.

    None if the mask depends on parameters.
    """
    if facts(mask)["role"] not in (INPUT, DATA) or not math.prod(shape(mask)):
        return None
    values = values_in_call(trace, mask, all_rows=True)
    return None if values is None or values.is_meta else max(float(values.bool().float().mean()), 1 / values.numel())


def _partition_key(mask: fx.Node) -> Hashable:
    """Return a key of a mask. Masks that split the elements of one value between them have equal keys.

    Such masks are slices of one tensor, or comparisons of one tensor with different numbers (`expert == 0`).
    """
    node = mask
    while node.op == "call_function":
        rule = rule_of(node)
        if node.target is operator.getitem:
            return node.args[0]
        if rule.selects and not isinstance(node.args[1], fx.Node):
            return node.args[0], operator_name(node)
        if not rule.keeps_masks or len(node.all_input_nodes) != 1:
            break
        node = node.args[0]
    return mask
