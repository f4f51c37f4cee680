"""Placements of a value and its gradient on one mesh axis, and the conversions between placements.

A `Placement` is one of these pairs (value, gradient), in the words of `torch.distributed.tensor`:

| text          | value on the axis                        | gradient on the axis        |
|---------------|------------------------------------------|-----------------------------|
| `R`           | replicated                               | replicated                  |
| `R(grad P)`   | replicated                               | partial sum on every rank   |
| `S(d)`        | sharded along tensor dim `d`             | sharded along dim `d`       |
| `P`           | partial sum on every rank                | replicated                  |
| `E(0)`        | tokens on the rank of their expert       | tokens on that rank         |
| `E(0; sent)`  | dispatched tokens on that rank           | tokens on that rank         |

Only the operators between `to_experts` and `from_experts` of a mixture of experts use `E(0)` and `E(0; sent)`. Neither
can be converted to another placement, because the number of tokens per rank is known only at run time. For `E(0)` every
rank selects the tokens of its experts from the tokens of all ranks. For `E(0; sent)` an all-to-all dispatches tokens to
the ranks of their experts, and a second one returns the results to the ranks of the tokens.

A sequence dim can be sharded in zigzag, `S(1; zigzag)`. It is split into twice as many chunks as ranks. Rank i gets the
i-th chunk from the front and the i-th from the back. So causal attention costs the same on every rank (context
parallelism of Llama 3: Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2).

A dim that is a concatenation (q|k|v in one projection) is sharded section by section: `S(0; sections=3)` for equal
sections, `S(0; sections=64+16+16)` for unequal ones. A *layout* maps mesh axis names to placements.

Every conversion is one forward collective and one backward collective (`conversion`), so the planner knows its cost in
both directions before anything runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Sections = tuple[int, ...]
"""Sections of a dim: `()` for one, `(k,)` for k sections of equal size, `(a, b, ...)` for these sizes.

`(-k,)` for k equal sections that are each sharded in zigzag.
"""


@dataclass(frozen=True, order=True)
class Placement:
    """Placement of a value and its gradient on a mesh axis: replicated, shard, partial sum or dispatched.

    The docstring of this file defines all placements. Create one with `R`, `R_GRAD_P`, `P`, `ON_EXPERT_RANK`,
    `DISPATCHED` or `shard(dim)`.
    """

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
        """This placement without zigzag: `S(1)` for `S(1; zigzag)`."""
        return shard(self.dim, (-self.sections[0],)) if self.is_zigzag else self

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def is_partitioned(self) -> bool:
        """True if a rank has only some elements of the value: a shard, or the tokens of its experts."""
        return self.is_shard or self.is_dispatched

    @property
    def is_dispatched(self) -> bool:
        """True if a rank has the tokens of its local experts (`E(0)` or `E(0; sent)`)."""
        return self in EXPERT_PLACEMENTS

    @property
    def is_replicated(self) -> bool:
        return self.kind in ("R", "R(grad P)")

    @staticmethod
    def parse(text: str) -> Placement:
        """Parse a placement such as `S(0)`. Raises ValueError for any other text.

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
        for placement in EXPERT_PLACEMENTS:
            if text.strip() == str(placement):
                return placement
        raise ValueError(f"'{text}' is not a placement; try R, R(grad P), P, S(0) or S(0; sections=3)")


R = Placement("R")
R_GRAD_P = Placement("R(grad P)")
P = Placement("P")
ON_EXPERT_RANK = Placement("E(0)", 0)
DISPATCHED = Placement("E(0; sent)", 0)
EXPERT_PLACEMENTS = (ON_EXPERT_RANK, DISPATCHED)

Layout = Mapping[str, Placement]

MIN_DIMS = 2
"""Minimum number of dims of a parameter that ZeRO-3 shards.

Vectors (norms, biases) stay replicated: they are a thousandth of a model and would need as many collectives as its
matrices.
"""


def shard(dim: int, sections: Sections = ()) -> Placement:
    """Return the placement `S(dim)`.

    Args:
        sections: sizes of the concatenated sections of the dim, if any. If all sizes are equal, only the number of
            sections is stored: `(8, 8, 8)` becomes `(3,)`.

    >>> str(shard(1, (8, 8, 8)))
    'S(1; sections=3)'
    """
    if len(sections) > 1 and len(set(sections)) == 1:
        sections = (len(sections),)
    return Placement("S", dim, () if sections == (1,) else sections)


def is_zigzag(sections: Sections) -> bool:
    """Return True if each section (concatenated part) of the sharded dim is split in zigzag.

    A rank then gets a chunk from the front of the section, and one from its back.
    """
    return len(sections) == 1 and sections[0] < 0


