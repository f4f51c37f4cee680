"""`dp_sync` methods that average models: every data rank trains its own replica.

A method averages the replicas before or after an optimizer step, and changes parameters in place. The functions take a
list of the replicas in this process: one in training, all in a single-process test. The state of methods has the type
`State` of `gradient_methods.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopart.extras.dp_sync.gradient_methods import State
from autopart.extras.dp_sync.mixing_matrices import mixing_rows, receivers
from autopart.extras.dp_sync.sync_options import Method
from autopart.extras.dp_sync.transports import SyncTransport

Parameters = Mapping[str, Tensor]
"""{name: this rank's parameter}, of one dtype, in equal order on every rank."""


def before_step(
    method: Method, parameters: Sequence[Parameters], states: Sequence[State], wire: SyncTransport, step: int
) -> None:
    """Run the part of a method before the optimizer step `step` (from 0). Gradients are in `.grad`."""
    if method.name == "gradient_tracking":
        _gradient_tracking(method, parameters, states, wire)
    elif method.name == "exact_diffusion":
        for replica, state in zip(parameters, states, strict=True):
            for name, parameter in replica.items():
                memory = state.setdefault(name, {})
                memory["ahead"] = _flat_copy(parameter) - memory.get("adapted", _flat_copy(parameter))
    elif method.name == "diloco":
        for replica, state in zip(parameters, states, strict=True):
            for name, parameter in replica.items():
                if name not in state:
                    state[name] = {"anchor": _flat_copy(parameter), "velocity": torch.zeros_like(parameter).view(-1)}


def after_step(
    method: Method, parameters: Sequence[Parameters], states: Sequence[State], wire: SyncTransport, step: int
) -> None:
    """Run the part of a method after the optimizer step `step` (from 0), such as averaging."""
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
                memory = state[name]
                if method.name == "exact_diffusion":
                    memory["adapted"] = _flat_copy(parameter)
                parameter.add_(memory.pop("ahead").view(parameter.shape))
        if method.name == "exact_diffusion":
            _mix(method.graph, parameters, wire, step, halfway=True)


def means(values: Sequence[Mapping[str, Tensor]], wire: SyncTransport) -> list[dict[str, Tensor]]:
    """Return, for each local rank, {name: mean of the value over all replicas}."""
    flat = wire.sum([_flat(list(replica.values())) for replica in values])
    return [_by_name(total / wire.num_ranks, replica) for total, replica in zip(flat, values, strict=True)]


def _mix(graph: str, parameters: Sequence[Parameters], wire: SyncTransport, step: int, halfway: bool = False) -> None:
    """Replace the parameters x_i of each rank i by the weighted average sum_j w_ij x_j, in place.

    W is the mixing matrix of the gossip graph: w_ij is 0 unless rank j sends to rank i. With `halfway`, the weights are
    (I + W) / 2 instead of W.
    """
    for replica, mixed in zip(parameters, _mixed(graph, parameters, wire, step), strict=True):
        for name, parameter in replica.items():
            parameter.copy_((parameter + mixed[name]) / 2 if halfway else mixed[name])


def _mixed(
    graph: str, values: Sequence[Mapping[str, Tensor]], wire: SyncTransport, step: int
) -> list[dict[str, Tensor]]:
    """Return, for each local rank i, the weighted average sum_j w_ij v_j of the values v_j of all ranks j.

    The weights w_ij are row i of the gossip graph's mixing matrix. A complete graph needs only an all-reduce.
    """
    if graph == "complete":
        return means(values, wire)
    rows = mixing_rows(graph, wire.num_ranks, step)
    receivers_of = receivers(rows)
    flat = [_flat(list(replica.values())) for replica in values]
    mixed = wire.exchange(flat, [rows[rank] for rank in wire.here], [receivers_of[rank] for rank in wire.here])
    return [_by_name(one, replica) for one, replica in zip(mixed, values, strict=True)]


def _gradient_tracking(
    method: Method, parameters: Sequence[Parameters], states: Sequence[State], wire: SyncTransport
) -> None:
    """Run gradient tracking: each rank has an estimate q of the mean gradient, which its optimizer uses.

    With the mixing matrix W of the gossip graph, parameters x and gradient g, a step is q = W q + g - (previous g) and
    then x = W x - step(q). The first q is g. The optimizer gets q in place of g. After its step, W x - x is added to x.
    Parameters and q are sent in one message.
    """
    sent: list[dict[str, Tensor]] = []
    for replica, state in zip(parameters, states, strict=True):
        tracked = {name: state.get(name, {}).get("tracked") for name in replica}
        values = {name: parameter.detach() for name, parameter in replica.items()}
        sent.append(
            {**values, **{f"{name}.": t.view(replica[name].shape) for name, t in tracked.items() if t is not None}}
        )
    for replica, state, mixed in zip(parameters, states, _mixed(method.graph, sent, wire, 0), strict=True):
        for name, parameter in replica.items():
            gradient = _flat_copy(parameter.grad)
            memory, target = state.setdefault(name, {}), gradient
            if f"{name}." in mixed:
                target = mixed[f"{name}."].reshape(-1) + gradient - memory["before"]
            memory["tracked"], memory["before"] = target, gradient
            memory["ahead"] = mixed[name].reshape(-1) - _flat_copy(parameter)
            parameter.grad.copy_(target.view(parameter.shape))


def _outer_step(method: Method, parameters: Sequence[Parameters], states: Sequence[State], wire: SyncTransport) -> None:
    """Run the outer optimizer of DiLoCo: SGD with Nesterov momentum.

    Its gradient is the mean distance between the replicas and the anchor, the model after the previous outer step. All
    replicas continue from the new anchor.
    """
    moved = [
        {name: state[name]["anchor"].view(parameter.shape) - parameter for name, parameter in model.items()}
        for model, state in zip(parameters, states, strict=True)
    ]
    for replica, state, mean in zip(parameters, states, means(moved, wire), strict=True):
        for name, parameter in replica.items():
            memory, gradient = state[name], mean[name].reshape(-1)
            memory["velocity"] = method.outer_momentum * memory["velocity"] + gradient
            ahead = gradient + method.outer_momentum * memory["velocity"]
            memory["anchor"] = memory["anchor"] - method.outer_lr * ahead
            parameter.copy_(memory["anchor"].view(parameter.shape))


def _flat_copy(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _by_name(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = flat.split([tensor.numel() for tensor in like.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(like.items(), parts, strict=True)}
