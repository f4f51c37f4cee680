"""The attention masks of a stage: which calls read them, and the stage in which kernels are told what they are.

A model that is traced makes its masks as tensors, also a causal one. What a mask is depends on the values of a call
(a batch with padding), so a stage keeps it, and for a call is written anew for the bands that its masks turn out to be
(`attention.band_of`): one kernel that leaves out what no query sees, and no mask in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopart.ir.collective_nodes import axis_of
from autopart.ir.facts import cost_notes, facts
from autopart.ir.graph import argument, draws_random_numbers, dropout_probability, operator_name, shape, value
from autopart.ir.mask_structure import Band, Run
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program, Stage, StageGraph, StageInput
from autopart.ir.sharding import Cut
from autopart.ir.subgraphs import erase_unread, is_given, made_for, part_of
from autopart.ops.mask_key_ranges import Told, intervals_of_band, told_of
from autopart.ops.masked_attention import blocks_fit
from autopart.ops.operators import autopart_ops

_OF_PLACE = ("nn_module_stack", "stack_trace", "key", "region", "on_host", "block", "times")
"""The facts of a call that what is written for it has too."""
_ATTENTION = ("aten::scaled_dot_product_attention", "autopart::attention_dropout")


def masks_of(stage: Stage) -> dict[fx.Node, list[fx.Node]]:
    """{mask: the calls that read it}, of the masks that a rank makes of the stage's inputs alone."""
    by_mask: dict[fx.Node, list[fx.Node]] = {}
    for node in stage.graph.graph.nodes:
        if (mask := mask_of(node)) is not None:
            by_mask.setdefault(mask, []).append(node)
    return {mask: calls for mask, calls in by_mask.items() if _is_of_inputs(mask, stage)}


def _is_of_inputs(mask: fx.Node, stage: Stage) -> bool:
    """Whether a value without gradient is made of keyword inputs and buffers, by every rank for itself."""
    if facts(mask).get("needs_grad"):
        return False
    inputs = {stage_input.name for stage_input in stage.inputs}
    for node in made_for([mask]):
        known = {"placeholder": node.target in inputs, "get_attr": node.target in stage.buffers}
        is_local = axis_of(node) is None or _is_slice(node)
        if not known.get(node.op, is_local and not draws_random_numbers(node)):
            return False
    return True


def _is_slice(node: fx.Node) -> bool:
    return operator_name(node) == "autopart::slice"


def differ_by_rank(stage: Stage) -> set[str]:
    """The names of masks of which every rank takes a shard."""
    return {mask.name for mask in masks_of(stage) if any(map(_is_slice, made_for([mask])))}


def mask_of(node: fx.Node) -> fx.Node | None:
    """The mask that a call reads: attention, the `where` that hides some of its scores or of their bias, or the `add`
    to the scores of attention that a pass has written out."""
    if is_ring(node):
        mask = argument(node, "mask")
    elif is_attention(node):
        mask = argument(node, "attn_mask")
    else:
        mask = node.args[0] if _hides_scores(node) else node.args[1] if _adds_mask(node) else None
    return mask if isinstance(mask, fx.Node) else None


def is_attention(node: fx.Node) -> bool:
    """Whether a call is attention in one operator, all keys at once; of a stage graph also such as drops weights."""
    return node.op == "call_function" and operator_name(node) in _ATTENTION


def is_ring(node: fx.Node) -> bool:
    """Whether a call is attention whose keys and values go around."""
    return node.target is autopart_ops.ring_attention.default


def _is_any_attention(node: fx.Node) -> bool:
    """Whether a call may be written otherwise by what its mask is, or by where it runs."""
    return is_attention(node) or is_ring(node) or node.target is autopart_ops.attention_runs.default


def _hides_scores(node: fx.Node) -> bool:
    """Whether a call is a `where` of numbers and of one as low as there is."""
    if node.target is not torch.ops.aten.where.ScalarOther or len(shape(node)) < 2:
        return False
    return bool(value(node).is_floating_point() and node.args[2] <= torch.finfo(value(node).dtype).min / 2)