def num_sections(sections: Sections) -> int:
    """Return the number of concatenated parts (sections) of a dim, which must have equal sizes.

    `(-3,)` means three sections that are each sharded in zigzag.

    >>> num_sections(()), num_sections((3,)), num_sections((-3,))
    (1, 3, 3)
    """
    return abs(sections[0]) if sections else 1


def section_sizes(size: int, sections: Sections) -> tuple[int, ...]:
    """Return the sizes of the concatenated parts (sections) of a dim of `size` elements.

    >>> section_sizes(96, (3,)), section_sizes(96, (64, 16, 16)), section_sizes(5, ())
    ((32, 32, 32), (64, 16, 16), (5,))
    """
    if not sections:
        return (size,)
    if len(sections) == 1:
        return (size // num_sections(sections),) * num_sections(sections)
    return sections


def shard_sizes(size: int, num_shards: int) -> tuple[int, ...]:
    """Return the number of elements of each shard, as in `torch.chunk`: the last shards can be smaller.

    >>> shard_sizes(97, 4)
    (25, 25, 25, 22)
    """
    step = -(-size // num_shards)
    return tuple(max(0, min(step, size - i * step)) for i in range(num_shards))


def mesh_axes_of(axis: str) -> tuple[str, ...]:
    """Return the mesh axes that a flattened axis such as `dp_cp` combines, outermost first.

    >>> mesh_axes_of("dp_cp"), mesh_axes_of("tp")
    (('dp', 'cp'), ('tp',))
    """
    return tuple(axis.split("_"))


def local_shape(
    full: Sequence[int], layout: Mapping[str, Placement], sizes: Mapping[str, int], balance: float = 1.0
) -> list[int]:
    """Return the local shape of a value on one rank.

    Args:
        full: global shape.
        layout: {axis: placement}. If a dim has unequal shards, the result has the size of the first, largest shard.
        sizes: {axis: number of ranks}.
        balance: load factor of experts. A rank gets `balance` times the mean number of tokens, at most all tokens.

    >>> local_shape((12, 8), {"dp": shard(0), "ep": ON_EXPERT_RANK}, {"dp": 2, "ep": 2}, 1.5)
    [5, 8]
    """
    local = list(full)
    for axis, placement in layout.items():
        if placement.is_partitioned:
            local[placement.dim] = -(-local[placement.dim] // sizes[axis])
    dispatched_dims = {axis: placement.dim for axis, placement in layout.items() if placement.is_dispatched}
    for dim in set(dispatched_dims.values()):
        local[dim] = math.ceil(local[dim] * min(balance, math.prod(map(sizes.__getitem__, dispatched_dims))))
    return local


def flattened_shards(layout: Layout) -> dict[str, Placement]:
    """Return {axis: placement} of the axes that shard a value, outermost first.

    If several axes shard one dim, they are flattened into one axis, unless the dim is a concatenation. The dim is split
    once over the ranks of all these axes, so that unequal shards have the sizes of `torch.chunk`.

    >>> [f"{axis}:{p}" for axis, p in flattened_shards({"cp": shard(0), "ep": shard(0), "tp": shard(1, (2,))}).items()]
    ['cp_ep:S(0)', 'tp:S(1; sections=2)']
    """
    dims: dict[int, list[str]] = {}
    for axis, placement in layout.items():
        if placement.is_shard:
            dims.setdefault(placement.dim, []).append(axis)
    shards: dict[str, Placement] = {}
    for axis, placement in layout.items():
        if not placement.is_shard:
            continue
        axes = dims[placement.dim]
        if any(layout[other].sections for other in axes):
            shards[axis] = placement
        elif axis == axes[0]:
            shards["_".join(axes)] = placement
    return shards


def cannot_store(place: Placement, sizes: Sequence[int], axis: str, num_shards: int) -> str:
    """Return the reason why a weight of shape `sizes` cannot have a placement on an axis; "" if it can.

    >>> cannot_store(shard(0), (6, 5), "tp", 4)
    'dim 0 has size 6, which cannot be sharded like this over tp=4'
    """
    if place.kind == "P":
        return "a weight is not a partial sum"
    if not place.is_shard:
        return ""
    if place.dim >= len(sizes):
        return f"its shape is {list(sizes)}, it has no dim {place.dim}"
    sizes_of_sections = section_sizes(sizes[place.dim], place.sections)
    uneven = any(part % num_shards for part in sizes_of_sections)
    leaves_empty_shard = (
        place.sections or -(-sizes_of_sections[0] // num_shards) * (num_shards - 1) >= sizes_of_sections[0]
    )
    if (uneven and leaves_empty_shard) or sum(sizes_of_sections) != sizes[place.dim]:
        return (
            f"dim {place.dim} has size {sizes[place.dim]}, which cannot be sharded like this over {axis}={num_shards}"
        )
    return ""


def cannot_store_sharded(place: Placement, sizes: Sequence[int], axis: str, num_shards: int, others: Layout) -> str:
    """Return the reason why ZeRO cannot shard a weight of shape `sizes` over an axis; "" if it can.

    Args:
        axis: a mesh axis, or several mesh axes flattened into one.
        others: the layout of the weight on the other axes.

    >>> cannot_store_sharded(shard(0), (8, 4), "dp", 2, {"tp": shard(0)})
    'tp shards dim 0 already'
    """
    if place.sections:
        return f"a dim with sections cannot be sharded over {axis}"
    for other, placement in others.items():
        if other == axis or not (place.is_shard and placement.is_shard):
            continue
        if set(mesh_axes_of(other)) & set(mesh_axes_of(axis)):
            return f"{other} shards it already"
        if place.dim == placement.dim:
            return f"{other} shards dim {place.dim} already"
    return cannot_store(place, sizes, axis, num_shards)


@dataclass(frozen=True)
class Conversion:
    """Conversion of a value from one placement to another on one axis.

    `operator` is the name of the custom operator `torch.ops.autopart.<operator>`. `forward` and `backward` name the
    primitive that it runs in each direction. `all_reduce`, `all_gather`, `reduce_scatter` and `all_to_all` communicate.
    `identity`, `slice`, `pad` and `own` are local; `own` keeps the value on the first rank and sets it to zero on
    all other ranks.
    """

    operator: str
    forward: str
    backward: str

    @property
    def transposed(self) -> Conversion:
        """The conversion of the gradient: forward and backward are exchanged."""
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


DISPATCH_CONVERSIONS = {
    "dispatch": Conversion("dispatch", "dispatch", "combine"),
    "combine": Conversion("combine", "combine", "dispatch"),
}
"""{operator: its primitives} for the MoE dispatch to `E(0; sent)` and the combine.

Both are all-to-alls of chunks of unequal size.
"""

DIRECTIONS = {c.operator: (c.forward, c.backward) for c in CONVERSIONS.values()} | {
    **dict.fromkeys(DISPATCH_CONVERSIONS, ("all_to_all", "all_to_all")),
    "exchange_counts": ("all_to_all", ""),
    "all_reduce_max": ("all_reduce", ""),
}
"""{operator of a stage graph: primitives of its forward and backward, or primitives of equal cost}.

The exchange of token counts, and the maximum of logits, have no backward.
"""


def conversion(source: Placement, target: Placement) -> Conversion | None:
    """Return the conversion between two placements on one axis.

    Returns None if the placements are equal, or if no single conversion exists, such as from `S` to `P`.
    """
    if source == target:
        return None
    return CONVERSIONS.get((source.kind, target.kind))


def relative_placement(place: Placement, others: Iterable[tuple[Placement, int]]) -> Placement:
    """Return an axis's placement of a value, relative to the shard that a rank has on other axes.

    Example: `tp` shards a dim that concatenates 6 sections, and `dp` shards the same dim over 2 ranks without sections.
    The axis with fewer sections splits the dim first: `dp`. A `dp` rank then has 3 of the 6 sections, so the result for
    `tp` is `sections=3`.

    Args:
        others: (placement, number of ranks) of each other axis.

    >>> str(relative_placement(shard(1, (6,)), [(shard(1), 2), (shard(0), 2)]))
    'S(1; sections=3)'
    >>> str(relative_placement(shard(1, (2,)), [(shard(1), 2)]))
    'S(1)'
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
    """Return True if one collective converts the value from `source` to `target`.

    Otherwise the value is first converted to replicated, and then to `target`. An all-to-all between two sharded dims
    supports neither unequal shards nor dims that are concatenations (sections).
    """
    if source == target:
        return True
    if source.is_shard and target.is_shard:
        plain = source.in_order
        return not plain.sections and not target.in_order.sections and shape[source.dim] % num_shards == 0
    return conversion(source, target) is not None


def format_layout(layout: Layout) -> str:
    """Format a layout as `{dp:S(0) tp:P}`. Replicated axes are left out."""
    return "{" + " ".join(f"{axis}:{p}" for axis, p in layout.items() if p != R) + "}"
