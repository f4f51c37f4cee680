"""A rank's shard in a state dict, which `torch.distributed.checkpoint` saves and loads.

It behaves as a tensor with the values and shape of the shard. Copies have the shard's offsets in the full tensor too,
so a state dict can be moved to CPU memory, staged or pickled before it is saved.
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
    tree_leaves,
    tree_map,
)
from autopart.errors import CheckpointError
from autopart.ir.sharding import Box, Span, boxes, spans_of
from autopart.runtime.checkpoint.dcp_planners import plan_checkpoints_with, reject_chunks_in_safetensors
from autopart.runtime.checkpoint.missing_state import keys_without_state
from autopart.runtime.consistency.replicas import check_before_saving
from autopart.runtime.shards.shard_owners import ShardInfo, shard_info_of

KEEPING_PLACE = frozenset(
    ["detach", "alias", "clone", "_to_copy", "_pin_memory", "copy", "lift_fresh", "lift_fresh_copy",
     "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_empty_strided",
     "add", "sub", "rsub", "mul", "div", "neg", "lerp", "addcmul", "addcdiv", "where"]
)  # fmt: skip
"""Copies and elementwise operators: a result with the shard's shape also has the shard's offsets."""


@dataclass(frozen=True)
class ShardOffsets:
    """Offsets of a shard in its full tensor.

    Attributes:
        name: name of the model's parameter.
        shape: shape of the full tensor.
        spans: for each dim, the (start, length) ranges of the full tensor that make up the shard. None: unknown.
        keys: names of the parameter. If set, the tensor can only be saved under a key that contains one of these names,
            because keys with parameter indices would differ between ranks.
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
    def is_full(self) -> bool:
        return self.spans is not None and self.local_shape == self.shape


PLACE = "autopart_place"
"""Attribute of a saved tensor that holds its shard offsets."""


def shard_offsets_of(shard_info: ShardInfo, *, only_by_name: bool = False) -> ShardOffsets:
    """Return the offsets of this rank's shard of a parameter.

    Args:
        only_by_name: True if the tensor can only be saved under a key with the parameter's name.
    """
    spans = spans_of(shard_info.stored.shape, shard_info.local_splits)
    keys = (shard_info.name, *shard_info.stored.aliases) if only_by_name else ()
    return ShardOffsets(shard_info.name, tuple(shard_info.stored.shape), spans, keys)


def chunks_of(place: ShardOffsets) -> list[Box]:
    """Return the rectangular chunks of a shard, with their offsets in the full tensor.

    An empty shard of a non-empty tensor has no chunk.
    """
    assert place.spans is not None
    if math.prod(place.shape) == 0:
        zeros = (0,) * len(place.shape)
        return [Box(zeros, zeros, place.shape)] if place.is_full else []
    return boxes(place.spans)


