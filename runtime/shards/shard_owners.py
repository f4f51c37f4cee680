"""Which part of which parameter of the model a rank's local parameter is, and which of its copies counts.

A norm, a checksum or a checkpoint needs every part of a parameter once: a part that several ranks hold alike (replicas
over `dp`, parameters that `tp` does not cut, tied parameters of two stages) counts on the first of them.
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

from autopart.ir.layout import parts_of
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program, StoredTensor
from autopart.ir.sharding import Cut
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.comm.stage_ranks import owners
from autopart.runtime.shards.shard_state import cuts_at, stored_cuts
from autopart.runtime.weights.deferred_init import Cuts


@dataclass(frozen=True)
class Home:
    """Where a local parameter belongs.

    `name`: of the model's parameter. `stored`: its full shape and layout. `owners`: the `pp` coordinates that hold it,
    first stage first. `process`: this rank.
    """

    name: str
    stored: StoredTensor
    owners: tuple[int, ...]
    process: Process

    @property
    def cuts(self) -> list[tuple[str, Cut]]:
        """How the full tensor is cut, axis by axis, outer axis first."""
        return stored_cuts(self.stored, self.process.mesh)

    @property
    def cuts_here(self) -> Cuts:
        """The same, each with the shard of it that this rank has."""
        return cuts_at(self.stored, self.process.mesh, self.process.coordinates)

    @cached_property
    def counts_here(self) -> bool:
        """Whether this rank is the first of those that hold this part."""
        return counts_at(self.stored, self.process.mesh, self.process.coordinates, self.owners)

    @cached_property
    def counts_in_stage(self) -> bool:
        """The same among the ranks at this `pp` coordinate."""
        return counts_at(self.stored, self.process.mesh, self.process.coordinates, (self.process.pp,))

    @cached_property
    def checksum(self) -> int:
        """Of the name."""
        return zlib.crc32(self.name.encode())


def counts_at(stored: StoredTensor, mesh: Mesh, coordinates: Mapping[str, int], owners: Sequence[int]) -> bool:
    """Whether the rank at these coordinates is the first of those that hold its part of a stored tensor.

    Example: a weight that `tp` cuts and `dp` replicates counts on every rank of `tp` whose `dp` coordinate is 0.
    """
    cut_axes = {part for axis, _ in stored_cuts(stored, mesh) for part in parts_of(axis)} | {*stored.differs_over(mesh)}
    if coordinates.get("pp", 0) != owners[0]:
        return False
    return all(index == 0 for axis, index in coordinates.items() if axis != "pp" and axis not in cut_axes)


_HOMES: Any = WeakIdKeyDictionary()
"""{local parameter: its Home}; it keeps no parameter alive."""


def settle(parameter: nn.Parameter, name: str, program: Program, process: Process, stage_style: str) -> None:
    """Note where a local parameter belongs, unless another module that shares it has done so."""
    if parameter not in _HOMES:
        _HOMES[parameter] = home_for(name, program, process, stage_style)


def home_for(name: str, program: Program, process: Process, stage_style: str) -> Home:
    """Return where this rank's shard of a parameter belongs."""
    stored = program.parameters[name]
    return Home(name, stored, tuple(owners(program, stored, stage_style)), process)


_EMPTY: Any = WeakIdKeyDictionary()
"""{the empty parameter of a rank whose stages read none: the rank}."""


def settle_empty(parameter: nn.Parameter, process: Process) -> None:
    """Note the parameter that stands on a rank without any: its owner asks for norms as the other ranks do."""
    _EMPTY[parameter] = process


def process_of(parameter: Tensor) -> Process | None:
    """The rank of a partitioned model that a parameter belongs to; None for one of no such model."""
    home = home_of(parameter)
    return home.process if home is not None else _EMPTY.get(parameter)


def process_among(parameters: Iterable[Tensor]) -> Process | None:
    """That of the first of these that are of a partitioned model; None where none is."""
    return next((process for process in map(process_of, parameters) if process is not None), None)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """In the order in which a state dict counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def settled_processes() -> list[Process]:
    """The ranks, one for each partitioned model, whose parameters are alive here."""
    processes = [home.process for home in _HOMES.values()] + list(_EMPTY.values())
    return list({id(process): process for process in processes}.values())


def home_of(parameter: Tensor) -> Home | None:
    """Where a parameter belongs; None for one that is not of a partitioned model."""
    return _HOMES.get(parameter)


def settled_parameters() -> list[tuple[nn.Parameter, Home]]:
    """Every local parameter that is alive, with its home."""
    return [(parameter, home) for parameter, home in _HOMES.items()]
