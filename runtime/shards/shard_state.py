"""A model's tensors as the ranks store them: cut out of the model, and put together again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopart.errors import RuntimeSetupError, StageError
from autopart.ir.collective_nodes import autopart_operator, axis_of
from autopart.ir.layout import cut_together, parts_of
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program, StoredTensor
from autopart.ir.sharding import Cut, part_of
from autopart.runtime.comm.collectives import PRIMITIVES
from autopart.runtime.comm.list_collectives import LIST_PRIMITIVES
from autopart.runtime.comm.process_mesh import Process, of_all_stages
from autopart.runtime.comm.stage_ranks import groups_along, owners
from autopart.runtime.weights.deferred_init import Cuts
from autopart.runtime.weights.load_weights import Weights


def stored_cuts(stored: StoredTensor, mesh: Mesh) -> list[tuple[str, Cut]]:
    """How the full tensor is cut, axis by axis, outer axis first; axes that cut a dim in one piece each cut it as
    one."""
    shape = list(stored.shape)
    cuts = []
    outermost_first = sorted((axis for axis in stored.layout if mesh.size(axis) > 1), key=mesh.stride, reverse=True)
    for axis, placement in cut_together({axis: stored.layout[axis] for axis in outermost_first}).items():
        cut = Cut(placement.dim, shape[placement.dim], placement.sections, mesh.size(axis))
        cuts.append((axis, cut))
        shape[placement.dim] = cut.length(0)
    return cuts


def cuts_at(stored: StoredTensor, mesh: Mesh, coordinates: Mapping[str, int]) -> Cuts:
    """How the part on the rank at these coordinates is cut out of the full tensor: each cut, and the shard of it."""
    return [(cut, mesh.index(coordinates, axis)) for axis, cut in stored_cuts(stored, mesh)]


def joined_axes(program: Program) -> list[str]:
    """Axes joined in one, along which stages move values or weights are cut, in the order of their names."""
    nodes = (node for stage in program.stages for node in stage.graph.graph.nodes)
    axes = {axis for node in nodes if autopart_operator(node) != "axis_index" and (axis := axis_of(node)) is not None}
    axes |= {axis for stored in program.parameters.values() for axis, _ in stored_cuts(stored, program.mesh)}
    return sorted(axis for axis in axes if len(parts_of(axis)) > 1)


def settled(new: Mapping[str, StoredTensor], known: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The parameters of a new program, stored where earlier ones have them.

    Raises StageError where a stage reads one that it does not hold: it may have been trained elsewhere since.
    """
    for name in new.keys() & known.keys():
        assert known[name].layout == new[name].layout, f"'{name}' has another layout in this program"
        missing = sorted(set(new[name].stages) - set(known[name].stages))
        if missing:
            raise StageError(
                f"this call reads parameter '{name}' on stage {missing[0]}, which does not hold it",
                why=f"by the first call, it is read on stage {', '.join(map(str, known[name].stages))} alone",
                hint="parallelize(model, mesh, example_kwargs=batch) with a batch that uses all of the model",
            )
    return {**known, **{name: stored for name, stored in new.items() if name not in known}}


def has_values_of(local: Tensor, stored: StoredTensor, program: Program, process: Process, full: Tensor) -> bool:
    """Return whether a local parameter is this rank's shard of a full tensor."""
    shard = part_of(full.detach(), cuts_at(stored, program.mesh, process.coordinates))
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
    """{name: local parameter} of the rank at `coordinates`, for the `stages` it runs (None: all), but for `known` ones.

    Each is a copy of its part of the model's parameter, with the same dtype and `requires_grad`; its values are those
    of `weights` where these are given. Raises RuntimeSetupError for a parameter on the meta device without.
    """
    source = dict(model.named_parameters(remove_duplicate=False))
    cuts = {}
    for name, stored in program.parameters.items():
        if name not in known and (stages is None or set(stages) & set(stored.stages)):
            cuts[name] = cuts_at(stored, program.mesh, coordinates)
    local = {}
    for name, value in _parts(source, cuts) if weights is None else weights.read(cuts):
        full = source[name]
        # What was read is nobody else's.
        value = value.to(device or full.device, copy=weights is None, memory_format=torch.contiguous_format)
        local[name] = nn.Parameter(value, requires_grad=full.requires_grad)
    return {name: local[name] for name in cuts}


def _parts(source: Mapping[str, Tensor], cuts: Mapping[str, Cuts]) -> Iterator[tuple[str, Tensor]]:
    """(name, this rank's part) of the parameters of a model."""
    for name, cut_here in cuts.items():
        if source[name].is_meta:
            raise RuntimeSetupError(
                f"parameter '{name}' has no values to run with",
                why="it is on the meta device",
                hint="weights='folder' of safetensors or weights='init', or load the model's weights first",
            )
        yield name, part_of(source[name].detach(), cut_here)


def gather(
    local: Mapping[str, Tensor], program: Program, process: Process, stage_style: str, names: Collection[str]
) -> dict[str, Tensor]:
    """{name: full tensor} on every rank, from each rank's `local` parts; `names` is the same on every rank.

    A part is gathered on the ranks of the first stage that reads the parameter, and sent from there along `pp`.
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
            for axis, cut in reversed(stored_cuts(stored, program.mesh)):
                value = PRIMITIVES["all_gather"](value, process.along(axis).group_name, cut)
        full[name] = broadcast_from(value, owner, process, stored.shape, dtypes[name])
    return full


def _dtypes(local: Mapping[str, Tensor], process: Process) -> dict[str, torch.dtype]:
    """{name: dtype} of the tensors of all ranks along `pp`."""
    mine = {name: tensor.dtype for name, tensor in local.items()}
    return {name: dtype for theirs in of_all_stages(mine, process) for name, dtype in theirs.items()}


def broadcast_from(
    value: Tensor | None, owner: int, process: Process, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """`value` of the rank at `pp` coordinate `owner`, on every rank along `pp`; the others may give None."""
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
    """The parameters that have a gradient on the rank that owns them; the same set on every rank."""
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
    """{name: full tensor} from {rank: {name: local tensor}} of all ranks: `gather` in one process.

    A name that is on no rank is left out.
    """
    full = {}
    mesh = program.mesh
    for name, stored in program.parameters.items():
        owner = owners(program, stored, stage_style)[0]
        parts = {
            rank: tensors[name].detach()
            for rank, tensors in local.items()
            if mesh.coordinates(rank).get("pp", 0) == owner and name in tensors
        }
        if not parts:
            continue
        for axis, cut in reversed(stored_cuts(stored, mesh)):
            for group in groups_along(mesh, list(parts), axis):
                joined = LIST_PRIMITIVES["all_gather"]([parts[rank] for rank in group], cut)
                parts.update(zip(group, joined, strict=True))
        full[name] = parts[min(parts)]
    return full
