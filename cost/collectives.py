"""What a collective costs: ring algorithms in the alpha-beta model, as sympy expressions.

Symbols: `n` ranks, `S` bytes of the whole array, `B` bytes/s per rank and direction, `alpha` seconds per hop.
Bandwidth terms as in nccl-tests' PERFORMANCE.md; latency terms as in Thakur et al. 2005.
"""

from __future__ import annotations

from functools import lru_cache

import sympy

from autopart.layout import Placement, conversion

from .hardware import Hardware

n, S, B, alpha = sympy.symbols("n S B alpha", positive=True)

TIME: dict[str, sympy.Expr] = {
    "all_reduce": 2 * (n - 1) * alpha + 2 * (n - 1) / n * S / B,
    "all_gather": (n - 1) * alpha + (n - 1) / n * S / B,
    "reduce_scatter": (n - 1) * alpha + (n - 1) / n * S / B,
    "all_to_all": (n - 1) * alpha + (n - 1) / n * S / n / B,
}
"""Seconds of each collective; every other primitive of `autopart.layout` is local and free."""

WIRE_BYTES: dict[str, sympy.Expr] = {kind: sympy.expand(B * time.subs(alpha, 0)) for kind, time in TIME.items()}
"""Bytes each rank sends."""

_TIME = {kind: sympy.lambdify((n, S, B, alpha), expression) for kind, expression in TIME.items()}
_BYTES = {kind: sympy.lambdify((n, S), expression) for kind, expression in WIRE_BYTES.items()}


def time_s(kind: str, num_ranks: int, size_bytes: float, hardware: Hardware) -> float:
    """Seconds of one collective over an array of `size_bytes` (0 for local primitives or one rank)."""
    if kind not in _TIME or num_ranks == 1:
        return 0.0
    return float(_TIME[kind](num_ranks, size_bytes, hardware.link_bytes_per_s, hardware.link_latency_s))


def wire_bytes(kind: str, num_ranks: int, size_bytes: float) -> float:
    """Bytes each rank sends in one collective."""
    return float(_BYTES[kind](num_ranks, size_bytes)) if kind in _BYTES and num_ranks > 1 else 0.0


@lru_cache(maxsize=100_000)
def conversion_time_s(
    source: Placement, target: Placement, num_ranks: int, size_bytes: float, needs_grad: bool, hardware: Hardware
) -> float:
    """Seconds of going from one placement to another, forward and backward; infinite where there is no way."""
    if source == target:
        return 0.0
    step = conversion(source, target)
    if step is None or (step.operator == "all_to_all" and (source.sections or target.sections)):
        return float("inf")
    forward = time_s(step.forward, num_ranks, size_bytes, hardware)
    backward = time_s(step.backward, num_ranks, size_bytes, hardware) if needs_grad else 0.0
    return forward + backward
