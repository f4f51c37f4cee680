"""What the backward computes again in place of keeping it: the regions of stage graphs, found from the graph alone.

`"full"` (Chen et al. 2016, arXiv:1604.06174): every repeated block in a stage is a region, whose inputs are kept.
`"selective"` (Korthikanti et al. 2022, arXiv:2205.05198, section 5): the core of attention is, which takes much memory
and little work: from one product of two activations (queries and keys) over everything that follows without a weight
(scale, mask, softmax, dropout) to the next (times values). Attention that is one operator keeps none of that, also
where it is one in the stage graph alone.
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
from autopart.ir.run.recompute_spec import Recompute, check_names, word_of, words_of

Groups = Mapping[str, str]
"""{key of an operator: the group of operators that is computed again together}"""

Region = list[fx.Node]

_CONVERSIONS = {f"autopart::{conversion.operator}" for conversion in CONVERSIONS.values()}


def region_marker(traced: fx.Graph, recompute: Recompute) -> Callable[[fx.Graph], None]:
    """What writes `region` on the calls of a stage graph that are run again: a number, from 0 in every stage.

    A region can be run as one call: nothing outside it lies between two of its nodes, and it is in one piece, for
    which nodes of the graph are moved.
    """
    whole, core_of = _groups(traced, recompute)

    def mark(graph: fx.Graph) -> None:
        regions = [*(_block_regions(graph, whole) if whole else ()), *_core_regions(graph, core_of)]
        for number, region in enumerate(_in_one_piece(graph, [region for region in regions if len(region) > 1])):
            for node in region:
                facts(node)["region"] = number

    return mark


def _groups(traced: fx.Graph, recompute: Recompute) -> tuple[Groups, Groups]:
    """The blocks that are computed again as a whole ("" for all other operators), and the cores that are."""
    words = words_of(recompute)
    block_of = blocks(traced) if words != {"none"} else {}
    whole = {key: block if word_of(recompute, block) == "full" else "" for key, block in block_of.items()}
    core_of = cores(traced) if "selective" in words else {}
    chosen = {key: core for key, core in core_of.items() if word_of(recompute, block_of[core]) == "selective"}
    return whole if any(whole.values()) else {}, chosen


def check_recompute(traced: fx.Graph, recompute: Recompute, where: str = "") -> None:
    """Raises OptionError for a pattern that is for no repeated block."""
    if not isinstance(recompute, str):
        check_names(recompute, blocks(traced).values(), where)


def recompute_notes(traced: fx.Graph, recompute: Recompute) -> tuple[str, ...]:
    """Why a plan that asks for recomputation recomputes nothing, if so."""
    words = words_of(recompute)
    if "full" in words and not any(blocks(traced).values()):
        return ("recompute='full' changes nothing: the model has no repeated blocks",)
    core_of = cores(traced) if "selective" in words else {}
    written_out = {facts(node)["key"] for node in operators(traced) if "attention" in facts(node)}
    if core_of and written_out.issuperset(core_of):
        why = "attention is one operator (attention_dropout), which keeps nothing between its products"
        return (f"recompute='selective' changes nothing with rng='fast': {why}",)
    if "selective" in words and not core_of:
        weights = _weights(traced)
        fused = [short_name(n) for n in active_operators(traced) if len(_activations(n, weights)) > 2]
        why = "no product of two activations leads to another without a weight between"
        if fused:
            why = f"attention is one operator ({fused[0]}), which keeps nothing between its products"
        return (f"recompute='selective' changes nothing: {why}",)
    return ()


# The model's own checkpoints


def recompute_of_checkpoints(traced: fx.Graph, checkpointed: Sequence[str | None]) -> tuple[Recompute, tuple[str, ...]]:
    """What to compute again where the model itself checkpoints those modules, and what a user should know of it.

    `checkpointed`: as `Trace.checkpointed`. A repeated block is computed again where the model checkpoints it, what is
    around it, or all of its parts that have weights.
    """
    block_of = blocks(traced)
    paths = [path for path in checkpointed if path is not None]
    weighted: dict[str, list[str]] = {block: [] for block in block_of.values() if block}
    for node in operators(traced):
        block = block_of.get(facts(node)["key"], "")
        if block and any(facts(read).get("parameter") for read in node.all_input_nodes):
            weighted[block].append(facts(node)["key"])
    again = [block for block, keys in weighted.items() if keys and all(_is_in(key, paths) for key in keys)]
    lost = [path for path in paths if not (_is_in(f"{path}/", again) or any(_is_in(f"{b}/", [path]) for b in again))]
    not_kept = [*lost, *(["plain operations"] if None in checkpointed else [])]
    notes = []
    if again:
        which = "every repeated block" if len(again) == len(weighted) else first_of(again)
        notes.append(f"the model's own checkpoints are kept: the backward computes {which} again")
    if not_kept:
        which = f"checkpoint of {not_kept[0]}" if len(not_kept) == 1 else f"checkpoints of {first_of(not_kept)}"
        notes.append(f"the model's own {which}: not kept, its values are stored (whole repeated blocks can be kept)")
    return ("full" if len(again) == len(weighted) else dict.fromkeys(again, "full")) if again else "none", tuple(notes)


def _is_in(key: str, paths: Sequence[str]) -> bool:
    """Whether an operator is in one of some modules."""
    return any(not path or key.startswith((f"{path}.", f"{path}/")) for path in paths)


# Repeated blocks


def _block_regions(graph: fx.Graph, block_of: Groups) -> list[Region]:
    """The runs of the stage's calls that are in one block."""
    runs: list[Region] = []
    traced_calls: set[fx.Node] = set()
    current, between = "", list[fx.Node]()
    for node in _calls(graph):
        key = _key(node)
        if key not in block_of:  # a conversion, or made from the inputs alone: written where it is first read
            between.append(node)
            continue
        traced_calls.add(node)
        if block_of[key] and block_of[key] == current:
            runs[-1] += [*between, node]
        elif block_of[key]:
            runs.append([*between, node])
        current, between = block_of[key], []
    return [_of_the_block(run, traced_calls) for run in runs]


