"""Description of local parameters: name in the model, shard, and the shard's owner rank.

A norm, a checksum or a checkpoint needs every shard of a parameter exactly once, but several ranks can store a shard:
ranks along `dp`, ranks along `tp` if the parameter is not sharded over `tp`, or stages that share a tied parameter. The
owner of a shard is the first rank that stores it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from autopart.ir.layout import mesh_axes_of
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program, StoredTensor
from autopart.ir.sharding import DimSharding
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.comm.stage_ranks import owners
from autopart.runtime.shards.shard_state import splits_at, splits_of
from autopart.runtime.weights.deferred_init import LocalSplits


@dataclass(frozen=True)
class ShardInfo:
    """Description of a local parameter: its name in the model, and its shard.

    Attributes:
        name: name of the parameter in the model.
        stored: full shape and layout of the parameter.
        owners: `pp` coordinates of the ranks that store the parameter, first stage first.
        process: this rank.
    """

    name: str
    stored: StoredTensor
    owners: tuple[int, ...]
    process: Process

    @property
    def cuts(self) -> list[tuple[str, DimSharding]]:
        """Splits of the full tensor as (mesh axis, split), outer axis first."""
        return splits_of(self.stored, self.process.mesh)

    @property
    def local_splits(self) -> LocalSplits:
        """Splits of the full tensor as (split, index of this rank's shard), outer axis first."""
        return splits_at(self.stored, self.process.mesh, self.process.coordinates)

    @cached_property
    def is_owner(self) -> bool:
        """True if this rank is the first of the ranks that store this shard."""
        return is_owner_at(self.stored, self.process.mesh, self.process.coordinates, self.owners)

    @cached_property
    def is_owner_in_stage(self) -> bool:
        """True if no earlier rank with the same `pp` coordinate stores this shard."""
        return is_owner_at(self.stored, self.process.mesh, self.process.coordinates, (self.process.pp,))

    @cached_property
    def checksum(self) -> int:
        """Checksum (CRC-32) of the parameter's name."""
        return zlib.crc32(self.name.encode())


def is_owner_at(stored: StoredTensor, mesh: Mesh, coordinates: Mapping[str, int], owners: Sequence[int]) -> bool:
    """Return True if the rank at these coordinates is the first that stores its shard of a tensor.

    Example: a weight that is sharded over `tp` and replicated over `dp` has one owner for each `tp` coordinate: the
    rank with `dp` coordinate 0.

    Args:
        owners: `pp` coordinates of the ranks that store the tensor, first stage first.
    """
    cut_axes = {part for axis, _ in splits_of(stored, mesh) for part in mesh_axes_of(axis)} | {
        *stored.differs_over(mesh)
    }
    if coordinates.get("pp", 0) != owners[0]:
        return False
    return all(index == 0 for axis, index in coordinates.items() if axis != "pp" and axis not in cut_axes)


_HOMES: Any = WeakIdKeyDictionary()
"""{local parameter: its ShardInfo}. It is a weak dict: it keeps no parameter alive."""


def register_shard(parameter: nn.Parameter, name: str, program: Program, process: Process, stage_style: str) -> None:
    """Register the shard info of a local parameter, unless it is registered already."""
    if parameter not in _HOMES:
        _HOMES[parameter] = make_shard_info(name, program, process, stage_style)


def make_shard_info(name: str, program: Program, process: Process, stage_style: str) -> ShardInfo:
    """Create the shard info of this rank's local parameter `name`."""
    stored = program.parameters[name]
    return ShardInfo(name, stored, tuple(owners(program, stored, stage_style)), process)


_EMPTY: Any = WeakIdKeyDictionary()
"""{placeholder parameter of a rank whose stages use no parameter: the process of the rank}."""


def register_placeholder(parameter: nn.Parameter, process: Process) -> None:
    """Register the placeholder parameter of a rank whose stages use no parameter.

    With the placeholder, this rank takes part in the collectives in which other ranks compute a gradient norm.
    """
    _EMPTY[parameter] = process


def process_of(parameter: Tensor) -> Process | None:
    """Return the `Process` (rank) of the partitioned model to which a parameter belongs, or None."""
    shard_info = shard_info_of(parameter)
    return shard_info.process if shard_info is not None else _EMPTY.get(parameter)


def process_among(parameters: Iterable[Tensor]) -> Process | None:
    """Return the `Process` (rank) of the first parameter that belongs to a partitioned model, or None."""
    return next((process for process in map(process_of, parameters) if process is not None), None)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters in the order of the indices in its state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def registered_processes() -> list[Process]:
    """Return the `Process` (rank) of each partitioned model whose registered parameters still exist."""
    processes = [shard_info.process for shard_info in _HOMES.values()] + list(_EMPTY.values())
    return list({id(process): process for process in processes}.values())


def shard_info_of(parameter: Tensor) -> ShardInfo | None:
    """Return the `ShardInfo` of a local parameter, or None if it belongs to no partitioned model."""
    return _HOMES.get(parameter)


def registered_parameters() -> list[tuple[nn.Parameter, ShardInfo]]:
    """Return each registered local parameter that still exists, with its `ShardInfo`."""
    return [(parameter, shard_info) for parameter, shard_info in _HOMES.items()]
