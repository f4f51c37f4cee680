"""Layout conversions, computed by indexing."""

import torch

from autopart.ir.layout import CONVERSIONS
from autopart.ops.operators import CUTTING

NUM_RANKS = 3


CUTS = [  # dim, size, sections
    (0, 6, ()),
    (1, 6, (2,)),
    (1, 7, ()),
    (-1, 11, (5, 2, 4)),
    (0, 4, ()),  # rank 2 of 3 holds nothing
]


SHAPE = [4, 5, 3]


CASES = [(name, cut) for name in CUTTING for cut in CUTS]


KINDS = {conversion.operator: pair for pair, conversion in CONVERSIONS.items()}


def indices(size, sections, rank):
    """The elements of a dim that a rank holds, from torch.chunk alone."""
    rows = torch.arange(size)
    if len(sections) == 1:
        parts = rows.chunk(sections[0])
    else:
        parts = rows.split(list(sections)) if sections else [rows]
    shards = [part.chunk(NUM_RANKS) for part in parts]
    return torch.cat([s[rank] if rank < len(s) else rows[:0] for s in shards])


def sample(name, arguments, seed):
    """The input of every rank: equal values where the source placement is R, else a shard or a partial sum."""
    generator = torch.Generator().manual_seed(seed)
    shape = list(SHAPE)
    source, _ = KINDS[name]
    if name in CUTTING:
        shape[arguments[0]] = arguments[1]
    elif name == "all_to_all":
        shape[arguments[0]] *= NUM_RANKS
    full = torch.randn(shape, dtype=torch.float64, generator=generator)
    if source.startswith("R"):
        return [full.clone() for _ in range(NUM_RANKS)]
    if source == "P":
        return list(torch.randn([NUM_RANKS, *shape], dtype=torch.float64, generator=generator))
    if name == "all_to_all":
        return [c.contiguous() for c in full.chunk(NUM_RANKS, arguments[0])]
    dim, size, sections = arguments
    return [full.index_select(dim, indices(size, sections, rank)) for rank in range(NUM_RANKS)]


def by_indexing(primitive, values, arguments):
    """Compute the results of a primitive on all ranks by index arithmetic."""
    if primitive == "identity":
        return values
    if primitive == "all_reduce":
        return [sum(values)] * NUM_RANKS
    if primitive == "own":
        return [values[0]] + [torch.zeros_like(v) for v in values[1:]]
    if primitive == "all_to_all":
        source, target = arguments
        chunks = torch.cat(values, source).chunk(NUM_RANKS, target)
        empty = chunks[0].narrow(target, 0, 0)
        return [chunks[r] if r < len(chunks) else empty for r in range(NUM_RANKS)]
    dim, size, sections = arguments
    own = [indices(size, sections, rank) for rank in range(NUM_RANKS)]
    if primitive == "slice":
        return [v.index_select(dim, i) for v, i in zip(values, own, strict=True)]
    if primitive == "reduce_scatter":
        return [sum(values).index_select(dim, i) for i in own]
    shape = list(values[0].shape)
    shape[dim] = size
    placed = [torch.zeros(shape, dtype=v.dtype).index_copy(dim, i, v) for v, i in zip(values, own, strict=True)]
    return placed if primitive == "pad" else [sum(placed)] * NUM_RANKS


def make_grad(output, rank):
    """A gradient with no regular strides, as backward passes produce them."""
    generator = torch.Generator().manual_seed(100 + rank)
    shape = list(output.shape)
    return torch.randn(shape[::-1], dtype=torch.float64, generator=generator).permute(*reversed(range(len(shape))))
