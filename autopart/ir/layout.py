"""Where a value lives on one mesh axis, for itself and for its gradient, and how to go from one place to another.

A `Placement` is one of these pairs (value, gradient), in the words of `torch.distributed.tensor`:

| text          | value on the axis            | gradient on the axis            |
|---------------|------------------------------|---------------------------------|
| `R`           | the same on every rank       | the same on every rank          |
| `R(grad P)`   | the same on every rank       | a partial sum on every rank     |
| `S(d)`        | cut along tensor dim `d`     | cut the same way                |
| `P`           | a partial sum on every rank  | the same on every rank          |
| `E(0)`        | rows on their expert's rank  | the same                        |
| `E(0; sent)`  | the same, in another order   | the same                        |

`E(0)` and `E(0; sent)` are for the operators on rows between `to_experts` and `from_experts` of a mixture alone, and
are converted to no other: how many rows a rank has is known when they are there. Of `E(0)` every rank has taken its own
out of the rows of all ranks; those of `E(0; sent)` have come from the ranks that have their tokens, and go back there.

Positions may be cut in zigzag, `S(1; zigzag)`: of twice as many pieces as ranks each rank has one from the front and
the one as far from the back, so that all have as many keys before their positions (Llama 3's context parallelism:
Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2).

A dim that is a concatenation (q|k|v in one projection) is cut section by section: `S(0; sections=3)` for equal
sections, `S(0; sections=64+16+16)` for unequal ones. A *layout* maps mesh axis names to placements.

Every conversion is one forward collective and one backward collective (`conversion`), so its price is known in both
directions before anything runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Sections = tuple[int, ...]
"""`()` for one piece, `(k,)` for k equal sections, `(a, b, ...)` for sections of these sizes; `(-k,)` for k equal
sections that are each cut in zigzag."""


@dataclass(frozen=True, order=True)
class Placement:
    """One of the pairs of the module docstring. Use `R`, `R_GRAD_P`, `P`, `ROUTED`, `SENT` and `shard(dim)`."""

    kind: str
    dim: int = -1
    sections: Sections = ()

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        if not self.sections:
            return f"S({self.dim})"
        if self.is_zigzag:
            return f"S({self.dim}; zigzag{f' sections={-self.sections[0]}' if self.sections != (-1,) else ''})"
        return f"S({self.dim}; sections={'+'.join(map(str, self.sections))})"

    @property
    def is_zigzag(self) -> bool:
        return is_zigzag(self.sections)

    @property
    def in_order(self) -> Placement:
        """The same, not in zigzag."""
        return shard(self.dim, (-self.sections[0],)) if self.is_zigzag else self

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def is_divided(self) -> bool:
        """Whether a rank has a part of the value: a shard, or the rows of its experts."""
        return self.is_shard or self.is_routed

    @property
    def is_routed(self) -> bool:
        """Whether a rank has the rows of its experts, in one order or the other."""
        return self in ROUTES

    @property
    def is_replicated(self) -> bool:
        return self.kind in ("R", "R(grad P)")

    @staticmethod
    def parse(text: str) -> Placement:
        """The inverse of `str`. Raises ValueError with the accepted forms.

        >>> Placement.parse("S(1; sections=3)")
        Placement(kind='S', dim=1, sections=(3,))
        """
        match = re.fullmatch(r"S\(\s*(\d+)\s*;\s*zigzag(?:\s+sections=(\d+))?\s*\)", text.strip())
        if match:
            return shard(int(match[1]), (-int(match[2] or 1),))
        match = re.fullmatch(r"S\(\s*(\d+)\s*(?:;\s*sections=(\d+(?:\+\d+)*)\s*)?\)", text.strip())
        if match:
            sections = tuple(int(n) for n in match[2].split("+")) if match[2] else ()
            return shard(int(match[1]), sections)
        if text.strip() in ("R", "R(grad P)", "P"):
            return Placement(text.strip())
        for place in ROUTES:
            if text.strip() == str(place):
                return place
        raise ValueError(f"'{text}' is not a placement; try R, R(grad P), P, S(0) or S(0; sections=3)")


R = Placement("R")
R_GRAD_P = Placement("R(grad P)")
P = Placement("P")
ROUTED = Placement("E(0)", 0)
SENT = Placement("E(0; sent)", 0)
ROUTES = (ROUTED, SENT)

Layout = Mapping[str, Placement]

MIN_DIMS = 2
"""Of what ZeRO-3 cuts. Vectors (norms, biases) stay whole: a thousandth of a model, for as many collectives as its
matrices."""


def shard(dim: int, sections: Sections = ()) -> Placement:
    """`S(dim)`, equal sections written as a count: sections `(8, 8, 8)` become `(3,)`.

    >>> str(shard(1, (8, 8, 8)))
    'S(1; sections=3)'
    """
    if len(sections) > 1 and len(set(sections)) == 1:
        sections = (len(sections),)
    return Placement("S", dim, () if sections == (1,) else sections)


def is_zigzag(sections: Sections) -> bool:
    """Whether sections are each cut in zigzag."""
    return len(sections) == 1 and sections[0] < 0


def num_sections(sections: Sections) -> int:
    """How many sections of equal size there are.

    >>> num_sections(()), num_sections((3,)), num_sections((-3,))
    (1, 3, 3)
    """
    return abs(sections[0]) if sections else 1


def section_sizes(size: int, sections: Sections) -> tuple[int, ...]:
    """Sizes of the sections of a dim of `size` elements.

    >>> section_sizes(96, (3,)), section_sizes(96, (64, 16, 16)), section_sizes(5, ())
    ((32, 32, 32), (64, 16, 16), (5,))
    """
    if not sections:
        return (size,)
    if len(sections) == 1:
        return (size // num_sections(sections),) * num_sections(sections)
    return sections


def shard_sizes(size: int, num_shards: int) -> tuple[int, ...]:
    """How many of `size` elements each shard holds: equal where possible, else the last ones smaller (`torch.chunk`).

    >>> shard_sizes(97, 4)
    (25, 25, 25, 22)
    """
    step = -(-size // num_shards)
    return tuple(max(0, min(step, size - i * step)) for i in range(num_shards))


def parts_of(axis: str) -> tuple[str, ...]:
    """The axes of the mesh that are joined in one, outermost first; of an axis of the mesh itself.

    >>> parts_of("dp_cp"), parts_of("tp")
    (('dp', 'cp'), ('tp',))
    """
    return tuple(axis.split("_"))


def local_shape(
    full: Sequence[int], layout: Mapping[str, Placement], sizes: Mapping[str, int], balance: float = 1.0
) -> list[int]:
    """The shape of a rank's part of a value; a dim cut unevenly counts as on the first rank, rows of experts as
    `balance` times those of a rank if all had as many, at most all rows.

    >>> local_shape((12, 8), {"dp": shard(0), "ep": ROUTED}, {"dp": 2, "ep": 2}, 1.5)
    [5, 8]
    """
    local = list(full)
    for axis, place in layout.items():
        if place.is_divided:
            local[place.dim] = -(-local[place.dim] // sizes[axis])
    routed = {axis: place.dim for axis, place in layout.items() if place.is_routed}
    for dim in set(routed.values()):
        local[dim] = math.ceil(local[dim] * min(balance, math.prod(map(sizes.__getitem__, routed))))
    return local


def cut_together(layout: Layout) -> dict[str, Placement]:
    """The axes that cut a value, outermost first, with how each does. Where all that cut a dim cut it in one piece, as
    several axes cut a stack of experts, they are joined: the dim is cut over all their ranks at once, so that shards of
    unequal sizes are those of one cut.

    >>> [f"{axis}:{p}" for axis, p in cut_together({"cp": shard(0), "ep": shard(0), "tp": shard(1, (2,))}).items()]
    ['cp_ep:S(0)', 'tp:S(1; sections=2)']
    """
    dims: dict[int, list[str]] = {}
    for axis, place in layout.items():
        if place.is_shard:
            dims.setdefault(place.dim, []).append(axis)
    cuts: dict[str, Placement] = {}
    for axis, place in layout.items():
        if not place.is_shard:
            continue
        axes = dims[place.dim]
        if any(layout[other].sections for other in axes):
            cuts[axis] = place
        elif axis == axes[0]:
            cuts["_".join(axes)] = place
    return cuts


def cannot_store(place: Placement, sizes: Sequence[int], axis: str, num_shards: int) -> str:
    """Why a weight of these sizes cannot be stored so on an axis; "" where it can.

    >>> cannot_store(shard(0), (6, 5), "tp", 4)
    'dim 0 has size 6, which does not cut so over tp=4'
    """
    if place.kind == "P":
        return "a weight is not a partial sum"
    if not place.is_shard:
        return ""
    if place.dim >= len(sizes):
        return f"its shape is {list(sizes)}, it has no dim {place.dim}"
    parts = section_sizes(sizes[place.dim], place.sections)
    uneven = any(part % num_shards for part in parts)
    few = place.sections or -(-parts[0] // num_shards) * (num_shards - 1) >= parts[0]
    if (uneven and few) or sum(parts) != sizes[place.dim]:
        return f"dim {place.dim} has size {sizes[place.dim]}, which does not cut so over {axis}={num_shards}"
    return ""


def cannot_store_parts(place: Placement, sizes: Sequence[int], axis: str, num_shards: int, others: Layout) -> str:
    """Why a weight of these sizes, whose layout on other axes is `others`, cannot be stored in parts so over an axis
    beside, or over several joined as one; "" where it can.

    >>> cannot_store_parts(shard(0), (8, 4), "dp", 2, {"tp": shard(0)})
    'tp cuts dim 0 already'
    """
    if place.sections:
        return f"over {axis} a dim is cut in one piece"
    for other, cut in others.items():
        if other == axis or not (place.is_shard and cut.is_shard):
            continue
        if set(parts_of(other)) & set(parts_of(axis)):
            return f"{other} cuts it already"
        if place.dim == cut.dim:
            return f"{other} cuts dim {place.dim} already"
    return cannot_store(place, sizes, axis, num_shards)


@dataclass(frozen=True)
class Conversion:
    """How a value goes from one placement to another on one axis.

    `operator` is the name of the custom operator `torch.ops.autopart.<operator>`; `forward` and `backward` name the
    primitive it runs in either direction: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` move data,
    `identity`, `slice`, `pad` and `own` (keep it on the first rank, zero elsewhere) are local.
    """

    operator: str
    forward: str
    backward: str

    @property
    def transposed(self) -> Conversion:
        """Return what the gradient goes through. Its own gradient goes through the conversion itself."""
        return Conversion(self.operator, self.backward, self.forward)


CONVERSIONS: dict[tuple[str, str], Conversion] = {
    ("R", "R(grad P)"): Conversion("sum_grad", "identity", "all_reduce"),
    ("R(grad P)", "R"): Conversion("own_grad", "identity", "own"),
    ("R", "P"): Conversion("own", "own", "identity"),
    ("R(grad P)", "P"): Conversion("own_both", "own", "own"),
    ("R", "S"): Conversion("slice", "slice", "all_gather"),
    ("R(grad P)", "S"): Conversion("slice_pad", "slice", "pad"),
    ("S", "R"): Conversion("all_gather", "all_gather", "slice"),
    ("S", "R(grad P)"): Conversion("all_gather_sum", "all_gather", "reduce_scatter"),
    ("P", "R"): Conversion("all_reduce", "all_reduce", "identity"),
    ("P", "R(grad P)"): Conversion("all_reduce_both", "all_reduce", "all_reduce"),
    ("P", "S"): Conversion("reduce_scatter", "reduce_scatter", "all_gather"),
    ("S", "S"): Conversion("all_to_all", "all_to_all", "all_to_all"),
}


ROUTING = {
    "dispatch": Conversion("dispatch", "dispatch", "combine"),
    "combine": Conversion("combine", "combine", "dispatch"),
}
"""{operator: its primitives} of what brings rows to `E(0; sent)` and back: all-to-alls of parts of unequal sizes."""

DIRECTIONS = {c.operator: (c.forward, c.backward) for c in CONVERSIONS.values()} | {
    **dict.fromkeys(ROUTING, ("all_to_all", "all_to_all")),
    "exchange_counts": ("all_to_all", ""),
    "all_reduce_max": ("all_reduce", ""),
}
"""{operator of a stage graph: the primitives that it runs forward and backward, or those that cost as much}; counts and
a maximum have no backward."""


def conversion(source: Placement, target: Placement) -> Conversion | None:
    """The conversion between two placements on one axis; None where they are the same or none exists (`S` to `P`)."""
    if source == target:
        return None
    return CONVERSIONS.get((source.kind, target.kind))


def inside(place: Placement, others: Iterable[tuple[Placement, int]]) -> Placement:
    """A placement of a value as it is for what a rank has of it, where other axes cut it too: those that cut the same
    dim into fewer sections are outside of it, and leave a rank fewer of its sections.

    Args:
        others: on the other axes, each with its ranks.

    >>> str(inside(shard(1, (6,)), [(shard(1), 2), (shard(0), 2)])), str(inside(shard(1, (2,)), [(shard(1), 2)]))
    ('S(1; sections=3)', 'S(1)')
    """
    if not place.is_shard or len(place.sections) != 1:
        return place
    outer = math.prod(
        ranks for other, ranks in others
        if other.is_shard and other.dim == place.dim and len(other.sections) < 2
        and num_sections(other.sections) < num_sections(place.sections)
    )  # fmt: skip
    return shard(place.dim, (place.sections[0] // outer,))


def is_direct(source: Placement, target: Placement, shape: Sequence[int], num_shards: int) -> bool:
    """Whether one conversion does it; else the value has to be whole in between.

    An all-to-all is not told where shards of unequal sizes or of sections begin.
    """
    if source == target:
        return True
    if source.is_shard and target.is_shard:
        plain = source.in_order
        return not plain.sections and not target.in_order.sections and shape[source.dim] % num_shards == 0
    return conversion(source, target) is not None


def format_layout(layout: Layout) -> str:
    """`{dp:S(0) tp:P}`; replicated axes are left out."""
    return "{" + " ".join(f"{axis}:{p}" for axis, p in layout.items() if p != R) + "}"
