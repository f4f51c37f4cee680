"""A rank's shard of a tensor in a state dict: torch's distributed checkpoint saves and loads it where it belongs.

Values and shape are those of the shard, so whatever is computed with it is computed with the shard. What copies it
keeps its place: a state dict that was moved to the host, staged, or pickled is saved as rightly as the first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from autopart.compat.torch_internals import (
    WITHOUT_TORCH_FUNCTION,
    empty_wrapper,
    operator_name,
    tree_map,
)
from autopart.errors import CheckpointError
from autopart.ir.sharding import Box, Span, boxes, spans_of
from autopart.runtime.checkpoint.dcp_planners import plan_checkpoints_with, refuse_pieces_in_safetensors
from autopart.runtime.checkpoint.missing_state import never_saved
from autopart.runtime.consistency.replicas import check_before_saving
from autopart.runtime.shards.shard_owners import Home, home_of

KEEPING_PLACE = frozenset(
    ["detach", "alias", "clone", "_to_copy", "_pin_memory", "copy", "lift_fresh", "lift_fresh_copy",
     "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_empty_strided",
     "add", "sub", "rsub", "mul", "div", "neg", "lerp", "addcmul", "addcdiv", "where"]
)  # fmt: skip
"""Operators whose result, where it has the shard's shape, lies where the shard does: copies, and entry by entry."""