def _adds_mask(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.add.Tensor and "attention" in facts(node)


def scores_of(call: fx.Node) -> tuple[int, int]:
    """How many queries and keys there are in a call that reads a mask."""
    if is_ring(call):
        return shape(call)[-2], int(argument(call, "size"))
    if not is_attention(call):
        return shape(call)[-2], shape(call)[-1]
    query, key = call.args[:2]
    return shape(query)[-2], shape(key)[-2]


def mask_graph(stage: Stage, masks: Sequence[fx.Node]) -> fx.GraphModule:
    """The part of a stage's graph that makes these masks, of the keyword inputs that it needs."""
    return part_of(stage.graph, masks)


def of_positions(stage: Stage) -> tuple[list[fx.Node], list[StageInput], fx.GraphModule]:
    """The masks that no input and no buffer decides, the stage's inputs that they are made of, and a graph that makes
    those of nothing."""
    value_of = dict(zip(stage.inputs, stage.prologue.graph.output_node().args[0], strict=False))
    of_nothing = {
        stage_input.name: stage_input for stage_input, value in value_of.items()
        if isinstance(value, fx.Node) and not any(map(is_given, made_for([value])))
    }  # fmt: skip
    masks: list[fx.Node] = []
    read: dict[str, StageInput] = {}
    for mask in masks_of(stage):
        names = [str(n.target) for n in made_for([mask]) if n.op != "call_function"]
        if of_nothing.keys() >= set(names):
            masks.append(mask)
            read |= {name: of_nothing[name] for name in names}
    inputs = list(read.values())
    return masks, inputs, part_of(stage.prologue, [value_of[stage_input] for stage_input in inputs])


def with_bands(stage: Stage, bands: Mapping[str, Told | None], device: torch.device | None = None) -> Stage:
    """A stage whose attention is told these bands, {name of a mask: its band}, without the masks that nothing reads
    then, and without the inputs that they alone were made of. `device`: where it runs, if that is known."""
    if not bands and not any(map(_is_any_attention, stage.graph.graph.nodes)):
        return stage
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(stage.graph.graph, copies))
    known = {copies[mask]: band for mask in masks_of(stage) if (band := bands.get(mask.name)) is not None}
    return _tell_all(replace(stage, graph=StageGraph(stage.graph, graph)), known, device)


def as_traced(program: Program) -> Program:
    """A program whose masks are what they were in the call that was traced (`passes/facts/mask_facts.py`); its
    graphs are written on."""
    stages = []
    for stage in program.stages:
        bands = {mask: _of_fullest_rank(mask, program.mesh, calls) for mask, calls in masks_of(stage).items()}
        stages.append(_tell_all(stage, {mask: band for mask, band in bands.items() if band is not None}))
    return replace(program, stages=tuple(stages))


def _of_fullest_rank(mask: fx.Node, mesh: Mesh, calls: Sequence[fx.Node]) -> Told | None:
    """What a mask was in the call that was traced, for the rank whose queries see the most keys."""
    band, layout = facts(mask).get("band"), facts(mask).get("layout", {})
    cut = [(axis, place) for axis, place in layout.items() if place.is_shard and place.dim == len(shape(mask)) - 2]
    if band is None or not cut:
        return band
    (axis, place), *others = cut
    queries, keys = facts(mask)["queries"], scores_of(calls[0])[1]
    whole = intervals_of_band(band, queries, keys)
    shards = Cut(0, queries, place.sections, mesh.size(axis))
    ranks = [
        whole._replace(first=shards.take(whole.first, index), end=shards.take(whole.end, index))
        for index in range(mesh.size(axis))
    ]
    fullest = max(ranks, key=lambda one: int((one.end - one.first).sum()))
    runs = told_of(fullest, fullest.first.numel(), keys) if not others else None
    return runs if isinstance(runs, tuple) else None


def _tell_all(stage: Stage, known: Mapping[fx.Node, Told], device: torch.device | None = None) -> Stage:
    """Let the attention of a stage know what its masks are; its graph is written on."""
    graph, of_masks = stage.graph.graph, made_for(known)
    for mask, band in known.items():
        for call in [user for user in mask.users if mask_of(user) is mask]:
            _tell(call, band)
    for call in list(filter(is_attention, graph.nodes)):
        if argument(call, "is_causal"):
            facts(call)["cost"] = cost_notes(call)._replace(is_causal=True)
        if argument(call, "attn_mask") is None and _kernel_takes_groups(call, device):
            _group_heads(call)
    in_runs = graph.find_nodes(op="call_function", target=autopart_ops.attention_runs.default)
    for call in (*filter(is_ring, graph.nodes), *(call for call in in_runs if _kernel_takes_groups(call, device))):
        _group_heads(call)
    if not known:
        return stage
    erase_unread(graph, of_masks)
    left = {node.target for node in graph.find_nodes(op="placeholder")}
    is_read = [stage_input.name in left for stage_input in stage.inputs]
    inputs = tuple(i for i, read in zip(stage.inputs, is_read, strict=True) if read)
    return replace(stage, inputs=inputs, prologue=_with_outputs(stage.prologue, is_read))


def _tell(call: fx.Node, band: Told) -> None:
    """Let a call know what its mask is, and read it no more. A window on which blocks gain nothing, or a band that no
    kernel takes, stays a mask."""
    queries, keys = scores_of(call)
    if is_ring(call):
        runs = intervals_of_band(band, queries, keys).runs() if isinstance(band, Band) else band
        call.args = (*call.args[:4], None, *call.args[5:7])
        call.kwargs = {"scale": argument(call, "scale"), "runs": [number for run in runs for number in run]}
        _count_seen(call, runs)
        return
    if not isinstance(band, Band):
        if is_attention(call) and len(shape(call)) == 4 and not dropout_probability(call):
            options = {name: argument(call, name) for name in ("scale", "enable_gqa")}
            call.target = autopart_ops.attention_runs.default
            call.args, call.kwargs = (*call.args[:3], [number for run in band for number in run]), options
            _count_seen(call, band)
        return
    if not is_attention(call):
        if band == (queries - 1, keys - 1):
            sizes, scores = list(shape(call)), call.args[0 if _adds_mask(call) else 1]
            same = zip(reversed(sizes), reversed(shape(scores)), strict=False)
            for dim, (size, scores_size) in enumerate(same, 1):
                sizes[-dim] = -1 if size == scores_size else size  # which other ranks may have more of
            call.replace_all_uses_with(_view(call, torch.ops.aten.expand.default, scores, sizes))
            call.graph.erase_node(call)
        return
    options = {name: argument(call, name) for name in ("scale", "enable_gqa")}
    if band == (queries - 1, keys - 1):
        _without_mask(call, is_causal=False)
    elif band == (queries - 1, 0) and queries == keys:
        _without_mask(call, is_causal=True)
    elif queries == keys and len(shape(call)) == 4 and not dropout_probability(call) and blocks_fit(band, queries):
        call.target = autopart_ops.window_attention.default
        call.args, call.kwargs = (*call.args[:3], *band), options