class ShardTensor(Tensor):
    """This rank's shard of a tensor, with its offsets in the full tensor.

    It behaves as the plain tensor that `to_local()` returns: same shape and values, and operators return plain tensors.
    `torch.distributed.checkpoint` saves it as a shard of the full tensor, under the full tensor's shape, and loads it
    from a checkpoint of any mesh.

    Example:
        >>> shard = ShardTensor(torch.zeros(2), ShardOffsets("bias", (4,), (((0, 1), (2, 1)),)))
        >>> [chunk.offsets for chunk in chunks_of(shard.place)]
        [(0,), (2,)]
    """

    place: ShardOffsets
    _local: Tensor
    __torch_function__ = WITHOUT_TORCH_FUNCTION  # type: ignore[assignment]  # as torch's own classes have it

    @staticmethod
    def __new__(cls, local: Tensor, place: ShardOffsets) -> ShardTensor:
        shard = empty_wrapper(cls, local)
        shard._local = local.detach()
        shard.place = place
        return shard

    def to_local(self) -> Tensor:
        """Return the shard as a plain tensor that shares memory with this one."""
        return self._local

    def numpy(self, *, force: bool = False) -> Any:
        return self._local.numpy(force=force)

    def tolist(self) -> Any:
        return self._local.tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor with the shard offsets in an attribute. Unpickling does not need autopart."""
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
            if result is shard._local:  # an in-place write returns the ShardTensor itself
                return shard
        places = {shard.place for shard in shards}
        keeps = operator_name(func) in KEEPING_PLACE and result.shape == shards[0].shape and len(places) == 1
        return ShardTensor(result, shards[0].place) if keeps else result

    # Protocol of torch.distributed.checkpoint for sharded tensors.

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
        shard = self._local
        for dim, (start, length) in enumerate(zip(chunk.local_offsets, chunk.sizes, strict=True)):
            shard = shard.narrow(dim, start, length)
        return shard

    def _check(self, key: str | None = None) -> None:
        """Raise CheckpointError if this tensor cannot be saved to, or loaded from, the entry `key`."""
        name, shape = self.place.name, tuple(self.shape)
        if self.place.spans is None or self.place.local_shape != shape:
            raise CheckpointError(
                f"a tensor of shape {shape} of '{name}' has no known offsets in a checkpoint",
                why=f"this rank holds a shard of '{name}', and the tensor does not have the shape of this shard",
                hint="save only tensors that are sharded as the parameter is",
            )
        if self.place.keys and key is not None and not any(name in key for name in self.place.keys):
            raise CheckpointError(
                f"'{key}' would name different parameters on different ranks",
                why=f"optimizer.state_dict() is keyed by parameter index; here the index means '{name}', and each "
                "pipeline stage has its own indices",
                hint="save and load torch.distributed.checkpoint.state_dict.get_state_dict(pm, optimizer), which has "
                "names, or pm.full_optimizer_state_dict(optimizer)",
            )


def check_saved_size(key: str, size: Sequence[int], shard: ShardTensor) -> None:
    """Raise CheckpointError if a saved tensor has another shape than the full tensor of the shard to load."""
    if tuple(size) != shard.place.shape:
        raise CheckpointError(
            f"the checkpoint's '{key}' has shape {tuple(size)}, the model's {shard.place.shape}",
            hint="load it into the model that was saved",
        )


def connect_checkpoints() -> None:
    """Register `ShardTensor` with `torch.distributed.checkpoint`, once per process."""
    plan_checkpoints_with(ShardTensor, check_saved_size, reject_plain_shards, keys_without_state, check_before_saving)
    reject_chunks_in_safetensors()


def offsets_in_file(tensor: Tensor) -> ShardOffsets | None:
    """Return the shard offsets of a `ShardTensor`, or of a tensor that was unpickled from one; else None."""
    if isinstance(tensor, ShardTensor):
        return tensor.place
    values = getattr(tensor, PLACE, None)
    return None if values is None else ShardOffsets(*values)


def reject_plain_shards(key: str, value: Any) -> None:
    """Raise CheckpointError for a shard that a checkpoint would save as if it were the full tensor."""
    if not isinstance(value, Tensor) or isinstance(value, ShardTensor):
        return
    shard_info = shard_info_of(value)
    place = offsets_in_file(value) if shard_info is None else shard_offsets_of(shard_info)
    if place is not None and not place.is_full:
        raise CheckpointError(
            f"'{key}' is one rank's shard of '{place.name}', and would be saved as if it were the full tensor",
            hint="save pm.state_dict(), or get_state_dict(pm, optimizer); load a file of one rank with "
            "pm.load_state_dict first",
        )


def reject_unloaded_shards(state_dict: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the state dict has a shard that `broadcast_from_rank0` did not load."""
    for key, value in state_dict.items():
        if isinstance(value, ShardTensor):
            raise CheckpointError(
                f"StateDictOptions(broadcast_from_rank0=True) does not broadcast '{key}' to this rank",
                why="the first rank's optimizer does not hold that parameter",
                hint="pm.load_full_optimizer_state_dict(optimizer, full) on every rank",
            )


def to_plain(tensor: Tensor) -> Tensor:
    """Return a tensor, or the local values of a `ShardTensor`, as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, ShardTensor) else tensor


def _reduce_for_process(shard: ShardTensor) -> Any:
    return ShardTensor, (shard.to_local(), shard.place)


ForkingPickler.register(ShardTensor, _reduce_for_process)
"""Keeps the shard offsets when a shard is sent to a background process that saves a checkpoint."""


def contains_shards(state: Any) -> bool:
    """Return True if a state dict, or another tree of values, has shards of a partitioned model."""
    return any(isinstance(leaf, ShardTensor) for leaf in tree_leaves(state))
