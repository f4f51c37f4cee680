"""The largest tensors of a rank, for the error of a plan that does not fit in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from autopart.cost.count.gradient_communication import local_bytes
from autopart.cost.count.stage_footprint import Liveness, own_saved_bytes, saved_buffers
from autopart.cost.memory_kinds import OPTIMIZER_VALUES, RankMemory
from autopart.ir.facts import facts, times
from autopart.ir.graph import pattern_of, short_name
from autopart.ir.program import Program
from autopart.ir.trace import Trace


def largest_tensors(
    trace: Trace, program: Program, walks: Sequence[Liveness], rank: RankMemory, number: int = 8
) -> dict[str, int]:
    """Return {description: bytes} of the `number` largest tensors of a rank, the largest first.

    The activations that an operator saves in all repeated blocks and all microbatches in flight are one entry.

    Args:
        walks: liveness analysis of every stage.
        rank: memory of the rank, with the stages that it runs.
    """
    sizes: dict[str, int] = defaultdict(int)
    trained = {str(node.target) for walk in walks for node in walk.reached() if node.op == "get_attr"}
    for name, stored in program.parameters.items():
        if set(stored.stages) & set(rank.stages):
            sizes[f"parameter {name}"] = size = local_bytes(trace, program, stored)
            if name in trained:
                sizes[f"gradient of {name}"] = size
                sizes[f"optimizer state of {name}"] = OPTIMIZER_VALUES * size
    for stage in rank.stages:
        walk = walks[stage].in_memory
        for node, saved in saved_buffers(walk, walk.reached()).items():
            size = sum(memory.size_bytes for memory in saved) + own_saved_bytes(walk, node)
            sizes[f"activations of {_named(node)}"] += size * rank.in_flight[stage] * times(node)
    return dict(sorted(sizes.items(), key=lambda item: -item[1])[:number])


def _named(node: fx.Node) -> str:
    """Return a text for a node, with module path and operator: `model.layers.*.mlp (linear)`."""
    path = pattern_of(facts(node).get("key", "").rsplit("/", 1)[0])
    return f"{path} ({short_name(node)})" if path else short_name(node)
