"""What is there while an operator of a stage runs, beside what is kept for backwards: what `peaks.py` and `backward.py`
read of the same steps, operator by operator and as `Size`, so that a table knows it at other sizes. Weights on their
way and gradients of weights are no part of it: `cost.table_memory` knows when those come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from torch import fx

from autopart.cost.count.footprint import Memory, Value, Walk
from autopart.cost.count.growth import Growth
from autopart.cost.count.steps import backward_steps, forward_steps
from autopart.cost.work import NOTHING, Powers, Size
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
        rerun: what regions that are run again keep then, by the node that keeps it first.
        size: of memory.
    """

    def __init__(
        self, walk: Walk, growth: Growth, passed: Set[fx.Node], saved: Mapping[fx.Node, Sequence[Memory]],
        kept: Mapping[fx.Node, Size], others: Mapping[fx.Node, Size], rerun: Mapping[fx.Node, Size],
        size: Callable[[Memory], Size],
    ):  # fmt: skip
        self.walk, self.growth, self.passed, self.saved = walk, growth, passed, saved
        self.kept, self.others, self.rerun, self.size = kept, others, rerun, size
        axes = storing_axes(walk.program)
        self.gathers = {node for node in walk.values if gathers_stored(node, axes)}

    def in_forward(self) -> dict[fx.Node, Size]:
        """While the forward of each node runs."""
        now, beyond = Running(), dict[fx.Node, Size]()
        held = {memory for pieces in self.saved.values() for memory in pieces}
        now.add(self._values(memory for memory in held if memory.lives))  # what the stage receives
        for step in forward_steps(self.walk, held):
            kept = self.kept.get(step.node, NOTHING) * -1
            needs = now.size() + self._takes(step.node, 0) + kept
            now.add(self._values(step.made) + self.others.get(step.node, NOTHING) + kept)
            beyond[step.node] = _largest(now.size(), needs)
            now.add(self._values(step.ended), -1)
        return beyond

    def in_backward(self) -> dict[fx.Node, Size]:
        """While the backward of each node runs: gradients of values, and what it takes itself."""
        now, beyond = Running(), dict[fx.Node, Size]()
        for step in backward_steps(self.walk, self.passed):
            now.add(Size.sum(self.rerun.get(node, NOTHING) for node in step.rerun))
            of_weights = Size.sum(map(self.size, filter(self._is_weight, step.made)))  # which are counted apart
            needs = now.size() + self._takes(step.node, 1) + of_weights * -1
            now.add(self._values(step.made))
            further = Size.sum(map(self._value, step.further))
            peak = _largest(now.size() + further, needs)
            now.add(self._values(step.done) + self.rerun.get(step.node, NOTHING), -1)
            ends = now.size() + further * 2 + self.kept.get(step.node, NOTHING) * -1
            beyond[step.node] = _largest(peak, ends)
        return beyond

    def _takes(self, node: fx.Node, direction: int) -> Size:
        """What a node makes for itself, which grows as the largest of what it reads and makes."""
        if node in self.gathers:
            return NOTHING
        sides = [n for n in (node, *node.all_input_nodes) if isinstance(self.walk.values[n], Value)]
        largest = max(sides or [node], key=lambda n: self.walk.values[n].form.size_bytes if sides else 0)
        return Size.of(self.walk.takes.get(node, (0, 0))[direction], self.growth.of(largest))

    def _values(self, pieces: Iterable[Memory]) -> Size:
        """All memory but that of weights and of what is gathered of them."""
        return Size.sum(self.size(memory) for memory in pieces if not self._is_weight(memory))

    def _is_weight(self, memory: Memory) -> bool:
        return memory.made_by.op == "get_attr" or memory.made_by in self.gathers

    def _value(self, node: fx.Node) -> Size:
        """A value by its own shape."""
        made = self.walk.values[node]
        return Size.of(made.form.size_bytes, self.growth.of(node)) if isinstance(made, Value) else NOTHING


def _largest(*sizes: Size) -> Size:
    return max(sizes, key=lambda size: size.value)
