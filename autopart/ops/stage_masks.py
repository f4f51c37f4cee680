"""Attention masks of a stage graph: the calls that read them, and their replacement by mask structure.

A traced model builds its masks as tensors, even a causal one. The structure of a mask (causal, sliding window) depends
on the values of a call, for example padding. So a stage graph keeps its mask tensors. At each call, the runtime finds
the structure of that call's masks (`masked_attention.mask_window_of`) and rewrites the stage graph for it. Then a
kernel skips masked keys, and no mask is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autopart.ir.collective_nodes import axis_of
from autopart.ir.facts import cost_notes, facts
from autopart.ir.graph import argument, draws_random_numbers, dropout_probability, operator_name, shape, value
from autopart.ir.mask_structure import MaskWindow, QueryRun
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program, Stage, StageGraph, StageInput
from autopart.ir.sharding import DimSharding
from autopart.ir.subgraphs import ancestors_of, erase_unused, extract_subgraph, is_leaf_value
from autopart.ops.key_value_cache import has_caches
from autopart.ops.mask_key_ranges import MaskStructure, key_ranges_of_window, mask_structure_of
from autopart.ops.masked_attention import blocks_fit
from autopart.ops.operators import autopart_ops

LARGEST_MASK = 2**24
"""Maximum number of elements of an input-independent mask that is materialised to detect its structure."""

ALL = 2**40
"""Value of a `MaskWindow` field that means all keys before (or after) a query, at every sequence length."""

NO_SIZES: Mapping[str, int] = MappingProxyType({})

_COPIED_FACTS = ("nn_module_stack", "stack_trace", "key", "region", "on_host", "block", "times")
"""Facts of a call that are copied to the nodes written for it."""
_ATTENTION = ("aten::scaled_dot_product_attention", "autopart::attention_dropout")


def masks_of(stage: Stage) -> dict[fx.Node, list[fx.Node]]:
    """Return {mask: the calls that read it} for masks that depend only on the stage's inputs and buffers.

    Returns {} if the stage writes to a key/value cache, because mask structures then differ for each new token.
    """
    if has_caches(stage.graph.graph.nodes):
        return {}
    by_mask: dict[fx.Node, list[fx.Node]] = {}
    for node in stage.graph.graph.nodes:
        if (mask := mask_of(node)) is not None:
            by_mask.setdefault(mask, []).append(node)
    return {mask: calls for mask, calls in by_mask.items() if _depends_on_inputs_only(mask, stage)}


def _depends_on_inputs_only(mask: fx.Node, stage: Stage) -> bool:
    """Return True if a mask depends only on inputs and buffers, and needs no gradient and no collective."""
    if facts(mask).get("needs_grad"):
        return False
    inputs = {stage_input.name for stage_input in stage.inputs}
    for node in ancestors_of([mask]):
        is_allowed = {"placeholder": node.target in inputs, "get_attr": node.target in stage.buffers}
        is_local = axis_of(node) is None or _is_slice(node)
        if not is_allowed.get(node.op, is_local and not draws_random_numbers(node)):
            return False
    return True


def _is_slice(node: fx.Node) -> bool:
    return operator_name(node) == "autopart::slice"


def differ_by_rank(stage: Stage) -> set[str]:
    """Return the names of masks that are sharded, so that each rank has a different part of the mask."""
    return {mask.name for mask in masks_of(stage) if any(map(_is_slice, ancestors_of([mask])))}


def mask_of(node: fx.Node) -> fx.Node | None:
    """Return the mask that a call reads; None if the call reads no mask.

    A call that reads a mask is attention, the `where` that masks scores or their bias, or the `add` of a mask to the
    scores of decomposed attention.
    """
    if is_ring(node):
        mask = argument(node, "mask")
    elif is_attention(node):
        mask = argument(node, "attn_mask")
    else:
        mask = node.args[0] if _masks_scores(node) else node.args[1] if _adds_mask(node) else None
    return mask if isinstance(mask, fx.Node) else None


def is_attention(node: fx.Node) -> bool:
    """Return True for an attention operator over all keys, with or without dropout (not ring attention)."""
    return node.op == "call_function" and operator_name(node) in _ATTENTION


def is_ring(node: fx.Node) -> bool:
    """Return True for ring attention."""
    return node.target is autopart_ops.ring_attention.default


def _is_any_attention(node: fx.Node) -> bool:
    """Return True for attention operators that are rewritten for a mask structure or for the device."""
    return is_attention(node) or is_ring(node) or node.target is autopart_ops.attention_runs.default


def _masks_scores(node: fx.Node) -> bool:
    """Return True for a `where` that replaces masked scores by the lowest number of the dtype."""
    if node.target is not torch.ops.aten.where.ScalarOther or len(shape(node)) < 2:
        return False
    return bool(value(node).is_floating_point() and node.args[2] <= torch.finfo(value(node).dtype).min / 2)


def _adds_mask(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.add.Tensor and "attention" in facts(node)


def scores_of(call: fx.Node, sizes: Mapping[str, int] = NO_SIZES) -> tuple[int, int]:
    """Return (number of queries, number of keys) of a call that reads a mask.

    Args:
        sizes: values of the graph's size inputs, if it has any.
    """
    if sized := facts(call).get("scores"):
        queries, keys = (sizes[number] if isinstance(number, str) else number for number in sized)
        return queries, keys
    if is_ring(call):
        return shape(call)[-2], int(argument(call, "size"))
    if not is_attention(call):
        return shape(call)[-2], shape(call)[-1]
    query, key = call.args[:2]
    return shape(query)[-2], shape(key)[-2]


def at_any_length(structure: MaskStructure, queries: int, keys: int) -> MaskStructure | None:
    """Replace the width of a window in a mask structure by `ALL` if it covers the full sequence.

    Masks of one kind, such as causal masks, then have equal structures at every sequence length.

    Returns None if no kernel supports the structure.

    >>> at_any_length(MaskWindow(before=7, after=0), 8, 8) == MaskWindow(ALL, 0)  # causal
    True
    """
    if not isinstance(structure, MaskWindow):
        return structure
    window = MaskWindow(
        ALL if structure.before >= queries - 1 else structure.before,
        ALL if structure.after >= keys - 1 and structure.before >= queries - 1 else structure.after,
    )
    if window == (ALL, ALL) or (queries == keys and (window == (ALL, 0) or blocks_fit(structure, queries))):
        return window
    return None


def mask_graph(stage: Stage, masks: Sequence[fx.Node]) -> fx.GraphModule:
    """Extract the subgraph of a stage that computes these masks. Its inputs are inputs of the stage."""
    return extract_subgraph(stage.graph, masks)


def input_independent_masks(stage: Stage) -> tuple[list[fx.Node], list[StageInput], fx.GraphModule]:
    """Return the masks of a stage that depend on no model input or buffer, and so are equal in all calls.

    Returns:
        The masks, the stage inputs that they are computed from, and a graph that computes these stage inputs from
        constants.
    """
    value_of = dict(zip(stage.inputs, stage.prologue.graph.output_node().args[0], strict=False))
    constant_inputs = {
        stage_input.name: stage_input for stage_input, value in value_of.items()
        if isinstance(value, fx.Node) and not any(map(is_leaf_value, ancestors_of([value])))
    }  # fmt: skip
    masks: list[fx.Node] = []
    needed: dict[str, StageInput] = {}
    for mask in masks_of(stage):
        names = [str(n.target) for n in ancestors_of([mask]) if n.op != "call_function"]
        if constant_inputs.keys() >= set(names):
            masks.append(mask)
            needed |= {name: constant_inputs[name] for name in names}
    inputs = list(needed.values())
    return masks, inputs, extract_subgraph(stage.prologue, [value_of[stage_input] for stage_input in inputs])


def with_mask_structure(
    stage: Stage, bands: Mapping[str, MaskStructure | None], device: torch.device | None = None,
    sizes: Mapping[str, int] = NO_SIZES,
) -> Stage:  # fmt: skip
    """Return a copy of the stage in which attention uses the known mask structure instead of mask tensors.

    Masks that lose their last use are removed, and so are the stage inputs that only these masks needed.

    Args:
        stage: the stage.
        bands: {name of a mask: its structure}.
        device: device on which the stage runs. None: unknown.
        sizes: values of the graph's size inputs. If the structures come from `at_any_length`, the returned stage also
            serves other sizes at which the masks have these structures.
    """
    if not bands and not any(map(_is_any_attention, stage.graph.graph.nodes)):
        return stage
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(stage.graph.graph, copies))
    structure_of = {copies[mask]: band for mask in masks_of(stage) if (band := bands.get(mask.name)) is not None}
    return _apply_structure(replace(stage, graph=StageGraph(stage.graph, graph)), structure_of, device, sizes)


def as_traced(program: Program) -> Program:
    """Rewrite a program's graphs for the mask structures of the traced call, and return the program.

    `passes/facts/mask_facts.py` has found these structures, such as a causal mask.
    """
    stages = []
    for stage in program.stages:
        bands = {mask: _structure_of_fullest_rank(mask, program.mesh, calls) for mask, calls in masks_of(stage).items()}
        stages.append(_apply_structure(stage, {mask: band for mask, band in bands.items() if band is not None}))
    return replace(program, stages=tuple(stages))


def _structure_of_fullest_rank(mask: fx.Node, mesh: Mesh, calls: Sequence[fx.Node]) -> MaskStructure | None:
    """Return the structure of a mask in the traced call.

    If the queries are sharded, return the structure on the rank whose queries attend the most keys.
    """
    band, layout = facts(mask).get("band"), facts(mask).get("layout", {})
    sharding = [
        (axis, placement)
        for axis, placement in layout.items()
        if placement.is_shard and placement.dim == len(shape(mask)) - 2
    ]
    if band is None or not sharding:
        return band
    (axis, placement), *other_axes = sharding
    queries, keys = facts(mask)["queries"], scores_of(calls[0])[1]
    ranges = key_ranges_of_window(band, queries, keys)
    shards = DimSharding(0, queries, placement.sections, mesh.size(axis))
    ranks = [
        ranges._replace(first=shards.take(ranges.first, index), end=shards.take(ranges.end, index))
        for index in range(mesh.size(axis))
    ]
    fullest = max(ranks, key=lambda rank_ranges: int((rank_ranges.end - rank_ranges.first).sum()))
    runs = mask_structure_of(fullest, fullest.first.numel(), keys) if not other_axes else None
    return runs if isinstance(runs, tuple) else None


def _apply_structure(
    stage: Stage, structure_of: Mapping[fx.Node, MaskStructure], device: torch.device | None = None,
    sizes: Mapping[str, int] = NO_SIZES,
) -> Stage:  # fmt: skip
    """Rewrite the attention calls in a stage's graph to use known mask structure. Return the stage."""
    graph, of_masks = stage.graph.graph, ancestors_of(structure_of)
    for mask, band in structure_of.items():
        for call in [user for user in mask.users if mask_of(user) is mask]:
            _rewrite_call(call, band, *scores_of(call, sizes))
    for call in list(filter(is_attention, graph.nodes)):
        if argument(call, "is_causal"):
            facts(call)["cost"] = cost_notes(call)._replace(is_causal=True)
        if argument(call, "attn_mask") is None and _kernel_takes_groups(call, device):
            _group_heads(call)
    in_runs = graph.find_nodes(op="call_function", target=autopart_ops.attention_runs.default)
    for call in (*filter(is_ring, graph.nodes), *(call for call in in_runs if _kernel_takes_groups(call, device))):
        _group_heads(call)
    if not structure_of:
        return stage
    erase_unused(graph, of_masks)
    remaining = {node.target for node in graph.find_nodes(op="placeholder")}
    is_read = [stage_input.name in remaining for stage_input in stage.inputs]
    inputs = tuple(i for i, read in zip(stage.inputs, is_read, strict=True) if read)
    return replace(stage, inputs=inputs, prologue=_with_outputs(stage.prologue, is_read))


