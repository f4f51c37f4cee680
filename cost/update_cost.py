"""Cost of optimizer updates: state, traffic, FLOPs, and exchanges of tensors with owner ranks.

The runtime's `pm.optimizer` updates a tensor that needs full values on one of the ranks that store its shards. This
module counts the bytes that the runtime sends for this (`runtime/optimizers/owner_exchange.py`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.collective_costs import time_s
from autopart.cost.predict.operator_work import CHOSEN, COPY_TRAFFIC, optimizer_s
from autopart.cost.update_rules import ADAMW, UPDATES, UpdateRule
from autopart.ir.mesh import Mesh
from autopart.ir.run.full_tensors import balanced_owners, position_of

if TYPE_CHECKING:
    from autopart.cost.predict.table import TableCost

EXCHANGES = 3
"""Times that a step exchanges a tensor with its owner: values and gradient to the owner, new values back."""

COPIES = 2
"""Copies of an exchanged tensor: into the buffer of an all-to-all, and out of it."""


class FullTensor(NamedTuple):
    """A tensor that its owner rank updates in full.

    Args:
        size_bytes: bytes of the full tensor.
        levels: (mesh axis, number of shards) of each split, outer axis first. Empty if the tensor is replicated.
        matrix: (rows, columns) if the update orthogonalizes it.
    """

    size_bytes: float
    levels: tuple[tuple[str, int], ...]
    matrix: tuple[int, ...] = ()


@dataclass(frozen=True)
class FullUpdate:
    """Cost of an update of the full tensors of a pipeline stage, on the fullest rank.

    Args:
        flops: FLOPs of matrix products.
        compute_s: seconds of the updates.
        sent_bytes: bytes that a rank sends to other ranks.
        exchange_s: seconds of the exchanges.
        state_bytes: optimizer state.
        workspace_bytes: full values and gradients of the tensors that a rank owns, and buffers of an all-to-all.
        shard_bytes: shards of the full tensors.
        count: number of the tensors.
    """

    flops: float = 0.0
    compute_s: float = 0.0
    sent_bytes: float = 0.0
    exchange_s: float = 0.0
    state_bytes: float = 0.0
    workspace_bytes: float = 0.0
    shard_bytes: float = 0.0
    count: int = 0

    def __add__(self, other: FullUpdate) -> FullUpdate:
        return FullUpdate(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def newton_schulz_flops(matrix: Sequence[int], steps: int) -> float:
    """Return the FLOPs to orthogonalize a matrix.

    With the smaller dim m and the larger dim n, a step computes X X^T (2 m^2 n), its square (2 m^3), and a product of
    the result with X (2 m^2 n).

    >>> newton_schulz_flops((4, 2), 5)
    400.0
    """
    m, n = sorted(matrix)
    return float(steps * (4 * m * m * n + 2 * m**3))


def newton_schulz_s(matrix: Sequence[int], steps: int, hardware: Hardware) -> float:
    """Return the seconds to orthogonalize a matrix. `torch.optim.Muon` computes the products in bf16."""
    m, n = sorted(matrix)
    dtype, size = hardware.known_dtype("bfloat16"), 2
    wide = hardware.matmul_time_s(2 * m * m * n, size * (2 * m * n + m * m), dtype, n)
    square = hardware.matmul_time_s(2 * m**3, size * 3 * m * m, dtype, m)
    back = hardware.matmul_time_s(2 * m * m * n, size * (2 * m * n + m * m), dtype, m)
    return steps * (wide + square + back)


def full_update(tensors: Sequence[FullTensor], rule: UpdateRule, hardware: Hardware, mesh: Mesh) -> FullUpdate:
    """Return the cost of a step of tensors whose update needs the full tensor."""
    groups = defaultdict[tuple[tuple[str, int], ...], list[FullTensor]](list)
    for tensor in tensors:
        groups[tensor.levels].append(tensor)
    total = FullUpdate()
    for levels, group in groups.items():
        total += _group_update(levels, group, rule, hardware, mesh)
    return total


def _group_update(
    levels: tuple[tuple[str, int], ...], tensors: Sequence[FullTensor], rule: UpdateRule, hardware: Hardware, mesh: Mesh
) -> FullUpdate:
    sizes = [ranks for _, ranks in levels]
    owned_bytes, flops, products_s = (np.zeros(sizes) for _ in range(3))
    owners = balanced_owners([tensor.size_bytes for tensor in tensors], math.prod(sizes))
    counts = Counter(zip(owners, (tensor.matrix for tensor in tensors), (t.size_bytes for t in tensors), strict=True))
    for (owner, matrix, size_bytes), count in counts.items():
        position = position_of(owner, sizes)
        owned_bytes[position] += count * size_bytes
        if matrix and rule.newton_schulz_steps:
            flops[position] += count * newton_schulz_flops(matrix, rule.newton_schulz_steps)
            products_s[position] += count * newton_schulz_s(matrix, rule.newton_schulz_steps, hardware)
    most_bytes = float(owned_bytes.max())
    traffic_s = rule.traffic_values * most_bytes / hardware.optimizer_efficiency / hardware.memory_bytes_per_s
    sent, exchange_s, buffer_bytes = np.zeros(sizes), 0.0, 0.0
    for level, (axis, ranks) in enumerate(levels):
        to_owners, from_owners = _exchanged_bytes(owned_bytes, level)
        sent += (EXCHANGES - 1) * to_owners + from_owners
        busiest = float(max(to_owners.max(), from_owners.max()))
        buffer_bytes = max(buffer_bytes, 2 * busiest)
        full_array = busiest * ranks**2 / max(ranks - 1, 1)  # a rank of an all-to-all sends (n - 1) / n^2 of the array
        copies_s = COPIES * hardware.traffic_time_s(COPY_TRAFFIC * busiest)
        exchange_s += EXCHANGES * (time_s("all_to_all", ranks, full_array, hardware, mesh.stride(axis)) + copies_s)
    return FullUpdate(
        flops=float(flops.max()),
        compute_s=float(products_s.max()) + traffic_s,
        sent_bytes=float(sent.max()),
        exchange_s=exchange_s,
        state_bytes=rule.state_values * most_bytes,
        workspace_bytes=2 * most_bytes + buffer_bytes if levels else 0.0,
        shard_bytes=float(owned_bytes.sum()) / math.prod(sizes),
        count=len(tensors),
    )


def _exchanged_bytes(owned_bytes: np.ndarray, level: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that each rank sends over one axis of an exchange: to owners, and from owners.

    Only ranks with the owner's coordinates on the inner axes take part: they hold the shards of the outer splits.

    Args:
        owned_bytes: bytes of the full tensors that each rank owns, as an array of shape [ranks of each axis].
        level: index of the axis.
    """
    num_shards = math.prod(owned_bytes.shape[: level + 1])
    received = owned_bytes.sum(axis=tuple(range(level)), keepdims=True) / num_shards  # from each rank of the axis
    to_owners = received.sum(axis=level, keepdims=True) - received
    from_owners = received * (owned_bytes.shape[level] - 1)
    return to_owners, from_owners


