"""What a collective costs: ring algorithms in the alpha-beta model on the links inside and between nodes, as sympy
expressions.

A group of n = g k ranks has g ranks inside each of k nodes: an all-reduce is a reduce-scatter inside the nodes, an
all-reduce of what each rank then holds (S / g) across them, and an all-gather inside. With k = 1 or g = 1 that is one
ring on one kind of link. Symbols: `n`, `g`, `k`; `S` bytes of the whole array; `B` bytes/s per rank and direction and
`alpha` seconds per hop inside a node, `B_node` and `alpha_node` between nodes.
Bandwidth terms as in nccl-tests' PERFORMANCE.md; latency terms as in Thakur et al. 2005.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import sympy

from autopart.cost.hardware.profile import Hardware
from autopart.ir.layout import Placement, conversion

n, g, k, S, B, alpha, B_node, alpha_node = sympy.symbols("n g k S B alpha B_node alpha_node", positive=True)


class Parts(NamedTuple):
    """The hops of a collective, one after the other, and the bytes a rank sends: inside its node, to other nodes."""

    hops: sympy.Expr
    bytes: sympy.Expr
    node_hops: sympy.Expr
    node_bytes: sympy.Expr

    @property
    def time_s(self) -> sympy.Expr:
        return self.hops * alpha + self.bytes / B + self.node_hops * alpha_node + self.node_bytes / B_node


_crosses = sympy.Piecewise((0, sympy.Eq(k, 1)), (1, True))
_one_way = Parts(g - 1, (g - 1) / g * S, k - 1, (k - 1) / k * S / g)

PARTS: dict[str, Parts] = {
    "all_reduce": Parts(*(2 * part for part in _one_way)),
    "all_gather": _one_way,
    "reduce_scatter": _one_way,
    "all_to_all": Parts(g - 1, (g - 1) / (g * k) * S / (g * k), g * (k - 1), (k - 1) / k * S / (g * k)),
    "send": Parts(1 - _crosses, (1 - _crosses) * S, _crosses, _crosses * S),
}
"""Every other primitive of `autopart.ir.layout` is local and free. A rank of an all-to-all holds S / n. A send is that
of a pipeline whose ranks lie in k nodes: its slowest hop."""

TIME: dict[str, sympy.Expr] = {kind: parts.time_s for kind, parts in PARTS.items()}
"""Seconds of each collective."""

WIRE_BYTES: dict[str, sympy.Expr] = {kind: parts.bytes.subs({k: 1, g: n}) for kind, parts in PARTS.items()}
"""Bytes each rank sends, wherever the ranks are."""

_TIME = {kind: sympy.lambdify((g, k, S, B, alpha, B_node, alpha_node), time, "math") for kind, time in TIME.items()}
_BYTES = {kind: sympy.lambdify((n, S), expression, "math") for kind, expression in WIRE_BYTES.items()}


@lru_cache(maxsize=10_000)
def levels(num_ranks: int, devices_per_node: int, stride: int = 1) -> tuple[int, int]:
    """(g, k): the ranks of a group inside each node, and the nodes. g is the largest divisor of the ranks that fits.

    `stride`: how far apart in rank numbers neighbours are (`Mesh.stride`). Nodes hold ranks of successive numbers, and
    groups are taken to begin where a node does.

    >>> levels(16, 8), levels(16, 8, stride=4), levels(16, 8, stride=8), levels(6, 8)
    ((8, 2), (2, 8), (1, 16), (6, 1))
    """
    most = max(1, min(num_ranks, devices_per_node // stride))
    inside = next(size for size in range(most, 0, -1) if num_ranks % size == 0)
    return inside, num_ranks // inside


def time_s(kind: str, num_ranks: int, size_bytes: float, hardware: Hardware, stride: int = 1) -> float:
    """Seconds of one collective over an array of `size_bytes` (0 for local primitives or one rank).

    `stride`: how far apart in rank numbers neighbours of the group are; on `tp`, the innermost axis, 1.
    """
    if kind not in _TIME or num_ranks == 1:
        return 0.0
    inside, nodes = levels(num_ranks, hardware.devices_per_node, stride)
    return float(_TIME[kind](inside, nodes, size_bytes, *hardware.links(kind)))


def wire_bytes(kind: str, num_ranks: int, size_bytes: float) -> float:
    """Bytes each rank sends in one collective."""
    return float(_BYTES[kind](num_ranks, size_bytes)) if kind in _BYTES and num_ranks > 1 else 0.0


@lru_cache(maxsize=100_000)
def conversion_time_s(
    source: Placement, target: Placement, num_ranks: int, size_bytes: float, needs_grad: bool, hardware: Hardware,
    stride: int = 1,
) -> float:  # fmt: skip
    """Seconds of going from one placement to another on an axis, both ways; infinite where there is no way."""
    if source == target:
        return 0.0
    step = conversion(source, target)
    if step is None or (step.operator == "all_to_all" and (source.in_order.sections or target.in_order.sections)):
        return float("inf")
    forward = time_s(step.forward, num_ranks, size_bytes, hardware, stride)
    backward = time_s(step.backward, num_ranks, size_bytes, hardware, stride) if needs_grad else 0.0
    return forward + backward
