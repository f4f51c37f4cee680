"""State of a training run, as tensors by name and one file of all other values.

Tensors have the names and shapes of the unpartitioned model: `model.<name>`, `optimizer.state.<name>.<key>` and
`dp_sync.<key>`. Other values, such as learning rates, are stored by `torch.save` and loaded with `weights_only=True`.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopart.errors import CheckpointError
from autopart.runtime.checkpoint.full_optimizer import load_by_name
from autopart.runtime.checkpoint.optimizer_groups import PARAM_NAMES, PARAMS, ParameterGroup, group_of, merge_by_options
from autopart.runtime.checkpoint.saved_shard import ShardOffsets, ShardTensor, shard_offsets_of, to_plain
from autopart.runtime.comm.process_mesh import Process, of_all_stages
from autopart.runtime.optimizers.partitioned_optimizer import PartitionedOptimizer
from autopart.runtime.saves.checkpoint_index import CheckpointIndex, SavedEntry
from autopart.runtime.shards.shard_owners import ShardInfo, parameters_of, shard_info_of

MODEL, STATE, SYNC = "model.", "optimizer.state.", "dp_sync."
VALUES = ("model", "optimizer groups", "optimizer values", "schedulers", "random", "dp_sync", "extra")
"""Keys of `TrainingState.values`: everything in a save except tensors of the model, optimizers and `dp_sync`."""


@dataclass
class TrainingState:
    """State of a run on this rank.

    Attributes:
        tensors: {name in the index: this rank's tensor, or its shard}.
        values: everything else, equal on every rank except for "random".
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, prefix: str, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Add the tensors of a flat state dict. Return its other values."""
        rest = {}
        for name, value in entries.items():
            if isinstance(value, Tensor):
                self.tensors[prefix + name] = value
            else:
                rest[name] = value
        return rest


def sequence_of(given: Any) -> list[Any]:
    """Return a list of the objects in an argument that is one object, a list of objects, or None."""
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def class_name(value: Any) -> str:
    """Return the name of the class of an optimizer or scheduler, as a save records it."""
    if isinstance(value, PartitionedOptimizer):
        return value.class_name
    return type(value).__name__


def add_optimizers(
    state: TrainingState, optimizers: Sequence[Optimizer], first: Mapping[str, str], process: Process
) -> None:
    """Add the state of optimizers. A collective call along `pp`.

    Args:
        first: {name of a parameter: its first name in the model}.
    """
    others: dict[str, dict[str, Any]] = {}
    groups = []
    for optimizer in optimizers:
        state_dict = optimizer.state_dict()
        for index, parameter in enumerate(parameters_of(optimizer)):
            shard_info = shard_info_of(parameter)
            if shard_info is None or index not in state_dict["state"]:
                continue
            name = first[shard_info.name]
            values = state_dict["state"][index]
            if process.apart:
                values = {key: of_data_rank(value, parameter, shard_info) for key, value in values.items()}
            rest = state.add(f"{STATE}{name}.", values)
            if rest:
                others[name] = rest
        local = [group_of(group, first.__getitem__) for group in optimizer.param_groups]
        groups.append([_as_dict(group) for group in merge_by_options(of_all_stages(local, process))])
    everyones = of_all_stages(others, process)
    state.values["optimizer values"] = {name: values for theirs in everyones for name, values in theirs.items()}
    state.values["optimizer groups"] = groups


def of_data_rank(value: Any, parameter: Tensor, shard_info: ShardInfo) -> Any:
    """Return a data rank's optimizer state as its shard of a tensor [data ranks, *parameter shape].

    With this tensor, a save has the state of every data rank. It is needed if `dp_sync` gives data ranks different
    models, and so different state. Values without the parameter's shape are returned unchanged.
    """
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != parameter.shape:
        return value
    process, place = shard_info.process, shard_offsets_of(shard_info)
    (axis,) = process.apart
    assert place.spans is not None
    spans = (((process.mesh.index(process.coordinates, axis), 1),), *place.spans)
    shape = (process.mesh.size(axis), *place.shape)
    return ShardTensor(to_plain(value).unsqueeze(0), ShardOffsets(place.name, shape, spans))


def of_all_data_ranks(entry: SavedEntry, shard_info: ShardInfo) -> Tensor:
    """Return the tensor to load into, for optimizer state that was saved by data rank (`of_data_rank`).

    It has the values of this data rank. If the save has another number of data ranks than this module, it has the
    values of all saved data ranks, and each rank loads their mean.
    """
    process, place, num_saved = shard_info.process, shard_offsets_of(shard_info), entry.shape[0]
    assert place.spans is not None
    span = (0, num_saved)
    if process.apart and process.mesh.size(process.apart[0]) == num_saved:
        span = (process.mesh.index(process.coordinates, process.apart[0]), 1)
    local = torch.empty(span[1], *place.local_shape, dtype=getattr(torch, entry.dtype))
    return ShardTensor(local, ShardOffsets(place.name, entry.shape, ((span,), *place.spans)))


def _as_dict(group: ParameterGroup) -> dict[str, Any]:
    labels = {} if group.user_names is None else {PARAM_NAMES: group.user_names}
    return {**group.options, **labels, PARAMS: group.names}


def group_problems(
    optimizers: Sequence[Optimizer], saved: Sequence[Sequence[Mapping[str, Any]]], first: Mapping[str, str],
    process: Process,
) -> list[str]:  # fmt: skip
    """Return texts on how optimizer groups differ from the saved groups. A collective call along `pp`."""
    problems = []
    for number, (optimizer, groups) in enumerate(zip(optimizers, saved, strict=True)):
        group_by_name = {name: index for index, group in enumerate(groups) for name in group[PARAMS]}
        names = [group_of(group, first.__getitem__).names for group in optimizer.param_groups]
        everyones = {name for theirs in of_all_stages(names, process) for group in theirs for name in group}
        which = f"optimizer {number}" if len(optimizers) > 1 else "the optimizer"
        unknown = sorted(everyones - group_by_name.keys())
        problems += [f"{which} has '{name}', and the saved one does not" for name in unknown]
        problems += [f"{which} lacks '{name}', which was saved" for name in group_by_name if name not in everyones]
        for index, of_group in enumerate(names):
            numbers = sorted({group_by_name[name] for name in of_group if name in group_by_name})
            if len(numbers) > 1:
                problems.append(f"group {index} of {which} has parameters of the saved groups {numbers}")
    return problems


def optimizer_targets(
    optimizers: Sequence[Optimizer], index: CheckpointIndex, first: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return {name in the index: empty tensor to load into} for this rank's optimizer state."""
    is_by_data_rank = any(name.startswith(SYNC) and name.endswith(".replica") for name in index.entries)
    by_parameter: dict[str, list[tuple[str, SavedEntry]]] = {}
    for name, entry in index.entries.items():
        if name.startswith(STATE):
            by_parameter.setdefault(name[len(STATE) :].rpartition(".")[0], []).append((name, entry))
    targets: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            shard_info = shard_info_of(parameter)
            if shard_info is None:
                continue
            place = shard_offsets_of(shard_info)
            for name, entry in by_parameter.get(first[shard_info.name], ()):
                if is_by_data_rank and entry.shape[1:] == place.shape and place.shape:
                    targets[name] = of_all_data_ranks(entry, shard_info)
                else:
                    targets[name] = target_of(entry, place)
    return targets


def target_of(entry: SavedEntry, place: ShardOffsets) -> Tensor:
    """Return an empty tensor to load a value of optimizer state into.

    It is a shard if the saved value has the shape of the parameter. `place`: this rank's shard of the parameter.
    """
    dtype = getattr(torch, entry.dtype)
    if entry.shape == place.shape and entry.shape:
        return ShardTensor(torch.empty(place.local_shape, dtype=dtype), place)
    return torch.empty(entry.shape, dtype=dtype)


def load_optimizers(
    optimizers: Sequence[Optimizer], tensors: Mapping[str, Tensor], values: Mapping[str, Any],
    first: Mapping[str, str],
) -> None:  # fmt: skip
    """Load the state of optimizers.

    Args:
        tensors: the result of `optimizer_targets`, filled with saved values.
        values: the saved values that are not tensors (`TrainingState.values`).
        first: {name of a parameter: its first name in the model}.
    """
    by_parameter: dict[str, dict[str, Any]] = {name: dict(rest) for name, rest in values["optimizer values"].items()}
    shapes = {}
    for parameter in (parameter for optimizer in optimizers for parameter in parameters_of(optimizer)):
        if (info := shard_info_of(parameter)) is not None:
            shapes[first[info.name]] = info.stored.shape
    for name, tensor in tensors.items():
        parameter_name, _, key = name[len(STATE) :].rpartition(".")
        if isinstance(tensor, ShardTensor) and len(tensor.place.shape) > len(shapes[parameter_name]):
            tensor = tensor.to_local()[0] if tensor.shape[0] == 1 else tensor.to_local().mean(0)
        by_parameter.setdefault(parameter_name, {})[key] = tensor
    for optimizer, saved in zip(optimizers, values["optimizer groups"], strict=True):
        state = load_by_name(optimizer, saved, first, lambda _, shard_info: by_parameter.get(first[shard_info.name]))
        restore_dtypes(optimizer, state)


def restore_dtypes(optimizer: Optimizer, loaded: Mapping[int, Mapping[str, Any]]) -> None:
    """Undo the casts of `Optimizer.load_state_dict`, which casts state to the dtype of the parameter.

    `loaded`: {index of a parameter: its saved state}.
    """
    for position, parameter in enumerate(parameters_of(optimizer)):
        state = optimizer.state.get(parameter, {})
        for key, value in loaded.get(position, {}).items():
            current = state.get(key)
            if not isinstance(value, Tensor) or not isinstance(current, Tensor) or current.dtype == value.dtype:
                continue
            values = value.to_local() if isinstance(value, ShardTensor) else value
            if values.shape == current.shape:
                state[key] = values.to(current.device)


def saved_keys(index: CheckpointIndex, names: Iterable[str], first: Mapping[str, str]) -> dict[str, str]:
    """Return {name in the model: key in the index}, without names that are not saved.

    A tied parameter can be saved under any of its names.

    Args:
        first: {name of a parameter: its first name in the model}.
    """
    tied: dict[str, list[str]] = {}
    for name, first_name in first.items():
        tied.setdefault(first_name, []).append(name)
    keys = {}
    for name in names:
        candidates = [MODEL + one for one in (name, *tied.get(first.get(name, name), ()))]
        found = [index.aliases.get(key, key) for key in candidates if key in index.entries or key in index.aliases]
        if found:
            keys[name] = found[0]
    return keys


def model_targets(state_dict: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Tensor]:
    """Return {key in the index: empty tensor to load into} for this rank's shards of the model."""
    targets: dict[str, Tensor] = {}
    for name, value in state_dict.items():
        if isinstance(value, ShardTensor):
            targets[keys[name]] = ShardTensor(torch.empty(value.shape, dtype=value.dtype), value.place)
        elif isinstance(value, Tensor):
            targets[keys[name]] = torch.empty(value.shape, dtype=value.dtype)
    return targets


# --- Random numbers


def random_state(device: torch.device, of_calls: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state of the random generators that a training loop may use.

    Args:
        of_calls: state of the generators from which the partitioned module draws, for example, dropout masks.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate(), "calls": dict(of_calls)}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), *rest]
    return state


