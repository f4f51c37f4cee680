"""What comes into being and goes while a stage's operators run, forward and backward, in their order.

Here it is pieces of memory: `events.py` measures them in bytes, for a plan's memory, and `held.py` as `Size`, for what
a table says of other sizes.

The gradient of a view is a view of the gradient, and that of what is summed the sum's, expanded. A further gradient of
the same value is added out of place, when what made it is gone; in place by operators that write over what they read.
A parameter's stays in the first backward of a step; in later ones it is added to the earlier, in place, when it is
whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import fx

from autopart.cost.count.stage_footprint import Memory, Walk, memories
from autopart.ir.facts import cost_notes, facts


class Forward(NamedTuple):
    """`made`: memory that an operator is the first to have. `ended`: what none after it reads, and the backward does
    not either."""

    node: fx.Node
    made: Set[Memory]
    ended: Set[Memory]


class Backward(NamedTuple):
    """`rerun`: operators that are run again right before. `made`: memory whose gradient comes into being, `done`: whose
    goes. `further`: values that get a further gradient. `whole`: {parameter whose gradient is now all there: its
    memory, None where its gradient is a view of another}."""

    node: fx.Node
    rerun: Sequence[fx.Node]
    made: Set[Memory]
    further: Sequence[fx.Node]
    done: Set[Memory]
    whole: Mapping[str, Memory | None]


def forward_steps(walk: Walk, kept: Set[Memory]) -> Iterator[Forward]:
    """Of every node. `kept`: what the backward reads."""
    last: dict[Memory, fx.Node] = {}
    for node in walk.values:
        for used in (node, *node.all_input_nodes):
            last |= dict.fromkeys(memories(walk.values[used]), node)
    ended: dict[fx.Node, set[Memory]] = defaultdict(set)
    for memory, node in last.items():
        if memory not in kept:
            ended[node].add(memory)
    seen: set[Memory] = set()
    for node in walk.values:
        new = memories(walk.values[node]) - seen
        seen |= new
        yield Forward(node, new, ended[node])


def backward_steps(walk: Walk, alive: Set[fx.Node]) -> Iterator[Backward]:
    """Of every operator that a gradient passes, from the last on. `alive`: the nodes that one passes."""
    calls = [node for node in walk.values if node in alive and node.op == "call_function"]
    inputs = {node: walk.towards(node) for node in reversed(calls)}
    uses = Counter(_key(used) for towards in inputs.values() for used in towards)
    regions, received = walk.regions(alive), Counter[Any]()
    grads, made_by = set[Memory](), defaultdict[fx.Node, set[Memory]](set)
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
    """A value; a parameter wherever it is read."""
    return str(node.target) if node.op == "get_attr" else node
