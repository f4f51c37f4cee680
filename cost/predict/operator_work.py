"""Work of one operator on a rank, as polynomials in the sizes of a run.

A `Size` is a polynomial in the samples of a microbatch `b`, the tokens per sample `s`, `1 / tp`, `1 / cp` and
`1 / ep`. A `Work` is one kernel or collective with its FLOPs and bytes, both `Size`s. A hardware profile (`Hardware`)
converts it to seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.collective_costs import time_s, wire_bytes
from autopart.cost.update_rules import OPTIMIZER_TRAFFIC
from autopart.ir.mesh import Cuts, Mesh
from autopart.ir.run.buckets import BUCKET_BYTES

COPY_TRAFFIC = 2
"""Number of values that a copy reads or writes per copied value: one read and one write."""

BUCKET_COPIES = 2
"""Copies by a reduce-scatter or all-gather of a flat bucket: one into the bucket and one out of it."""


class Exponents(NamedTuple):
    """Exponents of `b`, `s`, `1 / tp`, `1 / cp` and `1 / ep` in one term of a polynomial (`Size`)."""

    b: int = 0
    s: int = 0
    tp: int = 0
    cp: int = 0
    ep: int = 0


class Sizes(NamedTuple):
    """Values of `b` (samples), `s` (tokens), `tp`, `cp` and `ep`, as numbers, arrays or sympy symbols."""

    b: Any = 1
    s: Any = 1
    tp: Any = 1
    cp: Any = 1
    ep: Any = 1

    def scale(self, powers: Exponents) -> Any:
        """Return the product of `b`, `s`, `1 / tp`, `1 / cp` and `1 / ep`, each raised to its exponent."""
        ranks = self.tp**powers.tp * self.cp**powers.cp * self.ep**powers.ep
        return self.b**powers.b * self.s**powers.s / ranks


CHOSEN: Mapping[str, Cuts] = {"tp": "features", "cp": "positions", "ep": "experts"}
"""{mesh axis that `Exponents` has a field for: kind of dims that the axis shards}.

