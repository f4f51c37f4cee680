"""State of `dp_sync` methods as tensors that a distributed checkpoint saves and loads on any mesh.

State that differs between data ranks is saved as a tensor of shape [data ranks, *the parameter's shape]. State of
gradient methods is converted from units of partial gradients to units of the mean gradient of a rank's samples, as in
the papers. If the number of data ranks changes, each rank loads the mean over all saved ranks. The convergence proofs
of these methods need only this mean (with error feedback e, the mean of x - e is unchanged).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autopart.errors import CheckpointError
from autopart.extras.dp_sync.sync_options import Method
from autopart.runtime.checkpoint.saved_shard import ShardOffsets, ShardTensor, shard_offsets_of, to_plain
from autopart.runtime.shards.shard_owners import shard_info_of

if TYPE_CHECKING:
    from autopart.extras.dp_sync.data_sync import DataSync

OWN = {
    "top_k": ("error",), "sign": ("error",), "double_squeeze": ("error",), "neolithic": ("error",),
    "ef21": ("tracked",), "ef21_sgdm": ("tracked", "momentum"),
    "gossip": ("replica",), "local": ("replica",), "diloco": ("replica",),
    "exact_diffusion": ("replica", "adapted"), "gradient_tracking": ("replica", "tracked", "before"),
}  # fmt: skip
"""{method: kinds of its state that differ between data ranks}."""

ALIKE = {"ef21": ("sum",), "ef21_sgdm": ("sum",), "diloco": ("anchor", "velocity")}
"""{method: kinds of its state that are replicated over the data ranks}."""

SERVED = {"double_squeeze": ("server_error",), "neolithic": ("server_error",)}
"""{method: kinds of its state that only the server of a parameter has}."""

COUNTS = ("steps", "updates", "data_ranks")


def state_of(sync: DataSync, data_ranks: int | None = None) -> dict[str, Any]:
    """Return the state of the `dp_sync` methods, as tensors that a checkpoint can save or load into.

    Args:
        data_ranks: number of data ranks that saved the checkpoint to load; None to save a checkpoint.
    """
    ranks = sync.wire.num_ranks if sync.wire is not None else 1
    entries: dict[str, Any] = {
        "steps": sync.steps, "updates": sync.updates, "data_ranks": ranks, "begun": bool(sync.state)
    }  # fmt: skip
    served = sync.served()
    for name, method in sync.methods.items():
        parameter = sync.parameters[name]
        for kind in OWN.get(method.name, ()):
            value = (
                parameter.detach()
                if kind == "replica"
                else _state_or_zeros(sync, name, kind) * _to_mean_gradient(method, ranks)
            )
            entries[f"{name}.{kind}"] = _as_rank_shard(sync, name, value.view(parameter.shape), data_ranks)
        for kind in (*ALIKE.get(method.name, ()), *(SERVED.get(method.name, ()) if name in served else ())):
            entries[f"{name}.{kind}"] = _as_shard(sync, name, _state_or_zeros(sync, name, kind).view(parameter.shape))
    here = sync.process.rank
    entries |= {f"powersgd.{rank}.of_rank_{here}": state for rank, state in sync.powersgd.items()}
    return entries


def load_state(sync: DataSync, saved: Mapping[str, Any]) -> None:
    """Load the state of the `dp_sync` methods, for `ParallelModule.load_dp_sync_state_dict`."""
    ranks = sync.wire.num_ranks if sync.wire is not None else 1
    expected = state_of(sync)
    missing = [key for key in expected if key not in saved and not key.startswith("powersgd.")]
    if missing:
        raise CheckpointError(
            f"the dp_sync state to load has no '{missing[0]}'", why=f"dp_sync='{sync.sync}' needs it",
            hint="load the state of a run with the same dp_sync, or load no dp_sync state at all",
        )  # fmt: skip
    sync.steps, sync.updates = int(saved["steps"]), int(saved["updates"])
    sync.state = {}
    for name, method in sync.methods.items():
        parameter = sync.parameters[name]
        for kind in OWN.get(method.name, ()):
            value = _local_value(saved[f"{name}.{kind}"], f"{name}.{kind}", parameter)
            if kind == "replica":
                with torch.no_grad():
                    parameter.copy_(value)
            elif saved["begun"]:
                sync.state.setdefault(name, {})[kind] = (value / _to_mean_gradient(method, ranks)).reshape(-1).clone()
        for kind in (*ALIKE.get(method.name, ()), *SERVED.get(method.name, ())):
            if saved["begun"] and f"{name}.{kind}" in expected:
                value = to_plain(saved[f"{name}.{kind}"])
                sync.state.setdefault(name, {})[kind] = value.to(parameter.device).reshape(-1).clone()
    _load_powersgd(sync, saved, int(saved["data_ranks"]))


def _load_powersgd(sync: DataSync, saved: Mapping[str, Any], saved_ranks: int) -> None:
    """Load torch's PowerSGD state.

    This state is keyed by buckets, so it can only be loaded on the mesh that saved it.
    """
    for name, state in saved.items():
        if name.startswith("powersgd.") and name.endswith(f".of_rank_{sync.process.rank}"):
            assert sync.wire is not None
            if saved_ranks != sync.wire.num_ranks:
                raise CheckpointError(
                    f"PowerSGD state of {saved_ranks} data ranks cannot be loaded on {sync.wire.num_ranks} data ranks",
                    why="torch's PowerSGD state cannot be redistributed",
                    hint="use the same number of data ranks, or load no PowerSGD state",
                )
            state.process_group = sync.wire.group  # pickling drops the group
            sync.powersgd[state.matrix_approximation_rank] = state


def _to_mean_gradient(method: Method, ranks: int) -> int:
    """Return the factor from units of partial gradients to units of the mean gradient of a rank's samples.

    It is 1 if the method averages models.
    """
    return ranks if method.changes == "gradients" else 1


def _state_or_zeros(sync: DataSync, name: str, kind: str) -> Tensor:
    saved = sync.state.get(name, {}).get(kind)
    return torch.zeros_like(sync.parameters[name]).view(-1) if saved is None else saved


def _as_shard(sync: DataSync, name: str, value: Tensor) -> Tensor:
    return ShardTensor(value.clone(), _state_offsets(sync, name))


def _state_offsets(sync: DataSync, name: str) -> ShardOffsets:
    """Return the offsets of this rank's state of a parameter in the full state tensor."""
    owner = shard_info_of(sync.stored[name])
    assert owner is not None
    return shard_offsets_of(replace(owner, stored=sync.layouts[name]))


