"""What runs graph passes, and the means to write one: new calls with values on fake tensors."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from autopart.compat import tree_flatten
from autopart.errors import AutopartError
from autopart.ir.graph import draws_random_numbers, short_name, source_text, value

_made: ContextVar[dict[tuple, Any]] = ContextVar("what calls on fake tensors have given while passes run")


class PassError(AutopartError):
    """A graph pass failed: its name, the node and the user's source line."""


def run_passes(graph: fx.Graph, passes: tuple[Callable[[fx.Graph], None], ...]) -> None:
    """Run graph passes in order; after each, dead code goes and the order of the graph is checked; at the end, all."""
    token = _made.set({})
    try:
        _run(graph, passes)
    finally:
        _made.reset(token)


def _run(graph: fx.Graph, passes: tuple[Callable[[fx.Graph], None], ...]) -> None:
    for rewrite in passes:
        try:
            rewrite(graph)
            eliminate_dead_code(graph)
            _check_order(graph)
            if rewrite is passes[-1]:
                graph.lint()
        except AutopartError:
            raise
        except Exception as error:
            raise _failed(rewrite.__name__, error) from error


def _failed(name: str, error: Exception) -> PassError:
    """The error of a pass: by the innermost frame that has a node, which node of the user's source it was at."""
    node: fx.Node | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        here = frame.f_locals.get("node")
        node = here if isinstance(here, fx.Node) else node
    at = f" at '{node.name}'" if node is not None else ""
    return PassError(
        f"pass '{name}' failed{at}", why=f"{type(error).__name__}: {error}",
        where=source_text(node) if node is not None else "",
        hint="this is a fault of autopart: report it with the model",
    )  # fmt: skip


def _check_order(graph: fx.Graph) -> None:
    """Raises RuntimeError where a node is read before it is made, or was erased."""
    made: set[fx.Node] = set()
    for node in graph.nodes:
        missing = [source.name for source in node.all_input_nodes if source not in made]
        if missing:
            raise RuntimeError(f"'{node.name}' reads '{missing[0]}', which is not made before it")
        made.add(node)


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Remove calls whose results nothing reads, but for those that draw random numbers: later draws depend on them."""
    for node in reversed(graph.nodes):
        if node.users or node.op in ("placeholder", "output"):
            continue
        if node.op != "call_function" or not draws_random_numbers(node):
            graph.erase_node(node)


def emit(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call before the insertion point, its meta from `like` and its value computed on fake tensors."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k in ("nn_module_stack", "stack_trace")}
    node.meta["val"] = fake_call(target, args, kwargs, [*node.all_input_nodes, like, *like.all_input_nodes])
    return node


def fake_call(target: Any, args: Any, kwargs: Any, near: list[fx.Node]) -> Any:
    """What a call gives on fake tensors, in the mode of those near it. `run_passes` makes equal calls once."""
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), value)
    leaves, spec = tree_flatten((fake_args, fake_kwargs))
    key = (target, str(spec), *map(_told, leaves))
    made = _made.get({})
    if key not in made:
        with fake_mode(near):
            made[key] = target(*fake_args, **fake_kwargs)
    return made[key]


def _told(leaf: Any) -> tuple:
    """What a call's result depends on of one argument."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), repr(leaf)
    sizes = leaf.shape, leaf.stride(), leaf.storage_offset()
    return type(leaf), *sizes, leaf.dtype, leaf.device, leaf.requires_grad


def fake_mode(near: list[fx.Node]) -> Any:
    """The context in which calls give fake tensors as these values are."""
    values = [v for n in near for v in (value(n) if isinstance(value(n), (tuple, list)) else [value(n)])]
    values = [v for v in values if isinstance(v, torch.Tensor)]
    mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
    return mode if mode is not None else values[0].device if values else torch.device("meta")


def name_written_out(node: fx.Node, before: fx.Node, name: str) -> None:
    """Name the calls between `before` and `node`, written in its place: the first as `node` was, so that a pipeline cut
    there is found in a trace that draws nothing; the others `name`, which such a trace does not have."""
    made, first = before.next, True
    while made is not node:
        if made.target is not operator.getitem:
            made.meta["named"] = short_name(node) if first else name
            made.meta["tied_to_mode"], first = not first, False
        made = made.next


def replace(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def getitem(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    part = graph.call_function(operator.getitem, (node, index))
    part.meta = {**node.meta, "val": value(node)[index]}
    return part
