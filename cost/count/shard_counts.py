"""Numbers of heads, experts or features that are sharded over an axis: the limit of its ranks.

On an axis with more ranks than heads, experts or features, some ranks would have no shard.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autopart.cost.predict.operator_work import CHOSEN
from autopart.ir.atoms import BATCH, DATA_DIM
from autopart.ir.facts import facts
from autopart.ir.graph import pattern_of, shape, tensor_inputs
from autopart.ir.program import Program
from autopart.ir.trace import Trace

Divided = dict[str, dict[int, str]]
"""{axis: {number: operator}}: the numbers of heads, experts or features that are sharded over an axis.

The operator is the first matrix product with this number, for example `{"tp": {16:
"model.layers.*.self_attn/scaled_dot_product_attention"}}`.
"""


def divided(trace: Trace, program: Program) -> Divided:
    """Return the numbers of heads, experts or features that matrix products shard over each axis.

    Only axes that shard features or experts have an entry.
    """
    mesh, counts = program.mesh, Divided()
    axes = {name: mesh.innermost(cuts) for name, cuts in CHOSEN.items() if cuts != "positions"}
    traced = {node.name: node for node in trace.graph.nodes}
    for stage in program.stages:
        for node in stage.graph.graph.nodes:
            origin = traced.get(facts(node).get("origin", ""))
            pattern = facts(origin).get("pattern") if origin is not None and node.op == "call_function" else None
            if origin is None or pattern is None or not pattern.flops:
                continue
            for name, axis in axes.items():
                for count in _counts(traced, node, axis) if mesh.size(axis) > 1 else ():
                    counts.setdefault(name, {}).setdefault(count, pattern_of(facts(origin)["key"]))
    return counts


def _counts(traced: dict[str, fx.Node], node: fx.Node, axis: str) -> Iterator[int]:
    """Yield the number of heads, experts or features in each dim that is sharded over an axis.

    The dims are those of a node's inputs and output. For a merged dim such as (heads, head size), the number is the
    size of its first factor. For a dim of concatenated tensors, one number is yielded per tensor.
    """
    for used in (node, *tensor_inputs(node)):
        origin, placement = traced.get(facts(used).get("origin", "")), facts(used).get("layout", {}).get(axis)
        if origin is None or placement is None or not placement.is_shard:
            continue
        atoms = facts(origin)["atoms"][placement.dim]
        if not atoms or atoms[0].kind in (BATCH, DATA_DIM):
            continue
        if len(placement.sections) == 1:  # equal sections, each with this number of heads or features
            yield shape(origin)[placement.dim] // abs(placement.sections[0])
        else:
            yield from placement.sections or (atoms[0].size,)
