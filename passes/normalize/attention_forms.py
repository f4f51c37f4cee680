"""Attention with dropout: decomposed for planning, and fused again in stage graphs.

With `rng="exact"` the stage's prologue (a graph that runs before the first microbatch) draws the dropout mask, which is
an input of the decomposed attention. With `rng="fast"` each rank draws its own mask. A stage graph then has the fused
operator `autopart.ops.attention_dropout`, whose kernel draws the mask.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import argument, dropout_probability, shape, value
from autopart.ops.operators import autopart_ops
from autopart.passes.normalize.random_ops import drop, noise_like
from autopart.passes.pass_pipeline import on_calls
from autopart.passes.rewriting import emit, name_replacement_calls, repeat_each, replace
from autopart.passes.rules import rule_of

aten = torch.ops.aten


@on_calls("aten::scaled_dot_product_attention")
def explicit_attention_dropout(graph: fx.Graph, node: fx.Node) -> None:
    """Decompose attention with dropout into products, softmax and a separate dropout.

    The first new operator gets the name of the attention, so that a stage boundary with this name exists in eval mode
    too.
    """
    if dropout_probability(node):
        before = node.prev
        with graph.inserting_before(node):
            result = _attention_formula(graph, node)
        name_replacement_calls(node, before, "attention_dropout")
        if len(shape(node)) == 4:  # in other cases, torch's kernels save the attention weights
            _mark(before, node)
        replace(node, result)


def _mark(before: fx.Node, node: fx.Node) -> None:
    while (before := before.next) is not node:
        facts(before)["attention"] = node.name


class _AttentionFormula(NamedTuple):
    """The operands of a decomposed attention, and its last call (`result`).

    `turned`: the transposed keys.
    """

    query: fx.Node
    turned: fx.Node
    value: fx.Node
    mask: fx.Node | None
    scale: float
    result: fx.Node


@on_calls("autopart::dropout")
def fuse_attention_dropout(graph: fx.Graph, node: fx.Node) -> None:
    """Fuse a decomposed attention with dropout into one operator, in a stage graph.

    `node`: the call of `autopart::dropout` in the attention, with which each rank draws its own mask.
    """
    formula = _formula_of(node)
    if formula is None:
        return
    query, turned, val, mask, scale, result = formula
    _, p, seed, salt, shard = node.args
    target = autopart_ops.attention_dropout.default
    with graph.inserting_before(result):
        key = _turned_back(graph, turned, result)
        arguments = (query, key, val, mask, p, seed, salt, shard)
        fused = graph.create_node("call_function", target, arguments, {"scale": scale}, name="attention_dropout")
    fused.meta = {**result.meta, "cost": rule_of(fused).cost}
    replace(result, fused)


def _formula_of(dropped: fx.Node) -> _AttentionFormula | None:
    """Return the decomposed attention that contains the dropout call `dropped`; None if there is none."""
    calls: dict[Any, fx.Node] = {}
    node: Any = dropped.args[0]
    for targets in _STEPS:
        if _is_of(node, dropped) and node.target in targets and len(node.users) == 1:
            calls |= dict.fromkeys(targets, node)
            node = node.args[1] if node.target is aten.where.ScalarOther else node.args[0]
        elif targets is not _MASKS:
            return None
    query, turned = calls[aten.matmul.default].args
    result = next(iter(dropped.users))
    if not (_is_of(result, dropped) and result.target is aten.matmul.default and len(dropped.users) == 1):
        return None
    val = result.args[1]
    rows = {shape(side)[:-2] for side in (query, turned, val)}
    if result.args[0] is not dropped or len(rows) > 1:
        return None
    masked, scale = calls.get(aten.add.Tensor), calls[aten.mul.Tensor].args[1]
    mask = None if masked is None else masked.args[0 if masked.target is aten.where.ScalarOther else 1]
    return _AttentionFormula(query, turned, val, mask, scale, result)


def _turned_back(graph: fx.Graph, turned: fx.Node, result: fx.Node) -> fx.Node:
    """Return the keys in the shape [..., sequence, head size], given the transposed keys `turned`."""
    if turned.target is aten.transpose.int and turned.args[1:] == (-2, -1):
        return turned.args[0]
    key = emit(graph, result, aten.transpose.int, turned, -2, -1)
    key.meta |= {name: known for name, known in turned.meta.items() if name in ("key", "block", "times", "needs_grad")}
    return key


_MASKS = (aten.where.ScalarOther, aten.add.Tensor)
_STEPS = ((aten.softmax.int,), _MASKS, (aten.mul.Tensor,), (aten.matmul.default,))
"""Calls of a decomposed attention before its dropout, last call first.

The mask (second item) may be missing.
"""


def _is_of(node: Any, dropped: fx.Node) -> bool:
    """Return True if `node` belongs to the decomposed attention whose dropout call is `dropped`."""
    attention = facts(dropped).get("attention")
    return isinstance(node, fx.Node) and attention is not None and facts(node).get("attention") == attention


@on_calls("aten::scaled_dot_product_attention")
def explicit_causal_masks(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite causal attention (`is_causal=True`) as attention with a mask tensor.

    At run time, `ops/stage_masks.py` decides whether kernels can skip the masked keys.
    """
    if not argument(node, "is_causal"):
        return
    with graph.inserting_before(node):
        sizes, device = [shape(side)[-2] for side in node.args[:2]], value(node).device
        query, key = (emit(graph, node, aten.arange.default, size, device=device) for size in sizes)
        others = [1] * (len(shape(node)) - 2)
        query = emit(graph, node, aten.reshape.default, query, [*others, sizes[0], 1])
        key = emit(graph, node, aten.reshape.default, key, [*others, 1, sizes[1]])
        mask = emit(graph, node, aten.le.Tensor, key, query)
        options = {name: argument(node, name) for name in ("dropout_p", "scale", "enable_gqa")}
        replace(node, emit(graph, node, node.target, *node.args[:3], mask, **options))


def _attention_formula(graph: fx.Graph, node: fx.Node) -> fx.Node:
    query, key, val = node.args[:3]
    groups = shape(query)[-3] // shape(key)[-3] if argument(node, "enable_gqa") else 1
    if groups > 1:
        key, val = (repeat_each(graph, node, heads, 1, groups) for heads in (key, val))
    scores = emit(graph, node, aten.matmul.default, query, emit(graph, node, aten.transpose.int, key, -2, -1))
    scores = emit(graph, node, aten.mul.Tensor, scores, argument(node, "scale") or shape(query)[-1] ** -0.5)
    mask = argument(node, "attn_mask")
    if argument(node, "is_causal"):
        size, device = list(shape(scores)[-2:]), value(query).device
        mask = emit(
            graph, node, aten.tril.default, emit(graph, node, aten.ones.default, size, dtype=torch.bool, device=device)
        )
    if mask is not None and value(mask).dtype == torch.bool:
        scores = emit(graph, node, aten.where.ScalarOther, mask, scores, -math.inf)
    elif mask is not None:
        scores = emit(graph, node, aten.add.Tensor, scores, mask)
    weights = emit(graph, node, aten.softmax.int, scores, -1)
    p = dropout_probability(node) or 0.0
    noise = noise_like(graph, node, value(weights), p)
    facts(noise)["inexact_on_gpu"] = "a GPU's fused attention kernel draws the dropout mask itself, in its own order"
    return emit(graph, node, aten.matmul.default, drop(graph, node, weights, noise, p), val)
