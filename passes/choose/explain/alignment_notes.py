"""Notes for the user on weights whose sizes are slow on tensor cores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import fx

from autopart.common.matrix_alignment import MULTIPLE, unaligned
from autopart.cost.flops import matrix_work
from autopart.cost.hardware.profile import Hardware
from autopart.ir.decisions import Decisions
from autopart.ir.facts import weighted
from autopart.ir.graph import active_operators, pattern_of, tensor_inputs, value
from autopart.ir.layout import shard_sizes
from autopart.ir.trace import Trace

LEAST_SHARE = 0.02
"""Minimum share of the model's matrix FLOPs for which a matrix product gets a note."""


def alignment_notes(trace: Trace, decisions: Decisions, hardware: Hardware) -> tuple[str, ...]:
    """Return a note for each 16-bit weight matrix whose shard has a dim that is not a multiple of 8.

    Repeated blocks share a note. The result is empty if the hardware profile has no penalty for unaligned products.
    """
    if hardware.matmul_unaligned >= 1:
        return ()
    work = _work_by_weight(trace.graph)
    total = sum(sum(of_dtype.values()) for of_dtype in work.values())
    return tuple(dict.fromkeys(
        f"{pattern_of(name)}: dim {dim} of {whole} in {dtype} is not a multiple of {each}, so its products run at "
        f"{100 * hardware.aligned_share(odd):.2g} % of the full rate; {-(-whole // each) * each} would run at "
        "the full rate"
        for name, of_dtype in work.items() for dtype, flops in of_dtype.items() if flops >= LEAST_SHARE * total
        for dim, whole, each, odd in _misaligned_dims(trace, decisions, name)
    ))  # fmt: skip


def _work_by_weight(graph: fx.Graph) -> Mapping[str, Mapping[str, float]]:
    """Return `{weight: {16-bit dtype: FLOPs of the matrix products with this weight}}`.

    Products of two activations have no weight and are counted under the name "".
    """
    work: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for node, weight in weighted(active_operators(graph)):
        if flops := matrix_work(node):
            weights = [used for used in map(_skip_unary_operators, tensor_inputs(node)) if used.op == "get_attr"]
            is_short = value(node).dtype.itemsize == 2
            name = str(weights[0].target) if weights and is_short else ""
            work[name][str(value(node).dtype).removeprefix("torch.")] += flops * weight
    return work


def _skip_unary_operators(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and len(node.all_input_nodes) == 1 and not matrix_work(node):
        (node,) = node.all_input_nodes
    return node


def _misaligned_dims(trace: Trace, decisions: Decisions, name: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield (dim, size, divisor, slowdown) for each dim of a weight matrix whose shards are not aligned.

    The size of an aligned dim is a multiple of `divisor`: 8 times the number of ranks that shard it.
    `slowdown` is the penalty for the size of a shard (`matrix_alignment.unaligned`).
    """
    full = trace.parameters[name].shape if name in trace.parameters else ()
    for dim, size in enumerate(full if len(full) == 2 else ()):
        ranks = 1
        for axis in decisions.mesh.along("features"):
            place = decisions.place(name, axis)
            if place.is_shard and place.dim == dim:
                ranks *= decisions.mesh.size(axis)
        if odd := unaligned(shard_sizes(size, ranks)[:1]):
            yield dim, size, MULTIPLE * ranks, odd
