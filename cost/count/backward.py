"""The most that the backward of a stage takes: gradients, what is still kept, and what is sent beside it.

`_Events` says how many bytes each operator's backward allocates and frees (`steps.py`) and what is sent beside it,
`_Backward` follows these for all blocks of the model, with the buckets of gradients that are sent when they are whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple

from torch import fx

from autopart.cost.count.footprint import Memory, Value, Walk, rerun_bytes
from autopart.cost.count.sending import Sent, Traffic
from autopart.cost.count.steps import Backward, backward_steps
from autopart.ir.buckets import UNDER_WAY
from autopart.ir.facts import facts, times
from autopart.ir.fold import Folds, later, unrolled


class _Event(NamedTuple):
    """`takes`: bytes more (or less). `needs`: so many beyond what is there, before other events; `peak`: the same now.
    `ahead`: what weights that are gathered ahead take from now on. `opens`: so many bytes more (or less) of gathered
    weights. `sends`: a copy of gradients, for `part` bytes of a rank's part of them. `gives`: the whole gradient of the
    parameter `name`, so many bytes where nothing gives it a gradient again."""

    kind: Literal["takes", "needs", "peak", "ahead", "opens", "sends", "gives"]
    size: int
    part: int = 0
    name: str = ""


class _Step(NamedTuple):
    """The backward of one operator; `block` that it is in."""

    block: str
    events: tuple[_Event, ...]

    def later(self, folds: Folds, blocks: int) -> _Step:
        """The same, so many blocks later."""
        if not any(event.name for event in self.events):
            return self
        return self._replace(
            events=tuple(event._replace(name=later(folds, event.name, blocks)) for event in self.events)
        )


def backward_peaks(
    walk: Walk, alive: Set[fx.Node], kept: Mapping[fx.Node, int], traffic: Traffic
) -> tuple[int, int]:  # fmt: skip
    """The most that gradients and what is still kept take while the backward runs: the first of a step, and later
    ones. Gradients that are summed once a step are sent in the last.

    Args:
        kept: bytes that are held for the backward of each node.
    """
    folds = walk.trace.folds
    counted = list(_Events(walk, alive, kept, traffic).steps())
    steps = list(unrolled(folds, counted, lambda step: step.block, lambda step, i: step.later(folds, i)))
    whole = {str(n.target): made.memory.size_bytes for n, made in walk.values.items() if n.op == "get_attr"}
    begins, count = sum(size * times(node) for node, size in kept.items()), walk.program.microbatches

    def peaks(sends: bool, is_later: bool = False) -> tuple[int, int]:
        return _Backward(begins, traffic, walk.trace.of_all(whole), sends, is_later, count).run(steps)

    if count == 1 or not traffic.sent:
        return peaks(True)
    first, later = peaks(False)
    last = peaks(True, True)[1]
    return first, max(later if count > 2 else 0, last)


class _Events:
    """What the backward of every operator of a stage does to a rank's memory, in its order."""

    def __init__(self, walk: Walk, alive: Set[fx.Node], kept: Mapping[fx.Node, int], traffic: Traffic):
        self.walk, self.alive, self.kept, self.traffic = walk, alive, kept, traffic
        self.again = rerun_bytes(walk, alive)
        self.in_rows = {str(used.target) for row in traffic.rows for n in row.nodes for used in n.all_input_nodes}
        self.opened: set[int] = set()
        self.parts_bytes: Counter[int] = Counter()
        self.wholes_bytes: Counter[int] = Counter()

    def steps(self) -> Iterator[_Step]:
        for step in backward_steps(self.walk, self.alive):
            block = facts(step.node).get("block", ("", 0))
            yield _Step(f"{block[0]}.{block[1]}", tuple(self._backward(step)))

    def _backward(self, step: Backward) -> Iterator[_Event]:
        node, values = step.node, self.walk.values
        made, done = _bytes(step.made), _bytes(step.done)
        further = sum(_size(values[used]) for used in step.further)
        yield from self._before(step)
        row = self.traffic.row_of.get(node)
        if row is None:
            yield _Event("needs", self.walk.takes.get(node, (0, 0))[1])
            yield _Event("takes", made)
        else:  # gradients of parts are made where those of all wholes are there, which are sent
            self.parts_bytes[row] += made
            self.wholes_bytes[row] += done
            made = done = 0
        yield _Event("needs", further)
        if row is not None and node is self.traffic.rows[row].nodes[0]:
            yield from self._scattered(row)
            done = self.wholes_bytes[row]
        yield _Event("takes", -done - self.kept.get(node, 0) - self.again.get(node, 0))
        yield _Event("peak", 2 * further)
        for name, memory in step.whole.items():
            yield _Event("gives", memory.size_bytes if memory and name not in self.in_rows else 0, name=name)

    def _before(self, step: Backward) -> Iterator[_Event]:
        """What is run again, and gathered again, before the backward of a node."""
        row_of = self.traffic.row_of
        if step.rerun:
            rows = {row_of[n] for n in step.rerun if n in row_of}
            yield from self._open(set(sorted(rows)[:1]))  # which it begins with
            yield _Event("takes", sum(self.again.get(n, 0) for n in step.rerun))
            yield from self._open(rows)
        yield from self._open({row_of[m.made_by] for m in self.walk.keeps.get(step.node, ())
                               if m.again and m.made_by in row_of})  # fmt: skip

    def _open(self, rows: set[int]) -> Iterator[_Event]:
        """The weights of these rows are read: they are gathered, and those of the rows before begin to be."""
        for row in sorted(rows - self.opened, reverse=True):
            one, first = self.traffic.rows[row], row - self.traffic.prefetch
            yield _Event("ahead", self._received_bytes(first + 1, row))
            yield _Event("peak", one.opening_bytes)
            yield _Event("ahead", self._received_bytes(first, row))
            self.opened.add(row)
            yield _Event("opens", one.whole_bytes)
            yield _Event("peak", 0)

    def _received_bytes(self, start: int, stop: int) -> int:
        return sum(row.received_bytes for row in self.traffic.rows[max(0, start) : stop])

    def _scattered(self, row: int) -> Iterator[_Event]:
        """The gradients of the weights of a row, which go when all of them are there."""
        one = self.traffic.rows[row]
        if row in self.opened:
            self.opened.discard(row)
            yield _Event("opens", -one.whole_bytes)
        yield _Event("sends", one.grad_bytes, self.parts_bytes[row])


