"""State dicts of a partitioned model: a rank's shards with their places, and full tensors that are cut on loading."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from autopart.compat.torch_internals import tree_map
from autopart.errors import CheckpointError
from autopart.ir.program import Program
from autopart.ir.sharding import part_of
from autopart.runtime.checkpoint.saved_shard import ShardPlace, ShardTensor, local_of, place_in_file, place_of
from autopart.runtime.comm.collectives import PRIMITIVES
from autopart.runtime.shards.shard_owners import Home, home_of

NO_PARAMETERS = "no_parameters_here"
"""The empty parameter of a rank whose stages read none: its optimizer can be made, and no state dict has it."""


def extra_state(model: nn.Module) -> dict[str, Any]:
    """What a model's state dict has beside tensors (`get_extra_state` of its modules), by its names."""
    return {name: value for name, value in model.state_dict().items() if not isinstance(value, Tensor)}


def with_places(module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, extra: Mapping[str, Any]) -> None:
    """Turn a module's state dict into what distributed checkpoints save rightly, under the model's own names.

    Every tensor that a rank holds in part becomes a `ShardTensor`; what all ranks hold whole stays plain. `extra` is
    added.
    """
    state_dict.pop(prefix + NO_PARAMETERS, None)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        home = home_of(parameter)
        value = state_dict.get(prefix + name)
        if home is not None and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            state_dict[prefix + name] = placed(value, home)
    state_dict.update({prefix + name: value for name, value in extra.items()})


def placed(value: Tensor, home: Home) -> Tensor:
    """A tensor laid out as a parameter is, with its place; plain where every rank has the same, whole."""
    place = place_of(home)
    return value if place.is_whole and home.process.mesh.size("pp") == 1 else at_home(value, place, home)


_HOMES: Any = WeakIdKeyDictionary()
"""{shard of a state dict: its home}; a copy has none."""


def at_home(value: Tensor, place: ShardPlace, home: Home) -> ShardTensor:
    """A shard that can be put together with those of the other ranks."""
    shard = ShardTensor(value, place)
    _HOMES[shard] = home
    return shard


def put_together(state_dict: Any) -> Any:
    """A state dict with the full tensor in place of every shard, on every rank. A collective call.

    Raises CheckpointError for a pipeline: a rank's state dict has the names of its own stages alone.
    """

    def full(value: Any) -> Any:
        if not isinstance(value, ShardTensor):
            return value
        home = _HOMES.get(value)
        if home is None or "pp" in home.process.groups:
            raise CheckpointError(
                "StateDictOptions(full_state_dict=True) does not put pipeline stages together",
                why=f"this rank's state dict has '{value.place.name}', but not the names of other stages",
                hint="pm.full_state_dict() and pm.full_optimizer_state_dict(optimizer) give the same",
            )
        whole = value.to_local()
        for axis, cut in reversed(home.cuts):
            whole = PRIMITIVES["all_gather"](whole, home.process.along(axis).group_name, cut)
        return whole

    return tree_map(full, state_dict)


def shapes_of(program: Program, model: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """{name: full shape} of what the model's state dict has; None for what is not a tensor."""
    shapes: dict[str, tuple[int, ...] | None] = {}
    for name, value in model.state_dict().items():
        shapes[name] = tuple(value.shape) if isinstance(value, Tensor) else None
    for name, stored in program.parameters.items():
        shapes |= dict.fromkeys((name, *stored.aliases), stored.shape)
    return shapes


class Loading:
    """One `load_state_dict`: takes this rank's part of what is given, and notes what does not fit.

    `shapes`: of the whole model (`shapes_of`); `missing` and `errors` are torch's own lists, which it reports.
    """

    def __init__(
        self, module: nn.Module, shapes: Mapping[str, tuple[int, ...] | None], missing: list[str], errors: list[str]
    ):
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        self.shapes, self.missing, self.errors = shapes, missing, errors

    def take(self, state_dict: MutableMapping[str, Any], prefix: str, extra: MutableMapping[str, Any]) -> None:
        """Leave in `state_dict` what `nn.Module` loads on this rank: local tensors under names that are here.

        Full tensors are cut, names of other stages are taken out, and where there are any, all of theirs must be.
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
        """This rank's part of a value, or the parameter's own where it does not fit."""
        parameter = self.parameters[name]
        home = home_of(parameter)
        if home is None or not isinstance(value, Tensor):
            return value
        try:
            return part_here(name, value, parameter, home)
        except CheckpointError as error:
            self.errors.append(str(error))
            return parameter


def part_here(name: str, value: Tensor, parameter: Tensor, home: Home) -> Tensor:
    """This rank's part of a value for a parameter: of a full tensor, or what it is already.

    Raises CheckpointError where it is neither, or another rank's.
    """
    place = place_of(home)
    saved_place = place_in_file(value)
    if saved_place is not None:
        check_same_part(name, saved_place, place)
    if value.shape == parameter.shape:
        return local_of(value)
    if tuple(value.shape) == place.shape:
        return part_of(value, home.cuts_here)
    what = f"'{name}' has shape {tuple(value.shape)} in the state dict"
    if place.is_whole:
        raise CheckpointError(what, why=f"the model's is {place.shape}", hint="load it into the model that was saved")
    raise CheckpointError(
        what, why=f"the model's is {place.shape}, and this rank's part of it {tuple(parameter.shape)}",
        hint="a full tensor fits on every mesh; a state_dict() of one rank fits on the same rank of the same mesh",
    )  # fmt: skip


def check_same_part(name: str, saved: ShardPlace, here: ShardPlace) -> None:
    """Raises CheckpointError where a shard is another part of the full tensor than this rank's."""
    if saved.spans is None or (saved.shape, saved.spans) == (here.shape, here.spans):
        return
    raise CheckpointError(
        f"'{name}' in the state dict is not the part that this rank holds",
        why=f"it is {_spoken(saved)} of {saved.shape}; here it is {_spoken(here)} of {here.shape}",
        hint="load the file that this rank saved on this mesh; torch.distributed.checkpoint or full_state_dict() "
        "bring weights to another mesh",
    )


def _spoken(place: ShardPlace) -> str:
    """The entries of a shard: `[0:4, 8:12]` of one dim, `[0:4] x [0:16]` of two."""
    assert place.spans is not None
    dims = [", ".join(f"{start}:{start + length}" for start, length in spans) for spans in place.spans]
    return " x ".join(f"[{dim}]" for dim in dims) or "all"
