"""Buckets of parameters: one collective for the parameters of a block, overlapped with compute.

A bucket contains consecutive parameters of one repeated block, in the order of their use in a stage. Blocks smaller
than `LEAST_BYTES` share a bucket. A block with large parameters is split into several buckets. The first blocks of a
stage have the smallest buckets: their gradients are computed last, when little compute remains to overlap with. A large
gradient that is all-reduced gets a bucket of its own.

Li et al. 2020 (arXiv:2006.15704, section 3.2) motivates buckets, Zhao et al. 2023 (arXiv:2304.11277, section 3.3)
buckets of blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, fx

LEAST_BYTES = 2**20
"""Minimum bytes of a bucket that combines several blocks. A smaller message takes hardly less time."""

BUCKET_BYTES = 25 * 2**20
"""Maximum bytes of a bucket of gradients to reduce, or of parameters to gather for a step.

A bucket is copied to one buffer.
"""

ALONE_BYTES = 4 * LEAST_BYTES
"""Minimum bytes of a gradient that is reduced alone: in place, as soon as it is computed."""

SHARD_BUCKETS_IN_FLIGHT, SUM_BUCKETS_IN_FLIGHT = 1, 2
"""Maximum number of gradient buckets in flight: for reduce-scatters, and for all-reduces.

The limit is for buckets that copy their gradients, or that allocate their reduced shards. A reduce-scatter bucket may
be a full block; an all-reduce bucket has at most `BUCKET_BYTES`. When the next bucket is complete, the reducer waits
for an earlier one before it copies.
"""


def by_first_use(graph: fx.Graph, names: Iterable[str]) -> list[str]:
    """Return the given parameter names that a stage graph uses, sorted by first use."""
    wanted = set(names)
    read = (
        str(used.target)
        for node in graph.nodes if node.op != "get_attr"
        for used in node.all_input_nodes if used.op == "get_attr"
    )  # fmt: skip
    return list(dict.fromkeys(name for name in read if name in wanted))


def block_of(name: str) -> str:
    """Return the path of the repeated block that contains a parameter; "" outside of blocks.

    >>> block_of("model.layers.3.mlp.up.weight"), block_of("lm_head.weight")
    ('model.layers.3', '')
    """
    match = re.match(r"(?:.*?\.)??\d+(?=\.)", name)
    return match[0] if match else ""


def block_runs(names: Iterable[str]) -> list[int]:
    """Number the parameters: consecutive parameters of one repeated block get the same number.

    >>> block_runs(["wte", "h.0.up", "h.0.down", "h.1.up", "head"])
    [0, 1, 1, 2, 3]
    """
    runs, block, number = list[int](), "", 0
    for name in names:
        if block_of(name) != block:
            block, number = block_of(name), number + 1
        runs.append(number)
    return runs


def bucketed(
    sizes: Mapping[str, int], most_bytes: int | None = BUCKET_BYTES, least_bytes: float = LEAST_BYTES,
    alone_bytes: float = math.inf,
) -> list[tuple[str, ...]]:  # fmt: skip
    """Split parameters into buckets, and return the names of each bucket.

    Args:
        sizes: {name: bytes}, in the order of use.
        most_bytes: size limit of a bucket. The first bucket has at most `least_bytes`; the limit of each next bucket is
            twice that of the previous one, until it reaches `most_bytes`. None: no block is split.
        least_bytes: blocks share a bucket until it has this size. If it is infinite, block boundaries do not matter.
        alone_bytes: a parameter of at least this size gets a bucket of its own.

    >>> mega = 2**20
    >>> bucketed({"a": 10, "h.0.up": mega, "h.0.down": mega, "h.1.up": mega}, 2 * mega)
    [('a',), ('h.0.up', 'h.0.down'), ('h.1.up',)]
    >>> bucketed({"h.0.norm": 10, "h.0.up": mega, "h.0.bias": 10}, alone_bytes=mega)
    [('h.0.norm', 'h.0.bias'), ('h.0.up',)]
    """
    alone = [(name,) for name, size in sizes.items() if size >= alone_bytes]
    if alone:
        rest = {name: size for name, size in sizes.items() if size < alone_bytes}
        order = {name: index for index, name in enumerate(sizes)}
        return sorted([*alone, *bucketed(rest, most_bytes, least_bytes)], key=lambda names: order[names[0]])
    buckets: list[list[str]] = []
    filled, block = 0, ""
    for name, size in sizes.items():
        begins = block_of(name) != block and filled >= least_bytes
        grown = least_bytes * 2 ** max(len(buckets) - 1, 0)
        overflows = most_bytes is not None and filled + size > min(most_bytes, grown)
        if not buckets or begins or (overflows and filled):
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled, block = filled + size, block_of(name)
    return [tuple(names) for names in buckets]


def kinds(names: Sequence[str], kind: Mapping[str, object]) -> list[list[str]]:
    """Group names with equal `kind[name]`. Groups are ordered by their first name."""
    rows: dict[object, list[str]] = {}
    for name in names:
        rows.setdefault(kind[name], []).append(name)
    return list(rows.values())


def bucket_by_kind(
    tensors: Mapping[str, Tensor], kind: Mapping[str, object] | None = None, most_bytes: int | None = BUCKET_BYTES
) -> list[tuple[str, ...]]:
    """Split tensors into buckets of one dtype and one `kind[name]`. A bucket can span several blocks.

    Returns the names of each bucket.
    """
    kind_and_dtype = {name: (kind[name] if kind else None, tensor.dtype) for name, tensor in tensors.items()}
    rows = list[tuple[str, ...]]()
    for names in kinds(list(tensors), kind_and_dtype):
        rows += bucketed({name: tensors[name].nbytes for name in names}, most_bytes, least_bytes=math.inf)
    return rows
