"""Cost per step of a data-parallel method: exchanges, passes over memory, and persistent state.

With `n` ranks, a gradient or model of `S` bytes, and `C` bytes of its compressed form (`dp_sync.sent_bytes`):

| method | exchanges | passes over `S` | state |
|---|---|---|---|
| parameter_server | a rank receives and sends `(n - 1) S`, one after the other | 2 | 0 |
| qsgd | all-gather of `n C` | 3 + n | 0 |
| top_k, sign | the same | 6 + n | S |
| ef21, ef21_sgdm | the same | 8 + n | 2 S, 3 S |
| double_squeeze, neolithic | all-to-all of `n C`, all-gather of `C` | 10, 10 a round | S + S/n |
| powersgd | three all-reduces: of both factors, and of what is not compressed | 10 | S + factors |
| gossip, exact_diffusion | a send of `S` to every neighbour | 2 and one a neighbour | 0, S |
| gradient_tracking | a send of `2 S` to every neighbour | 2 and one a neighbour | 2 S |
| local, diloco | an all-reduce of `S` every `every` steps | 2, 8 in such a step | 0, 2 S |

Passes are those of the runtime (`runtime/sync/`), each a read or a write of `S` bytes. Periodic averaging of
gossip adds its all-reduce every `every` steps. Patarasuk and Yuan 2009 has the ring's bytes, Yuan's lecture the
server's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.collective_costs import levels, time_s, wire_bytes
from autopart.cost.predict.table_rows import Parameter
from autopart.extras.dp_sync.sync_options import EXACT, DpSync, Method, neighbours, sent_bytes
from autopart.ir.mesh import Mesh

if TYPE_CHECKING:
    from autopart.cost.predict.table import Table

_SLOWEST, _FASTEST = 1e3, 1e13
"""Range of link bandwidths that is searched, in bytes/s."""


class Transfer(NamedTuple):
    """Collectives of one kind over an array of `size_bytes` bytes, `often` times a step."""

    kind: str
    size_bytes: Any
    often: Any = 1.0

    def seconds(self, num_ranks: int, hardware: Hardware, stride: int) -> float:
        return self.often * time_s(self.kind, num_ranks, self.size_bytes, hardware, stride)

    def sent_bytes(self, num_ranks: int) -> float:
        return self.often * wire_bytes(self.kind, num_ranks, self.size_bytes)


class MethodParameters(NamedTuple):
    """The parameters of a data-parallel method on a rank.

    Args:
        size_bytes: bytes of the parameters.
        made_bytes: bytes of the compressed form that a rank sends.
        factor_bytes: bytes of the factors that PowerSGD sends instead of matrices.
    """

    method: Method
    size_bytes: Any
    made_bytes: Any
    factor_bytes: Any = 0.0


def carried(method: Method, sizes: Iterable[tuple[float, int, tuple[int, ...]]]) -> MethodParameters:
    """Sum up the parameters of a method, from (elements of a rank's shard, bytes of an element, shape)."""
    total = sent = factors = 0.0
    for elements, itemsize, shape in sizes:
        total += elements * itemsize
        sent += sent_bytes(method, round(elements), itemsize)
        factors += _factor_bytes(method, elements, itemsize, shape)
    return MethodParameters(method, total, sent, factors)


def by_method(
    parameters: Mapping[str, Parameter], sizes: Mapping[str, float], names: Iterable[str], dp_sync: DpSync
) -> list[MethodParameters]:
    """Group trained parameters that are not all-reduced by their method.

    Args:
        sizes: bytes of each parameter, by its name in the table.
        names: names in the table.
    """
    rows: dict[Method, list[tuple[float, int, tuple[int, ...]]]] = {}
    for name in names:
        parameter, method = parameters[name], dp_sync.of(name)
        if parameter.trained and method != EXACT:
            shape = (parameter.rows, 1) if parameter.rows else ()
            rows.setdefault(method, []).append((sizes[name] / parameter.itemsize, parameter.itemsize, shape))
    return [carried(method, each) for method, each in rows.items()]


def shares(table: Table, dp_sync: DpSync) -> tuple[MethodParameters, ...]:
    """Return what data-parallel ranks exchange instead of gradients, per byte of trained parameters."""
    sizes = {name: float(parameter.size.value) for name, parameter in table.parameters.items()}
    total = math.fsum(sizes[name] for name in table.held.values() if table.parameters[name].trained)
    of_methods = by_method(table.parameters, sizes, table.held.values(), dp_sync)
    return tuple(MethodParameters(one.method, *(float(size) / total for size in one[1:])) for one in of_methods)


def _factor_bytes(method: Method, elements: float, itemsize: int, shape: tuple[int, ...]) -> float:
    """Return the bytes that PowerSGD sends of a rank's shard.

    This is r (m + n') of a matrix if it is at most half of the matrix, else all of it.
    """
    if method.name != "powersgd" or len(shape) < 2 or not elements:
        return elements * itemsize
    width = elements / shape[0]
    edges = (shape[0] + width) * min(method.rank, shape[0], width)
    return itemsize * (edges if 2 * edges <= elements else elements)


def exchanges(of: MethodParameters, num_ranks: Any, several: int | None = None) -> list[Transfer]:
    """Return the collectives of a step.

    All sizes may be expressions. `several` is the number of ranks for the neighbours on a graph, if `num_ranks` is
    an expression.
    """
    method, size, sent = of.method, of.size_bytes, of.made_bytes
    if num_ranks == 1:
        return []
    if method.name == "parameter_server":
        return [Transfer("send", size, 2 * (num_ranks - 1))]
    if method.name in ("double_squeeze", "neolithic"):
        return [Transfer("all_to_all", num_ranks * sent), Transfer("all_gather", sent)]
    if method.name == "powersgd":
        return [Transfer("all_reduce", of.factor_bytes / 3)] * 3
    if method.name in ("local", "diloco"):
        return [Transfer("all_reduce", size, 1 / method.every)]
    if method.changes == "models":
        times = 2 if method.name == "gradient_tracking" else 1
        if method.graph == "complete":
            return [Transfer("all_reduce", times * size)]
        gossip = [Transfer("send", times * size, neighbours(method.graph, several or num_ranks))]
        every = dict(method.numbers).get("every", 0)
        return [*gossip, Transfer("all_reduce", size, 1 / every)] if every else gossip
    if method.name == "all_reduce":
        return [Transfer("all_reduce", size)]
    return [Transfer("all_gather", num_ranks * sent)]


def passes(method: Method, num_ranks: int) -> float:
    """Return how often a step reads or writes as many bytes as there are gradients, besides communication."""
    several = {"qsgd": 3, "top_k": 6, "sign": 6, "ef21": 8, "ef21_sgdm": 10}
    if method.name in several:
        return several[method.name] + num_ranks
    if method.name in ("double_squeeze", "neolithic"):
        return 10.0 * dict(method.numbers).get("rounds", 1)
    if method.name == "powersgd":
        return 10.0
    if method.name in ("local", "diloco"):
        return (8.0 if method.name == "diloco" else 2.0) / method.every
    if method.changes == "models":
        return 2.0 + neighbours(method.graph, num_ranks)
    return 2.0


def sync_s(of: MethodParameters, num_ranks: int, stride: int, hardware: Hardware) -> float:
    """Return the seconds of a method per step."""
    moved = sum(one.seconds(num_ranks, hardware, stride) for one in exchanges(of, num_ranks))
    return moved + passes(of.method, num_ranks) * hardware.traffic_time_s(of.size_bytes)


def state_bytes_of_method(of: MethodParameters, num_ranks: int) -> float:
    """Return the bytes of state that a rank keeps from step to step."""
    method, size = of.method, of.size_bytes
    times = {"sign": 1.0, "ef21": 2.0, "ef21_sgdm": 3.0, "double_squeeze": 1 + 1 / num_ranks,
             "neolithic": 1 + 1 / num_ranks, "exact_diffusion": 1.0, "gradient_tracking": 2.0,
             "diloco": 2.0}  # fmt: skip
    if method.name == "top_k":
        return size if method.memory else 0.0
    return size + of.factor_bytes if method.name == "powersgd" else times.get(method.name, 0.0) * size


def exact_s(of: MethodParameters, num_ranks: int, stride: int, hardware: Hardware, kind: str = "all_reduce") -> float:
    """Return the seconds per step if a collective of this kind reduces the gradients instead."""
    moved = Transfer(kind, of.size_bytes).seconds(num_ranks, hardware, stride)
    return moved + passes(EXACT, num_ranks) * hardware.traffic_time_s(of.size_bytes)


def break_even_bytes_per_s(
    of: MethodParameters, mesh: Mesh, axis: str, hardware: Hardware, kind: str = "all_reduce"
) -> float | None:
    """Return the link bandwidth below which the method is faster than the exact gradient reduction.

    The bandwidth is in bytes/s per rank, between nodes, or inside a node if all ranks are in one. None: the method
    is always slower or always faster.

    It is (bytes_exact - bytes) / (passes + the difference of hops), in the model of `collective_costs`.

    Args:
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
