"""Shard a model's tensors into the local tensors of ranks, and gather full tensors from the shards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopart.errors import RuntimeSetupError, StageError
from autopart.ir.collective_nodes import autopart_operator, axis_of
from autopart.ir.layout import flattened_shards, mesh_axes_of
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program, StoredTensor
from autopart.ir.sharding import DimSharding, local_shard_of
from autopart.runtime.comm.collectives import PRIMITIVES
from autopart.runtime.comm.list_collectives import LIST_PRIMITIVES
from autopart.runtime.comm.process_mesh import Process, of_all_stages
from autopart.runtime.comm.stage_ranks import groups_along, owners
from autopart.runtime.weights.deferred_init import LocalSplits
from autopart.runtime.weights.load_weights import Weights


def splits_of(stored: StoredTensor, mesh: Mesh) -> list[tuple[str, DimSharding]]:
    """Return a tensor's sharding as a list of (mesh axis, split of a dim over the axis), outer axis first.

    Several mesh axes that shard one dim can be flattened into one axis, such as `dp_cp`.
    """
    shape = list(stored.shape)
    cuts = []
    outermost_first = sorted((axis for axis in stored.layout if mesh.size(axis) > 1), key=mesh.stride, reverse=True)
    for axis, placement in flattened_shards({axis: stored.layout[axis] for axis in outermost_first}).items():
        cut = DimSharding(placement.dim, shape[placement.dim], placement.sections, mesh.size(axis))
        cuts.append((axis, cut))
        shape[placement.dim] = cut.length(0)
    return cuts


def splits_at(stored: StoredTensor, mesh: Mesh, coordinates: Mapping[str, int]) -> LocalSplits:
    """Return, for each split of a tensor, (split, index of the shard of the rank at `coordinates`)."""
    return [(cut, mesh.index(coordinates, axis)) for axis, cut in splits_of(stored, mesh)]


def flattened_axes(program: Program) -> list[str]:
    """Return the flattened mesh axes (such as `dp_cp`) that a program uses, sorted by name."""
    nodes = (node for stage in program.stages for node in stage.graph.graph.nodes)
    axes = {axis for node in nodes if autopart_operator(node) != "axis_index" and (axis := axis_of(node)) is not None}
    axes |= {axis for stored in program.parameters.values() for axis, _ in splits_of(stored, program.mesh)}
    return sorted(axis for axis in axes if len(mesh_axes_of(axis)) > 1)


def merge_stored(new: Mapping[str, StoredTensor], known: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the descriptions of all parameters of earlier programs (`known`) and of a new program.

    Raises StageError if a stage of the new program uses a parameter that earlier programs store only on other stages.
    """
    for name in new.keys() & known.keys():
        assert known[name].layout == new[name].layout, f"'{name}' has another layout in this program"
        missing = sorted(set(new[name].stages) - set(known[name].stages))
        if missing:
            raise StageError(
                f"this call uses parameter '{name}' on stage {missing[0]}, which does not hold it",
                why=f"the first call used it on stage {', '.join(map(str, known[name].stages))} only",
                hint="parallelize(model, mesh, example_kwargs=batch) with a batch that uses all of the model, or a "
                "mesh without pp",
            )
    return {**known, **{name: stored for name, stored in new.items() if name not in known}}


def equals_shard_of(local: Tensor, stored: StoredTensor, program: Program, process: Process, full: Tensor) -> bool:
    """Return True if the local parameter equals this rank's shard of `full`, in the parameter's dtype."""
    shard = local_shard_of(full.detach(), splits_at(stored, program.mesh, process.coordinates))
    return bool(shard.shape == local.shape and torch.equal(shard.to(local.device, local.dtype), local))


def shard_parameters(
    model: nn.Module,
    program: Program,
    coordinates: Mapping[str, int],
    *,
    stages: Collection[int] | None = None,
    device: torch.device | None = None,
    known: Collection[str] = (),
    weights: Weights | None = None,
) -> dict[str, nn.Parameter]:
    """Return {name: local parameter} of the rank at `coordinates`, copied from the model's parameters.

    The copies have the model's dtypes and `requires_grad`. Raises RuntimeSetupError for a parameter on the meta device
    if `weights` is None.

    Args:
        stages: stages that the rank runs. None: all stages.
        device: device of the local parameters. None: the device of the model's parameters.
        known: names of parameters whose local parameters exist already and are left out of the result.
        weights: source of the values. None: the model.
    """
    source = dict(model.named_parameters(remove_duplicate=False))
    cuts = {}
    for name, stored in program.parameters.items():
        if name not in known and (stages is None or set(stages) & set(stored.stages)):
            cuts[name] = splits_at(stored, program.mesh, coordinates)
    local = {}
    for name, value in _shards(source, cuts) if weights is None else weights.read(cuts):
        full = source[name]
        # Values from files are not shared, so they need no copy.
        value = value.to(device or full.device, copy=weights is None, memory_format=torch.contiguous_format)
        local[name] = nn.Parameter(value, requires_grad=full.requires_grad)
    return {name: local[name] for name in cuts}


