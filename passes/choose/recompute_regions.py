"""Activation checkpointing: find the regions of stage graphs that the backward recomputes.

A region is a list of calls that run under one `torch.utils.checkpoint`. Only its inputs are saved for backward.

`"full"` (Chen et al. 2016, arXiv:1604.06174): every repeated block of a stage is a region.
`"selective"` (Korthikanti et al. 2022, arXiv:2205.05198, section 5): each attention core is a region, because it has
large activations and little compute. An attention core begins with a product of two activations (queries and keys). It
contains all following operators without a weight (scale, mask, softmax, dropout). It ends with the next product (times
values). Fused attention saves none of these activations, so it has no region, even if it is fused only in the stage
graph.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import networkx as nx
from torch import fx

from autopart.common.names import first_of
from autopart.cost.flops import matrix_work
from autopart.ir.blocks.block_index import blocks
from autopart.ir.facts import ACTIVE, PARAMETER, WEIGHT, facts
from autopart.ir.graph import (
    active_operators,
    is_floating,
    operator_name,
    operators,
    short_name,
    size_bytes,
    source_of,
    tensor_inputs,
    value,
)
from autopart.ir.layout import CONVERSIONS
from autopart.ir.run.recompute_spec import Recompute, check_names, recompute_mode_of, recompute_modes_of

Groups = Mapping[str, str]
"""{key of an operator (`layers.3.mlp/linear`): its group}. The operators of a group are recomputed together."""

Region = list[fx.Node]

_CONVERSIONS = {f"autopart::{conversion.operator}" for conversion in CONVERSIONS.values()}


def region_marker(traced: fx.Graph, recompute: Recompute) -> Callable[[fx.Graph], None]:
    """Return a function that finds the recomputed regions of a stage graph and numbers their nodes.

    Each node of a region gets the region's number in its metadata (`region`). The function also makes the nodes of a
    region adjacent, so that the region can run as one call.
    """
    full_blocks, core_of = _recompute_groups(traced, recompute)

    def mark(graph: fx.Graph) -> None:
        regions = [*(_block_regions(graph, full_blocks) if full_blocks else ()), *_core_regions(graph, core_of)]
        for number, region in enumerate(_contiguous_regions(graph, [region for region in regions if len(region) > 1])):
            for node in region:
                facts(node)["region"] = number

    return mark


def _recompute_groups(traced: fx.Graph, recompute: Recompute) -> tuple[Groups, Groups]:
    """Return the operators to recompute as two dicts, one for the mode "full" and one for "selective".

    - Full: {operator: its repeated block, or "" if this block is not recomputed}.
    - Selective: {operator of an attention core: key of the core}.
    """
    words = recompute_modes_of(recompute)
    block_of = blocks(traced) if words != {"none"} else {}
    full_blocks = {
        key: block if recompute_mode_of(recompute, block) == "full" else "" for key, block in block_of.items()
    }
    core_of = cores(traced) if "selective" in words else {}
    chosen = {key: core for key, core in core_of.items() if recompute_mode_of(recompute, block_of[core]) == "selective"}
    return full_blocks if any(full_blocks.values()) else {}, chosen


def check_recompute(traced: fx.Graph, recompute: Recompute, where: str = "") -> None:
    """Raise OptionError for a pattern in `recompute` that matches no repeated block."""
    if not isinstance(recompute, str):
        check_names(recompute, blocks(traced).values(), where)


def recompute_notes(traced: fx.Graph, recompute: Recompute) -> tuple[str, ...]:
    """Return notes that explain why a recompute option has no effect; empty if it has an effect."""
    words = recompute_modes_of(recompute)
    if "full" in words and not any(blocks(traced).values()):
        return ("recompute='full' changes nothing: the model has no repeated blocks",)
    core_of = cores(traced) if "selective" in words else {}
    written_out = {facts(node)["key"] for node in operators(traced) if "attention" in facts(node)}
    if core_of and written_out.issuperset(core_of):
        why = "attention is one operator (attention_dropout), which saves nothing between its products"
        return (f"recompute='selective' changes nothing with rng='fast': {why}",)
    if "selective" in words and not core_of:
        weights = _weights(traced)
        fused = [short_name(n) for n in active_operators(traced) if len(_activations(n, weights)) > 2]
        why = "the model has no two products of activations without a weight between them"
        if fused:
            why = f"attention is one operator ({fused[0]}), which saves nothing between its products"
        return (f"recompute='selective' changes nothing: {why}",)
    return ()


# The model's own checkpoints


def recompute_of_checkpoints(traced: fx.Graph, checkpointed: Sequence[str | None]) -> tuple[Recompute, tuple[str, ...]]:
    """Return the recompute option that is closest to the model's own checkpoints, and notes for the user.

    A repeated block is recomputed if the model checkpoints the block, a module around it, or all its submodules that
    have weights.

    Args:
        checkpointed: paths of the modules that the model runs under `torch.utils.checkpoint`; None for a function.
    """
    block_of = blocks(traced)
    paths = [path for path in checkpointed if path is not None]
    weighted: dict[str, list[str]] = {block: [] for block in block_of.values() if block}
    for node in operators(traced):
        block = block_of.get(facts(node)["key"], "")
        if block and any(facts(read).get("parameter") for read in node.all_input_nodes):
            weighted[block].append(facts(node)["key"])
    recomputed_blocks = [block for block, keys in weighted.items() if keys and all(_is_in(key, paths) for key in keys)]
    lost = [
        path
        for path in paths
        if not (_is_in(f"{path}/", recomputed_blocks) or any(_is_in(f"{b}/", [path]) for b in recomputed_blocks))
    ]
    not_kept = [*lost, *(["plain operations"] if None in checkpointed else [])]
    notes = []
    if recomputed_blocks:
        which = "every repeated block" if len(recomputed_blocks) == len(weighted) else first_of(recomputed_blocks)
        notes.append(f"the model's own checkpoints are followed: the backward recomputes {which}")
    if not_kept:
        which = f"checkpoint of {not_kept[0]}" if len(not_kept) == 1 else f"checkpoints of {first_of(not_kept)}"
        notes.append(
            f"autopart ignores the model's own {which} and saves the activations (only checkpoints of complete "
            "repeated blocks can be followed)"
        )
    return (
        "full" if len(recomputed_blocks) == len(weighted) else dict.fromkeys(recomputed_blocks, "full")
    ) if recomputed_blocks else "none", tuple(notes)


def _is_in(key: str, paths: Sequence[str]) -> bool:
    return any(not path or key.startswith((f"{path}.", f"{path}/")) for path in paths)


# Repeated blocks


def _block_regions(graph: fx.Graph, block_of: Groups) -> list[Region]:
    """Return the regions of the repeated blocks of a stage.

    A region contains the consecutive calls of one block in the stage graph.
    """
    runs: list[Region] = []
    traced_calls: set[fx.Node] = set()
    current, between = "", list[fx.Node]()
    for node in _calls(graph):
        key = _key(node)
        if key not in block_of:  # a conversion or input-only value, which precedes its first use
            between.append(node)
            continue
        traced_calls.add(node)
        if block_of[key] and block_of[key] == current:
            runs[-1] += [*between, node]
        elif block_of[key]:
            runs.append([*between, node])
        current, between = block_of[key], []
    return [_block_dependent(run, traced_calls) for run in runs]


def _block_dependent(run: Region, traced_calls: set[fx.Node]) -> Region:
    """Return the calls of a region that the backward recomputes.

    A region consists of the calls in a stage graph that compute one block. The recomputed calls are the operators of
    the block, and calls that depend on them. Other calls, such as layout conversions of the region's inputs, run only
    in the forward, and their outputs are saved. There is one exception: such a call is recomputed if its output is
    larger than its inputs and is used only in the region. An example is the all-gather of a weight. A value that
    another stage has sent as shards is gathered only once, before the region.
    """
    members = traced_calls.intersection(run)
    for node in run:
        if not members.isdisjoint(node.all_input_nodes):
            members.add(node)
    for node in reversed(run):
        grows = size_bytes(node) > sum(map(size_bytes, node.all_input_nodes)) and not facts(node).get("received")
        if grows and members.issuperset(node.users):
            members.add(node)
    return [node for node in run if node in members]


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _key(node: fx.Node) -> str:
    """Return the key of the traced operator from which a call of the stage graph was generated.

    A key such as `layers.3.mlp/linear` names a module and an operator. "" for a layout conversion, which has no traced
    operator.
    """
    source, _ = source_of(node)
    return "" if operator_name(source) in _CONVERSIONS else facts(source).get("key", "")


# The core of attention


def cores(traced: fx.Graph) -> dict[str, str]:
    """Return {key of an operator in an attention core: key of the core's first operator}.

    A core begins and ends with a product of two activations, and contains everything between the two products. All its
    operators belong to one block.
    """
    weights, block_of = _weights(traced), blocks(traced)
    products = {node for node in active_operators(traced) if matrix_work(node)}
    starts = [node for node in traced.nodes if node in products and len(_activations(node, weights)) > 1]
    # The output of a product is a separate vertex, so that no path leads through a product.
    calls, joined = _calls(traced), nx.Graph()
    flow = nx.DiGraph(((used, used in products), (node, False)) for node in calls for used in node.all_input_nodes)
    for start in starts:
        after = nx.descendants(flow, (start, True)) if (start, True) in flow else set()
        block = block_of[facts(start)["key"]]
        for end in starts:
            if (end, False) in after and block_of[facts(end)["key"]] == block:
                between = nx.ancestors(flow.subgraph(after), (end, False))
                nx.add_star(joined, [start, end, *(node for node, _ in between)])
    core_of: dict[str, str] = {}
    for core in nx.connected_components(joined):
        first = next(start for start in starts if start in core)
        core_of |= {facts(node)["key"]: facts(first)["key"] for node in core if "key" in facts(node)}
    return core_of


def _weights(traced: fx.Graph) -> set[fx.Node]:
    """Return all parameters, and all nodes computed from parameters alone without a matrix product."""
    weights: set[fx.Node] = set()
    for node in traced.nodes:
        read = [n for n in node.all_input_nodes if is_floating(n) or node.target is operator.getitem]
        from_weights = node.op == "call_function" and bool(read) and weights.issuperset(read)
        product = from_weights and node.target is not operator.getitem and matrix_work(node) > 0
        if facts(node).get("role") in (PARAMETER, WEIGHT) or (from_weights and not product):
            weights.add(node)
    return weights


def _activations(node: fx.Node, weights: set[fx.Node]) -> list[fx.Node]:
    read = [n for n in tensor_inputs(node) if facts(n)["role"] in (ACTIVE, PARAMETER, WEIGHT)]
    return read if matrix_work(node) and weights.isdisjoint(read) else []


def _core_regions(graph: fx.Graph, core_of: Groups) -> list[Region]:
    """Return the calls of each attention core of a stage graph, including collectives inside the core."""
    calls = _calls(graph)
    members: dict[str, list[int]] = defaultdict(list)
    for position, node in enumerate(calls):
        if _key(node) in core_of:
            members[core_of[_key(node)]].append(position)
    regions: list[Region] = []
    for positions in members.values():
        region = _closed([calls[i] for i in positions], calls[positions[0] : positions[-1] + 1])
        values = [node for node in region if value(node) is not None]
        if len(values) > 1 and not any(set(region) & set(other) for other in regions):
            regions.append(region)
    return regions


def _closed(nodes: Sequence[fx.Node], span: Sequence[fx.Node]) -> Region:
    """Return `nodes`, and all nodes of `span` on a path from one of `nodes` to another, in graph order."""
    after, before = set(nodes), set(nodes)
    for node in span:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    for node in reversed(span):
        if not before.isdisjoint(node.users):
            before.add(node)
    return [node for node in span if node in after and node in before]


def _contiguous_regions(graph: fx.Graph, regions: list[Region]) -> list[Region]:
    """Reorder the graph so that the nodes of each region are adjacent. Return the reordered regions.

    Two regions that each depend on the other cannot be made contiguous, and are left out.
    """
    if not regions:
        return []
    place = {node: number for number, node in enumerate(graph.nodes)}
    unit = place | {node: place[region[0]] for region in regions for node in region}
    members: dict[int, list[fx.Node]] = defaultdict(list)
    for node, number in unit.items():
        members[number].append(node)
    order = nx.DiGraph((unit[used], unit[node]) for node in place for used in node.all_input_nodes)
    order.add_nodes_from(members)
    order.remove_edges_from(list(nx.selfloop_edges(order)))
    waiting = {number for one in nx.strongly_connected_components(order) if len(one) > 1 for number in one}
    if waiting:
        return _contiguous_regions(graph, [region for region in regions if place[region[0]] not in waiting])
    *first, _ = [node for number in nx.lexicographical_topological_sort(order) for node in members[number]]
    for node in first:  # keep the original order of all other nodes
        graph.output_node().prepend(node)
    return regions
