"""Decomposition of operators that have no sharding rule into operators that have one."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from autopart.compat.torch_internals import decomposition, trace_function, tree_flatten, tree_unflatten
from autopart.ir.facts import facts
from autopart.ir.graph import is_tensor, value
from autopart.passes.rewriting import argument_key, emit, fake_mode, replace, replace_parts
from autopart.passes.rules import pattern_for
from autopart.passes.rules.call_keys import CallCache


def _safe_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Compute the softmax, with zeros in rows that are all -inf.

    It replaces torch's decomposition, which sets the zeros after the softmax, so that the gradient is NaN in these
    rows.
    """
    masked = (x == -math.inf).all(dim, keepdim=True)
    return torch.softmax(x.masked_fill(masked, 0.0), dim, dtype=dtype).masked_fill(masked, 0.0)


def _multilabel_margin_loss(
    logits: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the loss, and the mask of target classes.

    `reduction`: 0 returns the loss of each sample, 1 the mean, 2 the sum. This replaces torch's decomposition, which
    counts the entries of `target` after the first -1 as class 0.
    """
    rows, labels = torch.atleast_2d(logits), torch.atleast_2d(target)
    ended = (labels == -1).cumsum(-1)
    labels = torch.where(ended == 0, labels, 0)
    is_label = ended.unsqueeze(2) == 0
    classes = torch.arange(rows.shape[1], device=rows.device)
    is_target = (is_label & (labels.unsqueeze(2) == classes)).any(1, keepdim=True)
    margins = torch.relu(1 - rows.gather(1, labels).unsqueeze(2) + rows.unsqueeze(1))
    loss = torch.where(is_label & ~is_target, margins, 0).sum((1, 2)) / rows.shape[1]
    if reduction:
        loss = loss.mean() if reduction == 1 else loss.sum()
    elif logits.dim() < 2:
        loss = loss.squeeze(0)
    return loss, is_target.to(logits.dtype).reshape(target.shape)


_FORMULAS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._safe_softmax.default: _safe_softmax,
    torch.ops.aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
}
"""{operator: decomposition that replaces torch's}."""


def take_apart(graph: fx.Graph, depth: int = 4) -> None:
    """Decompose operators that depend on a parameter and have no rule, with torch's decompositions.

    Args:
        depth: maximum number of nested decompositions: the operators of a decomposition can be decomposed too.
    """
    known: dict[Any, fx.GraphModule | None] = {}
    for _ in range(depth):
        active = _depends_on_parameters(graph)
        kinds = CallCache()
        calls = [n for n in graph.nodes if n in active and n.op == "call_function"]
        without_rule = [n for n in calls if n.target is not operator.getitem and kinds.once(n, pattern_for) is None]
        taken = [node for node in without_rule if _replace_by_parts(graph, node, known)]
        if not taken:
            return


def _depends_on_parameters(graph: fx.Graph) -> set[fx.Node]:
    active: set[fx.Node] = set()
    for node in graph.nodes:
        if facts(node).get("parameter") or any(n in active for n in node.all_input_nodes):
            active.add(node)
    return active


def _replace_by_parts(graph: fx.Graph, node: fx.Node, known: dict[Any, fx.GraphModule | None]) -> bool:
    flat, spec = tree_flatten((node.args, node.kwargs))
    tensors = [a for a in flat if isinstance(a, fx.Node)]
    if not all(is_tensor(n) for n in tensors):
        return False
    key = (node.target, str(spec), *(argument_key(value(a) if isinstance(a, fx.Node) else a) for a in flat))
    if key not in known:
        known[key] = _parts(node, flat, spec)
    parts = known[key]
    if parts is None:
        return False
    with graph.inserting_before(node):
        copied: dict[fx.Node, Any] = dict(zip(parts.graph.find_nodes(op="placeholder"), tensors, strict=True))
        for part in parts.graph.nodes:
            if part.op == "call_function":
                args, kwargs = fx.map_arg((part.args, part.kwargs), copied.__getitem__)
                copied[part] = emit(graph, node, part.target, *args, **kwargs)
    result = fx.map_arg(parts.graph.output_node().args[0], copied.__getitem__)
    if is_tensor(node):
        replace(node, result)
    else:
        replace_parts(node, result)
    return True


def _parts(node: fx.Node, flat: list[Any], spec: Any) -> fx.GraphModule | None:
    """Return the graph of an operator's decomposition, or None.

    The result is None if torch has no decomposition, or if the decomposition cannot be traced, writes in place, or
    contains the operator itself.
    """
    whole = _FORMULAS.get(node.target) or decomposition(node.target)
    if whole is None or torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    places = [i for i, a in enumerate(flat) if isinstance(a, fx.Node)]

    def call(*tensors: torch.Tensor) -> Any:
        leaves = list(flat)
        for place, tensor in zip(places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, spec)
        result = whole(*args, **kwargs)
        return tuple(result) if isinstance(result, (tuple, list)) else result

    inputs = [_copied(value(flat[place])) for place in places]
    try:
        with fake_mode(node.all_input_nodes):
            parts = trace_function(call, inputs)
    except (RuntimeError, NotImplementedError, TypeError, IndexError):  # it reads values, or dims of a scalar
        return None
    _without_writes(parts.graph)
    parts.graph.eliminate_dead_code()
    calls = [n for n in parts.graph.nodes if n.op not in ("placeholder", "output")]
    same = all(n.op == "call_function" and n.target is not node.target and not _is_write(n) for n in calls)
    return parts if same else None


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a fake tensor and its `requires_grad`, on which some of torch's decompositions depend."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _is_write(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _without_writes(graph: fx.Graph) -> None:
    """Rewrite an in-place `x.sqrt_()` as `x.sqrt()`, and let later uses of `x` use the result.

    In-place calls stay if another tensor can share the memory of `x`.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_write(node):
            continue
        written = node.args[0]
        packet = getattr(torch.ops.aten, node.target._schema.name.removeprefix("aten::").removesuffix("_"), None)
        overload = getattr(packet, node.target._overloadname, None)
        if overload is None or not isinstance(written, fx.Node) or _may_share(written):
            continue
        node.target = overload
        later = [user for user in written.users if user is not node and user > node]
        for user in later:
            user.replace_input_with(written, node)


def _may_share(node: fx.Node) -> bool:
    """Return True if another tensor may share the memory of the node's value.

    This is possible if the node is an input or a view, or if there is a view of it.
    """
    views = [n for n in (node, *node.users) if n.op == "call_function" and not _is_write(n) and _is_view(n)]
    return node.op != "call_function" or bool(views)


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(a.alias_info is not None for a in schema.returns)
