"""How torch's distributed checkpoint and torch's optimizers are told of tensors that are held in parts.

Both are told once in a process, by functions of theirs that are put in place of their own and call those.
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
    """Lets torch's distributed checkpoint load tensors of a class that hold a part of a saved one.

    It compares a tensor's own size with that of the saved one; `check_loaded(key, saved size, tensor)` is called
    instead. `check_saved(key, value)` is called for all that is saved. `absent(state dict, saved keys)` gives the keys
    that a checkpoint may lack. `before_saving(state dict)` is called first, on every rank that saves.
    """
    from torch.distributed.checkpoint import default_planner

    plan_load, plan_save = (
        default_planner.create_default_local_load_plan,
        default_planner.create_default_local_save_plan,
    )

    @functools.wraps(plan_load)
    def load(state_dict: dict[str, Any], metadata: Any, *args: Any, **kwargs: Any) -> Any:
        parts = {}
        left_out = absent(state_dict, metadata.state_dict_metadata.keys())
        for key, value in state_dict.items():
            if key in left_out:
                continue
            parts[key] = _PartOfSaved(value) if isinstance(value, kind) else value
            size = getattr(metadata.state_dict_metadata.get(key), "size", None)
            if isinstance(value, kind) and size is not None:
                check_loaded(key, size, value)
        return plan_load(parts, metadata, *args, **kwargs)

    @functools.wraps(plan_save)
    def save(state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        before_saving(state_dict)
        for key, value in state_dict.items():
            check_saved(key, value)
        return plan_save(state_dict, *args, **kwargs)

    default_planner.create_default_local_load_plan, default_planner.create_default_local_save_plan = load, save


class _PartOfSaved:
    """Stands for a tensor where a load is planned: it has no size to be compared."""

    def __init__(self, tensor: Any):
        self.__create_chunk_list__ = tensor.__create_chunk_list__


@functools.cache
def refuse_pieces_in_safetensors() -> None:
    """Raises CheckpointError where a rank would write several pieces of one tensor into files of safetensors: these
    have one tensor of a name, and torch's writer keeps the last.
    """
    from torch.distributed.checkpoint import filesystem

    prepare = filesystem.FileSystemWriter.prepare_local_plan

    @functools.wraps(prepare)
    def prepared(self: Any, plan: Any) -> Any:
        if self.serialization_format == filesystem.SerializationFormat.SAFETENSORS:
            pieces = Counter(item.index.fqn for item in plan.items)
            for key, count in pieces.items():
                if count > 1:
                    raise CheckpointError(
                        f"safetensors cannot hold '{key}' as it is laid out here",
                        why=f"this rank has {count} pieces of it; torch's writer keeps one tensor of a name in a file",
                        hint="safetensors.torch.save_file(pm.full_state_dict(), path) on one rank, or a checkpoint in "
                        "torch's own format",
                    )
        return prepare(self, plan)

    filesystem.FileSystemWriter.prepare_local_plan = prepared  # type: ignore[method-assign]


@functools.cache
def call_with_optimizers(call: Callable[[Optimizer], None]) -> None:
    """Has every optimizer pass `call` when it is made or copied, and whenever parameters are added to it."""
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
