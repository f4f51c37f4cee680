"""Rewrite a traced graph into few forms, so that one rule per operator is enough.

Every pass is a function of the graph, runs under `run_passes`, and keeps what the graph computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopart.errors import AutopartError, TraceError
from autopart.graph import (
    describe,
    draws_random_numbers,
    dropout_probability,
    is_floating,
    is_tensor,
    operator_name,
    shape,
    short_name,
    value,
)

from .rules.tables import LOSS_REDUCTIONS

aten = torch.ops.aten
NONE, MEAN = 0, 1


class PassError(AutopartError):
    """A graph pass failed: its name, the node and the user's source line."""


def run_passes(graph: fx.Graph, passes: tuple[Callable[[fx.Graph], None], ...]) -> None:
    """Run graph passes in order; after each, dead code goes and the graph is checked."""
    for rewrite in passes:
        try:
            rewrite(graph)
            graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
            graph.lint()
        except AutopartError:
            raise
        except Exception as error:
            raise PassError(f"pass '{rewrite.__name__}' failed", why=f"{type(error).__name__}: {error}") from error


def emit(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call before the insertion point, its meta from `like` and its value computed on fake tensors."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k in ("nn_module_stack", "stack_trace")}
    node.meta["val"] = _fake_call(target, args, kwargs, node.all_input_nodes)
    return node


def _fake_call(target: Any, args: Any, kwargs: Any, inputs: list[fx.Node]) -> Any:
    """What a call gives on fake tensors."""
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), value)
    mode = next((value(n).fake_mode for n in inputs if hasattr(value(n), "fake_mode")), None)
    with mode if mode is not None else torch.device("meta"):
        return target(*fake_args, **fake_kwargs)


