"""Full optimizer state keyed by the model's names: gathered on every rank, and loaded on any mesh.

The format is as returned by `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` with the option
`full_state_dict=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from autopart.errors import CheckpointError
from autopart.ir.program import Program
from autopart.runtime.checkpoint.optimizer_groups import PARAM_NAMES, PARAMS, ParameterGroup, group_of, merge_by_options
from autopart.runtime.checkpoint.optimizer_state import local_state
from autopart.runtime.checkpoint.saved_shard import shard_offsets_of
from autopart.runtime.checkpoint.state_dicts import as_shard
from autopart.runtime.comm.process_mesh import Process, of_all_stages
from autopart.runtime.comm.stage_ranks import stage_style_of
from autopart.runtime.comm.watchdog import meeting
from autopart.runtime.consistency.replicas import Replicas
from autopart.runtime.optimizers.full_tensor_update import ReplicatedEntry, unwrap_replicated
from autopart.runtime.optimizers.partitioned_optimizer import PartitionedOptimizer
from autopart.runtime.shards.shard_owners import ShardInfo, parameters_of, shard_info_of
from autopart.runtime.shards.shard_state import gather
from autopart.tracing.meta_copy import Source

FullState = dict[str, Any]
"""{"state": {name: {key: full tensor or number}}, "param_groups": [{"params": [name, ...], "lr": ..., ...}]}"""


@dataclass(frozen=True)
class ShardedMarker:
    """Placeholder that replaces a sharded tensor when pipeline stages exchange their optimizer state."""


def canonical_names(program: Program, model: nn.Module) -> dict[str, str]:
    """Return {each name of a parameter: its first name in the model's `named_parameters()`}.

    A tied parameter has several names.
    """
    first: dict[str, str] = {}
    stored_names = program.stored_names
    names = [name for name, _ in model.named_parameters(remove_duplicate=False) if name in stored_names]
    for name in names:
        first.setdefault(stored_names[name], name)
    return {name: first[stored_names[name]] for name in names}


def full_state(
    optimizer: Optimizer, program: Program, model: nn.Module, process: Process, stage_style: str
) -> FullState:
    """Implement `ParallelModule.full_optimizer_state_dict`. A collective call."""
    first = canonical_names(program, model)
    order = {name: index for index, name in enumerate(dict.fromkeys(first.values()))}
    local_groups = [group_of(group, first.__getitem__) for group in optimizer.param_groups]
    groups = merge_by_options(of_all_stages(local_groups, process))
    local: dict[str, Mapping[str, Any]] = {}
    for parameter in parameters_of(optimizer):
        shard_info = shard_info_of(parameter)
        if shard_info is not None and parameter in optimizer.state:
            local[shard_info.name] = optimizer.state[parameter]
    entries = _exchange_state(optimizer, process)
    full_tensors: dict[str, dict[str, Tensor]] = {}
    for key in sorted(
        {key for values in entries.values() for key, value in values.items() if value == ShardedMarker()}
    ):
        names = {name for name, values in entries.items() if values.get(key) == ShardedMarker()}
        shards = {name: values[key] for name, values in local.items() if name in names}
        full_tensors[key] = gather(shards, program, process, stage_style, names)
    state = {}
    for name in sorted(entries, key=lambda name: order[first[name]]):
        values = entries[name].items()
        state[first[name]] = {
            key: full_tensors[key][name] if value == ShardedMarker() else value for key, value in values
        }
    return {
        "state": state,
        "param_groups": [_group_dict(group, order if "pp" in process.groups else None) for group in groups],
    }


def _exchange_state(optimizer: Optimizer, process: Process) -> dict[str, dict[str, Any]]:
    """Return the optimizer state of all stages: {parameter name: {key: value, or ShardedMarker}}.

    Ranks along `pp` exchange replicated values, such as step counts. Sharded tensors are gathered later.
    """
    local: dict[str, dict[str, Any]] = {}
    for parameter in parameters_of(optimizer):
        shard_info = shard_info_of(parameter)
        if shard_info is None or parameter not in optimizer.state:
            continue
        values: dict[str, Any] = {}
        for key, value in optimizer.state[parameter].items():
            is_replicated, value = isinstance(value, ReplicatedEntry), unwrap_replicated(value)
            values[key] = value
            if isinstance(value, Tensor):
                is_sharded = value.dim() and value.shape == parameter.shape and not is_replicated
                values[key] = ShardedMarker() if is_sharded else value.detach().cpu().clone()
                is_unknown = not isinstance(optimizer, PartitionedOptimizer) and values[key] != ShardedMarker()
                if value.numel() > 1 and shard_info.cuts and is_unknown:
                    raise CheckpointError(
                        f"'{key}' of '{shard_info.name}' cannot be gathered",
                        why=f"it has shape {tuple(value.shape)}, and this rank's shard of the parameter has "
                        f"{tuple(parameter.shape)}, so its sharding is unknown",
                        hint="an optimizer whose state has the shape of its parameters, such as torch.optim.AdamW",
                    )
        local[shard_info.name] = values
    return {name: values for remote in reversed(of_all_stages(local, process)) for name, values in remote.items()}


def _group_dict(group: ParameterGroup, order: Mapping[str, int] | None) -> dict[str, Any]:
    """Return an optimizer group as state dicts have it.

    Args:
        order: {parameter name: index in the model}. The names of the group are sorted by this index, because the group
            was merged from several pipeline stages. None: keep their order.
    """
    rows = list(zip(group.names, group.user_names or group.names, strict=True))
    if order is not None:
        rows.sort(key=lambda row: order[row[0]])
    labels = {} if group.user_names is None else {PARAM_NAMES: [label for _, label in rows]}
    return {**group.options, **labels, PARAMS: [name for name, _ in rows]}


def load_full_state(optimizer: Optimizer, full: Mapping[str, Any], program: Program, model: nn.Module) -> None:
    """Implement `ParallelModule.load_full_optimizer_state_dict`."""
    first = canonical_names(program, model)
    _check_format(full, first)
    state_by_name = {first[name]: values for name, values in full["state"].items()}

    def state_of(parameter: Tensor, shard_info: ShardInfo) -> dict[str, Any] | None:
        values = state_by_name.get(first[shard_info.name])
        if values is None:
            return None
        return {key: _with_offsets(local_state(optimizer, key, value, parameter, shard_info), parameter, shard_info)
                for key, value in values.items()}  # fmt: skip

    load_by_name(optimizer, full["param_groups"], first, state_of)


def load_by_name(
    optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], first: Mapping[str, str],
    state_of: Callable[[Tensor, ShardInfo], Mapping[str, Any] | None],
) -> dict[int, Any]:  # fmt: skip
    """Load state and parameter groups by parameter name. Return {index of a parameter: its loaded state}.

    The index is that of the optimizer's own state dict. Raises CheckpointError if the saved groups do not match the
    groups of the optimizer.

    Args:
        saved: the saved groups, which list parameter names.
        first: {name of a parameter: its first name in the model}.
        state_of: function that returns the state to load for a parameter; None if the parameter has no state.
    """
    group_by_name = {first[name]: index for index, group in enumerate(saved) for name in group[PARAMS]}
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    count = 0
    for index, group in enumerate(optimizer.param_groups):
        names = group_of(group, first.__getitem__).names
        options = _options(index, group, names, group_by_name, saved)
        groups.append({**options, PARAMS: list(range(count, count + len(group[PARAMS])))})
        for position, parameter in enumerate(group[PARAMS], start=count):
            shard_info = shard_info_of(parameter)
            if shard_info is not None and (loaded := state_of(parameter, shard_info)) is not None:
                state[position] = loaded
        count += len(group[PARAMS])
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    return state


def _with_offsets(value: Any, parameter: Tensor, shard_info: ShardInfo) -> Any:
    """Return a copy of a state value; a shard with its offsets, by which `load_state_dict` recognises it."""
    copy = _copied(value)
    if not isinstance(copy, Tensor) or not copy.dim() or tuple(copy.shape) == tuple(shard_info.stored.shape):
        return copy
    is_shard = copy.shape == parameter.shape
    return as_shard(copy, shard_offsets_of(shard_info), shard_info) if is_shard else copy


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _check_format(full: Mapping[str, Any], first: Mapping[str, str]) -> None:
    """Raise CheckpointError if `full` is not a full optimizer state of this model."""
    if not {"state", "param_groups"} <= full.keys():
        raise CheckpointError(
            "this is not a full optimizer state",
            why=f"it has {', '.join(map(repr, list(full)[:3])) or 'nothing'}, not 'state' and 'param_groups'",
            hint="pm.full_optimizer_state_dict(optimizer), on any mesh",
        )
    names = [*full["state"], *(name for group in full["param_groups"] for name in group[PARAMS])]
    if any(isinstance(name, int) for name in names):
        raise CheckpointError(
            "this optimizer state is keyed by parameter index",
            why="indices differ between meshes",
            hint="save pm.full_optimizer_state_dict(optimizer); for an unpartitioned model, "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)",
        )
    unknown = [name for name in names if name not in first]
    if unknown:
        raise CheckpointError(f"the model has no parameter '{unknown[0]}'", why="the optimizer state to load has it")


def _options(
    index: int,
    group: Mapping[str, Any],
    names: list[str],
    group_by_name: Mapping[str, int],
    saved: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the options (such as the learning rate) to load into group `index` of an optimizer.

    They are the options of the saved group that contains the parameters of this group. For a group without parameters
    on this rank, it is the saved group with the same index. Raises CheckpointError if a parameter is not saved, or if
    the parameters are in several saved groups.

    Args:
        names: names of the group's parameters.
        group_by_name: {parameter name: index of its saved group}.
        saved: the saved groups.
    """
    missing = [name for name in names if name not in group_by_name]
    if missing:
        raise CheckpointError(
            f"the optimizer state to load does not have '{missing[0]}'", why=f"it is in the optimizer's group {index}"
        )
    numbers = sorted({group_by_name[name] for name in names})
    if len(numbers) > 1:
        raise CheckpointError(
            f"the parameters of the optimizer's group {index} are in groups {', '.join(map(str, numbers))} of the "
            "state to load",
            why="a group has one learning rate and one weight decay",
            hint="create the optimizer with the groups that it had when it was saved",
        )
    number = numbers[0] if numbers else index if index < len(saved) else None
    source = group if number is None else saved[number]
    labels = {PARAM_NAMES: group[PARAM_NAMES]} if PARAM_NAMES in group else {}
    return {**{key: _copied(value) for key, value in source.items() if key not in (PARAMS, PARAM_NAMES)}, **labels}


class OptimizerStateMethods:
    """Methods of a module that save and load full optimizer state."""

    _process: Process
    _source: Source
    _schedule: str | None
    _traced: Callable[[str], Program]
    _replicas: Replicas
    _local_parameters: dict[str, nn.Parameter]

    @meeting
    def full_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state of an optimizer of this module, on every rank. A collective call.

        The format is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)` for
        the unpartitioned model: `{"state": {name: {"exp_avg": full tensor, ...}}, "param_groups": [{"params": [name,
        ...], ...}]}`. Raises CheckpointError for state that is not sharded as its parameter is.

        Example:
            full = pm.full_optimizer_state_dict(optimizer)  # on every rank
            if torch.distributed.get_rank() == 0:
                torch.save(full, "optimizer.pt")
        """
        program = self._traced("full_optimizer_state_dict()")
        self._replicas.check_before("full_optimizer_state_dict", program, self._local_parameters)
        with optimizer.shared_state() if isinstance(optimizer, PartitionedOptimizer) else nullcontext():
            return full_state(optimizer, program, self._source.model, self._process, stage_style_of(self._schedule))

    @meeting
    def load_full_optimizer_state_dict(self, optimizer: Optimizer, full: Mapping[str, Any]) -> None:
        """Load a full optimizer state that was saved on any mesh or from the unpartitioned model.

        Every rank passes the full state and keeps its shards. Raises CheckpointError if the state does not match the
        optimizer.

        Example:
            pm.load_full_optimizer_state_dict(optimizer, torch.load("optimizer.pt"))
        """
        load_full_state(optimizer, full, self._traced("load_full_optimizer_state_dict()"), self._source.model)
