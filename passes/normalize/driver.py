"""What runs graph passes, and the means to write one: new calls with values on fake tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopart.errors import AutopartError
from autopart.graph import draws_random_numbers, short_name, value


class PassError(AutopartError):
    """A graph pass failed: its name, the node and the user's source line."""


def run_passes(graph: fx.Graph, passes: tuple[Callable[[fx.Graph], None], ...]) -> None:
    """Run graph passes in order; after each, dead code goes and the graph is checked."""
    for rewrite in passes:
        try:
            rewrite(graph)
            eliminate_dead_code(graph)
            graph.lint()
        except AutopartError:
            raise
        except Exception as error:
            raise PassError(f"pass '{rewrite.__name__}' failed", why=f"{type(error).__name__}: {error}") from error


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Remove calls whose results nothing reads, but for those that draw random numbers: later draws depend on them."""
    graph.eliminate_dead_code(
        is_impure_node=lambda n: (
            n.op in ("placeholder", "output") or (n.op == "call_function" and draws_random_numbers(n))
        )
    )


def emit(graph: fx.Graph, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call before the insertion point, its meta from `like` and its value computed on fake tensors."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k in ("nn_module_stack", "stack_trace")}
    node.meta["val"] = fake_call(target, args, kwargs, [*node.all_input_nodes, like, *like.all_input_nodes])
    return node


def fake_call(target: Any, args: Any, kwargs: Any, near: list[fx.Node]) -> Any:
    """What a call gives on fake tensors, in the mode of those near it."""
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), value)
    with fake_mode(near):
        return target(*fake_args, **fake_kwargs)


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
