"""What methods of data parallelism remember, as tensors that a distributed checkpoint saves and loads on any mesh.

What every data rank has of its own is [data ranks, *the parameter's shape] in the full tensor; gradients are there in
the units of the papers, as means of a rank's own rows. Loaded on another number of data ranks, each takes the mean of
all, which is what the proofs of these methods follow (a memory e: the mean of x - e is unchanged).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopart.errors import CheckpointError
from autopart.ir.run.dp_sync import Method
from autopart.runtime.checkpoint.saved_shard import ShardPlace, ShardTensor, local_of, place_of
from autopart.runtime.dp_sync.data_sync import DataSync
from autopart.runtime.shards.shard_owners import home_of

OWN = {
    "top_k": ("error",), "sign": ("error",), "double_squeeze": ("error",), "neolithic": ("error",),
    "ef21": ("tracked",), "ef21_sgdm": ("tracked", "momentum"),
    "gossip": ("replica",), "local": ("replica",), "diloco": ("replica",),
    "exact_diffusion": ("replica", "adapted"), "gradient_tracking": ("replica", "tracked", "before"),
}  # fmt: skip
"""What every data rank has of its own of a parameter."""

ALIKE = {"ef21": ("sum",), "ef21_sgdm": ("sum",), "diloco": ("anchor", "velocity")}
"""What all data ranks have alike."""

SERVED = {"double_squeeze": ("server_error",), "neolithic": ("server_error",)}
"""What a parameter's server has."""

COUNTS = ("steps", "updates", "data_ranks")


def state_of(sync: DataSync, data_ranks: int | None = None) -> dict[str, Any]:
    """What `ParallelModule.dp_sync_state_dict` gives."""
    ranks = sync.wire.num_ranks if sync.wire is not None else 1
    entries: dict[str, Any] = {
        "steps": sync.steps, "updates": sync.updates, "data_ranks": ranks, "begun": bool(sync.state)
    }  # fmt: skip
    served = sync.served()
    for name, method in sync.methods.items():
        parameter = sync.parameters[name]
        for kind in OWN.get(method.name, ()):
            value = parameter.detach() if kind == "replica" else _known(sync, name, kind) * _units(method, ranks)
            entries[f"{name}.{kind}"] = _of_ranks(sync, name, value.view(parameter.shape), data_ranks)
        for kind in (*ALIKE.get(method.name, ()), *(SERVED.get(method.name, ()) if name in served else ())):
            entries[f"{name}.{kind}"] = _placed(sync, name, _known(sync, name, kind).view(parameter.shape))
    here = sync.process.rank
    entries |= {f"powersgd.{rank}.of_rank_{here}": state for rank, state in sync.powersgd.items()}
    return entries


def load_state(sync: DataSync, saved: Mapping[str, Any]) -> None:
    """What `ParallelModule.load_dp_sync_state_dict` does."""
    ranks = sync.wire.num_ranks if sync.wire is not None else 1
    expected = state_of(sync)
    missing = [key for key in expected if key not in saved and not key.startswith("powersgd.")]
    if missing:
        raise CheckpointError(
            f"dp_sync's state has no '{missing[0]}'", why=f"the methods here remember it (dp_sync='{sync.sync}')",
            hint="the state of a run with the same dp_sync; without any state training goes on with none",
        )  # fmt: skip
    sync.steps, sync.updates = int(saved["steps"]), int(saved["updates"])
    sync.state = {}
    for name, method in sync.methods.items():
        parameter = sync.parameters[name]
        for kind in OWN.get(method.name, ()):
            value = _own_of(saved[f"{name}.{kind}"], f"{name}.{kind}", parameter)
            if kind == "replica":
                with torch.no_grad():
                    parameter.copy_(value)
            elif saved["begun"]:
                sync.state.setdefault(name, {})[kind] = (value / _units(method, ranks)).reshape(-1).clone()
        for kind in (*ALIKE.get(method.name, ()), *SERVED.get(method.name, ())):
            if saved["begun"] and f"{name}.{kind}" in expected:
                value = local_of(saved[f"{name}.{kind}"])
                sync.state.setdefault(name, {})[kind] = value.to(parameter.device).reshape(-1).clone()
    _load_powersgd(sync, saved, int(saved["data_ranks"]))


def _load_powersgd(sync: DataSync, saved: Mapping[str, Any], saved_ranks: int) -> None:
    """torch's own state, which knows its buckets alone: on the mesh that it was saved on."""
    for name, state in saved.items():
        if name.startswith("powersgd.") and name.endswith(f".of_rank_{sync.process.rank}"):
            assert sync.wire is not None
            if saved_ranks != sync.wire.num_ranks:
                raise CheckpointError(
                    f"the state of PowerSGD on {sync.wire.num_ranks} data ranks", why=f"it was saved on {saved_ranks}, "
                    "and torch's has no parts that could be put together", hint="the same number, or without its state",
                )  # fmt: skip
            state.process_group = sync.wire.group  # a copy has none
            sync.powersgd[state.matrix_approximation_rank] = state


def _units(method: Method, ranks: int) -> int:
    """What the parts of gradients here are multiplied by for those of the papers."""
    return ranks if method.changes == "gradients" else 1


def _known(sync: DataSync, name: str, kind: str) -> Tensor:
    known = sync.state.get(name, {}).get(kind)
    return torch.zeros_like(sync.parameters[name]).view(-1) if known is None else known


def _placed(sync: DataSync, name: str, value: Tensor) -> Tensor:
    return ShardTensor(value.clone(), _place_of(sync, name))


def _place_of(sync: DataSync, name: str) -> ShardPlace:
    """Which part of the model's parameter a method has here."""
    home = home_of(sync.stored[name])
    assert home is not None
    return place_of(replace(home, stored=sync.layouts[name]))


def _of_ranks(sync: DataSync, name: str, value: Tensor, data_ranks: int | None) -> Tensor:
    """A value of this data rank among those of all; `data_ranks`: room for those of so many."""
    assert sync.wire is not None
    place, ranks = _place_of(sync, name), sync.wire.num_ranks
    assert place.spans is not None
    if data_ranks is not None and data_ranks != ranks:
        room = value.new_zeros(data_ranks, *value.shape)
        return ShardTensor(room, ShardPlace(name, (data_ranks, *place.shape), (((0, data_ranks),), *place.spans)))
    spans = (((sync.wire.here[0], 1),), *place.spans)
    return ShardTensor(value.clone().unsqueeze(0), ShardPlace(name, (ranks, *place.shape), spans))


def _own_of(saved: Any, key: str, parameter: Tensor) -> Tensor:
    """This data rank's own of what was saved: its own, or of other ranks' all, the mean."""
    value = local_of(saved)
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[1:] != parameter.shape:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise CheckpointError(f"'{key}' of dp_sync's state is {shape}", why="this rank's is [data ranks, "
                              f"*{list(parameter.shape)}]", hint="torch.distributed.checkpoint into "
                              "pm.dp_sync_state_dict(data_ranks=...) of the run that was saved")  # fmt: skip
    return value.to(parameter.device).mean(0)
