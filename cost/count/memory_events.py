"""Memory events of a stage's operators in bytes: allocations, frees and communication buffers.

The allocations come from `liveness.py`. `cost/predict/comm_buffers.py` follows the events over all blocks of
the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import fx

from autopart.cost.count.liveness import Backward, backward_steps, forward_steps
from autopart.cost.count.stage_footprint import Liveness, LocalValue, MemoryBuffer, own_saved_bytes, recomputed_buffers
from autopart.cost.predict.comm_buffers import MemoryEvent, StageCommBuffers, backward_peaks, forward_peak
from autopart.ir.blocks.deduplication import DeduplicatedBlocks, expand_blocks, later
from autopart.ir.facts import facts, times


class _OperatorEvents(NamedTuple):
    """The memory events of one operator."""

    node: fx.Node
    events: tuple[MemoryEvent, ...]

    @property
    def block(self) -> str:
        path, number = facts(self.node).get("block", ("", 0))
        return f"{path}.{number}"

    def later(self, folds: DeduplicatedBlocks, blocks: int) -> _OperatorEvents:
        """Return the step of the equivalent operator `blocks` blocks later, with its parameters renamed."""
        if not any(event.name for event in self.events):
            return self
        return self._replace(
            events=tuple(event._replace(name=later(folds, event.name, blocks)) for event in self.events)
        )


def _of_all(folds: DeduplicatedBlocks, steps: Iterable[_OperatorEvents]) -> list[tuple[MemoryEvent, ...]]:
    """Expand the steps of a deduplicated trace to all blocks of the model."""
    return [
        step.events
        for step in expand_blocks(folds, list(steps), lambda one: one.block, lambda one, i: one.later(folds, i))
    ]


def forward_bytes(walk: Liveness, saved: Mapping[fx.Node, Sequence[MemoryBuffer]], traffic: StageCommBuffers) -> float:
    """Return the peak bytes of values, gathered weights and saved tensors in a microbatch's forward."""
    steps = list(forward_steps(walk, {memory for pieces in saved.values() for memory in pieces}))
    made_bytes = {step.node: _bytes(step.made) for step in steps}

    def events(node: fx.Node, ended: Set[MemoryBuffer]) -> Iterator[MemoryEvent]:
        row, new_bytes = traffic.row_of.get(node), made_bytes[node]
        if row is None:
            yield MemoryEvent("needs", walk.takes.get(node, (0, 0))[0])
        elif node is traffic.rows[row].first:
            yield from traffic.gathers(row)
            new_bytes = sum(made_bytes[other] for other, at in traffic.row_of.items() if at == row)
        else:
            new_bytes = 0
        new_bytes += own_saved_bytes(walk, node) if node in saved else 0
        written_over = _bytes(ended) if _writes_over(walk, node) else 0
        yield MemoryEvent("takes", new_bytes - written_over)
        yield MemoryEvent("peak", 0)
        yield MemoryEvent("takes", written_over - _bytes(ended))

    return forward_peak(_of_all(walk.trace.folds, (
        _OperatorEvents(step.node, tuple(events(step.node, step.ended)))
        for step in steps if step.node.op == "call_function"
    )))  # fmt: skip


def backward_bytes(
    walk: Liveness, alive: Set[fx.Node], kept: Mapping[fx.Node, int], traffic: StageCommBuffers
) -> tuple[float, float]:  # fmt: skip
    """Return the peak bytes of gradients and saved tensors in backward: (first of a step, later ones).

    Args:
        kept: bytes saved for the backward of each node.
    """
    steps = _of_all(walk.trace.folds, _Backward(walk, alive, kept, traffic).steps())
    whole = {str(n.target): read.memory.size_bytes for n, read in walk.values.items() if n.op == "get_attr"}
    begins = sum(size * times(node) for node, size in kept.items())
    return backward_peaks(steps, begins, traffic, walk.trace.expand_to_all(whole), walk.program.microbatches)


