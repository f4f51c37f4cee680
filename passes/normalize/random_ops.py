"""Rewrites of random operators, so that they do not depend on values that the model computes.

A random operator can then run for the global batch, in the model's order and with the model's generator. The numbers
that it generates depend on operator, shape, dtype and memory layout, so the rewrites keep all four.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx

from autopart.errors import Refusal, TraceError
from autopart.ir.facts import facts
from autopart.ir.graph import argument, describe, draws_random_numbers, operator_name, reads, short_name, value
from autopart.ir.selection import is_data_dependent
from autopart.ops.operators import autopart_ops
from autopart.passes.rewriting import emit, getitem, replace, replace_parts

aten = torch.ops.aten

_SHAPE_ALONE = frozenset(
    f"aten::{name}"
    for name in (
        "rand_like", "randn_like", "randint_like", "uniform", "normal_functional", "exponential", "geometric", "cauchy",
        "log_normal", "random",
    )
)  # fmt: skip
"""Random operators that use only the shape, dtype and memory layout of their first argument.

`bernoulli` with a number `p` is another such operator.
"""


def draws_as_data(graph: fx.Graph) -> None:
    """Make every random operator independent of values that the model computes.

    An operator that uses only a tensor's shape gets an empty tensor instead. If values of the model scale or shift an
    operator's distribution, the operator becomes a standard random operator followed by arithmetic.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not draws_random_numbers(node) or facts(node).get("reads_no_value"):
            continue
        name = operator_name(node)
        if is_data_dependent(node) and "dropout" not in name:
            raise TraceError(
                f"{short_name(node)} draws as many random numbers as there are selected elements",
                refusal=Refusal.RANDOM,
                why="their number depends on tensor values, and ranks must draw the same random numbers",
                where=describe(node), hint="draw for all elements, then select",
            )  # fmt: skip
        with graph.inserting_before(node):
            if name in _SHAPE_ALONE or node.target is aten.bernoulli.p:
                node.args = (template(graph, node, value(node.args[0])), *node.args[1:])
            elif node.target in _FORMULAS:
                result = _FORMULAS[node.target](graph, node)
                if result is not None:
                    replace(node, result)


def template(graph: fx.Graph, like: fx.Node, of: Tensor, **options: Any) -> fx.Node:
    """Emit an uninitialized tensor with the metadata of `empty_like(of, **options)`. Return its node.

    `like`: the node from which the new node copies its module and source line.
    """
    empty = torch.empty_like(of, **options)
    empty_node = emit(
        graph, like, aten.empty_strided.default, list(empty.shape), _stride(empty), dtype=empty.dtype,
        device=empty.device,
    )  # fmt: skip
    facts(empty_node)["named"] = "template"
    return empty_node


def _stride(empty: Tensor) -> list[int]:
    return list(empty.stride())


def drop(graph: fx.Graph, like: fx.Node, source: fx.Node, noise: fx.Node, p: float) -> fx.Node:
    """Emit the product of `source` and dropout noise, named "dropout" in plans. Return its node."""
    dropped = emit(graph, like, autopart_ops.drop.default, source, noise, p)
    facts(dropped)["named"] = "dropout"
    return dropped


def noise_like(graph: fx.Graph, like: fx.Node, of: Tensor, p: float) -> fx.Node:
    """Emit dropout noise with the metadata of `of`: each element is 0 or 1 / (1 - p). Return its node.

    To get the noise, the node applies dropout to a tensor of ones.
    """
    noise = emit(graph, like, aten.dropout.default, _ones(graph, like, of), p, True)
    noise.meta.update(named="noise", reads_no_value=True)
    if is_data_dependent(like):
        facts(noise)["inexact"] = "how many numbers it draws depends on how many elements are selected"
    return noise


def _ones(graph: fx.Graph, like: fx.Node, of: Tensor) -> fx.Node:
    ones = emit(graph, like, aten.ones_like.default, template(graph, like, of))
    facts(ones)["named"] = "template"
    return ones


def _dropout(graph: fx.Graph, node: fx.Node) -> fx.Node:
    p = argument(node, "p")
    return drop(graph, node, node.args[0], noise_like(graph, node, value(node.args[0]), p), p)


