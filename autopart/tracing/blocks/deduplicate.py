"""Deduplication of equal blocks in the trace of a deep model.

Equal blocks that `RepeatedBlocks` found form a chain: each block reads the result of the previous block, its own
parameters, and values that all blocks read. The first three blocks of a chain, the last three and one middle block
stay in the graph; all others are removed. The middle block represents the removed blocks: its layouts and programs
apply to each of them. If pipeline stages begin inside a chain, the blocks next to each boundary stay too, and each
stage has a separate representative.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from autopart.ir.blocks.deduplication import DeduplicatedBlock
from autopart.ir.facts import facts
from autopart.ir.graph import tuple_values
from autopart.ir.trace import Trace

_ENDS = 3
"""Number of blocks that stay at each end of a chain of equal blocks.

In the plan, the first two may differ from the block that represents the removed ones: they have other neighbours, or
their layouts are chosen separately (`ShardingProblem.sharing_costs`). The third must equal it.
"""

_BEHIND = 2
"""Number of blocks that stay after the block in which a pipeline stage begins.

The first of these blocks can differ from later ones, if it is the first in its stage to read values that all blocks
share.
"""


class _Block(NamedTuple):
    """One block of a chain of equal blocks: path of its module list, its index in the list, and its nodes."""

    path: str
    number: int
    calls: list[fx.Node]

    @property
    def prefix(self) -> str:
        return f"{self.path}.{self.number}."


def deduplicated(traced: Trace, stage_starts: Sequence[str] = ()) -> Trace:
    """Return the trace with equal blocks removed. Returns `traced` itself if no block can be removed.

    Args:
        stage_starts: names of operators at which stages begin. Blocks next to these operators stay. No block represents
            blocks of several stages.
    """
    if traced.weight_updates or traced.checkpointed or traced.has_random_branches:
        return traced
    chains = (chain for chain in _chains(traced.graph) if _is_foldable(traced, chain))
    runs = [run for chain in chains for run in _alike_in(chain, stage_starts)]
    if not runs:
        return traced
    graph, folds, replaced, stands_for, left_out = (
        fx.Graph(),
        [],
        dict[fx.Node, fx.Node](),
        dict[fx.Node, DeduplicatedBlock](),
        [],
    )
    for kept, *others in runs:
        folds.append(DeduplicatedBlock(kept.path, kept.number, 1 + len(others)))
        stands_for |= dict.fromkeys(kept.calls, folds[-1])
        for block in others:
            left_out.append(block.prefix)
            replaced |= dict(zip(block.calls, kept.calls, strict=True))
    is_left_out = _within(left_out)
    copies: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        if node in replaced:
            copies[node] = copies[replaced[node]]
        elif node.op != "get_attr" or not is_left_out(node.target):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    parameters = {name: p for name, p in traced.parameters.items() if not is_left_out(name)}
    return replace(traced, graph=graph, parameters=parameters, folds=tuple(folds), whole=traced)


def _alike_in(chain: Sequence[_Block], stage_starts: Sequence[str]) -> Iterator[Sequence[_Block]]:
    """Yield groups of consecutive blocks of a chain. The first block of a group can represent the others.

    Blocks at the ends of the chain, and blocks next to an operator in `stage_starts`, are in no group.
    """
    path = chain[0].path
    touched = {DeduplicatedBlock(path, 0, 1).block(name) for name in stage_starts}
    run: list[_Block] = []
    for block in (*chain[_ENDS:-_ENDS], None):
        if block is not None and touched.isdisjoint(range(block.number - _BEHIND, block.number + 2)):
            run.append(block)
            continue
        if len(run) > 1:
            yield run
        run = []


def copied(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a traced graph, so that passes leave the original unchanged."""
    other, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = other.node_copy(node, copies.__getitem__)
    return other


