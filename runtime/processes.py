"""This process in the mesh: its coordinates, its device, and one process group per mesh axis."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopart.compat import is_gloo, runs_on_host, set_group_timeout
from autopart.errors import InputError, RuntimeSetupError
from autopart.mesh import Mesh

GROUP_TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others before it raises, in the process groups made here."""

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Process:
    """One rank. `groups` has the axes of more than one rank; `rank` counts as `Mesh` does."""

    mesh: Mesh
    rank: int
    device: torch.device
    groups: Mapping[str, dist.ProcessGroup]
    device_mesh: DeviceMesh | None = None
    owner_groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    connected: set[tuple[int, ...]] = field(default_factory=set)  # also the owner groups of other ranks
    host_group: dist.ProcessGroup | None = None  # all ranks, by gloo on the host

    @property
    def coordinates(self) -> dict[str, int]:
        return self.mesh.coordinates(self.rank)

    @property
    def wire(self) -> torch.device:
        """Where values are when they are sent to the next stage: on the host, for gloo sends nothing from a GPU."""
        on_host = self.device.type == "cuda" and is_gloo(self.groups["pp"], self.device)
        return torch.device("cpu") if on_host else self.device

    @property
    def pp(self) -> int:
        """This rank's `pp` coordinate, 0 without that axis."""
        return self.coordinates.get("pp", 0)

    def connect_owners(self, owners: tuple[int, ...]) -> None:
        """Makes a group of the ranks that hold the same tied tensors: `pp` coordinates `owners`, all else equal.

        Every rank must call this with the same `owners`, whether it is one of them or not.
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


def connect(mesh: Mesh, model_device: torch.device, device_mesh: DeviceMesh | None = None) -> Process:
    """This process as a rank of `mesh`: starts torch.distributed where torchrun has set it up, and makes the groups.

    The device is the device mesh's where one is given, else a GPU where the process group is nccl's or the model is
    on one, else the CPU. Raises RuntimeSetupError where the number of processes does not fit the mesh.
    """
    if mesh.num_ranks == 1 and device_mesh is None:
        return Process(mesh, 0, _device(model_device.type if model_device.type == "cuda" else "cpu", model_device), {})
    if not dist.is_initialized():
        _initialize(mesh)
    num_ranks = device_mesh.size() if device_mesh is not None else dist.get_world_size()
    if num_ranks != mesh.num_ranks:
        raise RuntimeSetupError(
            f"mesh {mesh} needs {mesh.num_ranks} processes, there are {num_ranks}",
            why=" x ".join(f"{axis}={size}" for axis, size in mesh.sizes.items()) + f" = {mesh.num_ranks}",
            hint=f"torchrun --nproc-per-node {mesh.num_ranks} ..., or a mesh of {num_ranks} ranks",
        )
    if device_mesh is None:
        uses_cuda = model_device.type == "cuda" or "nccl" in str(dist.get_backend())
        device = _device("cuda" if uses_cuda else "cpu", model_device)
        device_mesh = init_device_mesh(device.type, tuple(mesh.sizes.values()), mesh_dim_names=tuple(mesh.sizes))
        groups = _axis_groups(mesh, device_mesh)
        for group in groups.values():
            if group is not dist.group.WORLD:
                set_group_timeout(group, GROUP_TIMEOUT)
    else:
        device = _device(device_mesh.device_type, model_device)
        groups = _axis_groups(mesh, device_mesh)
    coordinate = device_mesh.get_coordinate()
    assert coordinate is not None
    rank = 0
    for size, index in zip(mesh.sizes.values(), coordinate, strict=True):
        rank = rank * size + index
    return Process(mesh, rank, device, groups, device_mesh, host_group=_host_group(device_mesh))


def first_ranks_seed(process: Process) -> int:
    """`torch.initial_seed()` of the first rank, on every rank: what they draw from it is the same everywhere."""
    seed = torch.tensor(torch.initial_seed() % 2**62, device=process.device)
    for group in process.groups.values():
        dist.broadcast(seed, group=group, group_src=0)
    return int(seed)


def check_agreement(process: Process, call: str) -> None:
    """Raises InputError on every rank where the ranks are not called alike: their collectives would not meet.

    A collective call, of two numbers on the host.
    """
    if process.host_group is None:
        return
    if all(_same_everywhere([call.encode()], process.host_group)):
        return
    calls = [""] * process.mesh.num_ranks
    dist.all_gather_object(calls, call, group=process.host_group)
    ranks = {text: [rank for rank, other in enumerate(calls) if other == text] for text in dict.fromkeys(calls)}
    raise InputError(
        "the ranks are called with different inputs",
        why="; ".join(f"rank {', '.join(map(str, who))}: {text}" for text, who in ranks.items()),
        hint=_SAME_BATCH,
    )


def check_values(process: Process, names: Sequence[str], values: Sequence[torch.Tensor]) -> None:
    """Raises InputError on every rank where whole numbers among the inputs, such as tokens, differ between ranks.

    A collective call. Floating values are left out: ranks may compute them with other roundings.
    """
    if process.host_group is None:
        return
    exact = {name: t for name, t in zip(names, values, strict=True) if not t.is_floating_point() and not t.is_complex()}
    same = _same_everywhere([t.cpu().contiguous().numpy().tobytes() for t in exact.values()], process.host_group)
    differ = [name for name, agreed in zip(exact, same, strict=True) if not agreed]
    if differ:
        raise InputError(
            f"the ranks are called with different values of {', '.join(differ)}",
            why="every rank takes the whole batch, and computes its part of it", hint=_SAME_BATCH,
        )  # fmt: skip


_SAME_BATCH = "give every rank the same global batch, without a DistributedSampler"


def _same_everywhere(contents: Sequence[bytes], group: dist.ProcessGroup) -> list[bool]:
    """Which of these are the same on all ranks of a group; as many on every rank."""
    digests = [int.from_bytes(hashlib.blake2b(c, digest_size=7).digest(), "little") for c in contents]
    extremes = torch.tensor([[digest, -digest] for digest in digests], dtype=torch.int64)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    return [high == -low for high, low in extremes.tolist()]


def _initialize(mesh: Mesh) -> None:
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise RuntimeSetupError(
            f"mesh {mesh} needs {mesh.num_ranks} processes, and torch.distributed is not initialised",
            why=f"this process was not started by torchrun: {', '.join(missing)} not set",
            hint=f"torchrun --nproc-per-node {mesh.num_ranks} script.py, or call init_process_group first",
        )
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    one_gpu_each = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
    if one_gpu_each:
        torch.cuda.set_device(_local_rank())
    dist.init_process_group("nccl" if one_gpu_each else "gloo", timeout=GROUP_TIMEOUT)


def _host_group(device_mesh: DeviceMesh) -> dist.ProcessGroup:
    """All ranks of the mesh in one group that needs no GPU."""
    world = dist.group.WORLD
    if world is not None and device_mesh.size() == world.size() and runs_on_host(world):
        return world
    ranks = sorted(device_mesh.mesh.flatten().tolist())
    group = dist.new_group(ranks, timeout=GROUP_TIMEOUT, backend="gloo", use_local_synchronization=True)
    assert group is not None
    return group


def _axis_groups(mesh: Mesh, device_mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    return {axis: device_mesh.get_group(axis) for axis, size in mesh.sizes.items() if size > 1}


def _device(kind: str, model_device: torch.device) -> torch.device:
    if kind != "cuda":
        return torch.device(kind)
    if model_device.type == "cuda":
        index = torch.cuda.current_device() if model_device.index is None else model_device.index
    else:
        index = _local_rank() % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
