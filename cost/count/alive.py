"""What is there while an operator of a stage runs, beside what is kept for backwards: the peaks of `peaks.py`, operator
by operator and as `Size`, so that a table knows them at other sizes. Weights on their way and gradients of weights are
no part of it: `cost.table_memory` knows when those come and go.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from torch import fx

from autopart.cost.count.footprint import Memory, Value, Walk, memories
from autopart.cost.count.growth import Growth
from autopart.cost.work import NOTHING, Powers, Size
from autopart.ir.facts import cost_notes, facts
from autopart.ir.storing import gathers_stored, storing_axes


class Running:
    """A sum of Sizes that come and go."""

    def __init__(self) -> None:
        self.total: dict[Powers, float] = {}

    def add(self, size: Size, times: int = 1) -> None:
        for powers, value in size.terms:
            self.total[powers] = self.total.get(powers, 0) + times * value

    def size(self) -> Size:
        return Size(tuple(sorted((powers, value) for powers, value in self.total.items() if value)))


class Alive:
    """Of one stage.

    Args:
        passed: the nodes that a gradient passes.
        saved: what is kept, by the node that keeps it first.
        kept: the same as sizes, with what is no value, which `others` has.
        rerun: of every region that is run again, what it keeps then, by the node that keeps it first.
        size: of memory.
    """

    def __init__(
        self, walk: Walk, growth: Growth, passed: Set[fx.Node], saved: Mapping[fx.Node, Sequence[Memory]],
        kept: Mapping[fx.Node, Size], others: Mapping[fx.Node, Size], rerun: Mapping[int, Mapping[fx.Node, Size]],
        size: Callable[[Memory], Size],
    ):  # fmt: skip
        self.walk, self.growth, self.passed, self.saved = walk, growth, passed, saved
        self.kept, self.others, self.rerun, self.size = kept, others, rerun, size
        axes = storing_axes(walk.program)
        self.gathers = {node for node in walk.values if gathers_stored(node, axes)}

    def takes(self, node: fx.Node, direction: int) -> Size:
        """What a node makes for itself, which grows as the largest of what it reads and makes."""
        if node in self.gathers:
            return NOTHING
        sides = [n for n in (node, *node.all_input_nodes) if isinstance(self.walk.values[n], Value)]
        largest = max(sides or [node], key=lambda n: self.walk.values[n].form.size_bytes if sides else 0)
        return Size.of(self.walk.takes.get(node, (0, 0))[direction], self.growth.of(largest))

    def in_forward(self) -> dict[fx.Node, Size]:
        """While the forward of each node runs."""
        walk, now, beyond = self.walk, Running(), dict[fx.Node, Size]()
        held = {memory for pieces in self.saved.values() for memory in pieces}
        for memory in held:
            now.add(self.size(memory), int(memory.lives))  # what the stage receives
        last = {memory: node for node in walk.values for used in (node, *node.all_input_nodes)
                for memory in self._values(used)}  # fmt: skip
        ends: dict[fx.Node, list[Memory]] = defaultdict(list)
        for memory, node in last.items():
            if memory not in held:
                ends[node].append(memory)
        seen: set[Memory] = set()
        for node in walk.values:
            before = now.size()
            fresh = set(self._values(node)) - seen
            seen |= fresh
            for memory in fresh:
                now.add(self.size(memory))
            now.add(self.others.get(node, NOTHING))
            kept = self.kept.get(node, NOTHING)
            now.add(kept, -1)
            beyond[node] = _largest(now.size(), before + self.takes(node, 0) + kept * -1)
            for memory in ends[node]:
                now.add(self.size(memory), -1)
        return beyond

    def in_backward(self) -> dict[fx.Node, Size]:
        """While the backward of each node runs: gradients of values, and what it takes itself."""
        walk, now, beyond = self.walk, Running(), dict[fx.Node, Size]()
        made_by: dict[Any, set[Memory]] = defaultdict(set)
        grads, begun = set[Memory](), set[Memory]()
        given: Counter[fx.Node] = Counter()
        rerun = dict(self.rerun)
        for node in reversed(list(walk.values)):
            if node not in self.passed or node.op != "call_function":
                continue
            region = facts(node).get("region", -1)
            now.add(Size.sum(rerun.pop(region, {}).values()))
            towards = walk.towards(node)
            is_view = cost_notes(node).gradient_is_view
            before = now.size()
            made = [used for used in (node, *towards) if not (given[node] if used is node else is_view)]
            fresh = {memory for used in made for memory in self._values(used, True)} - grads
            grads |= fresh
            for memory in fresh:
                made_by[memory.made_by].add(memory)
                now.add(self.size(memory))
            further = Size.sum(self._value(used) for used in towards if given[used])
            weights = {memory for used in made for memory in self._of_weights(used)} - begun
            begun |= weights
            takes = self.takes(node, 1) + Size.sum(map(self.size, weights)) * -1  # their gradients are counted apart
            peak = _largest(now.size() + further, before + takes)
            given.update(towards)
            done = made_by.pop(node, set()) & grads
            for memory in done:
                now.add(self.size(memory), -1)
            now.add(self.rerun.get(region, {}).get(node, NOTHING), -1)
            grads -= done
            beyond[node] = _largest(peak, now.size() + further * 2 + self.kept.get(node, NOTHING) * -1)
        return beyond

    def _values(self, node: fx.Node, lasting: bool = False) -> list[Memory]:
        """The memory of a node's values but for weights and what is gathered of them."""
        pieces = memories(self.walk.values[node], lasting)
        return [memory for memory in pieces if not self._is_weight(memory)]

    def _of_weights(self, node: fx.Node) -> list[Memory]:
        """The memory of weights, and of what is gathered of them."""
        return [memory for memory in memories(self.walk.values[node], True) if self._is_weight(memory)]

    def _is_weight(self, memory: Memory) -> bool:
        return memory.made_by.op == "get_attr" or memory.made_by in self.gathers

    def _value(self, node: fx.Node) -> Size:
        """A value by its own shape; nothing of a weight."""
        made, is_weight = self.walk.values[node], node.op == "get_attr" or node in self.gathers
        if is_weight or not isinstance(made, Value):
            return NOTHING
        return Size.of(made.form.size_bytes, self.growth.of(node))


def _largest(*sizes: Size) -> Size:
    return max(sizes, key=lambda size: size.value)
