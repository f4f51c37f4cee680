"""Helpers for passes that rewrite a graph: add calls, and compute their results on fake tensors."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopart.compat.torch_internals import tree_flatten
from autopart.ir.facts import facts
from autopart.ir.graph import changes_precision, shape, short_name, value
from autopart.passes.pass_pipeline import same_calls


def emit(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call to the graph at the insertion point. Return its node.

    The node gets the module and source line of `like`. Its value (`meta["val"]`) is computed on fake tensors.
    """
    node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k in ("nn_module_stack", "stack_trace")}
    node.meta["val"] = fake_call(target, args, kwargs, [*node.all_input_nodes, like, *like.all_input_nodes])
    return node


def fake_call(target: Any, args: Any, kwargs: Any, near: list[fx.Node]) -> Any:
    """Return the result of a call on fake tensors. Within `run_passes`, equal calls are computed once.

    `near`: nodes whose fake mode is used.
    """
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), value)
    leaves, spec = tree_flatten((fake_args, fake_kwargs))
    key = (target, str(spec), *map(argument_key, leaves))
    results = same_calls.get({})
    if key not in results:
        with fake_mode(near):
            results[key] = target(*fake_args, **fake_kwargs)
    return results[key]


def argument_key(leaf: Any) -> tuple:
    """Return a cache key of an argument.

    Calls whose arguments have equal keys have results with equal metadata.
    """
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), repr(leaf)
    sizes = leaf.shape, leaf.stride(), leaf.storage_offset()
    return type(leaf), *sizes, leaf.dtype, leaf.device, leaf.requires_grad


def fake_mode(near: list[fx.Node]) -> Any:
    """Return a context manager in which operators compute on fake tensors: the fake mode of `near`.

    If `near` has no fake mode, the context manager is the device of `near` (meta).
    """
    values = [v for n in near for v in (value(n) if isinstance(value(n), (tuple, list)) else [value(n)])]
    values = [v for v in values if isinstance(v, torch.Tensor)]
    mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
    return mode if mode is not None else values[0].device if values else torch.device("meta")


def name_replacement_calls(node: fx.Node, before: fx.Node, name: str) -> None:
    """Name the calls that replace `node`: the calls between `before` and `node` in the graph.

    The first call gets the name of `node`, all other calls get `name`. Without random operators (eval mode), a trace
    contains `node` itself. So a stage boundary with this name is found in both traces.
    """
    call, first = before.next, True
    while call is not node:
        if call.target is not operator.getitem:
            is_first = first and not changes_precision(call)
            facts(call)["named"] = short_name(node) if is_first else name
            facts(call)["tied_to_mode"], first = not is_first, first and not is_first
        call = call.next


def replace(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def replace_parts(node: fx.Node, parts: Mapping[int, fx.Node] | Sequence[fx.Node]) -> None:
    """Erase a call that has several results, and replace result `i` by `parts[i]`.

    Unused results may be missing in `parts`.
    """
    for part in list(node.users):
        if part.users:
            part.replace_all_uses_with(parts[part.args[1]])
        part.graph.erase_node(part)
    node.graph.erase_node(node)


def repeat_each(graph: fx.Graph, like: fx.Node, node: fx.Node, dim: int, times: int) -> fx.Node:
    """Emit `torch.repeat_interleave`: each index along `dim` is repeated `times` times. Return the node."""
    before, size, after = shape(node)[:dim], shape(node)[dim], shape(node)[dim + 1 :]
    apart = emit(graph, like, torch.ops.aten.unsqueeze.default, node, dim + 1)
    wide = emit(graph, like, torch.ops.aten.expand.default, apart, [*before, size, times, *after])
    return emit(graph, like, torch.ops.aten.reshape.default, wide, [*before, size * times, *after])


def getitem(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    part = graph.call_function(operator.getitem, (node, index))
    part.meta = {**node.meta, "val": value(node)[index]}
    return part
