"""Optimizer state of a partitioned model: shards in state dicts, and full tensors by name.

State tensors with the shape of their parameter, such as Adam's moments, are sharded like the parameter. Scalars, such
as step counts, are replicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer

from autopart.compat.state_dict_internals import full_state_dicts_through, optimizer_state_dicts_through
from autopart.compat.torch_function_internals import on_local_values
from autopart.errors import CheckpointError
from autopart.runtime.checkpoint.dcp_planners import call_with_optimizers
from autopart.runtime.checkpoint.missing_state import record_parameter_of, without_absent
from autopart.runtime.checkpoint.optimizer_groups import PARAMS
from autopart.runtime.checkpoint.saved_shard import (
    ShardOffsets,
    ShardTensor,
    connect_checkpoints,
    offsets_in_file,
    reject_unloaded_shards,
    shard_offsets_of,
    to_plain,
)
from autopart.runtime.checkpoint.stage_groups import load_by_names, save_by_names, with_all_stages
from autopart.runtime.checkpoint.state_dicts import NO_PARAMETERS, as_shard, checked_shard_of, gather_state_dict
from autopart.runtime.optimizers.full_tensor_update import ReplicatedEntry, unwrap_replicated, wrap_replicated
from autopart.runtime.optimizers.partitioned_optimizer import PartitionedOptimizer
from autopart.runtime.shards.shard_owners import ShardInfo, parameters_of, process_among, shard_info_of

_HOOKED: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose state dicts are hooked to contain shard offsets."""


def connect_state_dicts() -> None:
    """Patch optimizers, so that their state dicts contain shard offsets.

    Also registers shards with `torch.distributed.checkpoint`. Optimizers that already exist are not changed. The state
    of parameters outside of partitioned models is not changed.
    """
    connect_checkpoints()
    full_state_dicts_through(gather_state_dict, reject_unloaded_shards)
    optimizer_state_dicts_through(save_by_names, load_by_names)
    call_with_optimizers(_add_hooks)


def _add_hooks(optimizer: Optimizer) -> None:
    if optimizer not in _HOOKED:
        _HOOKED.add(optimizer)
        optimizer.register_state_dict_post_hook(_add_shard_offsets)
        optimizer.register_load_state_dict_pre_hook(_with_local_shards)