def _within(prefixes: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that returns True for names in one of these blocks (given as `layers.3.`)."""
    prefix_set, depths = set(prefixes), {prefix.count(".") for prefix in prefixes}

    def is_within(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:depth]) + "." in prefix_set for depth in depths)

    return is_within


def _chains(graph: fx.Graph) -> Iterator[list[_Block]]:
    """Yield the sequences of consecutive blocks of a module list that were traced once and copied."""
    calls: dict[int, dict[int, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    for node in graph.nodes:
        if (place := (facts(node).get("custom") or {}).get("copied")) is not None:
            calls[place[0]][place[1]].append(node)
    for copies in calls.values():
        chain: list[_Block] = []
        blocks = _blocks(list(copies.values()))
        for block in (*blocks, None):
            if chain and (block is None or (block.path, block.number) != (chain[-1].path, chain[-1].number + 1)):
                yield chain
                chain = []
            chain += [block] if block is not None else []


def _blocks(copies: Sequence[list[fx.Node]]) -> list[_Block]:
    """Convert copies of one traced block to `_Block`s, with their path and index from the module stack."""
    stacks = [[path for path, _ in (facts(calls[0]).get("nn_module_stack") or {}).values()] for calls in copies]
    blocks: list[_Block] = []
    for stack, other, calls in zip(stacks, [*stacks[1:], *stacks[-2:-1]], copies, strict=False):
        name = next((mine for mine, its in zip(stack, other, strict=False) if mine != its), "")
        path, _, number = name.rpartition(".")
        if path and number.isdigit():
            blocks.append(_Block(path, int(number), calls))
    return blocks


def _is_foldable(traced: Trace, chain: Sequence[_Block]) -> bool:
    """Return True if blocks of a chain can be removed from the graph and represented by another block."""
    if len(chain) < 2 * _ENDS + 2 or not _is_in_one_piece(traced.graph, chain):
        return False
    place = {node: (k, i) for k, block in enumerate(chain) for i, node in enumerate(block.calls)}
    first = [_wiring(node, chain, place) for node in chain[1].calls]
    for k, block in enumerate(chain):
        last = len(chain) - 1
        if len(block.calls) != len(first):
            return False
        for node, like, expected in zip(block.calls, chain[1].calls, first, strict=True):
            if k and (node.target is not like.target or not _alike(node, like)
                      or _wiring(node, chain, place) != expected):  # fmt: skip
                return False
            if k < last and any(user not in place or place[user][0] - k not in (0, 1) for user in node.users):
                return False
    return _have_like_parameters(traced, chain, place)


def _is_in_one_piece(graph: fx.Graph, chain: Sequence[_Block]) -> bool:
    """Return True if the operators of a chain of blocks are adjacent in the graph."""
    calls = [node for block in chain for node in block.calls]
    order = [node for node in graph.nodes if node.op == "call_function"]
    start = order.index(calls[0])
    return order[start : start + len(calls)] == calls


def _wiring(node: fx.Node, chain: Sequence[_Block], place: Mapping[fx.Node, tuple[int, int]]) -> Any:
    """Return a comparison key of a node's arguments. Corresponding nodes of equal blocks have equal keys.

    Values of the node's block and of the previous block are replaced by their positions in the block.
    """
    index = place[node][0]
    prefix = chain[index].prefix

    def described(used: fx.Node) -> Any:
        if used in place:
            return (index - place[used][0], place[used][1])
        if used.op == "get_attr" and used.target.startswith(prefix):
            return used.target[len(prefix) :]
        return used

    return fx.map_arg((node.args, node.kwargs), described)


def _alike(node: fx.Node, other: fx.Node) -> bool:
    if node.meta.get("val") is other.meta.get("val"):
        return True
    pairs = zip(tuple_values(node), tuple_values(other), strict=False)
    return len(tuple_values(node)) == len(tuple_values(other)) and all(_form(a) == _form(b) for a, b in pairs)


def _form(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.dtype, value.device, value.layout is torch.strided and value.stride()


def _have_like_parameters(
    traced: Trace, chain: Sequence[_Block], place: Mapping[fx.Node, tuple[int, int]]
) -> bool:  # fmt: skip
    """Return True if all blocks have equal parameters: names and metadata.

    Also requires that no parameter is used outside of its block.
    """
    container = f"{chain[0].path}."
    held: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for name, parameter in traced.parameters.items():
        if name.startswith(container):
            number, _, rest = name[len(container) :].partition(".")
            held[number].append((rest, _form(parameter), parameter.requires_grad, traced.aliases.get(name, ())))
    by_block = [held[str(block.number)] for block in chain]
    if any(other != by_block[0] for other in by_block) or any(aliases for *_, aliases in by_block[0]):
        return False
    number_of = {str(block.number): k for k, block in enumerate(chain)}
    for node in traced.graph.find_nodes(op="get_attr"):
        if node.target.startswith(container):
            k = number_of.get(node.target[len(container) :].partition(".")[0])
            if k is not None and any(user not in place or place[user][0] != k for user in node.users):
                return False
    return True
