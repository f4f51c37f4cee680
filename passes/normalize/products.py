"""Matrix products and attention in one form each."""

from __future__ import annotations

import math

import torch
from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import (
    argument,
    dropout_probability,
    is_sparse,
    is_tensor,
    operator_name,
    shape,
    short_name,
    value,
)
from autopart.passes.pipeline import on_calls
from autopart.passes.rules.equations import read_equation

from .new_calls import emit, name_written_out, repeat_each, replace
from .random import drop, noise_like

aten = torch.ops.aten


_PRODUCTS = {"addmm": "mm", "baddbmm": "bmm", "addbmm": "bmm", "addmv": "matmul", "mv": "matmul", "dot": "matmul"}


@on_calls("aten::bilinear", "aten::mm", "aten::matmul", *(f"aten::{name}" for name in _PRODUCTS))
def plain_products(graph: fx.Graph, node: fx.Node) -> None:
    """`beta * bias + alpha * product` in one call becomes its parts; `mv` and `dot` become `matmul`, `bilinear` an
    `einsum`, a product of a sparse matrix `_sparse_mm`. A plain `addmm` is left to `one_linear`."""
    name = short_name(node)
    with graph.inserting_before(node):
        if name in ("mm", "matmul"):
            if _is_sparse_product(node):
                replace(node, emit(graph, node, aten._sparse_mm.default, *node.args))
        elif name == "bilinear":
            replace(node, _bilinear(graph, node))
        elif name in ("mv", "dot"):
            replace(node, emit(graph, node, aten.matmul.default, *node.args))
        elif name != "addmm" or is_sparse(node.args[1]) or argument(node, "beta") != 1 or argument(node, "alpha") != 1:
            replace(node, _scaled_sum(graph, node, name))


def _is_sparse_product(node: fx.Node) -> bool:
    """Whether a call multiplies a sparse matrix by a matrix that is not."""
    left, right = node.args
    return is_sparse(left) and not is_sparse(right) and len(shape(left)) == len(shape(right)) == 2


def _scaled_sum(graph: fx.Graph, node: fx.Node, name: str) -> fx.Node:
    bias, *factors = node.args
    beta, alpha = argument(node, "beta"), argument(node, "alpha")
    target = aten._sparse_mm if is_sparse(factors[0]) else getattr(aten, _PRODUCTS[name])
    product = emit(graph, node, target.default, *factors)
    if name == "addbmm":
        product = emit(graph, node, aten.sum.dim_IntList, product, [0])
    if alpha != 1:
        product = emit(graph, node, aten.mul.Tensor, product, alpha)
    if beta == 0:
        return product
    scaled = bias if beta == 1 else emit(graph, node, aten.mul.Tensor, bias, beta)
    return emit(graph, node, aten.add.Tensor, product, scaled)


def _bilinear(graph: fx.Graph, node: fx.Node) -> fx.Node:
    left, right, weight, *bias = node.args
    rows = "abcdefgh"[: len(shape(left)) - 1]
    half = emit(graph, node, aten.einsum.default, f"{rows}i,oij->{rows}oj", [left, weight])
    product = emit(graph, node, aten.einsum.default, f"{rows}oj,{rows}j->{rows}o", [half, right])
    return emit(graph, node, aten.add.Tensor, product, bias[0]) if bias and bias[0] is not None else product


def one_linear(graph: fx.Graph) -> None:
    """`addmm` and `mm` between two views become an n-d `linear`; biases of `linear` and convolutions become an `add`.

    A merged `(batch sequence)` dim would hide the sequence, and a bias may be added only after a partial sum is whole.
    """
    for node in list(graph.nodes):
        name = short_name(node) if node.op == "call_function" else ""
        with graph.inserting_before(node):
            if name == "mm" and not any(is_sparse(n) for n in node.args):
                _matrix_product(graph, node, *node.args)
            elif name == "addmm":
                _matrix_product(graph, node, *node.args[1:], node.args[0])
            elif name == "linear" and len(node.args) > 2 and node.args[2] is not None:
                product = emit(graph, node, aten.linear.default, *node.args[:2])
                replace(node, emit(graph, node, aten.add.Tensor, product, node.args[2]))
            elif name.startswith("conv") and len(node.args) > 2 and isinstance(node.args[2], fx.Node):
                product = emit(graph, node, node.target, *node.args[:2], None, *node.args[3:])
                ones = [1] * (len(shape(node.args[1])) - 2)
                bias = emit(graph, node, aten.reshape.default, node.args[2], [shape(node.args[2])[0], *ones])
                replace(node, emit(graph, node, aten.add.Tensor, product, bias))