def _native_dropout(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite `native_dropout` as a product with dropout noise.

    If the user's code also uses the mask, `native_dropout` of a tensor of ones gives both noise and mask.
    """
    source, p = node.args[0], argument(node, "p")
    read, results = {user.args[1]: bool(user.users) for user in node.users}, dict[int, fx.Node]()
    if read.get(1):
        pair = emit(graph, node, node.target, _ones(graph, node, value(source)), p, True)
        noise, results[1] = getitem(graph, pair, 0), getitem(graph, pair, 1)
    else:
        noise = noise_like(graph, node, value(source), p)
    if 0 in read:
        results[0] = drop(graph, node, source, noise, p)
    replace_parts(node, results)


def _bernoulli(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Rewrite `bernoulli(p)`, if `p` depends on a trained parameter, as `uniform < p`.

    On the CPU torch computes the same comparison. On a GPU it draws the uniform numbers in another order.
    """
    probability = node.args[-1] if len(node.args) > 1 else node.args[0]
    if _from_inputs_alone(probability):
        return None
    wide = value(probability).dtype == torch.float64
    options: dict[str, Any] = {"dtype": torch.float64 if wide else torch.float32}
    if len(node.args) == 1:
        options["memory_format"] = torch.contiguous_format
    uniform = emit(graph, node, aten.rand_like.default, template(graph, node, value(node.args[0]), **options))
    facts(uniform)["inexact_on_gpu"] = (
        "the model computes the probabilities, and a GPU then draws the random numbers in another order"
    )
    heads = emit(graph, node, aten.lt.Tensor, uniform, _constant(graph, node, probability))
    return emit(graph, node, aten.to.dtype, heads, value(node).dtype)


def _from_inputs_alone(node: fx.Node) -> bool:
    made_of = {node, *nx.descendants(reads(node.graph), node)}
    return not any(n.op == "get_attr" and value(n).requires_grad for n in made_of)


def _normal(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Rewrite `normal(mean, std)` as `mean + std * z`, in torch's own order of operations.

    As in torch, `mean` and `std` get no gradient.
    """
    mean, std = argument(node, "mean"), argument(node, "std")
    scales = isinstance(std, fx.Node)
    like = template(graph, node, value(node), memory_format=torch.contiguous_format)
    drawn = emit(graph, node, aten.normal_functional.default, like, 0.0, 1.0 if scales else std)
    if scales:
        drawn = emit(graph, node, aten.mul.Tensor, drawn, _constant(graph, node, std))
    if isinstance(mean, fx.Node):
        return emit(graph, node, aten.add.Tensor, drawn, _constant(graph, node, mean))
    return emit(graph, node, aten.add.Tensor, drawn, mean)


def _multinomial(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Rewrite sampling without replacement as the top k of probabilities divided by exponential numbers."""
    weights, number = node.args[0], argument(node, "num_samples")
    if number > 1 and argument(node, "replacement"):
        return None
    noise = emit(graph, node, aten.exponential.default, template(graph, node, value(weights)))
    scores = emit(graph, node, aten.div.Tensor, _constant(graph, node, weights), noise)
    if number == 1:
        return emit(graph, node, aten.argmax.default, scores, -1, True)
    return getitem(graph, emit(graph, node, aten.topk.default, scores, number), 1)


def _rrelu(graph: fx.Graph, node: fx.Node) -> fx.Node:
    source = node.args[0]
    lower, upper = argument(node, "lower"), argument(node, "upper")
    slope = emit(graph, node, aten.uniform.default, template(graph, node, value(source)), lower, upper)
    facts(slope)["inexact"] = (
        "torch draws slopes only for inputs that are not positive, so the number of draws depends on the values"
    )
    leaks = emit(graph, node, aten.mul.Tensor, source, slope)
    return emit(graph, node, aten.where.self, emit(graph, node, aten.gt.Scalar, source, 0), source, leaks)


def _constant(graph: fx.Graph, like: fx.Node, node: fx.Node) -> fx.Node:
    return emit(graph, like, aten.detach.default, node)


_FORMULAS: dict[Any, Callable[[fx.Graph, fx.Node], fx.Node | None]] = {
    aten.dropout.default: _dropout,
    aten.native_dropout.default: _native_dropout,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.multinomial.default: _multinomial,
    aten.rrelu.default: _rrelu,
}