If several axes of a mesh shard a kind, the innermost of them counts.
"""


def chosen_ranks(mesh: Mesh) -> dict[str, int]:
    """Return the number of ranks of a mesh on its tensor, context and expert axes (`CHOSEN`).

    >>> chosen_ranks(Mesh.parse("dp2,cp4"))
    {'tp': 1, 'cp': 4, 'ep': 1}
    """
    return {name: mesh.size(mesh.innermost(cuts)) for name, cuts in CHOSEN.items()}


@dataclass(frozen=True)
class Size:
    """A polynomial in samples `b`, tokens `s`, `1 / tp`, `1 / cp` and `1 / ep`, such as bytes of a value.

    An operator is counted for one setting of `b`, `s`, `tp`, `cp` and `ep`, the reference sizes. The polynomial stores
    the exponents of each term, and the value of each term at the reference sizes.

    >>> x = Size.of(12.0, Exponents(1, 1, 0)) + Size.of(4.0, Exponents(0, 0, 1))
    >>> x.value, x.at(Sizes(2.0, 3.0, 0.5))
    (16.0, 80.0)
    """

    terms: tuple[tuple[Exponents, float], ...] = ()

    @staticmethod
    def of(value: float, powers: Exponents) -> Size:
        """Return the monomial with exponents `powers` that equals `value` at the sizes of the cost table."""
        return Size(((powers, value),)) if value else NOTHING

    @staticmethod
    def sum(sizes: Iterable[Size]) -> Size:
        total: dict[Exponents, float] = {}
        for size in sizes:
            for powers, value in size.terms:
                total[powers] = total.get(powers, 0) + value
        return Size(tuple(sorted(total.items())))

    @property
    def value(self) -> float:
        """Value of the polynomial at the reference sizes, for which operators were counted."""
        return sum(value for _, value in self.terms)

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """Axes in `CHOSEN` that shard the value, such as `tp`."""
        return tuple(name for name in CHOSEN if any(getattr(powers, name) for powers, _ in self.terms))

    def at(self, times: Sizes) -> Any:
        """Return the value of the polynomial at other sizes.

        Args:
            times: the sizes as multiples of the reference sizes. `Sizes(2.0, 3.0)`: twice the samples, 3 times the
                tokens.
        """
        return sum((value * times.scale(powers) for powers, value in self.terms), 0)

    def __add__(self, other: Size) -> Size:
        return Size.sum((self, other))

    def __mul__(self, factor: float) -> Size:
        return Size(tuple((powers, value * factor) for powers, value in self.terms)) if factor else NOTHING


NOTHING = Size()
SAME = Sizes()


class Work(NamedTuple):
    """One kernel or collective of an operator.

    A roofline model gives the seconds of kernels. Matrix products take the seconds of their FLOPs or of their memory
    traffic, whichever is longer. All other kernels take the seconds of their memory traffic. The launch latency is
    added to both. Collectives follow the alpha-beta model.

    Args:
        kind: "matmul", "attention" or "other" (memory traffic alone), or the primitive of a collective over `axis`.
        size: bytes read and written; for a collective, bytes of the full array.
        flops: FLOPs of a product, in `dtype`.
        axis: mesh axis of a collective; empty for a kernel.
        times: how often it runs; may be a fraction.
        in_place: True if it writes to no new memory.
        depth: inner dim of a matrix product, or head width of attention.
        unaligned: penalty for the row lengths of a 16-bit product (`autopart.common.matrix_alignment.unaligned`).
        in_order: True for pointwise arithmetic on contiguous tensors.
        causal: number of queries of causal attention, whose kernel skips masked keys. `flops` nevertheless counts all
            keys, as in torch and publications.
    """

    kind: str
    size: Size
    flops: Size = NOTHING
    dtype: str = ""
    axis: str = ""
    times: float = 1.0
    in_place: bool = False
    depth: Size = NOTHING
    causal: Size = NOTHING
    unaligned: int = 0
    in_order: bool = False

    @property
    def name(self) -> str:
        """Label in reports: the kind, and for a collective also the axis, such as "tp all_reduce"."""
        return f"{self.axis} {self.kind}" if self.axis else self.kind

    def seconds(self, hardware: Hardware, mesh: Mesh, times: Sizes = SAME) -> float:
        """Return the seconds of the kernel or collective on one rank.

        Args:
            times: factors by which the numbers of samples, tokens and ranks differ from those in the counted call.
        """
        size = float(self.size.at(times))
        if self.axis:
            once_s = time_s(self.kind, mesh.size(self.axis), size, hardware, mesh.stride(self.axis))
        elif self.flops.terms:
            flops, depth = float(self.flops.at(times)), float(self.depth.at(times))
            if self.causal.terms:
                flops *= hardware.causal_share(float(self.causal.at(times)))
            dtype = hardware.known_dtype(self.dtype)
            once_s = hardware.matmul_time_s(flops, size, dtype, depth, self.kind, self.unaligned)
        elif self.in_place:
            once_s = size / hardware.memory_bytes_per_s + hardware.launch_s
        else:
            once_s = hardware.traffic_time_s(size, self.in_order) + hardware.launch_s
        return once_s * self.times

    def sent_bytes(self, mesh: Mesh, times: Sizes = SAME) -> float:
        """Return the bytes that a rank sends in a collective, or 0 for a kernel.

        Args:
            times: factors by which the numbers of samples, tokens and ranks differ from those in the counted call.
        """
        if not self.axis:
            return 0.0
        return wire_bytes(self.kind, mesh.size(self.axis), float(self.size.at(times))) * self.times


def flops_by_dtype(works: Iterable[tuple[Work, float]], times: Sizes = SAME) -> dict[str, float]:
    """Return {dtype: matrix FLOPs} of kernels.

    Args:
        works: pairs (kernel, number of runs).
        times: factors by which the numbers of samples, tokens and ranks differ from those in the counted call.
    """
    flops: dict[str, float] = {}
    for work, count in works:
        if work.flops.terms:
            flops[work.dtype] = flops.get(work.dtype, 0.0) + float(work.flops.at(times)) * work.times * count
    return flops


def gradient_sum_s(
    size_bytes: float, groups: Sequence[tuple[str, int, int]], hardware: Hardware, kind: str = "all_reduce",
    bucket_bytes: float = BUCKET_BYTES,
) -> float:  # fmt: skip
    """Return the seconds to reduce gradients of `size_bytes` bytes in buckets.

    An all-reduce works in place. A reduce-scatter of gradients, or an all-gather of parameters, copies into and out of
    a flat bucket.

    Args:
        groups: groups of ranks, each as (axis, ranks, stride in ranks). The groups reduce one after another.
        kind: "all_reduce", "reduce_scatter" or "all_gather".
        bucket_bytes: bytes of a bucket.
    """
    whole, rest = divmod(size_bytes, bucket_bytes)
    copies, total_s = 0 if kind == "all_reduce" else BUCKET_COPIES, 0.0
    for count, size in ((whole, bucket_bytes), (1, rest)):
        if count and size:
            summed = sum(time_s(kind, n, size, hardware, stride) for _, n, stride in groups)
            total_s += count * (summed + copies * hardware.traffic_time_s(2 * size))
    return total_s


def optimizer_s(
    size_bytes: float, hardware: Hardware, copied_bytes: float = 0.0, values: float = OPTIMIZER_TRAFFIC
) -> float:
    """Return the seconds to update `size_bytes` bytes of parameters with AdamW, and to make a copy.

    Args:
        copied_bytes: bytes of the copy.
        values: number of values that the update reads or writes per parameter.
    """
    updated = values * size_bytes / hardware.optimizer_efficiency
    return (updated + COPY_TRAFFIC * copied_bytes) / hardware.memory_bytes_per_s
