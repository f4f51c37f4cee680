"""Alpha-beta costs (latency and bandwidth) of collectives as sympy expressions, for rings of links.

A group of n = g k ranks has g ranks in each of k nodes. A ring over several nodes has n - 1 steps, and each step takes
as long as its slowest hop, which is between nodes. An all-reduce is a reduce-scatter inside the nodes, an
all-reduce of each rank's shard (S / g) across nodes, and an all-gather inside the nodes. If k = 1 or g = 1, it is one
ring over links of one kind.

Symbols: `n`, `g`, `k` as above, and `S` bytes of the full array. Links inside a node have `B` bytes/s per rank and
direction, and `alpha` seconds per hop. Links between nodes have `B_node` and `alpha_node`. Bandwidth terms are those of
nccl-tests' PERFORMANCE.md, latency terms those of Thakur et al. 2005.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import sympy

from autopart.cost.hardware.profile import Hardware
from autopart.ir.layout import Placement, conversion

n, g, k, S, B, alpha, B_node, alpha_node = sympy.symbols("n g k S B alpha B_node alpha_node", positive=True)


class Parts(NamedTuple):
    """Hops and bytes of a collective: its sequential hops, and the bytes that a rank sends.

    Both are given for links inside a node and for links between nodes.
    """

    hops: sympy.Expr
    bytes: sympy.Expr
    node_hops: sympy.Expr
    node_bytes: sympy.Expr

    @property
    def time_s(self) -> sympy.Expr:
        return self.hops * alpha + self.bytes / B + self.node_hops * alpha_node + self.node_bytes / B_node


_crosses = sympy.Piecewise((0, sympy.Eq(k, 1)), (1, True))
_one_way = Parts((1 - _crosses) * (g - 1), (g - 1) / g * S, _crosses * (g * k - 1), (k - 1) / k * S / g)

PARTS: dict[str, Parts] = {
    "all_reduce": Parts(*(2 * part for part in _one_way)),
    "all_gather": _one_way,
    "reduce_scatter": _one_way,
    "all_to_all": Parts(g - 1, (g - 1) / (g * k) * S / (g * k), g * (k - 1), (k - 1) / k * S / (g * k)),
    "send": Parts(1 - _crosses, (1 - _crosses) * S, _crosses, _crosses * S),
}
"""{collective: its hops and bytes}.

All other primitives of `autopart.ir.layout` are local and free. In an all-to-all, each of n ranks has S / n bytes. A
send has the cost of the slowest hop of a pipeline whose ranks are in k nodes.
"""

TIME: dict[str, sympy.Expr] = {kind: parts.time_s for kind, parts in PARTS.items()}
"""{collective: its seconds}."""

WIRE_BYTES: dict[str, sympy.Expr] = {kind: parts.bytes.subs({k: 1, g: n}) for kind, parts in PARTS.items()}
"""{collective: bytes that each rank sends}. These bytes do not depend on the number of nodes."""

_TIME = {kind: sympy.lambdify((g, k, S, B, alpha, B_node, alpha_node), time, "math") for kind, time in TIME.items()}
_BYTES = {kind: sympy.lambdify((n, S), expression, "math") for kind, expression in WIRE_BYTES.items()}


_ROUNDS = {"all_reduce": 2}
"""Rounds of a collective through its ring, if not one."""


@lru_cache(maxsize=10_000)
def levels(num_ranks: int, devices_per_node: int, stride: int = 1) -> tuple[int, int]:
    """Return (g, k): the ranks of a group in each node, and the number of nodes.

    g is the largest divisor of the group size that fits in a node. Nodes hold consecutive ranks. Groups are assumed
    to begin at the first rank of a node.

    Args:
        stride: distance in ranks between neighbours of the group (`Mesh.stride`).

    >>> levels(16, 8), levels(16, 8, stride=4), levels(16, 8, stride=8), levels(6, 8)
    ((8, 2), (2, 8), (1, 16), (6, 1))
    """
    most = max(1, min(num_ranks, devices_per_node // stride))
    inside = next(size for size in range(most, 0, -1) if num_ranks % size == 0)
    return inside, num_ranks // inside


def time_s(kind: str, num_ranks: int, size_bytes: float, hardware: Hardware, stride: int = 1) -> float:
    """Return the seconds of one collective over a full array of `size_bytes` bytes.

    Local operations and groups of one rank take 0 seconds. If the profile has measured rates between nodes, they
    replace the bandwidths of links. Then a round of the ring has the latency of its k - 1 hops between nodes, as in
    NCCL's model (src/graph/tuning.cc); measured rates include hops inside of nodes. All ranks of a node are assumed to
    share its links to other nodes, as in the measurement.

    Args:
        kind: name of the collective, as in `PARTS`.
        stride: distance in ranks between neighbours of the group; 1 on `tp`, the innermost axis.
    """
    if kind not in _TIME or num_ranks == 1:
        return 0.0
    inside, nodes = levels(num_ranks, hardware.devices_per_node, stride)
    rate = hardware.rate_between_nodes(kind, nodes)
    if rate is not None:
        _, _, _, node_latency_s = hardware.links(kind)
        hops_s = _ROUNDS.get(kind, 1) * (nodes - 1) * node_latency_s
        return hops_s + wire_bytes(kind, num_ranks, size_bytes) / rate
    return float(_TIME[kind](inside, nodes, size_bytes, *hardware.links(kind)))


def wire_bytes(kind: str, num_ranks: int, size_bytes: float) -> float:
    """Return the bytes that each rank sends in one collective over a full array of `size_bytes` bytes."""
    return float(_BYTES[kind](num_ranks, size_bytes)) if kind in _BYTES and num_ranks > 1 else 0.0


@lru_cache(maxsize=100_000)
def conversion_time_s(
    source: Placement, target: Placement, num_ranks: int, size_bytes: float, needs_grad: bool, hardware: Hardware,
    stride: int = 1,
) -> float:  # fmt: skip
    """Return the seconds of a conversion between two placements on an axis, forward and backward.

    The seconds are infinite if no conversion exists.

    Args:
        size_bytes: bytes of the full array.
        needs_grad: True to include the backward.
        stride: distance in ranks between neighbours on the axis.
    """
    if source == target:
        return 0.0
    step = conversion(source, target)
    if step is None or (step.operator == "all_to_all" and (source.in_order.sections or target.in_order.sections)):
        return float("inf")
    forward = time_s(step.forward, num_ranks, size_bytes, hardware, stride)
    backward = time_s(step.backward, num_ranks, size_bytes, hardware, stride) if needs_grad else 0.0
    return forward + backward