@dataclass(frozen=True)
class ShardPlace:
    """Where a shard lies in its full tensor.

    `name`: of the model's parameter. `shape`: of the full tensor. `spans`: for each dim, the runs of elements that the
    shard is made of, in its order; None where that is not known. `keys`: save it only under a key that has one of these
    in it (names of the parameter), for a number would mean another parameter on another rank.
    """

    name: str
    shape: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...] | None
    keys: tuple[str, ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        assert self.spans is not None
        return tuple(sum(length for _, length in dim) for dim in self.spans)

    @property
    def is_whole(self) -> bool:
        return self.spans is not None and self.local_shape == self.shape


PLACE = "autopart_place"
"""The attribute that has the place of a tensor in a file."""


def place_of(home: Home, *, only_by_name: bool = False) -> ShardPlace:
    """Where the shards of a home lie on this rank; `only_by_name`: saved under a name of the parameter alone."""
    spans = spans_of(home.stored.shape, home.cuts_here)
    keys = (home.name, *home.stored.aliases) if only_by_name else ()
    return ShardPlace(home.name, tuple(home.stored.shape), spans, keys)


def chunks_of(place: ShardPlace) -> list[Box]:
    """The boxes that a shard is made of; none where it is empty and its full tensor is not."""
    assert place.spans is not None
    if math.prod(place.shape) == 0:
        zeros = (0,) * len(place.shape)
        return [Box(zeros, zeros, place.shape)] if place.is_whole else []
    return boxes(place.spans)


class ShardTensor(Tensor):
    """This rank's shard of a tensor, with its place in the full one.

    It behaves as the plain tensor that `to_local()` gives: same shape, same values, and results of operators are plain
    tensors. `torch.distributed.checkpoint` saves it as its part of the full tensor, under the full tensor's shape, and
    fills it from a checkpoint of any mesh.

    Example:
        >>> shard = ShardTensor(torch.zeros(2), ShardPlace("bias", (4,), (((0, 1), (2, 1)),)))
        >>> [chunk.offsets for chunk in chunks_of(shard.place)]
        [(0,), (2,)]
    """

    place: ShardPlace
    _local: Tensor
    __torch_function__ = WITHOUT_TORCH_FUNCTION  # type: ignore[assignment]  # as torch's own classes have it

    @staticmethod
    def __new__(cls, local: Tensor, place: ShardPlace) -> ShardTensor:
        shard = empty_wrapper(cls, local)
        shard._local = local.detach()
        shard.place = place
        return shard

    def to_local(self) -> Tensor:
        """The shard as a plain tensor; it shares its memory."""
        return self._local

    def numpy(self, *, force: bool = False) -> Any:
        return self._local.numpy(force=force)

    def tolist(self) -> Any:
        return self._local.tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A file has the plain tensor, which is read without autopart, with the place as an attribute."""
        plain = self._local.detach()
        setattr(plain, PLACE, dataclasses.astuple(self.place))
        return plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # as Tensor has it
        return f"ShardTensor({self._local!r}, '{self.place.name}' of shape {self.place.shape})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # Tensor declares it as a static function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        shards: list[ShardTensor] = []

        def local(value: Any) -> Any:
            if not isinstance(value, ShardTensor):
                return value
            shards.append(value)
            return value._local

        result = func(*tree_map(local, args), **tree_map(local, kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        for shard in shards:
            if result is shard._local:  # written in place
                return shard
        places = {shard.place for shard in shards}
        keeps = operator_name(func) in KEEPING_PLACE and result.shape == shards[0].shape and len(places) == 1
        return ShardTensor(result, shards[0].place) if keeps else result

    # What torch.distributed.checkpoint asks of a tensor in parts.

    def __create_write_items__(self, key: str, value: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self._check(key)
        properties, size = TensorProperties.create_from_tensor(self._local), torch.Size(self.place.shape)
        return [
            WriteItem(
                index=MetadataIndex(key, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        self._check()
        return [
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in chunks_of(self.place)
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        self._check(index.fqn)
        (chunk,) = (chunk for chunk in chunks_of(self.place) if chunk.offsets == tuple(index.offset))
        part = self._local
        for dim, (start, length) in enumerate(zip(chunk.local_offsets, chunk.sizes, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def _check(self, key: str | None = None) -> None:
        """Raises CheckpointError where this cannot be saved, or loaded, under `key`."""
        name, shape = self.place.name, tuple(self.shape)
        if self.place.spans is None or self.place.local_shape != shape:
            raise CheckpointError(
                f"a tensor of shape {shape} of '{name}' has no place in a checkpoint",
                why=f"this rank holds a part of '{name}', and which part of the whole this tensor is cannot be known",
                hint="save what is cut as the parameter is",
            )
        if self.place.keys and key is not None and not any(name in key for name in self.place.keys):
            raise CheckpointError(
                f"'{key}' would be other parameters on other ranks",
                why=f"optimizer.state_dict() counts parameters; here this one is '{name}', and each pipeline stage "
                "counts its own",
                hint="save and load torch.distributed.checkpoint.state_dict.get_state_dict(pm, optimizer), which has "
                "names, or pm.full_optimizer_state_dict(optimizer)",
            )


def check_saved_size(key: str, size: Sequence[int], shard: ShardTensor) -> None:
    """Raises CheckpointError where a checkpoint's tensor has not the size of the shard's full tensor."""
    if tuple(size) != shard.place.shape:
        raise CheckpointError(
            f"the checkpoint's '{key}' has shape {tuple(size)}, the model's {shard.place.shape}",
            hint="load it into the model that was saved",
        )


def connect_checkpoints() -> None:
    """Let torch's distributed checkpoint know of shards; done once."""
    plan_checkpoints_with(ShardTensor, check_saved_size, refuse_parts_without_place, never_saved, check_before_saving)
    refuse_pieces_in_safetensors()


def place_in_file(tensor: Tensor) -> ShardPlace | None:
    """Where a tensor lies that was a shard, or was one when it was written into the file that it was read from."""
    if isinstance(tensor, ShardTensor):
        return tensor.place
    values = getattr(tensor, PLACE, None)
    return None if values is None else ShardPlace(*values)


def refuse_parts_without_place(key: str, value: Any) -> None:
    """Raises CheckpointError for a tensor that is a part of another and that a checkpoint would save as if whole."""
    if not isinstance(value, Tensor) or isinstance(value, ShardTensor):
        return
    home = home_of(value)
    place = place_in_file(value) if home is None else place_of(home)
    if place is not None and not place.is_whole:
        raise CheckpointError(
            f"'{key}' is one rank's part of '{place.name}', and would be saved as if it were all of it",
            hint="save pm.state_dict(), or get_state_dict(pm, optimizer); what was read from a file of one rank goes "
            "through pm.load_state_dict first",
        )


def refuse_what_was_not_loaded(state_dict: Mapping[str, Any]) -> None:
    """Raises CheckpointError where a shard is left in a state dict into which the first rank's tensors were loaded."""
    for key, value in state_dict.items():
        if isinstance(value, ShardTensor):
            raise CheckpointError(
                f"StateDictOptions(broadcast_from_rank0=True) does not bring '{key}' to this rank",
                why="the first rank's optimizer does not hold that parameter",
                hint="pm.load_full_optimizer_state_dict(optimizer, full) on every rank",
            )


def local_of(tensor: Tensor) -> Tensor:
    """The plain tensor of this rank's values."""
    return tensor.to_local() if isinstance(tensor, ShardTensor) else tensor


def _between_processes(shard: ShardTensor) -> Any:
    return ShardTensor, (shard.to_local(), shard.place)


ForkingPickler.register(ShardTensor, _between_processes)
"""A process that saves in the background is given shards as they are."""
