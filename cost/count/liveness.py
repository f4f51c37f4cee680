"""Buffers that each operator of a stage graph allocates and frees, in forward and in backward.

`symbolic_memory.py` adds up the bytes of these buffers, as polynomials in the batch, the sequence and the axis sizes.

Rules for gradients:

- The gradient of a view is a view of the gradient. The gradient of a sum's operand is the sum's gradient, expanded.
- If two operators give gradients to a value, the gradients are added out of place, after the backward of the second
  operator. Operators that overwrite their inputs add in place.
- A parameter's gradient stays allocated after the first backward of a step. Later backwards add their complete
  gradient to it in place.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import fx

from autopart.cost.count.stage_footprint import Liveness, MemoryBuffer, memories
from autopart.ir.facts import cost_notes, facts


class Forward(NamedTuple):
    """Buffers that the forward of one operator allocates and frees.

    Args:
        made: buffers that this operator allocates.
        ended: buffers that no later operator uses and that are not saved for backward.
    """

    node: fx.Node
    made: Set[MemoryBuffer]
    ended: Set[MemoryBuffer]


class Backward(NamedTuple):
    """Buffers that the backward of one operator allocates and frees.

    Args:
        rerun: operators that are recomputed right before this backward.
        made: buffers whose gradients it allocates.
        further: values that already have a gradient, to which this backward adds another one.
        done: buffers whose gradients it frees.
        whole: {parameter whose gradient this backward completes: its buffer}. The buffer is None if the gradient is a
            view of another gradient.
    """

    node: fx.Node
    rerun: Sequence[fx.Node]
    made: Set[MemoryBuffer]
    further: Sequence[fx.Node]
    done: Set[MemoryBuffer]
    whole: Mapping[str, MemoryBuffer | None]


def forward_steps(walk: Liveness, kept: Set[MemoryBuffer]) -> Iterator[Forward]:
    """Yield, for each node in forward order, the buffers that it allocates and frees.

    Args:
        walk: liveness analysis of the stage.
        kept: buffers saved for backward, which are not freed in forward.
    """
    last: dict[MemoryBuffer, fx.Node] = {}
    for node in walk.values:
        for used in (node, *node.all_input_nodes):
            last |= dict.fromkeys(memories(walk.values[used]), node)
    ended: dict[fx.Node, set[MemoryBuffer]] = defaultdict(set)
    for memory, node in last.items():
        if memory not in kept:
            ended[node].add(memory)
    seen: set[MemoryBuffer] = set()
    for node in walk.values:
        new = memories(walk.values[node]) - seen
        seen |= new
        yield Forward(node, new, ended[node])


def backward_steps(walk: Liveness, alive: Set[fx.Node]) -> Iterator[Backward]:
    """Yield the buffers that the backward of each operator allocates and frees, the last operator first.

    Args:
        walk: liveness analysis of the stage.
        alive: nodes through which a gradient flows.
    """
    calls = [node for node in walk.values if node in alive and node.op == "call_function"]
    inputs = {node: walk.towards(node) for node in reversed(calls)}
    uses = Counter(_key(used) for towards in inputs.values() for used in towards)
    regions, received = walk.regions(alive), Counter[Any]()
    grads, made_by = set[MemoryBuffer](), defaultdict[fx.Node, set[MemoryBuffer]](set)
    for node, towards in inputs.items():
        is_view = cost_notes(node).gradient_is_view
        begins = [used for used in (node, *towards) if not (received[node] if used is node else is_view)]
        new = {memory for used in begins for memory in memories(walk.values[used], lasting=True)} - grads
        grads |= new
        for memory in new:
            made_by[memory.made_by].add(memory)
        further = [used for used in towards if received[_key(used)]] if node not in walk.in_place else []
        received.update(map(_key, towards))
        done = made_by.pop(node, set())
        grads -= done
        whole = {str(used.target): memory if (memory := walk.values[used].memory) in grads else None
                 for used in towards if used.op == "get_attr" and received[_key(used)] == uses[_key(used)]}  # fmt: skip
        yield Backward(node, regions.pop(facts(node).get("region", -1), ()), new, further, done, whole)


def _key(node: fx.Node) -> Any:
    """Return a dictionary key of a value: the name of a parameter, or the node of any other value."""
    return str(node.target) if node.op == "get_attr" else node
