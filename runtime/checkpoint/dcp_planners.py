"""Hooks into `torch.distributed.checkpoint` (DCP) and into torch's optimizers, for sharded tensors.

Each hook is installed once per process. It wraps a function of torch and calls the original.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from autopart.errors import CheckpointError


@functools.cache
def plan_checkpoints_with(
    kind: type,
    check_loaded: Callable[[str, Sequence[int], Any], None],
    check_saved: Callable[[str, Any], None],
    absent: Callable[[Mapping[str, Any], Collection[str]], Collection[str]],
    before_saving: Callable[[Mapping[str, Any]], None],
) -> None:
    """Patch the default planners of DCP, so that they load and save this package's shards.

    Args:
        kind: class of the shards.
        check_loaded: called with (key, saved size, shard), in place of the planner's comparison of sizes.
        check_saved: called with (key, value) for every entry to save.
        absent: called with (state dict, saved keys). Returns the keys that the load skips, because the checkpoint lacks
            them.
        before_saving: called with the state dict on every rank, before a save is planned.
    """
    from torch.distributed.checkpoint import default_planner

    plan_load, plan_save = (
        default_planner.create_default_local_load_plan,
        default_planner.create_default_local_save_plan,
    )

    @functools.wraps(plan_load)
    def load(state_dict: dict[str, Any], metadata: Any, *args: Any, **kwargs: Any) -> Any:
        to_plan = {}
        left_out = absent(state_dict, metadata.state_dict_metadata.keys())
        for key, value in state_dict.items():
            if key in left_out:
                continue
            to_plan[key] = _PartOfSaved(value) if isinstance(value, kind) else value
            size = getattr(metadata.state_dict_metadata.get(key), "size", None)
            if isinstance(value, kind) and size is not None:
                check_loaded(key, size, value)
        return plan_load(to_plan, metadata, *args, **kwargs)

    @functools.wraps(plan_save)
    def save(state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        before_saving(state_dict)
        for key, value in state_dict.items():
            check_saved(key, value)
        return plan_save(state_dict, *args, **kwargs)

    default_planner.create_default_local_load_plan, default_planner.create_default_local_save_plan = load, save


class _PartOfSaved:
    """Replacement for a shard while DCP plans a load. It has no size, so that DCP compares no sizes."""

    def __init__(self, tensor: Any):
        self.__create_chunk_list__ = tensor.__create_chunk_list__


@functools.cache
def reject_chunks_in_safetensors() -> None:
    """Make the safetensors writer raise CheckpointError if a rank has several chunks of one tensor.

    A safetensors file has one tensor per name, so torch's writer would silently drop all chunks except the last.
    """
    from torch.distributed.checkpoint import filesystem

    prepare = filesystem.FileSystemWriter.prepare_local_plan

    @functools.wraps(prepare)
    def prepared(self: Any, plan: Any) -> Any:
        if self.serialization_format == filesystem.SerializationFormat.SAFETENSORS:
            num_chunks = Counter(item.index.fqn for item in plan.items)
            for key, count in num_chunks.items():
                if count > 1:
                    raise CheckpointError(
                        f"safetensors cannot hold '{key}' as it is sharded on this mesh",
                        why=f"this rank has {count} chunks of it, and torch's writer keeps one tensor per name in "
                        "a file",
                        hint="safetensors.torch.save_file(pm.full_state_dict(), path) on one rank, or a checkpoint in "
                        "torch's own format",
                    )
        return prepare(self, plan)

    filesystem.FileSystemWriter.prepare_local_plan = prepared  # type: ignore[method-assign]


@functools.cache
def call_with_optimizers(call: Callable[[Optimizer], None]) -> None:
    """Patch `Optimizer` to call `call(optimizer)` after `add_param_group` and after copying or unpickling."""
    add, set_state = Optimizer.add_param_group, Optimizer.__setstate__

    @functools.wraps(add)
    def added(self: Optimizer, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        call(self)

    @functools.wraps(set_state)
    def copied(self: Optimizer, state: dict[str, Any]) -> None:
        set_state(self, state)
        call(self)

    Optimizer.add_param_group = added  # type: ignore[method-assign]
    Optimizer.__setstate__ = copied  # type: ignore[method-assign]