def replace(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


_TRANSPARENT = {
    "aten::alias", "aten::contiguous", "aten::clone", "aten::lift_fresh_copy", "aten::_assert_tensor_metadata",
    "aten::to", "aten::_to_copy", "aten::reshape", "aten::expand", "aten::slice", "aten::dropout",
    "aten::feature_dropout", "aten::detach",
}  # fmt: skip


def drop_no_ops(graph: fx.Graph) -> None:
    """Remove what changes neither values nor gradients: copies, casts to the same type, dropout that drops nothing."""
    for node in list(graph.nodes):
        name = operator_name(node) if node.op == "call_function" else ""
        if name not in _TRANSPARENT:
            continue
        if name == "aten::_assert_tensor_metadata":
            graph.erase_node(node)
            continue
        source = node.args[0]
        same = value(node).shape == value(source).shape and value(node).dtype == value(source).dtype
        if "dropout" in name:
            same = node.args[1] == 0 or not node.args[2]
        if name == "aten::detach":
            same = not is_floating(node) or _from_inputs_alone(source)
        if same:
            replace(node, source)


def _from_inputs_alone(node: fx.Node) -> bool:
    """Whether a detach here is a no-op because no parameter is upstream (a short walk; False when in doubt)."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo and len(seen) < 64:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.op == "get_attr" and value(current).requires_grad:
            return False
        todo.extend(current.all_input_nodes)
    return not todo


def positional_arguments(graph: fx.Graph) -> None:
    """Arguments given by name move to their position where the operator has one, so that all passes find them there."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not node.kwargs:
            continue
        args, kwargs = list(node.args), dict(node.kwargs)
        positional = [argument for argument in schema.arguments if not argument.kwarg_only]
        last = max((i for i, argument in enumerate(positional) if argument.name in kwargs), default=-1)
        for argument in positional[len(args) : last + 1]:
            args.append(kwargs.pop(argument.name, argument.default_value))
        node.args, node.kwargs = tuple(args), kwargs


def plain_copies(graph: fx.Graph) -> None:
    """`copy(a, b)`, which a write in place through a view becomes, is `b` in the shape and dtype of `a`; `view_as` and
    `expand_as` name the shape they mean."""
    for node in list(graph.nodes):
        name = operator_name(node) if node.op == "call_function" else ""
        if name not in ("aten::copy", "aten::expand_as", "aten::view_as", "aten::reshape_as"):
            continue
        source = node.args[1] if name == "aten::copy" else node.args[0]
        reshapes = name in ("aten::view_as", "aten::reshape_as")
        with graph.inserting_before(node):
            if value(source).dtype != value(node).dtype:
                source = emit(graph, node, aten.to.dtype, source, value(node).dtype)
            if shape(source) != shape(node):
                target = aten.reshape.default if reshapes else aten.expand.default
                source = emit(graph, node, target, source, list(shape(node)))
            replace(node, source)


def one_reshape(graph: fx.Graph) -> None:
    """Every view that merges or splits dims becomes `reshape` with its full shape (a shard may not be viewable)."""
    for node in list(graph.nodes):
        if node.op == "call_function" and operator_name(node) in _VIEWS:
            with graph.inserting_before(node):
                replace(node, emit(graph, node, aten.reshape.default, node.args[0], list(shape(node))))


_VIEWS = {"aten::view", "aten::reshape", "aten::_unsafe_view", "aten::flatten", "aten::unflatten"}


def plain_broadcasts(graph: fx.Graph) -> None:
    """`broadcast_tensors` (in losses) becomes an `expand` of what is not of the full shape already."""
    for node in list(graph.nodes):
        if node.op == "call_function" and operator_name(node) == "aten::broadcast_tensors":
            for part in list(node.users):
                source = node.args[0][part.args[1]]
                with graph.inserting_before(part):
                    same = shape(source) == shape(part)
                    replace(part, source if same else emit(graph, part, aten.expand.default, source, list(shape(part))))


def one_split(graph: fx.Graph) -> None:
    """`split`, `chunk` and runs of slices that tile a dim all become `split_with_sizes`."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = operator_name(node)
        if name in ("aten::split", "aten::chunk"):
            dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
            dim %= len(shape(node.args[0]))
            sizes = [t.shape[dim] for t in value(node)]
            with graph.inserting_before(node):
                replace(node, emit(graph, node, aten.split_with_sizes.default, node.args[0], sizes, dim))
        else:
            _join_slices(graph, node)


def _join_slices(graph: fx.Graph, node: fx.Node) -> None:
    slices: dict[int, list[tuple[int, int, fx.Node]]] = {}
    for user in node.users:
        if (
            user.op == "call_function"
            and operator_name(user) == "aten::slice"
            and len(user.args) <= 4
            and value(user).numel()
        ):
            dim = user.args[1] % len(shape(node)) if len(user.args) > 1 else 0
            start = (user.args[2] if len(user.args) > 2 else 0) or 0
            start += shape(node)[dim] if start < 0 else 0
            slices.setdefault(dim, []).append((start, start + shape(user)[dim], user))
    for dim, pieces in slices.items():
        pieces.sort(key=lambda piece: piece[:2])
        ends = [0, *(end for _, end, _ in pieces)]
        if len(pieces) < 2 or [start for start, _, _ in pieces] != ends[:-1] or ends[-1] != shape(node)[dim]:
            continue
        first = min((user for _, _, user in pieces), key=list(graph.nodes).index)
        with graph.inserting_before(first):
            whole = emit(graph, first, aten.split_with_sizes.default, node, [e - s for s, e, _ in pieces], dim)
            parts = [_getitem(graph, whole, i) for i in range(len(pieces))]
        for part, (_, _, user) in zip(parts, pieces, strict=True):
            replace(user, part)


def _getitem(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    import operator

    part = graph.call_function(operator.getitem, (node, index))
    part.meta = {**node.meta, "val": value(node)[index]}
    return part


def one_linear(graph: fx.Graph) -> None:
    """`addmm` and `mm` between two views become an n-d `linear`; the bias of `linear` and `conv` becomes an `add`.

    A merged `(batch sequence)` dim would hide the sequence, and a bias may be added only after a partial sum is whole.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = operator_name(node)
        with graph.inserting_before(node):
            if name in ("aten::addmm", "aten::mm") and not node.kwargs:
                _matrix_product(graph, node, name)
            elif name == "aten::linear" and len(node.args) > 2 and node.args[2] is not None:
                product = emit(graph, node, aten.linear.default, *node.args[:2])
                replace(node, emit(graph, node, aten.add.Tensor, product, node.args[2]))
            elif name in ("aten::conv1d", "aten::conv2d") and len(node.args) > 2 and node.args[2] is not None:
                product = emit(graph, node, node.target, *node.args[:2], None, *node.args[3:])
                ones = [1] * (len(shape(node)) - 2)
                bias = emit(graph, node, aten.reshape.default, node.args[2], [shape(node.args[2])[0], *ones])
                replace(node, emit(graph, node, aten.add.Tensor, product, bias))


def _matrix_product(graph: fx.Graph, node: fx.Node, name: str) -> None:
    *bias, left, right = node.args
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


def explicit_attention_dropout(graph: fx.Graph) -> None:
    """Attention that drops weights becomes its formula, so that dropout is an operator of its own.

    The first new operator keeps the attention's name, so that a pipeline cut there is found in eval mode too.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or operator_name(node) != "aten::scaled_dot_product_attention":
            continue
        if dropout_probability(node):
            before = node.prev
            with graph.inserting_before(node):
                result = _attention_formula(graph, node)
            while before.next is not node:
                before = before.next
                named = before.prev.meta.get("named") if before.prev.op == "call_function" else None
                before.meta["named"] = "attention_dropout" if named else short_name(node)
            replace(node, result)


def _attention_formula(graph: fx.Graph, node: fx.Node) -> fx.Node:
    query, key, val, *rest = node.args
    options = dict(zip(("attn_mask", "dropout_p", "is_causal"), rest, strict=False)) | node.kwargs
    groups = shape(query)[-3] // shape(key)[-3] if options.get("enable_gqa") else 1
    if groups > 1:
        key, val = (_repeat_heads(graph, node, heads, groups) for heads in (key, val))
    scores = emit(graph, node, aten.matmul.default, query, emit(graph, node, aten.transpose.int, key, -2, -1))
    scores = emit(graph, node, aten.mul.Tensor, scores, options.get("scale") or shape(query)[-1] ** -0.5)
    mask = options.get("attn_mask")
    if options.get("is_causal"):
        size, device = list(shape(scores)[-2:]), value(query).device
        mask = emit(
            graph, node, aten.tril.default, emit(graph, node, aten.ones.default, size, dtype=torch.bool, device=device)
        )
    if mask is not None and value(mask).dtype == torch.bool:
        scores = emit(graph, node, aten.where.ScalarOther, mask, scores, -math.inf)
    elif mask is not None:
        scores = emit(graph, node, aten.add.Tensor, scores, mask)
    weights = emit(graph, node, aten.softmax.int, scores, -1)
    dropped = emit(graph, node, aten.dropout.default, weights, dropout_probability(node), True)
    return emit(graph, node, aten.matmul.default, dropped, val)


def _repeat_heads(graph: fx.Graph, like: fx.Node, heads: fx.Node, times: int) -> fx.Node:
    batch, groups, *rest = shape(heads)
    wide = emit(
        graph,
        like,
        aten.expand.default,
        emit(graph, like, aten.unsqueeze.default, heads, 2),
        [batch, groups, times, *rest],
    )
    return emit(graph, like, aten.reshape.default, wide, [batch, groups * times, *rest])


def only_dropout_is_random(graph: fx.Graph) -> None:
    """Raises TraceError where the model draws random numbers other than by dropout: ranks would draw different ones."""
    for node in graph.nodes:
        if node.op == "call_function" and draws_random_numbers(node) and operator_name(node) != "aten::dropout":
            raise TraceError(
                f"{short_name(node)} draws random numbers", 
                why="only dropout is kept the same over ranks; other draws are not built yet",
                where=describe(node), hint="draw them outside the model and pass them in",
            )  # fmt: skip


def explicit_reductions(graph: fx.Graph) -> None:
    """The mean of a loss becomes a sum over the count of all labels that are not ignored.

    The count depends on the inputs alone, so it is known for the whole batch on every rank: the loss stays the mean
    over ALL tokens, however they fall over microbatches and ranks.
    """
    for node in list(graph.nodes):
        position = LOSS_REDUCTIONS.get(operator_name(node)) if node.op == "call_function" else None
        if position is None:
            continue
        args, kwargs = list(node.args), dict(node.kwargs)
        names = [argument.name for argument in node.target._schema.arguments]
        reduction = args[position] if len(args) > position else kwargs.pop("reduction", MEAN)
        labels = operator_name(node) in ("aten::cross_entropy_loss", "aten::nll_loss_nd")
        weight = args[2] if len(args) > 2 else kwargs.get("weight")
        if reduction == NONE or (labels and (weight is not None or is_floating(node.args[1]))):
            continue
        defaults = [argument.default_value for argument in node.target._schema.arguments]
        args += [kwargs.pop(names[i], defaults[i]) for i in range(len(args), position)]
        args = [*args[:position], NONE, *args[position + 1 :]]
        with graph.inserting_before(node):
            each = emit(graph, node, node.target, *args, **kwargs)
            total = emit(graph, node, aten.sum.default, each)
            if reduction == MEAN:
                count: Any = value(each).numel()
                if labels:
                    ignored = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
                    count = emit(graph, node, aten.sum.default, emit(graph, node, aten.ne.Scalar, args[1], ignored))
                total = emit(graph, node, aten.div.Tensor, total, count)
            replace(node, total)


def whole_means(graph: fx.Graph) -> None:
    """`mean()` over everything becomes a sum over a constant, so that it can be a partial sum of unequal parts."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.mean.default:
            with graph.inserting_before(node):
                total = emit(graph, node, aten.sum.default, node.args[0])
                replace(node, emit(graph, node, aten.div.Tensor, total, value(node.args[0]).numel()))


_LOWER = (torch.float32, torch.float16, torch.bfloat16)


def in_double(graph: fx.Graph) -> bool:
    """Let a float64 model compute in float64 throughout: casts of floating values to a lower precision (losses and
    norms that work in float32) keep float64. Returns whether there were any."""
    changed = False
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if any(is_floating(n) and value(n).dtype == torch.float64 for n in node.all_input_nodes):
            args = fx.node.map_aggregate(node.args, _doubled)
            kwargs = fx.node.map_aggregate(node.kwargs, _doubled)
            changed |= args != node.args or kwargs != node.kwargs
            node.args, node.kwargs = args, kwargs
        if changed:
            node.meta["val"] = _fake_call(node.target, node.args, node.kwargs, node.all_input_nodes)
    return changed


def _doubled(argument: Any) -> Any:
    return torch.float64 if argument in _LOWER and isinstance(argument, torch.dtype) else argument


NORMALIZE = (
    positional_arguments,
    one_reshape,
    plain_copies,
    drop_no_ops,
    plain_broadcasts,
    one_split,
    explicit_attention_dropout,
    only_dropout_is_random,
    one_linear,
    explicit_reductions,
    whole_means,
    drop_no_ops,
)
