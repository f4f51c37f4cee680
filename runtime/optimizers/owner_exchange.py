"""Exchange of shards with owner ranks: each sharded tensor is gathered on one rank, then scattered.

Each tensor has one owner among the ranks that store its shards. The tensors are distributed evenly over these ranks. An
update that needs full tensors, such as Muon's, is thus computed only once, and ranks update different tensors at the
same time. Liu et al. 2025 ("Muon is Scalable for LLM Training", arXiv:2502.16982, section 2.3) gather each matrix in
the same way.

The functions are generators, which yield each all-to-all as an `AllToAll` and receive its result. One implementation
thus runs on process groups (`run_on_groups`) and for all ranks in one process (`run_in_lockstep`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopart.ir.mesh import Mesh
from autopart.ir.run.full_tensors import balanced_owners, position_of
from autopart.ir.sharding import DimSharding
from autopart.runtime.comm.collectives import communicate
from autopart.runtime.comm.process_mesh import Process, gather_over_all
from autopart.runtime.comm.stage_ranks import groups_along

T = TypeVar("T")


@dataclass(frozen=True)
class AllToAll:
    """An all-to-all along a mesh axis.

    Attributes:
        axis: the mesh axis, which can be flattened (`dp_cp`).
        sends: for each rank of the axis, the flat tensor to send to it.
        receives: for each rank of the axis, the number of elements to receive from it.
    """

    axis: str
    sends: list[Tensor]
    receives: list[int]


@dataclass(frozen=True)
class GatherObjects:
    """An all-gather of a Python object over all ranks of the mesh."""

    value: Any


Steps = Generator[AllToAll | GatherObjects, list[Any], T]
"""Generator that yields collectives and receives their results: an item per rank of the axis, or of the mesh."""


@dataclass(frozen=True)
class OwnedTensor:
    """A sharded tensor and the coordinates of its owner.

    Attributes:
        shape: full shape.
        splits: (mesh axis, split, index of this rank's shard), outer axis first.
        owner: coordinate of the owner on each axis of `splits`.
    """

    name: str
    shape: tuple[int, ...]
    splits: tuple[tuple[str, DimSharding, int], ...]
    owner: tuple[int, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _, _ in self.splits)

    @property
    def is_mine(self) -> bool:
        """True if this rank owns the tensor."""
        return self.is_mine_from(0)

    def is_mine_from(self, level: int) -> bool:
        """Return True if this rank and the owner have equal coordinates on the axes `splits[level:]`."""
        pairs = zip(self.splits[level:], self.owner[level:], strict=True)
        return all(index == owner for (_, _, index), owner in pairs)

    def shape_within(self, level: int, index: int | None = None) -> tuple[int, ...]:
        """Return the shape of a shard after the splits over the first `level` axes.

        Args:
            index: index of the shard on the last of these axes. None: this rank's index.
        """
        shape = list(self.shape)
        for position, (_, cut, own) in enumerate(self.splits[:level]):
            shape[cut.dim] = cut.length(own if index is None or position < level - 1 else index)
        return tuple(shape)


def assign_owners(
    tensors: Sequence[tuple[str, tuple[int, ...], Sequence[tuple[str, DimSharding]]]],
    mesh: Mesh, coordinates: Mapping[str, int],
) -> list[OwnedTensor]:  # fmt: skip
    """Choose an owner for each sharded tensor, so that ranks own about equally many elements.

    All ranks that store the tensors get equal results, except for the index of the rank's shard.

    Args:
        tensors: (name, full shape, splits as (mesh axis, split)) of each tensor.
        coordinates: this rank's coordinates.
    """
    groups: defaultdict[tuple[str, ...], list[Any]] = defaultdict(list)
    for row in sorted(tensors, key=lambda row: row[0]):
        groups[tuple(axis for axis, _ in row[2])].append(row)
    chosen = {}
    for group in groups.values():
        sizes = [cut.num_shards for _, cut in group[0][2]]
        ranks = balanced_owners([math.prod(shape) for _, shape, _ in group], math.prod(sizes))
        for (name, shape, cuts), rank in zip(group, ranks, strict=True):
            splits = tuple((axis, cut, mesh.index(coordinates, axis)) for axis, cut in cuts)
            chosen[name] = OwnedTensor(name, shape, splits, position_of(rank, sizes))
    return [chosen[name] for name, _, _ in tensors]


def to_owners(shards: Mapping[str, Tensor], tensors: Sequence[OwnedTensor]) -> Steps[dict[str, Tensor]]:
    """Send shards to the owners of their tensors. Return {name: full tensor} of what this rank owns.

    Args:
        shards: {name: this rank's shard}. The names must be equal on all ranks.
    """
    full = dict(shards)
    for axes, bucket in _buckets(shards, tensors):
        for level in reversed(range(len(axes))):
            here = [tensor for tensor in bucket if tensor.is_mine_from(level + 1)]
            num_ranks = bucket[0].splits[level][1].num_shards
            sends = [
                _flat([full[tensor.name] for tensor in here if tensor.owner[level] == rank], shards[bucket[0].name])
                for rank in range(num_ranks)
            ]
            owned = [tensor for tensor in here if tensor.is_mine_from(level)]
            shapes = [[tensor.shape_within(level + 1, rank) for tensor in owned] for rank in range(num_ranks)]
            received = yield AllToAll(axes[level], sends, [sum(map(math.prod, row)) for row in shapes])
            pieces = [_unflatten(flat, row) for flat, row in zip(received, shapes, strict=True)]
            for position, tensor in enumerate(owned):
                full[tensor.name] = tensor.splits[level][1].join([row[position] for row in pieces])
    return {tensor.name: full[tensor.name] for tensor in tensors if tensor.name in shards and tensor.is_mine}


def from_owners(
    full: Mapping[str, Tensor], like: Mapping[str, Tensor], tensors: Sequence[OwnedTensor]
) -> Steps[dict[str, Tensor]]:
    """Send shards of full tensors from the owners to all ranks. Return {name: this rank's shard}.

    Args:
        full: {name: full tensor} of the tensors that this rank owns.
        like: {name: tensor with the dtype and device of the shard}. The names must be equal on all ranks.
    """
    shards = dict(full)
    for axes, bucket in _buckets(like, tensors):
        example = like[bucket[0].name]
        for level in range(len(axes)):
            here = [tensor for tensor in bucket if tensor.is_mine_from(level + 1)]
            num_ranks = bucket[0].splits[level][1].num_shards
            owned = [tensor for tensor in here if tensor.is_mine_from(level)]
            sends = [
                _flat([tensor.splits[level][1].take(shards[tensor.name], rank) for tensor in owned], example)
                for rank in range(num_ranks)
            ]
            sources = [[tensor for tensor in here if tensor.owner[level] == rank] for rank in range(num_ranks)]
            shapes = [[tensor.shape_within(level + 1) for tensor in row] for row in sources]
            received = yield AllToAll(axes[level], sends, [sum(map(math.prod, row)) for row in shapes])
            for flat, row, names in zip(received, shapes, sources, strict=True):
                shards.update(zip((tensor.name for tensor in names), _unflatten(flat, row), strict=True))
    return {name: shards[name] for name in like}


def _buckets(
    given: Mapping[str, Tensor], tensors: Sequence[OwnedTensor]
) -> list[tuple[tuple[str, ...], list[OwnedTensor]]]:
    """Group tensors that are exchanged together. Return (mesh axes, tensors) of each group.

    The tensors of a group have equal axes and dtype. Tensors that are not in `given` are left out.
    """
    buckets: defaultdict[Any, list[OwnedTensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.name in given:
            buckets[tensor.axes, given[tensor.name].dtype].append(tensor)
    return [(axes, bucket) for (axes, _), bucket in buckets.items()]


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


def _unflatten(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    chunks = flat.split([math.prod(shape) for shape in shapes])
    return [chunk.reshape(shape) for chunk, shape in zip(chunks, shapes, strict=True)]


def run_on_groups(steps: Steps[T], process: Process) -> T:
    """Run a generator of collectives on this rank, on the mesh's process groups. Return its result.

    A collective call.
    """
    received: list[Any] | None = None
    while True:
        try:
            request = steps.send(received)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as finished:
            result: T = finished.value
            return result
        if isinstance(request, GatherObjects):
            received = gather_over_all(request.value, process)
        else:
            group = process.along(request.axis).group_name
            sizes = [send.numel() for send in request.sends]
            collective = torch.ops._c10d_functional.all_to_all_single
            flat = communicate(collective, torch.cat(request.sends), request.receives, sizes, group)
            received = list(flat.split(request.receives))


def run_in_lockstep(steps: Mapping[int, Steps[T]], mesh: Mesh) -> dict[int, T]:
    """Run the generators of all ranks in one process. Return {rank: result}.

    Args:
        steps: {rank: generator of collectives}. Ranks that exchange tensors must yield their all-to-alls in the same
            order.
    """
    results: dict[int, T] = {}
    requests: dict[int, AllToAll | GatherObjects] = {}

    def advance(rank: int, received: list[Any] | None) -> None:
        requests.pop(rank, None)
        try:
            requests[rank] = steps[rank].send(received)  # type: ignore[arg-type]
        except StopIteration as finished:
            results[rank] = finished.value

    for rank in steps:
        advance(rank, None)
    while requests:
        request = next((r for r in requests.values() if isinstance(r, AllToAll)), None)
        if request is None:  # all ranks have arrived
            values = [requests[rank].value for rank in sorted(requests)]
            for rank in steps:
                advance(rank, values)
            continue
        first = next(rank for rank in requests if requests[rank] is request)
        group = next(group for group in groups_along(mesh, list(steps), request.axis) if first in group)
        sends = [requests[rank].sends for rank in group]
        for position, rank in enumerate(group):
            advance(rank, [row[position].clone() for row in sends])
    return results