def _rewrite_call(call: fx.Node, band: MaskStructure, queries: int, keys: int) -> None:
    """Rewrite one attention call to use the mask structure instead of its mask.

    The call keeps its mask if no kernel supports the structure, or if a sliding window (`band`) is so wide that
    the kernel saves little by skipping the blocks outside of it.
    """
    if is_ring(call):
        runs = key_ranges_of_window(band, queries, keys).runs() if isinstance(band, MaskWindow) else band
        call.args = (*call.args[:4], None, *call.args[5:7])
        call.kwargs = {"scale": argument(call, "scale"), "runs": [number for run in runs for number in run]}
        _count_attended(call, runs)
        return
    if not isinstance(band, MaskWindow):
        if is_attention(call) and len(shape(call)) == 4 and not dropout_probability(call):
            options = {name: argument(call, name) for name in ("scale", "enable_gqa")}
            call.target = autopart_ops.attention_runs.default
            call.args, call.kwargs = (*call.args[:3], [number for run in band for number in run]), options
            _count_attended(call, band)
        return
    is_full = band.before >= queries - 1 and band.after >= keys - 1
    if not is_attention(call):
        if is_full and "scores" not in facts(call):
            sizes, scores = list(shape(call)), call.args[0 if _adds_mask(call) else 1]
            same = zip(reversed(sizes), reversed(shape(scores)), strict=False)
            for dim, (size, scores_size) in enumerate(same, 1):
                sizes[-dim] = -1 if size == scores_size else size  # -1: shards of other ranks may be longer
            call.replace_all_uses_with(_view(call, torch.ops.aten.expand.default, scores, sizes))
            call.graph.erase_node(call)
        return
    options = {name: argument(call, name) for name in ("scale", "enable_gqa")}
    if is_full:
        _without_mask(call, is_causal=False)
    elif band.before >= queries - 1 and band.after == 0 and queries == keys:
        _without_mask(call, is_causal=True)
    elif queries == keys and len(shape(call)) == 4 and not dropout_probability(call) and blocks_fit(band, queries):
        call.target = autopart_ops.window_attention.default
        call.args, call.kwargs = (*call.args[:3], *band), options


