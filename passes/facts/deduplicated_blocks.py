"""Checks of block deduplication: the block in the trace must equal the blocks that are left out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NoReturn

from torch import fx

from autopart.ir.blocks.deduplication import DeduplicatedBlock, DeduplicatedBlocks, NotDeduplicable
from autopart.ir.facts import facts
from autopart.ir.graph import module_path, value
from autopart.ir.trace import Trace

_CHOOSE_ALONE = 2
"""Number of first, and of last, repeated blocks that must stay in the trace.

`ShardingProblem.sharing_costs` compares the plan with one in which these blocks have separate layouts.
"""


def note_blocks(trace: Trace) -> None:
    """Write on nodes of repeated blocks which block they belong to, and how many blocks they represent.

    `block` is (module path of the repeated blocks, block number). `times` is written only on the deduplicated block:
    the number of equal blocks that it represents.
    """
    for node in trace.graph.nodes if trace.folds else ():
        name = node.target if node.op == "get_attr" else module_path(node)
        for fold in trace.folds:
            number = fold.block(name) if node.op in ("get_attr", "call_function") else None
            if number is not None:
                facts(node)["block"] = fold.path, number
                if number == fold.number and fold.times > 1:
                    facts(node)["times"] = fold.times


def check_blocks(trace: Trace) -> None:
    """Raise NotDeduplicable if a deduplicated block differs from the blocks before and after it.

    A deduplicated block represents several equal blocks. The function compares the blocks' operators, and what the
    analysis has found for their values (facts).
    """
    for fold in trace.folds:
        blocks = beside(trace.graph, fold)
        if not blocks[1]:
            _fail(fold)
        for nodes in zip(*blocks, strict=True):
            if len({_signature(node) for node in nodes}) > 1 or not _positions_match(nodes):
                _fail(fold)


def _signature(node: fx.Node) -> Any:
    return node.target, facts(node)["role"], facts(node).get("other_positions", frozenset())


def check_written(graph: fx.Graph, folds: DeduplicatedBlocks) -> None:
    """Raise NotDeduplicable unless a block of a stage graph can represent the blocks that were left out.

    The block must equal the blocks before and after it in operators, shapes and recomputation. Its nodes must be
    adjacent in the graph.
    """
    held = {facts(node).get("block") for node in graph.nodes}
    for fold in folds:
        if (fold.path, fold.number) not in held:
            continue
        for nodes in zip(*beside(graph, fold), strict=True):
            alike = {(node.target, getattr(value(node), "shape", None), "region" in facts(node)) for node in nodes}
            if len(alike) > 1:
                _fail(fold)
        order = [facts(node).get("block") for node in graph.nodes if node.op != "placeholder"]
        places = [i for i, block in enumerate(order) if block == (fold.path, fold.number)]
        if places != list(range(places[0], places[-1] + 1)):
            _fail(fold)


def beside(graph: fx.Graph, fold: DeduplicatedBlock) -> list[list[fx.Node]]:
    """Return the calls of three blocks: a deduplicated block, and the blocks before and after it.

    Each list is in graph order. Raises NotDeduplicable if the blocks differ in size or are not adjacent.
    """
    numbers = [fold.number - 1, fold.number, fold.number + fold.times]
    calls = [node for node in graph.nodes if node.op == "call_function"]
    blocks = [[node for node in calls if facts(node).get("block") == (fold.path, number)] for number in numbers]
    together = [node for block in blocks for node in block]
    start = calls.index(together[0]) if together else 0
    if len({len(block) for block in blocks}) > 1 or calls[start : start + len(together)] != together:
        _fail(fold)
    return blocks


def _positions_match(nodes: tuple[fx.Node, ...]) -> bool:
    """Return True if three operators correspond to each other in three consecutive blocks.

    Returns False if the second operator is in one of the first or last blocks of the model, because these blocks may
    have other layouts.
    """
    places = [facts(node).get("place") for node in nodes]
    if all(place is None for place in places):
        return True
    if any(place is None or place.block is None for place in places) or len({place.like for place in places}) > 1:
        return False
    in_order = all(b.block == (a.block[0], a.block[1] + 1) for a, b in pairwise(places))
    return in_order and places[1].end(_CHOOSE_ALONE) is None


def _fail(fold: DeduplicatedBlock) -> NoReturn:
    raise NotDeduplicable(f"the block {fold.path}.{fold.number} cannot represent other blocks")