@on_calls("aten::add")
def fuse_bias(graph: fx.Graph, node: fx.Node) -> None:
    """What `one_linear` took apart is put together again in a stage graph, where no collective came between."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return
    product, bias = node.args
    fits = (
        isinstance(product, fx.Node) and isinstance(bias, fx.Node)
        and product.target is aten.linear.default
        and len(product.users) == 1 and len(product.args) == 2 and _is_parameter(bias)
        and value(bias).dim() == 1 and value(bias).shape[0] == value(product).shape[-1]
    )  # fmt: skip
    if fits:
        with graph.inserting_before(node):
            fused = graph.call_function(aten.linear.default, (*product.args, bias))
        fused.meta = {**product.meta, **node.meta}
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
        graph.erase_node(product)


def _is_parameter(node: fx.Node) -> bool:
    """Whether a node of a stage graph reads a parameter, gathers one where it is stored in parts, or casts one."""
    reads = operator_name(node) in ("autopart::cast", "autopart::all_gather", "autopart::all_gather_sum")
    return node.op == "get_attr" or (reads and node.args[0].op == "get_attr")


@on_calls("aten::einsum")
def pairs_of_factors(graph: fx.Graph, node: fx.Node) -> None:
    """An `einsum` of more than two operands becomes a chain of two each, from the left as torch itself computes it."""
    if len(node.args[1]) < 3:
        return
    terms, result = read_equation(node.args[0], [len(shape(n)) for n in node.args[1]])
    if any("..." in letter for term in terms for letter in term):
        return
    product, letters = node.args[1][0], terms[0]
    with graph.inserting_before(node):
        for i, (operand, term) in enumerate(zip(node.args[1][1:], terms[1:], strict=True), start=2):
            later = {letter for rest in terms[i:] for letter in rest} | set(result)
            kept = result if i == len(terms) else [c for c in dict.fromkeys(letters + term) if c in later]
            equation = f"{''.join(letters)},{''.join(term)}->{''.join(kept)}"
            product, letters = emit(graph, node, aten.einsum.default, equation, [product, operand]), kept
        replace(node, product)


def _matrix_product(graph: fx.Graph, node: fx.Node, left: fx.Node, right: fx.Node, *bias: fx.Node) -> None:
    merged = _unmerged(left)
    weight = emit(graph, node, aten.t.default, right)
    product = emit(graph, node, aten.linear.default, merged if merged is not None else left, weight)
    if bias:
        product = emit(graph, node, aten.add.Tensor, product, bias[0])
    for user in list(node.users):
        same = is_tensor(user) and user.op == "call_function" and operator_name(user) == "aten::reshape"
        if merged is not None and same and shape(user) == shape(product):
            replace(user, product)
    if node.users and merged is not None:
        product = emit(graph, node, aten.reshape.default, product, list(shape(node)))
    replace(node, product)


def _unmerged(node: fx.Node) -> fx.Node | None:
    """The value behind a view that only merges leading dims: `x` for `x.view(-1, x.shape[-1])`."""
    if node.op != "call_function" or operator_name(node) != "aten::reshape":
        return None
    source = node.args[0]
    merges = shape(node) == (math.prod(shape(source)[:-1]), shape(source)[-1])
    return source if merges and len(shape(source)) > 2 else None


@on_calls("aten::scaled_dot_product_attention")
def explicit_attention_dropout(graph: fx.Graph, node: fx.Node) -> None:
    """Attention that drops weights becomes its formula, so that dropout is an operator of its own.

    The first new operator keeps the attention's name, so that a pipeline cut there is found in eval mode too.
    """
    if dropout_probability(node):
        before = node.prev
        with graph.inserting_before(node):
            result = _attention_formula(graph, node)
        name_written_out(node, before, "attention_dropout")
        replace(node, result)


@on_calls("aten::scaled_dot_product_attention")
def explicit_causal_masks(graph: fx.Graph, node: fx.Node) -> None:
    """Causal attention is attention with a mask, as all is: what its kernel does with it is decided where it runs, by
    the queries that are there (`ir/masks.py`)."""
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
    facts(noise)["inexact_on_gpu"] = (
        "the fused attention kernels of a GPU draw their masks inside, in an order of their own"
    )
    return emit(graph, node, aten.matmul.default, drop(graph, node, weights, noise, p), val)
