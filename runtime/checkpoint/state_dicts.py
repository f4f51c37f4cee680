"""State dicts of a partitioned model: save shards with offsets, and shard full tensors on loading."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from autopart.compat.torch_internals import tree_map
from autopart.errors import CheckpointError
from autopart.ir.program import Program
from autopart.ir.sharding import local_shard_of
from autopart.runtime.checkpoint.saved_shard import (
    ShardOffsets,
    ShardTensor,
    offsets_in_file,
    shard_offsets_of,
    to_plain,
)
from autopart.runtime.comm.collectives import PRIMITIVES
from autopart.runtime.shards.shard_owners import ShardInfo, shard_info_of

NO_PARAMETERS = "no_parameters_here"
"""Name of the empty parameter of a rank whose stages use no parameter: optimizers need at least one.

State dicts do not contain it.
"""


def extra_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict entries that are not tensors, such as results of `get_extra_state`."""
    return {name: value for name, value in model.state_dict().items() if not isinstance(value, Tensor)}


def with_shard_offsets(
    module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, extra: Mapping[str, Any]
) -> None:
    """Prepare a module's state dict for distributed checkpoints, in place.

    Replaces parameters by `ShardTensor`s, unless all ranks store the full parameter. Adds the entries of `extra`.
    """
    state_dict.pop(prefix + NO_PARAMETERS, None)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shard_info = shard_info_of(parameter)
        value = state_dict.get(prefix + name)
        if shard_info is not None and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            state_dict[prefix + name] = with_offsets(value, shard_info)
    state_dict.update({prefix + name: value for name, value in extra.items()})


def with_offsets(value: Tensor, shard_info: ShardInfo) -> Tensor:
    """Return a local parameter's value as a `ShardTensor`; unchanged if all ranks store the full value."""
    place = shard_offsets_of(shard_info)
    return value if place.is_full and shard_info.process.mesh.size("pp") == 1 else as_shard(value, place, shard_info)


_HOMES: Any = WeakIdKeyDictionary()
"""{shard of a state dict: its shard info (name, shape and layout)}. Copies of a shard are not in it."""


def as_shard(value: Tensor, place: ShardOffsets, shard_info: ShardInfo) -> ShardTensor:
    """Return a `ShardTensor` of a local tensor. Registers its shard info for `gather_state_dict`."""
    shard = ShardTensor(value, place)
    _HOMES[shard] = shard_info
    return shard


def gather_state_dict(state_dict: Any) -> Any:
    """Replace every shard in a state dict by its full tensor, on every rank. A collective call.

    Raises CheckpointError under `pp`, because a rank's state dict lacks the names of other stages' parameters.
    """

    def full(value: Any) -> Any:
        if not isinstance(value, ShardTensor):
            return value
        shard_info = _HOMES.get(value)
        if shard_info is None or "pp" in shard_info.process.groups:
            raise CheckpointError(
                "StateDictOptions(full_state_dict=True) does not gather pipeline stages",
                why=f"this rank's state dict has '{value.place.name}', but not the names of other stages",
                hint="use pm.full_state_dict() and pm.full_optimizer_state_dict(optimizer)",
            )
        gathered = value.to_local()
        for axis, cut in reversed(shard_info.cuts):
            gathered = PRIMITIVES["all_gather"](gathered, shard_info.process.along(axis).group_name, cut)
        return gathered

    return tree_map(full, state_dict)