@on_local_values
def _add_shard_offsets(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Hook of `state_dict()`: replace tensors that differ between ranks by `ShardTensor`."""
    parameters, groups = parameters_of(optimizer), with_all_stages(optimizer, state_dict["param_groups"])
    if process_among(parameters) is None:
        return {**state_dict, "param_groups": groups}
    state = _converted(
        state_dict["state"], dict(enumerate(parameters)), lambda _, *given: _state_with_offsets(optimizer, *given)
    )
    return {**state_dict, "state": state, "param_groups": groups}


def _converted(
    state: Mapping[Any, Any],
    parameters: Mapping[Any, nn.Parameter],
    convert: Callable[[str, Any, Tensor, ShardInfo], Any],
) -> dict[Any, Any]:
    """Apply `convert` to each state value of the partitioned model's parameters. Return the new state.

    Args:
        parameters: {key in `state`: parameter}.
    """
    converted = {}
    for index, values in state.items():
        parameter = parameters.get(index)
        shard_info = None if parameter is None else shard_info_of(parameter)
        if parameter is not None and shard_info is not None and isinstance(values, Mapping):
            values = {key: convert(key, value, parameter, shard_info) for key, value in values.items()}
        converted[index] = values
    return converted


def _state_with_offsets(optimizer: Optimizer, value: Any, parameter: Tensor, shard_info: ShardInfo) -> Any:
    """Return a value of a parameter's optimizer state as a `ShardTensor`.

    The value is returned unchanged if it is a scalar, or if all ranks have an equal tensor.
    """
    is_replicated, value = isinstance(value, ReplicatedEntry), unwrap_replicated(value)
    if not isinstance(value, Tensor) or isinstance(value, ShardTensor):
        return value
    if value.dim() == 0 or shard_offsets_of(shard_info).is_full:
        record_parameter_of(value, shard_info.name)
    if value.dim() == 0:
        return value
    is_pipeline = shard_info.process.mesh.size("pp") > 1
    place = shard_offsets_of(shard_info, only_by_name=is_pipeline)
    if value.shape == parameter.shape and not is_replicated:
        return value if place.is_full and not is_pipeline else as_shard(value, place, shard_info)
    if not place.is_full and value.numel() > 1 and not isinstance(optimizer, PartitionedOptimizer):
        return ShardTensor(value, ShardOffsets(place.name, place.shape, None, place.keys))
    shape = tuple(value.shape)
    spans = tuple(((0, size),) for size in shape)
    return ShardTensor(value, ShardOffsets(place.name, shape, spans, place.keys)) if is_pipeline else value


@on_local_values
def _with_local_shards(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Hook of `load_state_dict()`: replace full tensors by this rank's shards.

    Raises CheckpointError if a tensor does not have the shape of its parameter.
    """
    saved = state_dict["param_groups"]
    parameters = parameters_of(optimizer)
    if process_among(parameters) is None or len(saved) != len(optimizer.param_groups):  # torch reports the latter
        return None
    state_dict = {**state_dict, "state": without_absent(state_dict["state"])}
    groups = [_local_group(*pair) for pair in zip(saved, optimizer.param_groups, strict=True)]
    indices = [index for group in groups for index in group[PARAMS]]
    if len(indices) != len(parameters):
        return None
    by_index = dict(zip(indices, parameters, strict=True))
    state = _converted(state_dict["state"], by_index, lambda *given: local_state(optimizer, *given))
    return {**state_dict, "state": state, "param_groups": groups}


def _local_group(saved: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved parameter group, reduced to this rank's parameter names, in the optimizer's order.

    If the group has parameter indices instead of names, the indices do not change. Raises CheckpointError for a group
    without options: it means that the checkpoint has no group with these parameters.
    """
    options = {key: value for key, value in saved.items() if key != PARAMS}
    keys = [_names(parameter) for parameter in group[PARAMS]]
    if not options and keys and any(key != [NO_PARAMETERS] for key in keys):
        raise CheckpointError(
            f"the checkpoint has no optimizer group with parameter '{keys[0][0]}'",
            why="its optimizer groups contain other parameters",
            hint="save the unchanged result of get_state_dict(pm, optimizer), called on every rank",
        )
    names_here = [next((name for name in names if name in saved[PARAMS]), None) for names in keys]
    params = list(saved[PARAMS]) if None in names_here else names_here
    return {**(options or group), PARAMS: params}


def _names(parameter: Tensor) -> list[str]:
    shard_info = shard_info_of(parameter)
    return [NO_PARAMETERS] if shard_info is None else [shard_info.name, *shard_info.stored.aliases]


def local_state(optimizer: Optimizer, key: str, value: Any, parameter: Tensor, shard_info: ShardInfo) -> Any:
    """Return this rank's shard of a saved value, such as `exp_avg`, of a parameter's optimizer state."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    place = offsets_in_file(value)
    if place is not None and value.shape != parameter.shape:
        return to_plain(value)  # its offsets are unknown, or it is replicated
    if value.numel() == 1 and math.prod(shard_info.stored.shape) != 1:
        return value
    is_replicated = shard_offsets_of(shard_info).is_full or isinstance(optimizer, PartitionedOptimizer)
    if is_replicated and value.shape not in (parameter.shape, shard_info.stored.shape):
        return value  # the optimizer chose another shape than the parameter's
    is_of_shard = place is not None and place.shape == tuple(shard_info.stored.shape)
    if is_replicated and value.shape == parameter.shape and not is_of_shard:
        return wrap_replicated(to_plain(value), parameter.shape, shard_info.stored.shape)
    shard = checked_shard_of(f"{shard_info.name} ({key})", value, parameter, shard_info)
    return shard if shard is value or isinstance(value, ShardTensor) else shard.clone()
