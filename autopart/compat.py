"""The one file that touches private parts of torch. Each name says what it stands for."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group, _set_pg_timeout
from torch.utils import _pytree as pytree

TreeSpec = pytree.TreeSpec
tree_flatten = pytree.tree_flatten
tree_unflatten = pytree.tree_unflatten


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of this name, as functional collectives name it."""
    return _resolve_process_group(name)


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group moves tensors of this device with gloo, which on a GPU can only all-reduce and broadcast."""
    return group._get_backend(device).name() == "gloo"


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """How long a rank of the group waits for the others; the device mesh's own groups have no argument for it."""
    _set_pg_timeout(timeout, group)


def tree_map(fn, tree):
    """Apply `fn` to every leaf."""
    return pytree.tree_map(fn, tree)


def leaves_with_names(tree) -> list[tuple[str, object]]:
    """The leaves of a dict of arguments with readable names: `mask`, `batch.ids`, `states.0`."""
    named = []
    for path, leaf in pytree.tree_leaves_with_path(tree):
        keys = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path]
        named.append((".".join(keys), leaf))
    return named
