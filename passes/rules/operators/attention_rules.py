"""Local forms of ring attention (`ops/blockwise_attention.py`) and caches (`ops/key_value_cache.py`)."""

from __future__ import annotations

from torch import fx

from autopart.ir.decisions import is_ring_strategy
from autopart.ir.facts import facts
from autopart.ir.graph import argument, shape
from autopart.ops.operators import autopart_ops
from autopart.passes.rules.local_forms import LocalCall


def ring(call: LocalCall) -> fx.Node | None:
    """Emit ring attention if queries, keys and values are sharded equally along the sequence.

    Returns None otherwise. In each step of the ring, the local queries attend to the keys of one rank.
    """
    axis = next((axis for axis, strategy in call.strategies.items() if is_ring_strategy(call.node, strategy)), "")
    if not axis:
        return None
    query, key, value, *rest = call.args
    mask = call.kwargs.get("attn_mask", rest[0] if rest else None)
    sections = list(call.strategies[axis].inputs[0].sections)
    size, scale = shape(call.node.args[0])[-2], argument(call.node, "scale")
    return call.emit(autopart_ops.ring_attention.default, query, axis, key, value, mask, size, sections, scale)


def update_cache(call: LocalCall) -> fx.Node:
    """Emit a write to a key/value cache that has the operator's key (`layers.3.attn/...`) as its name.

    The name separates the caches of equal layers. The program for the prompt and the program for the next tokens use
    equal names, so both use one cache per layer.
    """
    return call.as_traced({2: facts(call.node)["key"]})
