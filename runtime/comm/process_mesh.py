"""Position of this process in the mesh: coordinates, device, and one process group per axis."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopart.compat.torch_internals import is_gloo, runs_on_host
from autopart.errors import HangError, RuntimeSetupError
from autopart.ir.layout import mesh_axes_of
from autopart.ir.mesh import Mesh
from autopart.plans.rank_digest import TIMEOUT_S
from autopart.runtime.comm.host_group import HostGroup, own_group
from autopart.runtime.comm.one_caller import Caller
from autopart.runtime.comm.watchdog import FIRST, NOT_MET, Watch, is_lost

GROUP_TIMEOUT = timedelta(minutes=10)
"""Timeout of the process groups that this file creates."""

SAVES, SAVE_TIMEOUT = "saves", timedelta(minutes=30)

T = TypeVar("T")

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Process:
    """One rank of the mesh, with a process group for each axis that has more than one rank.

    Attributes:
        rank: index in the mesh, which can differ from the rank in torch.distributed.
    """

    mesh: Mesh
    rank: int
    device: torch.device
    groups: Mapping[str, dist.ProcessGroup]
    device_mesh: DeviceMesh | None = None
    owner_groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    connected: set[tuple[int, ...]] = field(default_factory=set)  # {owners}: includes groups without this rank
    side_groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    joined_groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)  # {flattened axes: group}
    host_group: HostGroup | None = None  # None if the mesh has one rank
    serial: int = field(default_factory=itertools.count().__next__)  # counts processes in order of creation
    step_scale: float | None = None  # `loss_scale` of the last `step`; None after a forward
    averages_losses: bool = False  # losses of local samples: the total is their mean over data ranks, not their sum
    skipped_steps: int = 0  # number of steps that `on_nonfinite="skip"` has dropped
    stop_requested: bool = False  # True if some rank had received SIGTERM before the last call
    apart: tuple[str, ...] = ()  # axes over which replicas may differ (`dp_sync`)
    caller: Caller | None = None  # the current call; copies of a module share it
    unreduced: set[object] = field(
        default_factory=set
    )  # not empty if gradients are not reduced yet (`gradients/no_sync.py`)

    @property
    def watch(self) -> Watch | None:
        """The watchdog of this rank. None if the mesh has one rank."""
        return None if self.host_group is None else self.host_group.watch

    @property
    def coordinates(self) -> dict[str, int]:
        return self.mesh.coordinates(self.rank)

    @property
    def wire(self) -> torch.device:
        """Device of tensors that are sent between stages: the CPU if gloo sends them, else `device`."""
        on_host = self.device.type == "cuda" and is_gloo(self.groups["pp"], self.device)
        return torch.device("cpu") if on_host else self.device

    @property
    def pp(self) -> int:
        """This rank's `pp` coordinate; 0 if the mesh has no `pp` axis."""
        return self.coordinates.get("pp", 0)

    def along(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of a mesh axis, or of several axes that are flattened into one.

        The first call for a flattened axis creates its group. All ranks must therefore request new groups in one order.
        """
        if axis in self.groups:
            return self.groups[axis]
        if axis not in self.joined_groups:
            self.joined_groups[axis] = self._new_group(axis)
        return self.joined_groups[axis]

    def overlap_group(self, axis: str) -> dist.ProcessGroup:
        """Return a second process group of an axis, for collectives that overlap with stage graphs.

        Two collectives of one process group cannot overlap. The first call for an axis creates the group. All ranks
        must therefore request new groups in one order.
        """
        if axis not in self.side_groups:
            self.side_groups[axis] = self._new_group(axis)
        return self.side_groups[axis]

    def save_group(self) -> dist.ProcessGroup:
        """Return a CPU process group of all ranks, for saves that a background thread writes.

        The first call creates the group, so every rank must make this call. The group's timeout is long, because ranks
        wait for the slowest disk.
        """
        if SAVES not in self.side_groups:
            assert self.host_group is not None
            self.side_groups[SAVES] = own_group([self.host_group.ranks], SAVE_TIMEOUT)
        return self.side_groups[SAVES]

    def _new_group(self, axis: str) -> dist.ProcessGroup:
        assert self.device_mesh is not None
        parts = [part for part in mesh_axes_of(axis) if part in self.groups]
        backend = dist.get_backend(self.groups[parts[0]])
        group = own_group(_ranks_along(self.mesh, self.device_mesh, parts), GROUP_TIMEOUT, backend)
        if self.watch is not None:
            self.watch.over([group])
        return group

    def connect_owners(self, owners: tuple[int, ...]) -> None:
        """Create the process group of the pipeline ranks that store copies of the same tied tensors.

        Every rank must make this call, even a rank that is not in the group.

        Args:
            owners: `pp` coordinates of the ranks that store the tensors.
        """
        if owners in self.connected:
            return
        self.connected.add(owners)
        if len(owners) == self.mesh.size("pp"):
            self.owner_groups[owners] = self.groups["pp"]
            return
        assert self.device_mesh is not None
        ranks = self.device_mesh.mesh.reshape(self.mesh.size("pp"), -1)
        for column in range(ranks.size(1)):
            members = ranks[list(owners), column].tolist()
            group = dist.new_group(members, timeout=GROUP_TIMEOUT)
            if dist.get_rank() in members:
                self.owner_groups[owners] = group
                if self.watch is not None:
                    self.watch.over([group])


def meet(
    mesh: Mesh, device_mesh: DeviceMesh | None = None, timeout_s: float = TIMEOUT_S, compile: bool = False
) -> HostGroup | None:
    """Create the CPU groups of all ranks, with a watchdog, and wait for all ranks.

    Call it before any other group of `mesh` is created. Returns None if `mesh` has one rank. If torch.distributed is
    not initialized, it is initialized from torchrun's environment variables; RuntimeSetupError is raised if they are
    missing. Raises HangError if a rank does not arrive.
    """
    if mesh.num_ranks == 1 and device_mesh is None:
        return None
    limit = timedelta(seconds=FIRST * timeout_s)
    try:
        if not dist.is_initialized():
            _initialize(mesh, limit)
        group = _host_group(mesh, device_mesh, limit)
    except RuntimeError as error:
        if not is_lost(error) and not any(text in str(error) for text in NOT_MET):
            raise
        raise HangError(
            f"not all ranks called parallelize() within {limit.total_seconds():g} s: {_this_rank()} waited for them",
            why="the missing rank was killed, is frozen or slower, or raised an error before",
            hint="the first error of any rank, in its log; timeout=600 if a rank is slow",
        ) from error
    if dist.get_backend() != "fake":
        group.watch = Watch(group.ranks, group.groups, timeout_s, compile)
    return group


def connect(
    mesh: Mesh, model_device: torch.device, device_mesh: DeviceMesh | None = None,
    host_group: HostGroup | None = None,
) -> Process:  # fmt: skip
    """Create the process groups of `mesh`, and return this process as one of its ranks.

    The rank computes on the device of `device_mesh`, if there is one. Otherwise it computes on a GPU if the model is on
    a GPU or the process group uses nccl, else on the CPU. Raises RuntimeSetupError if the number of processes does not
    fit the mesh.

    Args:
        host_group: the result of `meet`.
    """
    if host_group is None:
        host_group = meet(mesh, device_mesh)
    if host_group is None:
        return Process(mesh, 0, _device(model_device.type if model_device.type == "cuda" else "cpu", model_device), {})
    num_ranks = host_group.size
    if num_ranks != mesh.num_ranks:
        raise RuntimeSetupError(
            f"mesh {mesh} needs {mesh.num_ranks} processes, there are {num_ranks}",
            why=" x ".join(f"{axis}={size}" for axis, size in mesh.sizes.items()) + f" = {mesh.num_ranks}",
            hint=f"torchrun --nproc-per-node {mesh.num_ranks} ..., or a mesh of {num_ranks} ranks",
        )
    if device_mesh is None:
        device = _device("cuda" if _uses_gpus(model_device) else "cpu", model_device)
        device_mesh = init_device_mesh(device.type, tuple(mesh.sizes.values()), mesh_dim_names=tuple(mesh.sizes))
    else:
        device = _device(device_mesh.device_type, model_device)
    watch = host_group.watch
    groups = _axis_groups(mesh, device_mesh, GROUP_TIMEOUT.total_seconds() if watch is None else watch.send_s)
    if watch is not None:
        watch.over(list(groups.values()))
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    rank = 0
    for size, index in zip(mesh.sizes.values(), coordinate, strict=True):
        rank = rank * size + index
    return Process(mesh, rank, device, groups, device_mesh, host_group=host_group)


def first_ranks_seed(process: Process) -> int:
    """Return the first rank's `torch.initial_seed()` on every rank. A collective call."""
    seed = torch.tensor(torch.initial_seed() % 2**62, device=process.device)
    for group in process.groups.values():
        dist.broadcast(seed, group=group, group_src=0)
    return int(seed)


def reduce_over_all(values: Tensor, operation: Any, process: Process) -> None:
    """All-reduce a CPU tensor over all ranks of the mesh. Raises HangError if a rank does not arrive."""
    if process.host_group is not None:
        process.host_group.all_reduce(values, operation)


def broadcast_from_first(value: Tensor, process: Process) -> None:
    """Overwrite a CPU tensor by the first rank's values. Raises HangError if a rank does not arrive."""
    if process.host_group is not None:
        process.host_group.broadcast(value)


def is_on_any_rank(condition: bool, process: Process) -> bool:
    """Return True if `condition` is True on any rank of the mesh. A collective call.

    Raises HangError if a rank does not arrive.
    """
    found = torch.tensor(float(condition))
    reduce_over_all(found, dist.ReduceOp.MAX, process)
    return bool(found)


def gather_over_all(mine: Any, process: Process) -> list[Any]:
    """All-gather an object over all ranks of the mesh. Return the objects in rank order.

    Raises HangError if a rank does not arrive.
    """
    return [mine] if process.host_group is None else process.host_group.gather_objects(mine)


def of_all_stages(mine: T, process: Process) -> list[T]:
    """All-gather an object over the ranks along `pp`. Return the objects in stage order (`pp` coordinate)."""
    if "pp" not in process.groups:
        return [mine]
    everyones = [mine] * process.mesh.size("pp")
    dist.all_gather_object(everyones, mine, group=process.groups["pp"])
    return everyones


def _this_rank() -> str:
    return f"rank {dist.get_rank() if dist.is_initialized() else os.environ['RANK']}"


def _initialize(mesh: Mesh, limit: timedelta) -> None:
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise RuntimeSetupError(
            f"mesh {mesh} needs {mesh.num_ranks} processes, and torch.distributed is not initialised",
            why=f"this process was not started by torchrun: {', '.join(missing)} not set",
            hint=f"torchrun --nproc-per-node {mesh.num_ranks} script.py, or call init_process_group first",
        )
    one_gpu_each = _one_gpu_each()
    if one_gpu_each:
        torch.cuda.set_device(_local_rank())
    dist.init_process_group("nccl" if one_gpu_each else "gloo", timeout=limit)


def _host_group(mesh: Mesh, device_mesh: DeviceMesh | None, limit: timedelta) -> HostGroup:
    """Create the CPU groups of all ranks of `device_mesh`, or of all processes if it is None."""
    ranks = list(range(dist.get_world_size())) if device_mesh is None else device_mesh.mesh.flatten().tolist()
    if len(ranks) != mesh.num_ranks:  # `connect` raises an error
        return HostGroup(ranks, 1, limit)
    rows = same_rows(mesh)
    return HostGroup([ranks[index] for indices in rows for index in indices], len(rows[0]), limit)


def same_rows(mesh: Mesh) -> list[list[int]]:
    """Return lists of ranks that compute the same samples of a batch, one list per data rank."""
    groups: dict[int, list[int]] = {}
    for rank in range(mesh.num_ranks):
        groups.setdefault(mesh.row_index(mesh.coordinates(rank)), []).append(rank)
    return list(groups.values())


def _axis_groups(mesh: Mesh, device_mesh: DeviceMesh, send_s: float) -> dict[str, dist.ProcessGroup]:
    """Return {mesh axis: process group of this rank along the axis}.

    Groups come from the device mesh, with two exceptions on the CPU. For an axis that has all processes, a new group is
    created, because the default group has the user's timeout. For `pp`, new groups are created, because sends and
    receives use the timeout that is set when a group is created.
    """
    groups = {axis: device_mesh.get_group(axis) for axis, size in mesh.sizes.items() if size > 1}
    for axis, group in groups.items():
        if runs_on_host(group) and (axis == "pp" or group is dist.group.WORLD):
            groups[axis] = own_group(_ranks_along(mesh, device_mesh, [axis]), timedelta(seconds=send_s))
    return groups


def _ranks_along(mesh: Mesh, device_mesh: DeviceMesh, axes: Sequence[str]) -> list[list[int]]:
    """Return lists of ranks that differ only in their coordinates on `axes`, sorted along these axes."""
    dims = [list(mesh.sizes).index(axis) for axis in axes]
    along = device_mesh.mesh.movedim(dims, list(range(-len(dims), 0)))
    return along.reshape(-1, math.prod(map(mesh.size, axes))).tolist()


def _device(kind: str, model_device: torch.device) -> torch.device:
    if kind != "cuda":
        return torch.device(kind)
    if model_device.type == "cuda":
        index = torch.cuda.current_device() if model_device.index is None else model_device.index
        if index == 0 and _one_gpu_each():  # `.to("cuda")` on every rank without `set_device`
            index = _local_rank()
    else:
        index = torch.cuda.current_device() or _local_rank() % torch.cuda.device_count()  # set by the user, or by rank
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _uses_gpus(model_device: torch.device) -> bool:
    """Return True if ranks compute on GPUs: the model is on a GPU, or the process group uses nccl.

    A process group that was initialized without a backend has both gloo and nccl. In this case, ranks use GPUs if this
    machine has a GPU for each of its ranks.
    """
    if model_device.type == "cuda" or str(dist.get_backend()) == "nccl":
        return True
    return "nccl" in str(dist.get_backend_config()) and _one_gpu_each()


def _one_gpu_each() -> bool:
    """Return True if this machine has at least as many GPUs as ranks.

    If torchrun has not set the number of local ranks, all ranks are assumed to be on this machine.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", num_ranks)))
    return torch.cuda.is_available() and torch.cuda.device_count() >= local_size


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", dist.get_rank() if dist.is_initialized() else 0))


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's tensors; the CPU if it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
