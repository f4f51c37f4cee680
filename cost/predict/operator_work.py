"""What an operator does on a rank, counted so that it can be priced at other sizes and on other devices.

A `Size` is a polynomial in the rows of a microbatch `b`, the tokens of a row `s`, `1 / tp`, `1 / cp` and `1 / ep`. A
`Work` is one kernel or collective: its FLOPs and bytes, both Sizes; a profile (`Hardware`) makes seconds of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.collective_costs import time_s, wire_bytes
from autopart.ir.mesh import Cuts, Mesh
from autopart.ir.run.buckets import BUCKET_BYTES

OPTIMIZER_TRAFFIC = 7
"""Values that AdamW reads (parameter, gradient, two moments) and writes (all but the gradient), per parameter."""

COPY_TRAFFIC = 2
"""Of a copy: each value is read and written."""

BUCKET_COPIES = 2
"""What is scattered or gathered is copied into a flat bucket, and out of it again; each reads and writes it."""


class Powers(NamedTuple):
    """The powers in which a product of dims has `b`, `s`, `1 / tp`, `1 / cp` and `1 / ep`."""

    b: int = 0
    s: int = 0
    tp: int = 0
    cp: int = 0
    ep: int = 0


class Sizes(NamedTuple):
    """What `b`, `s`, `tp`, `cp` and `ep` are: numbers, arrays of them, or symbols."""

    b: Any = 1
    s: Any = 1
    tp: Any = 1
    cp: Any = 1
    ep: Any = 1

    def scale(self, powers: Powers) -> Any:
        """What a product of dims of these powers is, of these sizes."""
        ranks = self.tp**powers.tp * self.cp**powers.cp * self.ep**powers.ep
        return self.b**powers.b * self.s**powers.s / ranks


CHOSEN: Mapping[str, Cuts] = {"tp": "features", "cp": "positions", "ep": "experts"}
"""What the axis cuts that a field of `Powers` is named after: of several the innermost."""


def chosen_ranks(mesh: Mesh) -> dict[str, int]:
    """The ranks of these axes.

    >>> chosen_ranks(Mesh.parse("dp2,cp4"))
    {'tp': 1, 'cp': 4, 'ep': 1}
    """
    return {name: mesh.size(mesh.innermost(cuts)) for name, cuts in CHOSEN.items()}


@dataclass(frozen=True)
class Size:
    """A polynomial as its terms' values at the sizes it was counted at, by their powers.

    >>> x = Size.of(12.0, Powers(1, 1, 0)) + Size.of(4.0, Powers(0, 0, 1))
    >>> x.value, x.at(Sizes(2.0, 3.0, 0.5))
    (16.0, 80.0)
    """

    terms: tuple[tuple[Powers, float], ...] = ()

    @staticmethod
    def of(value: float, powers: Powers) -> Size:
        """One term of this value."""
        return Size(((powers, value),)) if value else NOTHING

    @staticmethod
    def sum(sizes: Iterable[Size]) -> Size:
        total: dict[Powers, float] = {}
        for size in sizes:
            for powers, value in size.terms:
                total[powers] = total.get(powers, 0) + value
        return Size(tuple(sorted(total.items())))

    @property
    def value(self) -> float:
        """At the sizes it was counted at."""
        return sum(value for _, value in self.terms)

    def at(self, times: Sizes) -> Any:
        """At other sizes, each given as how many times (`b`, `s`, `tp`, ...) those that it was counted at."""
        return sum((value * times.scale(powers) for powers, value in self.terms), 0)

    def __add__(self, other: Size) -> Size:
        return Size.sum((self, other))

    def __mul__(self, factor: float) -> Size:
        return Size(tuple((powers, value * factor) for powers, value in self.terms)) if factor else NOTHING


NOTHING = Size()
SAME = Sizes()


class Work(NamedTuple):
    """One kernel or collective.

    `kind`: "matmul", "attention" or "other" (priced by its memory traffic alone), or the primitive of a collective over
    `axis`, whose whole array has `size` bytes. `flops`: of a product, in `dtype`. `size`: bytes read and written.
    `times`: how often; may be a fraction. `in_place`: it writes to no new memory. `depth`: the terms that an element of
    a matrix product is the sum of, of attention the width of a head. `unaligned`: as `ir.sizes` has it of the rows of
    a product in 16 bits. `in_order`: arithmetic of whole tensors, value by value. `causal`: the queries of causal
    attention, of which a kernel leaves out what they do not see; its FLOPs count as those of the whole, as torch and
    publications count them.
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
        """What its seconds are counted under: its kind, for a collective with its axis."""
        return f"{self.axis} {self.kind}" if self.axis else self.kind

    def seconds(self, hardware: Hardware, mesh: Mesh, times: Sizes = SAME) -> float:
        """Of one rank, at sizes that are so many times those it was counted at."""
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
        """What a rank sends in a collective."""
        if not self.axis:
            return 0.0
        return wire_bytes(self.kind, mesh.size(self.axis), float(self.size.at(times))) * self.times


def flops_by_dtype(works: Iterable[tuple[Work, float]], times: Sizes = SAME) -> dict[str, float]:
    """Matrix work by dtype of (work, how often)."""
    flops: dict[str, float] = {}
    for work, count in works:
        if work.flops.terms:
            flops[work.dtype] = flops.get(work.dtype, 0.0) + float(work.flops.at(times)) * work.times * count
    return flops


def gradient_sum_s(
    size_bytes: float, groups: Sequence[tuple[str, int, int]], hardware: Hardware, kind: str = "all_reduce"
) -> float:
    """Seconds of summing gradients of so many bytes, large ones in place; or of scattering them, or gathering
    parameters, in buckets that are copied together and apart again.

    Args:
        groups: of ranks, one after the other: (axis, ranks, how far apart they are).
    """
    whole, rest = divmod(size_bytes, BUCKET_BYTES)
    copies, total_s = 0 if kind == "all_reduce" else BUCKET_COPIES, 0.0
    for count, size in ((whole, BUCKET_BYTES), (1, rest)):
        if count and size:
            summed = sum(time_s(kind, n, size, hardware, stride) for _, n, stride in groups)
            total_s += count * (summed + copies * hardware.traffic_time_s(2 * size))
    return total_s


def optimizer_s(size_bytes: float, hardware: Hardware, copied_bytes: float = 0.0) -> float:
    """Seconds of AdamW's update of so many bytes of parameters, and of a copy of so many."""
    updated = OPTIMIZER_TRAFFIC * size_bytes / hardware.optimizer_efficiency
    return (updated + COPY_TRAFFIC * copied_bytes) / hardware.memory_bytes_per_s
