"""The one file that touches private parts of torch. Each name says what it stands for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.distributed_c10d import _resolve_process_group, _set_pg_timeout
from torch.distributed.pipelining import _backward as pipelining_backward
from torch.utils import _pytree as pytree

TreeSpec = pytree.TreeSpec
tree_flatten = pytree.tree_flatten
tree_unflatten = pytree.tree_unflatten


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of this name, as functional collectives name it."""
    return _resolve_process_group(cast(Any, name))  # a plain str in torch 2.11, a type of its own later


def is_higher_order(target: Any) -> bool:
    """Whether a node's target is a higher-order operator, which holds a region of the graph."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group moves tensors of this device with gloo, which on a GPU can only all-reduce and broadcast."""
    return group._get_backend(device).name() == "gloo"


class PipelineStage(pipelining.PipelineStage):
    """A pipeline stage that does not greet itself: in torch 2.11 neighbouring stages on one rank (zbv, dualpipev) do,
    which gloo refuses."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


@functools.cache
def split_backward_counts_twice() -> bool:
    """Whether pipelining's split backward (zero bubble) is wrong for a parameter that one stage reads twice.

    Torch 2.11 counts a gradient twice that passes one use on its way to the other; later versions do not. Tried here
    rather than looked up by version: z = (x + w) + w has gradient 2 by w.
    """
    x, w = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    with torch.enable_grad():
        z = (x.clone() + w) + w
        _, groups = pipelining_backward.stage_backward_input([z], None, [x], iter([w]))
        pipelining_backward.stage_backward_weight(iter([w]), groups)
    return w.grad is None or w.grad.item() != 2.0


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """How long a rank of the group waits for the others; the device mesh's own groups have no argument for it."""
    _set_pg_timeout(timeout, group)


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `fn` to every leaf."""
    return pytree.tree_map(fn, tree)


def leaves_with_names(tree: Any) -> list[tuple[str, object]]:
    """The leaves of a dict of arguments with readable names: `mask`, `batch.ids`, `states.0`."""
    named = []
    for path, leaf in pytree.tree_leaves_with_path(tree):
        keys = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path]
        named.append((".".join(keys), leaf))
    return named