def _without_mask(call: fx.Node, is_causal: bool) -> None:
    """Let attention read no mask, but hide what a causal one hides."""
    options = {name: argument(call, name) for name in ("scale", "enable_gqa")} | {"is_causal": is_causal}
    if call.target is autopart_ops.attention_dropout.default:
        call.args, call.kwargs = (*call.args[:3], None, *call.args[4:]), options
    else:
        call.args, call.kwargs = call.args[:3], {"dropout_p": argument(call, "dropout_p"), **options}


def _count_seen(call: fx.Node, runs: Iterable[Run]) -> None:
    """Note the two products of every query with the keys that it sees."""
    (rows, heads, _, width), value_width = shape(call.args[0]), shape(call)[-1]
    facts(call)["counted_flops"] = 2 * rows * heads * (width + value_width) * sum(run.seen for run in runs)
    facts(call)["cost"] = cost_notes(call)._replace(counts_seen=True)


def _kernel_takes_groups(call: fx.Node, device: torch.device | None) -> bool:
    """On a GPU the kernel for 32 bits has none: torch would write the scores out."""
    return device is None or device.type != "cuda" or value(call).dtype.itemsize == 2


def _group_heads(call: fx.Node) -> None:
    """Hand keys and values over as they are that are repeated for several heads of queries (Ainslie et al. 2023,
    arXiv:2305.13245): no memory for the repeated ones, and no sum of their gradients."""
    first = 2 if is_ring(call) else 1
    wide = call.args[first : first + 2]
    repeated = [parts for heads in wide if (parts := _repeated(heads)) is not None]
    if call.kwargs.get("enable_gqa") or len(repeated) < 2 or len({times for *_, times in repeated}) > 1:
        return
    heads = [_one_of_each(narrow, dim, call) for narrow, dim, _ in repeated]
    call.args = (*call.args[:first], *heads, *call.args[first + 2 :])
    if not is_ring(call):
        call.kwargs = {**call.kwargs, "enable_gqa": True}
    for node in wide:
        _erase(node)


def _repeated(heads: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Of heads [b, (g r), s, d], each of g repeated r times: what an `expand` repeats, the dim of g in it, and r.

    The dims g and r are merged behind the positions, or before them."""
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


def _one_of_each(narrow: fx.Node, dim: int, call: fx.Node) -> fx.Node:
    """The heads [b, g, s, d] for a call, from what is repeated along the dim behind `dim`."""
    if _calls(narrow, "unsqueeze") and narrow.args[1] % 5 == dim + 1:
        heads = narrow.args[0]
    else:
        heads = _view(call, torch.ops.aten.squeeze.dims, narrow, [dim + 1])
    return heads if dim == 1 else _view(call, torch.ops.aten.transpose.int, heads, 1, 2)


def _view(call: fx.Node, target: Callable[..., Any], node: fx.Node, *arguments: Any) -> fx.Node:
    """A view of a value, beside the call that reads it."""
    with call.graph.inserting_before(call):
        view = call.graph.call_function(target, (node, *arguments))
    view.meta = {name: known for name, known in call.meta.items() if name in _OF_PLACE}
    view.meta.update(val=target(value(node), *arguments), needs_grad=facts(node).get("needs_grad", False))
    return view


def _erase(node: fx.Node) -> None:
    """Take a value away that nothing reads, with the views that were made for it alone."""
    if node.op == "call_function" and not node.users:
        source = node.args[0]
        node.graph.erase_node(node)
        _erase(source)


def _with_outputs(prologue: fx.GraphModule, is_read: Sequence[bool]) -> fx.GraphModule:
    """A prologue without those of its outputs, the first ones, that the stage does not read."""
    graph = fx.Graph()
    outputs: Any = graph.graph_copy(prologue.graph, {})
    graph.output((*(o for o, read in zip(outputs, is_read, strict=False) if read), *outputs[len(is_read) :]))
    unread = [
        output for output, read in zip(outputs, is_read, strict=False) if not read and isinstance(output, fx.Node)
    ]
    erase_unread(graph, {node for node in made_for(unread) if not is_given(node)})
    return fx.GraphModule(prologue, graph)
