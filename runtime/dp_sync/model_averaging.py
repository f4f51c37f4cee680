"""Methods with which every data rank has its own model: what they do before and after an optimizer's step.

Each is one function of all replicas that are here, so that it is the same on processes and in one process. `State` is
as in `gradients.py`; parameters are changed in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopart.ir.run.dp_sync import Method
from autopart.runtime.dp_sync.gradient_methods import State
from autopart.runtime.dp_sync.mixing_matrices import mixing, receivers
from autopart.runtime.dp_sync.transports import Wire

Parameters = Mapping[str, Tensor]
"""{name: this rank's parameter}, of one dtype, in the same order on every rank."""


def before_step(
    method: Method, parameters: Sequence[Parameters], states: Sequence[State], wire: Wire, step: int
) -> None:
    """What is done before an optimizer's step of this number (from 0), with `.grad` complete."""
    if method.name == "gradient_tracking":
        _track(method, parameters, states, wire)
    elif method.name == "exact_diffusion":
        for replica, state in zip(parameters, states, strict=True):
            for name, parameter in replica.items():
                known = state.setdefault(name, {})
                known["ahead"] = _copy(parameter) - known.get("adapted", _copy(parameter))
    elif method.name == "diloco":
        for replica, state in zip(parameters, states, strict=True):
            for name, parameter in replica.items():
                if name not in state:
                    state[name] = {"anchor": _copy(parameter), "velocity": torch.zeros_like(parameter).view(-1)}


def after_step(
    method: Method, parameters: Sequence[Parameters], states: Sequence[State], wire: Wire, step: int
) -> None:
    """What is done after an optimizer's step of this number (from 0)."""
    if method.name == "gossip":
        is_global = method.every and (step + 1) % method.every == 0
        _mix("complete" if is_global else method.graph, parameters, wire, step)
    elif method.name == "local":
        if (step + 1) % method.every == 0:
            _mix("complete", parameters, wire, step)
    elif method.name == "diloco":
        if (step + 1) % method.every == 0:
            _outer_step(method, parameters, states, wire)
    elif method.name in ("exact_diffusion", "gradient_tracking"):
        for replica, state in zip(parameters, states, strict=True):
            for name, parameter in replica.items():
                known = state[name]
                if method.name == "exact_diffusion":
                    known["adapted"] = _copy(parameter)
                parameter.add_(known.pop("ahead").view(parameter.shape))
        if method.name == "exact_diffusion":
            _mix(method.graph, parameters, wire, step, halfway=True)


def means(values: Sequence[Mapping[str, Tensor]], wire: Wire) -> list[dict[str, Tensor]]:
    """The means over all replicas, on every rank."""
    flat = wire.sum([_flat(list(replica.values())) for replica in values])
    return [_named(total / wire.num_ranks, replica) for total, replica in zip(flat, values, strict=True)]


def _mix(graph: str, parameters: Sequence[Parameters], wire: Wire, step: int, halfway: bool = False) -> None:
    """x_i = sum_j w_ij x_j; `halfway`: with (I + W) / 2."""
    for replica, mixed in zip(parameters, _mixed(graph, parameters, wire, step), strict=True):
        for name, parameter in replica.items():
            parameter.copy_((parameter + mixed[name]) / 2 if halfway else mixed[name])


def _mixed(graph: str, values: Sequence[Mapping[str, Tensor]], wire: Wire, step: int) -> list[dict[str, Tensor]]:
    """sum_j w_ij v_j on every rank i. What all average with all is a sum, which takes less than all sending all."""
    if graph == "complete":
        return means(values, wire)
    rows = mixing(graph, wire.num_ranks, step)
    to = receivers(rows)
    flat = [_flat(list(replica.values())) for replica in values]
    mixed = wire.exchange(flat, [rows[rank] for rank in wire.here], [to[rank] for rank in wire.here])
    return [_named(one, replica) for one, replica in zip(mixed, values, strict=True)]


def _track(method: Method, parameters: Sequence[Parameters], states: Sequence[State], wire: Wire) -> None:
    """x = W x - step(q) with q = W q + g - g of the step before, and q = g at first: an optimizer is given q in place
    of g, and W x - x is added after its step. Parameters and q are sent in one message."""
    sent: list[dict[str, Tensor]] = []
    for replica, state in zip(parameters, states, strict=True):
        tracked = {name: state.get(name, {}).get("tracked") for name in replica}
        values = {name: parameter.detach() for name, parameter in replica.items()}
        sent.append(
            {**values, **{f"{name}.": t.view(replica[name].shape) for name, t in tracked.items() if t is not None}}
        )
    for replica, state, mixed in zip(parameters, states, _mixed(method.graph, sent, wire, 0), strict=True):
        for name, parameter in replica.items():
            gradient = _copy(parameter.grad)
            known, followed = state.setdefault(name, {}), gradient
            if f"{name}." in mixed:
                followed = mixed[f"{name}."].reshape(-1) + gradient - known["before"]
            known["tracked"], known["before"] = followed, gradient
            known["ahead"] = mixed[name].reshape(-1) - _copy(parameter)
            parameter.grad.copy_(followed.view(parameter.shape))


def _outer_step(method: Method, parameters: Sequence[Parameters], states: Sequence[State], wire: Wire) -> None:
    """The mean of what replicas have moved from the anchor is the gradient of an outer SGD with Nesterov's momentum;
    all begin anew where it leads."""
    moved = [
        {name: state[name]["anchor"].view(parameter.shape) - parameter for name, parameter in model.items()}
        for model, state in zip(parameters, states, strict=True)
    ]
    for replica, state, mean in zip(parameters, states, means(moved, wire), strict=True):
        for name, parameter in replica.items():
            known, gradient = state[name], mean[name].reshape(-1)
            known["velocity"] = method.outer_momentum * known["velocity"] + gradient
            ahead = gradient + method.outer_momentum * known["velocity"]
            known["anchor"] = known["anchor"] - method.outer_lr * ahead
            parameter.copy_(known["anchor"].view(parameter.shape))


def _copy(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _named(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = flat.split([tensor.numel() for tensor in like.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(like.items(), parts, strict=True)}