def set_random_state(
    state: Mapping[str, Any], device: torch.device, set_calls: Callable[[Mapping[str, Tensor]], None]
) -> None:
    """Set all generators to a state that `random_state` has returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(_tuples(state["python"]))
    set_calls(state["calls"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state and "numpy" in sys.modules:
        kind, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys.numpy().astype("uint32"), *rest))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


# --- The file of other values


def packed(values: Mapping[str, Any]) -> bytes:
    """Return values as bytes that `torch.load(weights_only=True)` loads.

    Raises CheckpointError for an entry that `torch.load` could not load again.
    """
    for name, value in values.items():
        try:
            torch.load(io.BytesIO(_saved(value)), weights_only=True)
        except Exception as error:  # whatever pickling raises
            raise CheckpointError(
                f"'{name}' cannot be saved",
                why=str(error).strip().splitlines()[0],
                hint="numbers, texts, tensors, and lists and dicts of them: a save is never unpickled",
            ) from None
    return _saved(dict(values))


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(data: bytes, name: str) -> dict[str, Any]:
    """Return the values that `packed` has converted to bytes. Raises CheckpointError for other bytes."""
    try:
        values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch raises for bytes that something else has written
        raise CheckpointError(f"{name} cannot be read", why=f"{type(error).__name__}: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{name} cannot be read", why="it holds no dict")
    return values