def _shards(source: Mapping[str, Tensor], cuts: Mapping[str, LocalSplits]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, this rank's shard) of each parameter in `cuts`.

    `source`: {name: full tensor}. `cuts`: {name: splits that give this rank's shard}.
    """
    for name, splits in cuts.items():
        if source[name].is_meta:
            raise RuntimeSetupError(
                f"parameter '{name}' has no values to run with",
                why="it is on the meta device",
                hint="weights='folder' of safetensors or weights='init', or load the model's weights first",
            )
        yield name, local_shard_of(source[name].detach(), splits)


def gather(
    local: Mapping[str, Tensor], program: Program, process: Process, stage_style: str, names: Collection[str]
) -> dict[str, Tensor]:
    """Gather {name: full tensor} on every rank from the `local` shards of all ranks. A collective call.

    The ranks of the first stage that uses a parameter all-gather it, then broadcast it along `pp`.

    Args:
        names: parameters to gather, equal on every rank.
    """
    dtypes = _dtypes(local, process)
    full = {}
    for name, stored in program.parameters.items():
        if name not in names:
            continue
        owner = owners(program, stored, stage_style)[0]
        value = None
        if owner == process.pp:
            value = local[name].detach().clone()
            for axis, cut in reversed(splits_of(stored, program.mesh)):
                value = PRIMITIVES["all_gather"](value, process.along(axis).group_name, cut)
        full[name] = broadcast_from(value, owner, process, stored.shape, dtypes[name])
    return full


def _dtypes(local: Mapping[str, Tensor], process: Process) -> dict[str, torch.dtype]:
    local_dtypes = {name: tensor.dtype for name, tensor in local.items()}
    return {
        name: dtype for remote_dtypes in of_all_stages(local_dtypes, process) for name, dtype in remote_dtypes.items()
    }


def broadcast_from(
    value: Tensor | None, owner: int, process: Process, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Broadcast `value` along `pp` from the rank at `pp` coordinate `owner`. Other ranks can pass None."""
    if value is None:
        value = torch.empty(shape, dtype=dtype, device=process.device)
    assert tuple(value.shape) == tuple(shape) and value.dtype == dtype, f"{value.shape} {value.dtype}, {shape} {dtype}"
    value = value.contiguous()
    if "pp" in process.groups:
        dist.broadcast(value, group=process.groups["pp"], group_src=owner)
    return value


def names_with_gradient(
    parameters: Mapping[str, Tensor], program: Program, process: Process, stage_style: str
) -> set[str]:
    """Return the names of parameters that have a gradient on the first pipeline rank that stores them.

    The result is equal on every rank. A collective call.
    """
    names = list(program.parameters)
    present = torch.zeros(len(names), dtype=torch.int32, device=process.device)
    for index, name in enumerate(names):
        if owners(program, program.parameters[name], stage_style)[0] == process.pp:
            present[index] = parameters[name].grad is not None
    if "pp" in process.groups:
        dist.all_reduce(present, dist.ReduceOp.MAX, group=process.groups["pp"])
    return {name for name, is_present in zip(names, present.tolist(), strict=True) if is_present}


def join(
    local: Mapping[int, Mapping[str, Tensor]], program: Program, *, stage_style: str = "loop"
) -> dict[str, Tensor]:
    """Compute {name: full tensor} in one process, from the local tensors of all ranks.

    The result equals that of `gather`, which runs on every rank. Parameters that are not in `local` are left out.

    Args:
        local: {rank: {name: local tensor}}.
    """
    full = {}
    mesh = program.mesh
    for name, stored in program.parameters.items():
        owner = owners(program, stored, stage_style)[0]
        shards = {
            rank: tensors[name].detach()
            for rank, tensors in local.items()
            if mesh.coordinates(rank).get("pp", 0) == owner and name in tensors
        }
        if not shards:
            continue
        for axis, cut in reversed(splits_of(stored, mesh)):
            for group in groups_along(mesh, list(shards), axis):
                gathered = LIST_PRIMITIVES["all_gather"]([shards[rank] for rank in group], cut)
                shards.update(zip(group, gathered, strict=True))
        full[name] = shards[min(shards)]
    return full