def _of_the_block(run: Region, traced_calls: set[fx.Node]) -> Region:
    """A run without what does not depend on the block: it is kept for the region, which need not make it again; but for
    what is larger than what it is made of, and read here alone, such as a gathered weight. A value that was received in
    parts is gathered once, and kept whole."""
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
    """The operator that a written call belongs to; "" for a conversion between operators."""
    source, _ = source_of(node)
    return "" if operator_name(source) in _CONVERSIONS else facts(source).get("key", "")


# The core of attention


def cores(traced: fx.Graph) -> dict[str, str]:
    """{key of an operator: the first operator of its core}, of what lies between two products of activations in one
    block, these included."""
    weights, block_of = _weights(traced), blocks(traced)
    products = {node for node in active_operators(traced) if matrix_work(node)}
    starts = [node for node in traced.nodes if node in products and len(_activations(node, weights)) > 1]
    # What a product makes is a node of its own here, so that nothing is reached through a product.
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
    """Parameters, and what is made from these alone, such as rows picked from one."""
    weights: set[fx.Node] = set()
    for node in traced.nodes:
        read = [n for n in node.all_input_nodes if is_floating(n) or node.target is operator.getitem]
        from_weights = node.op == "call_function" and bool(read) and weights.issuperset(read)
        product = from_weights and node.target is not operator.getitem and matrix_work(node) > 0
        if facts(node).get("role") in (PARAMETER, WEIGHT) or (from_weights and not product):
            weights.add(node)
    return weights


def _activations(node: fx.Node, weights: set[fx.Node]) -> list[fx.Node]:
    """What a matrix product multiplies, where none of it is a weight."""
    read = [n for n in tensor_inputs(node) if facts(n)["role"] in (ACTIVE, PARAMETER, WEIGHT)]
    return read if matrix_work(node) and weights.isdisjoint(read) else []


def _core_regions(graph: fx.Graph, core_of: Groups) -> list[Region]:
    """The calls of every core in the stage, with what was written between them, such as collectives."""
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
    """The nodes, and what of a span lies between two of them."""
    after, before = set(nodes), set(nodes)
    for node in span:
        if not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    for node in reversed(span):
        if not before.isdisjoint(node.users):
            before.add(node)
    return [node for node in span if node in after and node in before]


def _in_one_piece(graph: fx.Graph, regions: list[Region]) -> list[Region]:
    """The regions without those that wait for each other; the graph gets an order in which each is in one piece."""
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
        return _in_one_piece(graph, [region for region in regions if place[region[0]] not in waiting])
    *first, _ = [node for number in nx.lexicographical_topological_sort(order) for node in members[number]]
    for node in first:  # what was first stays first
        graph.output_node().prepend(node)
    return regions
