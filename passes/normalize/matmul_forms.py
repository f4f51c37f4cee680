"""Rewrites of matrix products with few operators: `linear`, `matmul`, and `einsum` of two operands."""

from __future__ import annotations

import math

import torch
from torch import fx

from autopart.ir.facts import facts
from autopart.ir.graph import (
    argument,
    is_sparse,
    is_tensor,
    operator_name,
    shape,
    short_name,
    value,
)
from autopart.ir.subgraphs import ancestors_of
from autopart.passes.pass_pipeline import on_calls
from autopart.passes.rewriting import emit, replace
from autopart.passes.rules.operators.einsum_rules import read_equation

aten = torch.ops.aten


_PRODUCTS = {"addmm": "mm", "baddbmm": "bmm", "addbmm": "bmm", "addmv": "matmul", "mv": "matmul", "dot": "matmul"}
_CONVOLUTIONS = {"convolution", *(f"conv{n}d" for n in (1, 2, 3)), *(f"conv_transpose{n}d" for n in (1, 2, 3))}


@on_calls("aten::bilinear", "aten::mm", "aten::matmul", *(f"aten::{name}" for name in _PRODUCTS))
def plain_products(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite products with a scaled sum (`beta * bias + alpha * product`) as separate products and sums.

    `mv` and `dot` become `matmul`, `bilinear` becomes an `einsum`, and a product with a sparse matrix becomes
    `_sparse_mm`. An `addmm` whose `alpha` and `beta` are 1 is left to `one_linear`.
    """
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
        if not _can_have_gradient(bias):
            return product
        never = emit(graph, node, aten.full.default, [], False, dtype=torch.bool, device=value(bias).device)
        return emit(graph, node, aten.where.self, never, bias, product)  # with beta=0, the gradient of the bias is zero
    scaled = bias if beta == 1 else emit(graph, node, aten.mul.Tensor, bias, beta)
    return emit(graph, node, aten.add.Tensor, product, scaled)


def _can_have_gradient(node: fx.Node) -> bool:
    """Return True if a value depends on a parameter or on an input that needs a gradient."""
    return any(facts(one).get("parameter") or facts(one).get("input_grad") for one in ancestors_of([node]))


def _bilinear(graph: fx.Graph, node: fx.Node) -> fx.Node:
    left, right, weight, *bias = node.args
    rows = "abcdefgh"[: len(shape(left)) - 1]
    half = emit(graph, node, aten.einsum.default, f"{rows}i,oij->{rows}oj", [left, weight])
    product = emit(graph, node, aten.einsum.default, f"{rows}oj,{rows}j->{rows}o", [half, right])
    return emit(graph, node, aten.add.Tensor, product, bias[0]) if bias and bias[0] is not None else product


def one_linear(graph: fx.Graph) -> None:
    """Rewrite `addmm` and `mm` as `linear`, and biases of products and convolutions as a separate `add`.

    If the operand is a view that merges `(batch sequence)`, the `linear` uses the unmerged tensor, so that the
    sequence stays a separate dim. The bias is separate because it must be added after the partial sums of all ranks are
    reduced.
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
            elif name in _CONVOLUTIONS and len(node.args) > 2 and isinstance(node.args[2], fx.Node):
                product = emit(graph, node, node.target, *node.args[:2], None, *node.args[3:])
                ones = [1] * (len(shape(node.args[1])) - 2)
                bias = emit(graph, node, aten.reshape.default, node.args[2], [shape(node.args[2])[0], *ones])
                replace(node, emit(graph, node, aten.add.Tensor, product, bias))


@on_calls("aten::add")
def fuse_bias(graph: fx.Graph, node: fx.Node) -> None:
    """Fuse the addition of a bias into the `linear` before it, in a stage graph.

    A bias that is added after a collective stays separate.
    """
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
    """Return True if a node of a stage graph is a parameter, or a cast or an all-gather of one."""
    reads = operator_name(node) in ("autopart::cast", "autopart::all_gather", "autopart::all_gather_sum")
    return node.op == "get_attr" or (reads and node.args[0].op == "get_attr")


@on_calls("aten::einsum")
def pairs_of_factors(graph: fx.Graph, node: fx.Node) -> None:
    """Split an `einsum` of three or more operands into a chain of einsums of two, in torch's order."""
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
    """Return the input `x` of a view `x.view(-1, x.shape[-1])`, which merges all dims but the last.

    None for any other node.
    """
    if node.op != "call_function" or operator_name(node) != "aten::reshape":
        return None
    source = node.args[0]
    merges = shape(node) == (math.prod(shape(source)[:-1]), shape(source)[-1])
    return source if merges and len(shape(source)) > 2 else None
