"""Which parameters travel together: one collective for each block of a model, which runs beside the work of another.

A bucket holds consecutive parameters in the order in which a stage reads them, of one repeated block; blocks smaller
than `LEAST_BYTES` share one, and a larger one may be split. What is read first is split most: its gradients come last,
and little is left to compute beside which they could be sent. A large gradient that is summed whole does not wait for
others. (Li et al. 2020, arXiv:2006.15704, section 3.2, has the reasons for buckets; Zhao et al. 2023, arXiv:2304.11277,
section 3.3, for blocks.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, fx

LEAST_BYTES = 2**20
"""Blocks are put together until they have so much: a message of less takes hardly less time."""

BUCKET_BYTES = 25 * 2**20
"""Gradients are summed, and wholes that live for a step gathered, in buckets of at most so much, which are copied."""

ALONE_BYTES = 4 * LEAST_BYTES
"""A gradient of so much is summed by itself: as soon as it is there, and in place."""

UNDER_WAY, SUMS_UNDER_WAY = 1, 2
"""How many buckets of gradients are sent at a time, of parts and of whole sums, if each holds a copy of its gradients,
or of parts what it gets; those may be whole blocks, sums fill `BUCKET_BYTES` at most. One of those before is waited for
where the next is complete, before that is copied."""


def in_order_of_use(graph: fx.Graph, names: Iterable[str]) -> list[str]:
    """Those of the `names` that a stage graph reads, by their first use."""
    wanted = set(names)
    read = (
        str(used.target)
        for node in graph.nodes if node.op != "get_attr"
        for used in node.all_input_nodes if used.op == "get_attr"
    )  # fmt: skip
    return list(dict.fromkeys(name for name in read if name in wanted))


def block_of(name: str) -> str:
    """The repeated block that a parameter is in; "" for none.

    >>> block_of("model.layers.3.mlp.up.weight"), block_of("lm_head.weight")
    ('model.layers.3', '')
    """
    match = re.match(r"(?:.*?\.)??\d+(?=\.)", name)
    return match[0] if match else ""


def block_runs(names: Iterable[str]) -> list[int]:
    """Of every parameter, in which run of consecutive ones of a block it is.

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
    """The buckets of parameters, {name: bytes} in the order of their use; with `most_bytes` None no block is
    split, else the first bucket has `least_bytes` at most, and each other twice as much as the one before. With
    `least_bytes` infinite a bucket goes on from block to block. What has `alone_bytes` is in a bucket of its own.

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
    """Names by their kind, in order."""
    rows: dict[object, list[str]] = {}
    for name in names:
        rows.setdefault(kind[name], []).append(name)
    return list(rows.values())


def alike(
    tensors: Mapping[str, Tensor], kind: Mapping[str, object] | None = None, most_bytes: int | None = BUCKET_BYTES
) -> list[tuple[str, ...]]:
    """Names of tensors that may be sent as one, by {name: kind} if there is one, and dtype, whatever their blocks."""
    kind_and_dtype = {name: (kind[name] if kind else None, tensor.dtype) for name, tensor in tensors.items()}
    rows = list[tuple[str, ...]]()
    for names in kinds(list(tensors), kind_and_dtype):
        rows += bucketed({name: tensors[name].nbytes for name in names}, most_bytes, least_bytes=math.inf)
    return rows