class _Backward:
    """A rank's memory during the backward of a microbatch, in which the gradients of a step are sent, or not."""

    def __init__(
        self, kept: int, traffic: Traffic, whole: Mapping[str, int], sends: bool, is_later: bool, microbatches: int
    ):  # fmt: skip
        self.now = self.most = self.most_later = kept
        self.whole, self.sends = whole, sends
        self.added_bytes = self.opened_bytes = self.ahead = 0
        # What is sent after every microbatch may be under way when the next backward begins.
        # Of each what it is sent from, and what it is received in if that is added to what is there.
        is_second = microbatches == 2  # where nothing is there to add it to
        self.flats = deque((sent.flat_bytes, 0 if is_second else sent.part_bytes)
                           for sent in traffic.sent[:1] if sent.each and is_later)  # fmt: skip
        self.now += sum(map(sum, self.flats))
        self.sent = traffic.sent
        self.missing = [set(sent.names) for sent in traffic.sent]
        self.buckets_of: dict[str, list[int]] = defaultdict(list)
        for number, sent in enumerate(traffic.sent):
            for name in sent.names:
                self.buckets_of[name].append(number)
        self.apart = {name for sent in traffic.sent if sent.scatters and (sent.each or sent.kept_bytes)
                      for name in sent.names}  # fmt: skip

    def run(self, steps: Sequence[_Step]) -> tuple[int, int]:
        """The most bytes, all in all and without the gradients of weights that earlier microbatches have left."""
        needed = 0
        for step in steps:
            for kind, size, part, name in step.events:
                if kind == "takes":
                    self.now += size
                elif kind == "needs":
                    needed = max(needed, self.now + size)
                elif kind == "peak":
                    self._reach(max(needed, self.now + size))
                    needed = 0
                elif kind == "gives":
                    self._complete(name, size)
                elif kind == "ahead":
                    self.ahead = size
                elif kind == "opens":
                    self.opened_bytes += size
                else:
                    self._send(size, part, True)
        return self.most, self.most_later

    def _reach(self, peak: int) -> None:
        peak += self.ahead + self.opened_bytes
        self.most, self.most_later = max(self.most, peak), max(self.most_later, peak - self.added_bytes)

    def _complete(self, name: str, added_bytes: int) -> None:
        """The gradient of a parameter is whole."""
        if name not in self.apart:
            self.added_bytes += added_bytes
        for number in self.buckets_of.get(name, ()):
            self.missing[number].discard(name)
            if not self.missing[number] and (self.sent[number].each or self.sends):
                self._sum(self.sent[number])

    def _sum(self, sent: Sent) -> None:
        grads = sum(self.whole[name] for name in sent.names) if sent.scatters else 0
        before = grads if sent.kept_bytes else 0  # they are added to those of earlier microbatches
        self.now -= before
        self._send(sent.flat_bytes, sent.part_bytes, sent.each)
        self.now -= grads - before + sent.kept_bytes

    def _send(self, flat_bytes: int, part_bytes: int, is_added: bool) -> None:
        """Gradients are copied together and sent, when what was sent before has arrived. `is_added`: after the first
        microbatch what arrives is added to what is there."""
        while len(self.flats) >= UNDER_WAY:
            flat, part = self.flats.popleft()
            self.now -= flat
            self.added_bytes += part
        self.flats.append((flat_bytes, part_bytes * is_added))
        self.now += flat_bytes + part_bytes
        self._reach(self.now)


def _bytes(pieces: Set[Memory]) -> int:
    return sum(memory.size_bytes for memory in pieces)


def _size(value: Any) -> int:
    return value.form.size_bytes if isinstance(value, Value) else 0