def _without_mask(call: fx.Node, is_causal: bool) -> None:
    """Remove the mask argument of an attention call, and set the argument `is_causal`."""
    options = {name: argument(call, name) for name in ("scale", "enable_gqa")} | {"is_causal": is_causal}
    if call.target is autopart_ops.attention_dropout.default:
        call.args, call.kwargs = (*call.args[:3], None, *call.args[4:]), options
    else:
        call.args, call.kwargs = call.args[:3], {"dropout_p": argument(call, "dropout_p"), **options}


def _count_attended(call: fx.Node, runs: Iterable[QueryRun]) -> None:
    """Record the FLOPs of a call's two matrix products, counting only pairs of query and attended key."""
    (rows, heads, _, width), value_width = shape(call.args[0]), shape(call)[-1]
    facts(call)["counted_flops"] = 2 * rows * heads * (width + value_width) * sum(run.seen for run in runs)
    facts(call)["cost"] = cost_notes(call)._replace(counts_attended=True)


def _kernel_takes_groups(call: fx.Node, device: torch.device | None) -> bool:
    """Return True if the attention kernel supports grouped K/V heads on this device.

    The float32 kernel of a GPU does not. Torch would then materialise the scores.
    """
    return device is None or device.type != "cuda" or value(call).dtype.itemsize == 2