def _as_rank_shard(sync: DataSync, name: str, value: Tensor, data_ranks: int | None) -> Tensor:
    """Return this data rank's value as a shard of the full tensor [data ranks, *the parameter's shape].

    Args:
        data_ranks: number of data ranks that saved the checkpoint to load; None to save one. If it differs from the
            current number, the result is an empty buffer that receives the values of all saved ranks.
    """
    assert sync.wire is not None
    place, ranks = _state_offsets(sync, name), sync.wire.num_ranks
    assert place.spans is not None
    if data_ranks is not None and data_ranks != ranks:
        buffer = value.new_zeros(data_ranks, *value.shape)
        return ShardTensor(buffer, ShardOffsets(name, (data_ranks, *place.shape), (((0, data_ranks),), *place.spans)))
    spans = (((sync.wire.here[0], 1),), *place.spans)
    return ShardTensor(value.clone().unsqueeze(0), ShardOffsets(name, (ranks, *place.shape), spans))


def _local_value(saved: Any, key: str, parameter: Tensor) -> Tensor:
    """Return this data rank's value from a checkpoint.

    If another number of data ranks saved it, return the mean of all saved values.
    """
    value = to_plain(saved)
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[1:] != parameter.shape:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise CheckpointError(
            f"'{key}' in the dp_sync state to load does not fit: {shape}",
            why=f"this rank needs a tensor of shape [data ranks, *{list(parameter.shape)}]",
            hint="load it with torch.distributed.checkpoint into pm.dp_sync_state_dict(data_ranks=n) "
            "(n: number of data ranks that saved it)",
        )
    return value.to(parameter.device).mean(0)
