"""Which attention masks of a traced call are bands, where its values tell: for the figures of a plan made for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import networkx as nx
import torch
from torch import fx
from torch.fx.node import map_aggregate

from autopart.ir.attention import Band, band_of
from autopart.ir.facts import ACTIVE, DATA, INPUT, facts
from autopart.ir.graph import argument, draws_random_numbers, reads, value
from autopart.ir.masks import is_attention, mask_of, scores_of
from autopart.passes.pipeline import driven
from autopart.tracing.trace import Trace

_LARGEST = 2**27
"""Elements beyond which a mask is not made for a plan, which then takes it for one that kernels read."""


def band_notes(node: fx.Node) -> Iterator[str]:
    """What `find_bands` has found of a node, for readers."""
    if band := facts(node).get("band"):
        yield f"sees {band.before} before, {band.after} after"


@driven(notes=lambda _: band_notes)
def find_bands(trace: Trace) -> None:
    """Write `band` on the masks of attention that the inputs alone decide, by their values in the traced call."""
    calls = {
        mask: node for node in trace.graph.nodes
        if facts(node).get("role") == ACTIVE and (mask := mask_of(node)) is not None
        and facts(mask)["role"] in (INPUT, DATA) and not facts(mask)["needs_grad"] and value(mask).numel() <= _LARGEST
    }  # fmt: skip
    edges = reads(trace.graph) if calls else nx.DiGraph()
    needed = {mask: {mask, *nx.descendants(edges, mask)} for mask in calls if mask in edges}
    given = _given(trace)
    known = {mask for mask, nodes in needed.items() if all(_can_run(node, given) for node in nodes)}
    made = _run(trace.graph, set().union(*(needed[mask] for mask in known)), given)
    for mask in known:
        band = band_of(made[mask], *scores_of(calls[mask]))
        if band is not None:
            facts(mask)["band"] = band


def mask_notes(trace: Trace) -> list[str]:
    """What the masks of attention were in the traced call: `2 causal, 1 with its mask as it is`."""
    kinds = Counter[str]()
    for node in filter(is_attention, trace.graph.nodes):
        mask = argument(node, "attn_mask")
        if isinstance(mask, fx.Node) and facts(mask)["role"] in (INPUT, DATA):
            kinds[_kind(facts(mask).get("band"), *scores_of(node))] += 1
    said = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return [f"attention by the masks of this call: {said}"] if said else []


def _kind(band: Band | None, queries: int, keys: int) -> str:
    if band is None:
        return "with its mask as it is"
    if band.before < queries - 1 or 0 < band.after < keys - 1:
        return f"in a window of {band.before + 1 + band.after}"
    return "causal" if band.after == 0 and keys > 1 else "to all keys"


def _given(trace: Trace) -> dict[fx.Node, torch.Tensor]:
    """The inputs, buffers and constants whose values are there."""
    tensors = {**trace.buffers, **trace.constants}
    inputs = zip(trace.graph.find_nodes(op="placeholder"), trace.call.tensors, strict=True)
    found = dict(inputs) | {n: tensors[n.target] for n in trace.graph.find_nodes(op="get_attr") if n.target in tensors}
    return {node: tensor for node, tensor in found.items() if not tensor.is_meta}


def _can_run(node: fx.Node, given: Mapping[fx.Node, torch.Tensor]) -> bool:
    return node in given if node.op != "call_function" else not draws_random_numbers(node)


@torch.no_grad()
def _run(graph: fx.Graph, nodes: set[fx.Node], given: Mapping[fx.Node, torch.Tensor]) -> dict[fx.Node, Any]:
    """The values of these nodes, on the CPU."""
    cpu, made = torch.device("cpu"), dict[fx.Node, Any]()
    for node in graph.nodes:
        if node in nodes and node in given:
            made[node] = given[node].to(cpu)
        elif node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
            args, kwargs = map_aggregate((args, kwargs), lambda a: cpu if isinstance(a, torch.device) else a)
            made[node] = node.target(*args, **kwargs)
    return made
