"""Seconds and bytes per step of the data-parallel methods (`dp_sync`) that replace the all-reduce.

A method (`autopart.ir.run.sync_option.SyncMethod`) lists its collectives, how often it reads or writes the gradients in
memory, and the size of its state. The functions below convert these to seconds and bytes on a mesh and hardware.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.collective_costs import levels, time_s, wire_bytes
from autopart.cost.predict.table_rows import Parameter
from autopart.ir.mesh import Mesh
from autopart.ir.run.sync_option import Exchange, MethodParameters, SyncMethod, SyncOption

if TYPE_CHECKING:
    from autopart.cost.predict.table import Table

_ALL_REDUCE_PASSES = 2.0
"""Memory traffic of an all-reduce besides communication, as a multiple of the gradients' bytes.

Gradients are copied into a flat buffer and out of it.
"""

_SLOWEST, _FASTEST = 1e3, 1e13
"""Range of link bandwidths that is searched, in bytes/s."""


class Transfer(Exchange):
    """A collective of a data-parallel method, with functions that give its cost for a number of ranks."""

    def seconds(self, num_ranks: int, hardware: Hardware, stride: int) -> float:
        return self.often * time_s(self.kind, num_ranks, self.size_bytes, hardware, stride)

    def sent_bytes(self, num_ranks: int) -> float:
        return self.often * wire_bytes(self.kind, num_ranks, self.size_bytes)


def exchanges(of: MethodParameters, num_ranks: Any, several: int | None = None) -> list[Transfer]:
    """Return the collectives that a data-parallel method runs in a step; empty for a single rank.

    Args:
        of: the method and the sizes of its parameters, which may be sympy expressions.
        num_ranks: number of data-parallel ranks, which may be a sympy expression.
        several: number of ranks as an integer, if `num_ranks` is an expression. It sets the number of neighbours with
            which a rank of a gossip method communicates.
    """
    if num_ranks == 1:
        return []
    return [Transfer(*one) for one in of.method.exchanges(of, num_ranks, several or num_ranks)]


def carried(method: SyncMethod, sizes: Iterable[tuple[float, int, tuple[int, ...]]]) -> MethodParameters:
    """Return the total bytes of the parameters that a data-parallel method synchronizes.

    The result has three totals: bytes of the rank's shards, of the compressed data that the rank sends, and of low-rank
    factors.

    Args:
        method: the method that replaces the gradient all-reduce.
        sizes: for each parameter, (elements of a rank's shard, bytes of an element, shape).
    """
    total = sent = factors = 0.0
    for elements, itemsize, shape in sizes:
        total += elements * itemsize
        sent += method.sent_bytes(round(elements), itemsize)
        factors += method.factor_bytes(elements, itemsize, shape)
    return MethodParameters(method, total, sent, factors)


def by_method(
    parameters: Mapping[str, Parameter], sizes: Mapping[str, float], names: Iterable[str], dp_sync: SyncOption
) -> list[MethodParameters]:
    """Return, for each `dp_sync` method, the bytes of the parameters that it synchronizes.

    Parameters without a gradient, and parameters whose gradients are all-reduced, are left out.

    Args:
        parameters: {name: parameter} of a cost table.
        sizes: {name in the table: bytes of the parameter}.
        names: the parameters to count, by name in the table.
    """
    rows: dict[SyncMethod, list[tuple[float, int, tuple[int, ...]]]] = {}
    for name in names:
        parameter, method = parameters[name], dp_sync.method_of(name)
        if parameter.trained and method is not None:
            shape = (parameter.rows, 1) if parameter.rows else ()
            rows.setdefault(method, []).append((sizes[name] / parameter.itemsize, parameter.itemsize, shape))
    return [carried(method, each) for method, each in rows.items()]


def shares(table: Table, dp_sync: SyncOption) -> tuple[MethodParameters, ...]:
    """Return the bytes that each `dp_sync` method exchanges, per byte of the model's trained parameters."""
    sizes = {name: float(parameter.size.value) for name, parameter in table.parameters.items()}
    total = math.fsum(sizes[name] for name in table.held.values() if table.parameters[name].trained)
    of_methods = by_method(table.parameters, sizes, table.held.values(), dp_sync)
    return tuple(MethodParameters(one.method, *(float(size) / total for size in one[1:])) for one in of_methods)


def sync_s(of: MethodParameters, num_ranks: int, stride: int, hardware: Hardware) -> float:
    """Return the seconds per step of a data-parallel method: its collectives and its memory traffic.

    Args:
        of: the method and the sizes of its parameters.
        stride: distance in ranks between neighbouring data-parallel ranks.
    """
    moved = sum(one.seconds(num_ranks, hardware, stride) for one in exchanges(of, num_ranks))
    return moved + of.method.passes(num_ranks) * hardware.traffic_time_s(of.size_bytes)


def exact_s(of: MethodParameters, num_ranks: int, stride: int, hardware: Hardware, kind: str = "all_reduce") -> float:
    """Return the seconds per step of an exact gradient reduction, for comparison with a `dp_sync` method.

    Args:
        of: the `dp_sync` method and the sizes of its parameters.
        stride: distance in ranks between neighbouring data-parallel ranks.
        kind: the collective that reduces the gradients.
    """
    moved = Transfer(kind, of.size_bytes).seconds(num_ranks, hardware, stride)
    return moved + _ALL_REDUCE_PASSES * hardware.traffic_time_s(of.size_bytes)


def break_even_bytes_per_s(
    of: MethodParameters, mesh: Mesh, axis: str, hardware: Hardware, kind: str = "all_reduce"
) -> float | None:
    """Return the link bandwidth below which a data-parallel method is faster than the exact reduction.

    The bandwidth is in bytes/s per rank. It is that of links between nodes, or inside a node if all ranks are in one
    node. Returns None if the method is always slower or always faster.

    In the model of `collective_costs`, the bandwidth is the number of bytes that the method saves, divided by the
    seconds that it adds in memory traffic and latency.

    Args:
        of: the method and the sizes of its parameters.
        axis: the axis of the data-parallel ranks.
        kind: collective of the exact reduction.
    """
    n, stride = mesh.size(axis), mesh.stride(axis)
    if sum(one.sent_bytes(n) for one in exchanges(of, n)) >= Transfer(kind, of.size_bytes).sent_bytes(n):
        return None

    _, nodes = levels(n, hardware.devices_per_node, stride)
    link = "node_link_bytes_per_s" if nodes > 1 else "link_bytes_per_s"

    def difference(bytes_per_s: float) -> float:
        changed: dict[str, Any] = {link: bytes_per_s, "collectives": {}}
        there = replace(hardware, **changed)
        return sync_s(of, n, stride, there) - exact_s(of, n, stride, there, kind)

    low, high = _SLOWEST, _FASTEST
    if difference(low) >= 0 or difference(high) <= 0:
        return None
    from scipy.optimize import brentq  # slow to import, rarely needed

    return float(brentq(difference, low, high, rtol=1e-6))