def shapes_of(program: Program, model: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """Return {name: full shape} of the model's state dict; None for entries that are not tensors."""
    shapes: dict[str, tuple[int, ...] | None] = {}
    for name, value in model.state_dict().items():
        shapes[name] = tuple(value.shape) if isinstance(value, Tensor) else None
    for name, stored in program.parameters.items():
        shapes |= dict.fromkeys((name, *stored.aliases), stored.shape)
    return shapes


class Loading:
    """One `load_state_dict` call: takes this rank's shards of the tensors, and records errors.

    Args:
        shapes: {name: shape} of the full model (`shapes_of`).
        missing: torch's list of missing names, to which this class appends.
        errors: torch's list of errors, to which this class appends.
    """

    def __init__(
        self, module: nn.Module, shapes: Mapping[str, tuple[int, ...] | None], missing: list[str], errors: list[str]
    ):
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        self.shapes, self.missing, self.errors = shapes, missing, errors

    def take(self, state_dict: MutableMapping[str, Any], prefix: str, extra: MutableMapping[str, Any]) -> None:
        """Reduce `state_dict` in place to the local tensors that `nn.Module` loads on this rank.

        Full tensors are sharded, names of other stages' parameters are removed, and entries that are not tensors are
        moved to `extra`. If a state dict has any name of another stage, it must have all names.
        """
        names = {key[len(prefix) :] for key in state_dict if key.startswith(prefix)}
        elsewhere = self.shapes.keys() - self.parameters.keys() - self.buffers - extra.keys()
        if names & elsewhere:
            self.missing += [prefix + name for name in self.shapes if name in elsewhere - names]
        for name in names & elsewhere:
            self._check_shape(name, state_dict.pop(prefix + name))
        for name in names & self.parameters.keys():
            state_dict[prefix + name] = self._local(name, state_dict[prefix + name])
        for name in extra:
            if name in names:
                extra[name] = state_dict.pop(prefix + name)
            else:
                self.missing.append(prefix + name)
        if NO_PARAMETERS in self.parameters:
            state_dict.setdefault(prefix + NO_PARAMETERS, self.parameters[NO_PARAMETERS])

    def _check_shape(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and tuple(value.shape) != self.shapes[name]:
            self.errors.append(
                f"'{name}' has shape {tuple(value.shape)} in the state dict, in the model {self.shapes[name]}"
            )

    def _local(self, name: str, value: Any) -> Any:
        """Return this rank's shard of a value. If the value does not fit, record an error."""
        parameter = self.parameters[name]
        shard_info = shard_info_of(parameter)
        if shard_info is None or not isinstance(value, Tensor):
            return value
        try:
            return checked_shard_of(name, value, parameter, shard_info)
        except CheckpointError as error:
            self.errors.append(str(error))
            return parameter


def checked_shard_of(name: str, value: Tensor, parameter: Tensor, shard_info: ShardInfo) -> Tensor:
    """Return this rank's shard of a parameter, from a full tensor or a saved shard.

    Raises CheckpointError if the value has another shape, or is another rank's shard.
    """
    place = shard_offsets_of(shard_info)
    saved_place = offsets_in_file(value)
    if saved_place is not None:
        check_same_shard(name, saved_place, place)
    if value.shape == parameter.shape:
        return to_plain(value)
    if tuple(value.shape) == place.shape:
        return local_shard_of(value, shard_info.local_splits)
    if place.is_full:
        raise CheckpointError(
            f"'{name}' has shape {tuple(value.shape)} in the state dict",
            why=f"the model's parameter has shape {place.shape}", hint="load it into the model that was saved",
        )  # fmt: skip
    raise CheckpointError(
        f"'{name}' has shape {tuple(value.shape)} in the state dict",
        why=f"the model's parameter has shape {place.shape}, and this rank's shard of it has {tuple(parameter.shape)}",
        hint="a full tensor fits on every mesh; a state_dict() of one rank fits on the same rank of the same mesh",
    )


def check_same_shard(name: str, saved: ShardOffsets, local: ShardOffsets) -> None:
    """Raise CheckpointError if a saved shard has other offsets than this rank's shard."""
    if saved.spans is None or (saved.shape, saved.spans) == (local.shape, local.spans):
        return
    raise CheckpointError(
        f"'{name}' in the state dict is not the shard that this rank holds",
        why=f"it is {_ranges_text(saved)} of {saved.shape}; here it is {_ranges_text(local)} of {local.shape}",
        hint="load the file that this rank saved on this mesh; torch.distributed.checkpoint or full_state_dict() "
        "move weights to another mesh",
    )


def _ranges_text(place: ShardOffsets) -> str:
    """Format the ranges of a shard: `[0:4, 8:12]` for one dim, `[0:4] x [0:16]` for two."""
    assert place.spans is not None
    dims = [", ".join(f"{start}:{start + length}" for start, length in spans) for spans in place.spans]
    return " x ".join(f"[{dim}]" for dim in dims) or "all"