# The parameters of a rank in a cost table.


def update_row(priced: TableCost, parameters: Mapping[str, str], copied_bytes: float) -> dict[str, float]:
    """Return the entries of a rank in `Plan.timing` that describe the update of its parameters.

    Args:
        parameters: {parameter of the rank: its name in the table}.
        copied_bytes: bytes of weights that are copied after the update.
    """
    trained = sum(map(priced.gradient_bytes, parameters.values()))
    name, values = priced.table.optimizer, priced.setting.system.optimizer_values
    if name == ADAMW:
        return {"optimizer_s": optimizer_s(trained, priced.hardware, copied_bytes, values)}
    rule, full = UPDATES[name], rank_update(priced, parameters)
    values = rule.traffic_values if rule.full == "none" else values
    rest_s = optimizer_s(trained - full.shard_bytes, priced.hardware, copied_bytes, values)
    row: dict[str, float] = {"optimizer_s": rest_s + full.compute_s}
    if full.count:
        row |= {"owners_s": full.exchange_s, "full_tensors": full.count,
                "update_flops": round(full.flops), "update_sent_bytes": round(full.sent_bytes)}  # fmt: skip
    return row


def optimizer_bytes(priced: TableCost, parameters: Mapping[str, str]) -> float:
    """Return the bytes of optimizer state on the fullest rank that stores these parameters."""
    rule, full = UPDATES[priced.table.optimizer], rank_update(priced, parameters)
    is_adamw = rule.full != "none" or priced.table.optimizer == ADAMW
    values = priced.setting.state_bytes - 1 if is_adamw else rule.state_values
    elementwise = [known for known in parameters.values() if not priced.table.parameters[known].full]
    return values * sum(map(priced.gradient_bytes, elementwise)) + full.state_bytes


def rank_update(priced: TableCost, parameters: Mapping[str, str]) -> FullUpdate:
    """Return the cost of updating the full tensors among a rank's parameters."""
    full = [name for name in parameters.values() if priced.table.parameters[name].full and priced.gradient_bytes(name)]
    rule = UPDATES[priced.table.optimizer]
    return full_update([_full_tensor(priced, name) for name in full], rule, priced.hardware, priced.mesh)


def _full_tensor(priced: TableCost, name: str) -> FullTensor:
    """Return the full size of a parameter, and the axes that shard it, outermost first."""
    parameter, mesh = priced.table.parameters[name], priced.mesh
    axes = [mesh.innermost(CHOSEN[kind]) for kind in parameter.size.tensor_axes]
    size_bytes = priced.bytes_before_zero(name) * math.prod(map(mesh.size, axes))
    over = {axis for axis in (*axes, priced.zero_axis(name)) if mesh.size(axis) > 1}
    levels = sorted(over, key=mesh.stride, reverse=True)
    levels = ["_".join(levels)] if parameter.joined and levels else levels
    return FullTensor(size_bytes, tuple((axis, mesh.size(axis)) for axis in levels), parameter.matrix)