class _Backward:
    """Generates the memory events of every operator's backward."""

    def __init__(self, walk: Liveness, alive: Set[fx.Node], kept: Mapping[fx.Node, int], traffic: StageCommBuffers):
        self.walk, self.alive, self.kept, self.traffic = walk, alive, kept, traffic
        self.again = {
            node: _bytes(memory) + others for node, (memory, others) in recomputed_buffers(walk, alive).items()
        }
        self.in_rows = {name for row in traffic.rows for name in row.names}
        self.opened: set[int] = set()
        self.read_bytes = 0
        """Bytes that the preceding fused operators have read. They are one kernel with the next operator if that is
        fused too, so they stay allocated until the kernel ends."""
        self.read_sizes: set[int] = set()
        """Sizes in bytes of the buffers that these operators saved. The kernel overwrites one of its output's size."""
        self.parts_bytes: Counter[int] = Counter()
        self.wholes_bytes: Counter[int] = Counter()

    def steps(self) -> Iterator[_OperatorEvents]:
        for step in backward_steps(self.walk, self.alive):
            yield _OperatorEvents(step.node, tuple(self._events(step)))

    def _events(self, step: Backward) -> Iterator[MemoryEvent]:
        node, values = step.node, self.walk.values
        new_bytes, done, written_over = _bytes(step.made), _bytes(step.done), 0
        further = sum(_size(values[used]) for used in step.further)
        yield from self._before(step)
        row = self.traffic.row_of.get(node)
        if row is None:
            yield MemoryEvent("needs", self.walk.takes.get(node, (0, 0))[1])
            if _writes_over(self.walk, node):
                written_over = done + self.kept.get(node, 0) + self.again.get(node, 0)
                self.read_bytes += max(0, written_over - new_bytes)
                self.read_sizes |= {memory.size_bytes for memory in self.walk.keeps.get(node, ())}
            else:
                if node in self.walk.in_place and new_bytes not in self.read_sizes:
                    yield MemoryEvent("needs", new_bytes + self.read_bytes)
                self.read_bytes, self.read_sizes = 0, set()
            yield MemoryEvent("takes", new_bytes - written_over)
        else:  # gradients of shards are allocated while all unsharded gradients of the row are still resident
            self.parts_bytes[row] += new_bytes
            self.wholes_bytes[row] += done
            new_bytes = done = 0
        yield MemoryEvent("needs", further)
        if row is not None and node is self.traffic.rows[row].first:
            if row in self.opened:
                self.opened.discard(row)
                yield MemoryEvent("takes", -self.traffic.rows[row].whole_bytes)
            yield MemoryEvent("sends", self.traffic.rows[row].grad_bytes, self.parts_bytes[row])
            done = self.wholes_bytes[row]
        yield MemoryEvent("takes", written_over - done - self.kept.get(node, 0) - self.again.get(node, 0))
        yield MemoryEvent("peak", 2 * further)
        for name, memory in step.whole.items():
            yield MemoryEvent("gives", memory.size_bytes if memory and name not in self.in_rows else 0, name=name)

    def _before(self, step: Backward) -> Iterator[MemoryEvent]:
        """Yield the events of recomputation and of weight all-gathers before the backward of a node."""
        row_of = self.traffic.row_of
        if step.rerun:
            rows = {row_of[n] for n in step.rerun if n in row_of}
            yield from self._open(set(sorted(rows)[:1]))  # the first row that the region uses
            yield MemoryEvent("takes", sum(self.again.get(n, 0) for n in step.rerun))
            yield from self._open(rows)
        yield from self._open({row_of[m.made_by] for m in self.walk.keeps.get(step.node, ())
                               if m.again and m.made_by in row_of})  # fmt: skip

    def _open(self, rows: set[int]) -> Iterator[MemoryEvent]:
        for row in sorted(rows - self.opened, reverse=True):
            self.opened.add(row)
            yield from self.traffic.opens(row)


def _writes_over(walk: Liveness, node: fx.Node) -> bool:
    """Return True if an operator's output can reuse the buffer of its input.

    In backward, the input's gradient then reuses the buffer of the output's gradient.

    A cast to another element size cannot.
    """
    if node not in walk.in_place:
        return False
    made, *read = (value.form.dtype.itemsize for one in (node, *node.all_input_nodes)
                   if isinstance(value := walk.values[one], LocalValue))  # fmt: skip
    return made in read


def _bytes(pieces: Set[MemoryBuffer]) -> int:
    return sum(memory.size_bytes for memory in pieces)


def _size(value: Any) -> int:
    return value.form.size_bytes if isinstance(value, LocalValue) else 0
