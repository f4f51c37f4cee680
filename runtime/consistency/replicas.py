"""Check at intervals that the replicas of a parameter on several ranks are still equal.

A parameter has replicas over `dp`, over `tp` if it is not sharded there, and in two stages if it is tied. Replicas
start equal and get equal gradients. They stay bitwise identical unless the training loop updates them differently, for
example if ranks clip by different norms. The check compares checksums of replicas in one collective on the CPU.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.compat.torch_function_internals import local_values
from autopart.errors import ReplicaError
from autopart.ir.program import Program
from autopart.runtime.comm.host_group import HostGroup
from autopart.runtime.comm.process_mesh import Process, reduce_over_all
from autopart.runtime.comm.stage_ranks import owners
from autopart.runtime.consistency.checksums import checksums
from autopart.runtime.consistency.rank_checks import ranks_text
from autopart.runtime.shards.shard_state import splits_of

EARLY = (1, 2, 4, 8)
EVERY = 100
ROUNDING = 8
"""Allowed difference of replicas, in units in the last place of the largest element.

It is multiplied by the square root of the number of steps since the last comparison. It covers sums in another order
(atomics on a GPU).
"""

_NUMBERS = itertools.count()
_NOTED: WeakSet[Replicas] = WeakSet()
"""`Replicas` of the modules whose `state_dict` was called since the last checkpoint."""

ParameterStorage = tuple[tuple[int, ...], tuple[str, ...]]
"""Storage of a parameter: the `pp` coordinates that store it, and the axes over which it is sharded."""


def is_due(check_replicas: int | bool | None, step: int) -> bool:
    """Return True if replicas are compared before step number `step`.

    Args:
        check_replicas: None or True for steps 1, 2, 4, 8 and every 100th; an int n for every n-th step; False for no
            step.

    >>> [step for step in range(1, 301) if is_due(None, step)]
    [1, 2, 4, 8, 100, 200, 300]
    >>> [step for step in range(1, 8) if is_due(3, step)], is_due(False, 1)
    ([3, 6], False)
    """
    if check_replicas is None or check_replicas is True:
        return step in EARLY or step % EVERY == 0
    return check_replicas > 0 and step % check_replicas == 0


def check_before_saving(state_dict: Mapping[str, Any]) -> None:
    """Compare the replicas of parameters that a distributed checkpoint is about to save.

    Does nothing in a thread of an asynchronous save, because the training loop may use the process groups at the same
    time.
    """
    if threading.current_thread() is threading.main_thread():
        for replicas in sorted(_NOTED, key=lambda replicas: replicas._number):
            replicas.check_state_dict(state_dict.keys())


def replica_groups(storage: ParameterStorage, process: Process) -> list[list[int]]:
    """Return lists of ranks that store the same shard of a parameter: one list per replicated shard."""
    owning, cut_axes = storage
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(process.mesh.num_ranks):
        coordinates = process.mesh.coordinates(rank)
        if coordinates.get("pp", 0) in owning:
            groups.setdefault(tuple(process.mesh.index(coordinates, axis) for axis in cut_axes), []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) > 1]


class Replicas:
    """Compares the replicas of one module's parameters before certain steps (`is_due`).

    Args:
        stage_style: assignment of stages to ranks, "loop" or "V".
    """

    def __init__(self, process: Process, stage_style: str, check_replicas: int | bool | None = None):
        self.process, self.stage_style, self.check_replicas = process, stage_style, check_replicas
        self.step = self.last_step = 0
        self._program: Program | None = None
        self._names: dict[ParameterStorage, list[str]] = {}
        self._groups: dict[ParameterStorage, list[list[int]]] = {}
        self._number = next(_NUMBERS)
        self._in_state_dict: tuple[Program, Mapping[str, Tensor]] | None = None

    def is_next_due(self) -> bool:
        """Return True if the next step begins with a comparison of replicas."""
        return is_due(self.check_replicas, self.step + 1)

    def next_step(self, program: Program, parameters: Mapping[str, Tensor]) -> None:
        """Count a training step. If a comparison is due, compare replicas before the step runs."""
        self.step += 1
        if is_due(self.check_replicas, self.step):
            self.check(program, parameters, self.step)

    def check_before(self, method: str, program: Program, parameters: Mapping[str, Tensor]) -> None:
        """Compare replicas before a collective method saves parameters, unless `check_replicas` is False."""
        if self.check_replicas is not False and self.check_replicas != 0:
            self.check(program, parameters, self.step, f"{method}(), after step {self.step}")

    def note_state_dict(self, program: Program, parameters: Mapping[str, Tensor]) -> None:
        """Record that a state dict was created, so that `check_state_dict` runs if it is saved."""
        self._in_state_dict = program, parameters
        _NOTED.add(self)

    def check_state_dict(self, keys: Collection[str]) -> None:
        """Compare replicas if `keys`, of a checkpoint to be saved, include parameters of this module."""
        assert self._in_state_dict is not None
        (program, parameters), self._in_state_dict = self._in_state_dict, None
        _NOTED.discard(self)
        if not parameters or any(f".{key}".endswith(f".{name}") for name in parameters for key in keys):
            with local_values():
                self.check_before("torch.distributed.checkpoint.save", program, parameters)

    def check(self, program: Program, parameters: Mapping[str, Tensor], step: int, moment: str = "") -> None:
        """Compare the replicas of all parameters. A collective call of all ranks.

        If replicas differ by more than rounding explains, every rank raises ReplicaError. If they differ by less, the
        first rank warns, and all replicas get the values of the first rank that stores the parameter.

        Args:
            parameters: {name: this rank's parameter}.
            step: number of steps so far.
            moment: description of the call that is about to run, for messages. If empty, messages name the step.
        """
        group = self.process.host_group
        if group is None:
            return
        self._read(program)
        steps, self.last_step = step - self.last_step, step
        mine = dict(zip(parameters, checksums(parameters.values()), strict=True))
        slots = [(storage, ranks) for storage, groups in self._groups.items() for ranks in groups]
        if not slots or self._all_alike(slots, mine):
            return
        drifted = self._drifted(parameters, mine, group)
        differences = _replica_differences(drifted, parameters, steps, group)
        beyond = [row for row in differences if not row.difference <= row.rounding]
        if beyond:
            raise _error(beyond, moment or f"step {step}", group)
        for row in drifted:
            values = _first_copy(row, parameters, group)
            if group.index in row.members:
                with torch.no_grad():
                    parameters[row.name].copy_(values)
        if group.index == 0:
            _warn(differences, moment or f"step {step}", group)

    def _read(self, program: Program) -> None:
        """Find the ranks that replicate each parameter of a program."""
        if program is self._program:
            return
        self._program, self._names = program, {}
        for name, stored in program.parameters.items():
            cut_axes = tuple(axis for axis, _ in splits_of(stored, program.mesh))
            cut_axes += stored.differs_over(program.mesh)
            self._names.setdefault((tuple(owners(program, stored, self.stage_style)), cut_axes), []).append(name)
        self._groups = {storage: replica_groups(storage, self.process) for storage in self._names}

    def _all_alike(self, slots: Sequence[tuple[ParameterStorage, list[int]]], mine: Mapping[str, int]) -> bool:
        spans = torch.full((len(slots), 2), torch.iinfo(torch.int64).min)
        for slot, (storage, ranks) in enumerate(slots):
            if self.process.rank in ranks:
                numbers = repr([mine[name] for name in self._names[storage]]).encode()
                number = int.from_bytes(hashlib.blake2b(numbers, digest_size=7).digest())
                spans[slot] = torch.tensor([number, -number])
        reduce_over_all(spans, dist.ReduceOp.MAX, self.process)
        return not bool(spans.sum(1).any())

    def _drifted(self, parameters: Mapping[str, Tensor], mine: Mapping[str, int], group: HostGroup) -> list[Drifted]:
        """Return the parameters whose replicas differ, in the program's order.

        The result is equal on all ranks.
        """
        facts = {name: (number, tuple(parameters[name].shape), parameters[name].dtype) for name, number in mine.items()}
        everyones = group.gather_objects((self.process.rank, facts))
        place = {rank: index for index, (rank, _) in enumerate(everyones)}
        drifted = []
        assert self._program is not None
        for name in self._program.parameters:
            storage = next(storage for storage, names in self._names.items() if name in names)
            for ranks in self._groups[storage]:
                members = sorted(place[rank] for rank in ranks)
                theirs = [everyones[index][1][name] for index in members]
                if len({number for number, *_ in theirs}) > 1:
                    drifted.append(Drifted(name, members, *theirs[0][1:]))
        return drifted


class Drifted(NamedTuple):
    """A parameter whose replicas were found to differ.

    Attributes:
        members: the ranks that store the parameter, in rank order.
    """

    name: str
    members: list[int]
    shape: tuple[int, ...]
    dtype: torch.dtype


class ReplicaDifference(NamedTuple):
    """Largest difference between the replicas of a parameter on the ranks `rank` and `first`.

    Attributes:
        rounding: the largest difference that rounding can explain.
    """

    name: str
    rank: int
    first: int
    difference: float
    rounding: float


def _replica_differences(
    drifted: Sequence[Drifted], parameters: Mapping[str, Tensor], steps: int, group: HostGroup
) -> list[ReplicaDifference]:
    """Return the difference of every replica from the first replica. All ranks get equal results."""
    mine = []
    for row in drifted:
        values = _first_copy(row, parameters, group)
        if group.index in row.members:
            mine.append(_compared(row, group.index, values, parameters[row.name], steps))
    order = [row.name for row in drifted]
    rows = [row for rows in group.gather_objects(mine) for row in rows if row.rank != row.first]
    return sorted(rows, key=lambda row: (order.index(row.name), row.rank))


def _first_copy(row: Drifted, parameters: Mapping[str, Tensor], group: HostGroup) -> Tensor:
    """Broadcast a parameter from the first rank that stores it. Return its values in CPU memory."""
    if group.index in row.members:
        values = parameters[row.name].detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    else:
        values = torch.empty(row.shape, dtype=row.dtype)
    return group.broadcast(values, row.members[0])


def _compared(row: Drifted, rank: int, values: Tensor, local: Tensor, steps: int) -> ReplicaDifference:
    one, other = (t.detach().to("cpu", torch.float64) for t in (values, local))
    difference = (one - other).abs()
    difference[(one == other) | (one.isnan() & other.isnan())] = 0
    largest = float(difference.nan_to_num(nan=math.inf).max())
    size = float(one[one.isfinite()].abs().max()) if bool(one.isfinite().any()) else 0.0
    unit = torch.finfo(local.dtype).eps if local.is_floating_point() else 0.0
    return ReplicaDifference(row.name, rank, row.members[0], largest, ROUNDING * unit * size * math.sqrt(max(steps, 1)))


def _error(beyond: Sequence[ReplicaDifference], moment: str, group: HostGroup) -> ReplicaError:
    first = beyond[0]
    ranks = [row.rank for row in beyond if row.name == first.name]
    largest = max(row.difference for row in beyond if row.name == first.name)
    others = len({row.name for row in beyond}) - 1
    more = f", and of {others} other parameter{'s' * (others > 1)}" if others else ""
    differing, reference = ranks_text(sorted(set(ranks)), group), ranks_text([first.first], group)
    return ReplicaError(
        f"the replicas of '{first.name}' have different values",
        why=f"the values of {differing} and of {reference} differ by up to "
        f"{largest:.3g}; rounding explains at most {first.rounding:.1g}",
        where=f"before {moment}{more}",
        hint="pm.clip_grad_norm_ for clipping, and the same updates on every rank",
    )


def _warn(differences: Sequence[ReplicaDifference], moment: str, group: HostGroup) -> None:
    first, others = differences[0], len({row.name for row in differences}) - 1
    warnings.warn(
        f"before {moment} the replicas of '{first.name}' on {ranks_text([first.first, first.rank], group)} differ by "
        f"{first.difference:.1g}{f', and those of {others} more' if others else ''}. This is rounding; all ranks take "
        "the first rank's values. Additions in varying order cause it, such as atomics on a GPU: "
        "torch.use_deterministic_algorithms(True).",
        stacklevel=2,
    )