def _group_heads(call: fx.Node) -> None:
    """Replace repeated K/V heads by the unrepeated ones, and compute grouped-query attention.

    Repeated heads then need no memory, and their gradients need no sum. Grouped-query attention: Ainslie et al. 2023,
    arXiv:2305.13245.
    """
    first = 2 if is_ring(call) else 1
    wide = call.args[first : first + 2]
    repeated = [parts for heads in wide if (parts := _repeated(heads)) is not None]
    if call.kwargs.get("enable_gqa") or len(repeated) < 2 or len({times for *_, times in repeated}) > 1:
        return
    heads = [_unrepeated_heads(narrow, dim, call) for narrow, dim, _ in repeated]
    call.args = (*call.args[:first], *heads, *call.args[first + 2 :])
    if not is_ring(call):
        call.kwargs = {**call.kwargs, "enable_gqa": True}
    for node in wide:
        _erase(node)


def _repeated(heads: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Match K/V heads that are repeated for grouped-query attention, by `expand` and `reshape`.

    The repeated heads have the shape [b, g * r, s, d]. Here g is the number of K/V heads, and each is repeated r times.
    After these, a call can transpose the heads and the sequence. Returns the input of the `expand`, the index of its
    dim of size g, and r. Returns None for other nodes.
    """
    dim, source = 1, heads
    if _calls(source, "transpose") and {axis % 4 for axis in source.args[1:]} == {1, 2}:
        dim, source = 2, source.args[0]
    if not _calls(source, "reshape") or not _calls(source.args[0], "expand") or len(shape(source.args[0])) != 5:
        return None
    narrow = source.args[0].args[0]
    before, after = list(shape(narrow)), list(shape(source.args[0]))
    times = after[dim + 1]
    before_is_one = before == [*after[: dim + 1], 1, *after[dim + 2 :]]
    merged = [*after[:dim], after[dim] * times, *after[dim + 2 :]] == list(shape(source))
    return (narrow, dim, times) if before_is_one and merged and times > 1 else None


def _calls(node: fx.Node, name: str) -> bool:
    return node.op == "call_function" and operator_name(node) == f"aten::{name}"


def _unrepeated_heads(narrow: fx.Node, dim: int, call: fx.Node) -> fx.Node:
    """Recover the unrepeated K/V heads [b, g, s, d] from the input of `expand`, for `call` to read."""
    if _calls(narrow, "unsqueeze") and narrow.args[1] % 5 == dim + 1:
        heads = narrow.args[0]
    else:
        heads = _view(call, torch.ops.aten.squeeze.dims, narrow, [dim + 1])
    return heads if dim == 1 else _view(call, torch.ops.aten.transpose.int, heads, 1, 2)


def _view(call: fx.Node, target: Callable[..., Any], node: fx.Node, *arguments: Any) -> fx.Node:
    """Insert a view of a value before `call`, which will read the view."""
    with call.graph.inserting_before(call):
        view = call.graph.call_function(target, (node, *arguments))
    view.meta = {name: fact for name, fact in call.meta.items() if name in _COPIED_FACTS}
    view.meta.update(val=target(value(node), *arguments), needs_grad=facts(node).get("needs_grad", False))
    return view


def _erase(node: fx.Node) -> None:
    """Erase a node without users. Then erase its input views that have no user left."""
    if node.op == "call_function" and not node.users:
        source = node.args[0]
        node.graph.erase_node(node)
        _erase(source)


def _with_outputs(prologue: fx.GraphModule, is_read: Sequence[bool]) -> fx.GraphModule:
    """Return a copy of a stage's prologue without the outputs whose entry in `is_read` is False.

    The prologue is the graph that computes the inputs of a stage from the inputs of the model. Its first outputs are
    these stage inputs.
    """
    graph = fx.Graph()
    outputs: Any = graph.graph_copy(prologue.graph, {})
    graph.output((*(o for o, read in zip(outputs, is_read, strict=False) if read), *outputs[len(is_read) :]))
    unread = [
        output for output, read in zip(outputs, is_read, strict=False) if not read and isinstance(output, fx.Node)
    ]
    erase_unused(graph, {node for node in ancestors_of(unread) if not is_leaf_value(node)})
    return fx.GraphModule(prologue, graph)
