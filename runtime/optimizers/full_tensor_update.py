"""Optimizer steps on full tensors: each sharded tensor is updated on its owner rank.

Optimizers such as Muon, Shampoo, LAMB and Adafactor compute with full matrices, but a rank has shards. Each tensor has
an owner rank. In a step, the owner receives all shards of the tensor and its gradient, runs the unmodified optimizer,
and sends the new shards. The owner stores the optimizer state of the tensor, so state is distributed over ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopart.ir.mesh import Mesh
from autopart.ir.sharding import DimSharding
from autopart.runtime.optimizers.owner_exchange import GatherObjects, Steps, assign_owners, from_owners, to_owners
from autopart.runtime.shards.shard_owners import parameters_of

MakeOptimizers = Callable[[list[tuple[str, nn.Parameter]]], list[Optimizer]]
StateByName = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class LocalTensor:
    """A parameter on this rank: its local values, and the sharding of the full tensor.

    Attributes:
        values: the local tensor. Its `.grad` is the local gradient.
        shape: full shape.
        splits: how the full tensor is sharded, as (mesh axis, split), outer axis first.
    """

    name: str
    values: Tensor
    shape: tuple[int, ...]
    splits: tuple[tuple[str, DimSharding], ...]


@dataclass(frozen=True)
class SharedEntry:
    """Description of an entry of optimizer state, which the owner of the tensor sends to the other ranks.

    Attributes:
        dtype: dtype of the entry if it is a tensor with the shape of the parameter. None for any other value.
        value: the value, if `dtype` is None.
    """

    dtype: torch.dtype | None
    value: Any = None


@dataclass(frozen=True)
class ReplicatedEntry:
    """Optimizer state that is equal on all ranks, although it has the shape of this rank's shard.

    A state dict takes a tensor with the shape of a shard for a shard, unless it is wrapped in this class. An example
    is a preconditioner [16, 16] of Shampoo for a parameter [32, 16] on two ranks.
    """

    value: Tensor


def wrap_replicated(value: Any, shard_shape: Sequence[int], shape: Sequence[int]) -> Any:
    """Return replicated optimizer state, as a `ReplicatedEntry` if it has the shape of a shard.

    Args:
        shard_shape: shape of this rank's shard of the parameter.
        shape: full shape of the parameter.
    """
    is_ambiguous = isinstance(value, Tensor) and value.dim() and tuple(value.shape) == tuple(shard_shape)
    return ReplicatedEntry(value) if is_ambiguous and tuple(shape) != tuple(shard_shape) else value


def unwrap_replicated(value: Any) -> Any:
    """Return the tensor in a `ReplicatedEntry`, and any other value unchanged."""
    return value.value if isinstance(value, ReplicatedEntry) else value


class FullTensorUpdate:
    """Optimizers of a rank, for the full tensors that the rank owns and for shards of other parameters.

    Args:
        tensors: all parameters on this rank.
        make: function that creates optimizers from [(name, parameter)]. Sharded parameters in `full` are passed with
            their full shape. If another rank owns such a parameter, it never gets a gradient here, so optimizers skip
            it.
        full: names of parameters whose optimizer needs the full tensor. All other parameters are updated as shards.
    """

    def __init__(
        self, tensors: Sequence[LocalTensor], mesh: Mesh, coordinates: Mapping[str, int], make: MakeOptimizers,
        full: Collection[str],
    ) -> None:  # fmt: skip
        self.tensors = {tensor.name: tensor for tensor in tensors}
        sharded = [(t.name, t.shape, t.splits) for t in tensors if t.splits and t.name in full]
        self.sharded = assign_owners(sharded, mesh, coordinates)
        self.owned = {tensor.name for tensor in self.sharded if tensor.is_mine}
        self.sharded_names = {tensor.name for tensor in self.sharded}
        self.parameters = {tensor.name: self._parameter(tensor) for tensor in tensors}
        self.optimizers = make(list(self.parameters.items()))
        optimizer_of = {id(p): optimizer for optimizer in self.optimizers for p in parameters_of(optimizer)}
        self._optimizer_of = {name: optimizer_of[id(p)] for name, p in self.parameters.items() if id(p) in optimizer_of}

    def step(self) -> Steps[None]:
        """Update all tensors of this rank from their gradients. A generator, which yields its collectives."""
        values = {tensor.name: self.tensors[tensor.name].values.detach() for tensor in self.sharded}
        grads = {name: self.tensors[name].values.grad for name in values}
        full_values = yield from to_owners(values, self.sharded)
        full_grads = yield from to_owners(
            {name: torch.zeros_like(values[name]) if grad is None else grad for name, grad in grads.items()},
            self.sharded,
        )
        for name, parameter in self.parameters.items():
            if name in full_values:
                parameter.data = full_values[name]
                parameter.grad = None if grads[name] is None else full_grads[name]
            elif name not in values:
                parameter.grad = self.tensors[name].values.grad
        for optimizer in self.optimizers:
            optimizer.step()
        updated = {name: self.parameters[name].detach() for name in full_values}
        shards = yield from from_owners(updated, values, self.sharded)
        for name, shard in shards.items():
            values[name].copy_(shard)
        for name, parameter in self.parameters.items():
            parameter.grad = None
            if name in full_values:
                parameter.data = self._parameter(self.tensors[name]).data

    def zero_grad(self) -> None:
        """Remove the gradients of all parameters that an optimizer updates."""
        for name in self._optimizer_of:
            self.tensors[name].values.grad = None

    def shared_state(self) -> Steps[StateByName]:
        """Return the optimizer state of this rank's tensors, sharded, as {name: {key: value}}.

        A state tensor with the shape of its parameter is sharded like the parameter. All other values are copied from
        the owner of the tensor. A generator, which yields its collectives.
        """
        described = {
            name: {key: self._describe(name, value) for key, value in self._state_of(name).items()}
            for name in self.owned
            if self._has_state(name)
        }
        gathered = yield GatherObjects(described)
        entries = {name: row for rows in gathered for name, row in rows.items() if name in self.sharded_names}
        state: StateByName = dict(self.local_state())
        for name, row in entries.items():
            shapes = self.tensors[name].values.shape, self.tensors[name].shape
            state[name] = {key: wrap_replicated(entry.value, *shapes) for key, entry in row.items()}
        keys = dict.fromkeys(key for row in entries.values() for key, entry in row.items() if entry.dtype is not None)
        for key in sorted(keys):
            like = {
                name: self.tensors[name].values.new_empty(0, dtype=row[key].dtype)
                for name, row in entries.items()
                if key in row and row[key].dtype is not None
            }
            full = {name: self._state_of(name)[key] for name in like if name in self.owned}
            for name, shard in (yield from from_owners(full, like, self.sharded)).items():
                state[name][key] = shard
        return state

    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> Steps[None]:
        """Load optimizer state in the form that `shared_state` returns. Tensors without an entry get no state."""
        for name, optimizer in self._optimizer_of.items():
            optimizer.state.pop(self.parameters[name], None)
            is_sharded = name in self.sharded_names
            if name in state and (name in self.owned or not is_sharded):
                # Copied: all ranks of a lock step get the same objects.
                values = copy.deepcopy(state[name]) if is_sharded else state[name]
                optimizer.state[self.parameters[name]] = {key: unwrap_replicated(v) for key, v in values.items()}
        of_sharded = [tensor for tensor in self.sharded if tensor.name in state]
        for key in sorted({key for tensor in of_sharded for key in state[tensor.name]}):
            shards = {
                tensor.name: value for tensor in of_sharded
                if isinstance(value := state[tensor.name].get(key), Tensor) and value.dim()
                and value.shape == self.tensors[tensor.name].values.shape
            }  # fmt: skip
            for name, full in (yield from to_owners(shards, of_sharded)).items():
                self._state_of(name)[key] = full

    def local_state(self) -> StateByName:
        """Return the optimizer state of the tensors that are updated as shards, as {name: {key: value}}."""
        names = [name for name in self.tensors if name not in self.sharded_names and self._has_state(name)]
        return {name: self._state_of(name) for name in names}

    def _parameter(self, tensor: LocalTensor) -> nn.Parameter:
        is_full = tensor.name in self.sharded_names
        return placeholder(tensor.values, tensor.shape) if is_full else nn.Parameter(tensor.values.detach())

    def _has_state(self, name: str) -> bool:
        return name in self._optimizer_of and self.parameters[name] in self._optimizer_of[name].state

    def _state_of(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer_of[name].state[self.parameters[name]]
        return state

    def _describe(self, name: str, value: Any) -> SharedEntry:
        if not isinstance(value, Tensor):
            return SharedEntry(None, value)
        if value.dim() and tuple(value.shape) == self.tensors[name].shape:
            return SharedEntry(value.dtype)
        return SharedEntry(None, value.detach().cpu())


def placeholder(like: Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    """Return a parameter of this shape that uses no memory. Optimizer constructors read only its shape."""
    return nn.Parameter(like.detach().new_zeros(()).expand(shape))
