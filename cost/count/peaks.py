"""What one microbatch of a stage holds on a rank, and how far its forward and its backward go beyond that.

The walk of a stage (`footprint.py`) says whose memory every value is and until when it is read; its traffic
(`sending.py`) what weights and gradients take on their way between ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopart.cost.count.footprint import Memory, Value, Walk, memories, rerun_bytes, saved_memory, saved_others
from autopart.cost.count.sending import Sent, Traffic, traffic_of
from autopart.ir.actions import StageBytes
from autopart.ir.buckets import UNDER_WAY
from autopart.ir.facts import cost_notes, facts


@dataclass
class StageMemory:
    """What one microbatch of a stage holds on one rank.

    `saved`: what autograd keeps, by the node that keeps it first. `bytes`: how much the schedule's actions take.
    `input_bytes`: values of the inputs alone, for all microbatches. `trained`: the parameters that get a gradient.
    `whole`: {parameter that is held whole for a step: its bytes}. `whole_backward`: whether the runtime never splits
    the backward, as something is run again in it. `traffic`: what is sent beside its work.
    """

    saved: dict[fx.Node, int]
    bytes: StageBytes
    input_bytes: int
    trained: frozenset[str]
    whole: dict[str, int]
    whole_backward: bool
    traffic: Traffic

    @property
    def saved_bytes(self) -> int:
        return sum(self.saved.values())

    @property
    def temporary_bytes(self) -> int:
        """How far a forward or backward goes beyond what is held, at its largest."""
        return max(self.bytes.forward, self.bytes.backward)


def stage_memory(walk: Walk) -> StageMemory:
    """What one microbatch of a stage holds on its heaviest rank."""
    stage, program = walk.stage, walk.program
    alive = walk.reached()
    saved = saved_memory(walk, alive)
    by_node = {node: size for node, pieces in saved.items()
               if (size := sum(memory.size_bytes for memory in pieces) + saved_others(walk, node))}  # fmt: skip
    held = {memory for pieces in saved.values() for memory in pieces}
    is_last = stage.index == len(program.stages) - 1
    sends = [] if is_last else [walk.values[node] for node in walk.outputs[: len(stage.sends)]]
    kept = sum(by_node.values())
    weights = {str(node.target): walk.values[node].memory.size_bytes for node in alive if node.op == "get_attr"}
    read = {str(node.target): walk.values[node].memory.size_bytes for node in walk.values if node.op == "get_attr"}
    whole = {name: read[name] for name in walk.held if name in read}
    traffic = traffic_of(walk.trace, program, stage, whole, walk.held)
    scattered = {name: sent for sent in traffic.sent if sent.scatters and sent.each for name in sent.names}
    kept_apart = {name for sent in traffic.sent if sent.kept_bytes for name in sent.names}
    lasting = sum(size for name, size in weights.items() if name not in scattered and name not in kept_apart)
    lasting += sum(sent.kept_bytes for sent in traffic.sent)
    is_split = not (regions := bool(walk.regions(alive)))
    first_backward, backward = _backward_peaks(walk, alive, saved, traffic)
    taken = StageBytes(
        held=kept + sum(_sent_bytes(value, held) for value in sends),
        delayed=_delayed_bytes(walk, alive) if stage.index and is_split else 0,
        forward=max(0, _forward_peak(walk, saved, traffic) - kept),
        backward=max(0, backward - kept),
        first_backward=max(0, first_backward - kept),
        gradients=lasting + sum(sent.part_bytes for sent in set(scattered.values())),
    )  # fmt: skip
    return StageMemory(by_node, taken, walk.input_bytes, frozenset(weights), whole, regions, traffic)


def _delayed_bytes(walk: Walk, alive: Set[fx.Node]) -> int:
    """The gradients that pipelining keeps for the weights' part of a backward: of all that weights and values make."""
    weights = walk.of_weights(alive)
    mixed = [n for n in walk.values if n in alive and n not in weights and any(u in weights for u in n.all_input_nodes)]
    return sum(memory.size_bytes for memory in {m for node in mixed for m in memories(walk.values[node])})


def _sent_bytes(sent: Any, held: set[Memory]) -> int:
    """What sending a value holds beside what is held anyway: a copy where it does not lie in order."""
    if not isinstance(sent, Value) or sent.memory.lives or (sent.form.is_contiguous and sent.memory in held):
        return 0
    return sent.memory.size_bytes if sent.form.is_contiguous else sent.form.size_bytes


def _forward_peak(walk: Walk, saved: Mapping[fx.Node, Sequence[Memory]], traffic: Traffic) -> int:
    """The most that values, weights on their way and what is kept take while the forward runs."""
    nodes = list(walk.values)
    kept = {memory for pieces in saved.values() for memory in pieces}
    last: dict[Memory, int] = {}
    for index, node in enumerate(nodes):
        for used in (node, *node.all_input_nodes):
            last |= dict.fromkeys(memories(walk.values[used]), index)
    now = most = ahead = 0
    ends: dict[int, int] = defaultdict(int)
    for memory, index in last.items():
        if memory not in kept:
            ends[index] += memory.size_bytes
    seen: set[Memory] = set()
    for index, node in enumerate(nodes):
        row = traffic.row_of.get(node)
        made = [node]
        if row is None:
            most = max(most, now + ahead + walk.takes.get(node, (0, 0))[0])
        elif node is traffic.rows[row].nodes[0]:
            made = list(traffic.rows[row].nodes)
            others = traffic.rows[row + 1 : row + traffic.prefetch]  # which are gathered while this one comes
            most = max(most, now + sum(r.received_bytes for r in others) + traffic.rows[row].opening_bytes)
            ahead = sum(r.received_bytes for r in traffic.rows[row + 1 : row + 1 + traffic.prefetch])
        fresh = {memory for one in made for memory in memories(walk.values[one]) if memory not in seen}
        seen |= fresh
        now += sum(memory.size_bytes for memory in fresh) + (saved_others(walk, node) if node in saved else 0)
        most = max(most, now + ahead)
        now -= ends[index]
    return most


def _backward_peaks(
    walk: Walk, alive: Set[fx.Node], saved: Mapping[fx.Node, Sequence[Memory]], traffic: Traffic
) -> tuple[int, int]:
    """The most that gradients and what is still kept take while the backward runs: the first of a step, and later
    ones. Gradients that are summed once a step are sent in the last."""
    count = walk.program.microbatches
    if count == 1 or not traffic.sent:
        return _Backward(walk, alive, saved, traffic, True).run()
    first, later = _Backward(walk, alive, saved, traffic, False).run()
    last = _Backward(walk, alive, saved, traffic, True, True).run()[1]
    return first, max(later if count > 2 else 0, last)


class _Backward:
    """The backward of a microbatch, in which the gradients of a step are sent, or not.

    The gradient of a view is a view of the gradient, and that of what is summed the sum's, expanded. A further gradient
    of the same value is added out of place, when what made it is gone. A parameter's stays in the first backward of a
    step; in later ones it is added to the earlier, in place, when it is whole.
    """

    def __init__(
        self, walk: Walk, alive: Set[fx.Node], saved: Mapping[fx.Node, Sequence[Memory]], traffic: Traffic, sends: bool,
        is_later: bool = False,
    ):  # fmt: skip
        self.walk, self.alive, self.saved, self.traffic, self.sends = walk, alive, saved, traffic, sends
        self.now = sum(memory.size_bytes for pieces in saved.values() for memory in pieces)
        self.now += sum(saved_others(walk, node) for node in saved)
        self.most, self.most_later, self.added_bytes = self.now, self.now, 0
        self.opened: dict[int, int] = {}
        self.ahead = 0
        # What is sent after every microbatch may be under way when the next backward begins.
        # Of each what it is sent from, and what it is received in if that is added to what is there.
        is_second = walk.program.microbatches == 2  # where nothing is there to add it to
        self.flats = deque((sent.flat_bytes, 0 if is_second else sent.part_bytes)
                           for sent in traffic.sent[:1] if sent.each and is_later)  # fmt: skip
        self.now += sum(map(sum, self.flats))
        self.missing = {sent: {name for name in sent.names} for sent in traffic.sent}
        self.apart = {name for sent in traffic.sent if sent.scatters and (sent.each or sent.kept_bytes)
                      for name in sent.names}  # fmt: skip
        self.in_rows = {str(used.target) for row in traffic.rows for n in row.nodes for used in n.all_input_nodes}
        self.grads: set[Memory] = set()
        self.whole = {str(n.target): made.memory.size_bytes for n, made in walk.values.items() if n.op == "get_attr"}

    def run(self) -> tuple[int, int]:
        walk, alive, grads = self.walk, self.alive, self.grads
        of: dict[Any, set[Memory]] = defaultdict(set)  # by what has made it; some are no longer in `grads`
        given: Counter[Any] = Counter()
        rerun, regions = rerun_bytes(walk, alive), walk.regions(alive)
        again = {node: size for sizes in rerun.values() for node, size in sizes.items()}
        inputs = {n: walk.towards(n) for n in reversed(list(walk.values)) if n in alive and n.op == "call_function"}
        uses = Counter(_key(used) for towards in inputs.values() for used in towards)
        for node, towards in inputs.items():
            region = facts(node).get("region", -1)
            if region in rerun:
                rows = {self.traffic.row_of[n] for n in regions[region] if n in self.traffic.row_of}
                self._open(set(sorted(rows)[:1]))  # which it begins with
                self.now += sum(rerun.pop(region).values())
                self._open(rows)
            self._open({self.traffic.row_of[m.made_by] for m in walk.keeps.get(node, ())
                        if m.again and m.made_by in self.traffic.row_of})  # fmt: skip
            row = self.traffic.row_of.get(node)
            peak = self.now + (walk.takes.get(node, (0, 0))[1] if row is None else 0)
            is_view = cost_notes(node).gradient_is_view
            made = [used for used in (node, *towards) if not (given[node] if used is node else is_view)]
            made = made if row is None else []  # they are made where they are scattered
            fresh = {m for used in made for m in memories(walk.values[used], lasting=True)} - grads
            grads |= fresh
            for memory in fresh:
                of[memory.made_by].add(memory)
            self.now += sum(memory.size_bytes for memory in fresh)
            further = sum(_size(walk.values[used]) for used in towards if given[_key(used)])
            peak = max(peak, self.now + further)
            given.update(map(_key, towards))
            done = self._scattered(row, node) if row is not None else of.pop(node, set()) & grads
            self.now -= sum(memory.size_bytes for memory in done) + saved_others(walk, node)
            self.now -= sum(memory.size_bytes for memory in self.saved.get(node, ()))
            self.now -= again.get(node, 0)
            self._reach(max(peak, self.now + 2 * further))
            grads -= done
            for used in towards:
                if used.op == "get_attr" and given[_key(used)] == uses[_key(used)]:
                    self._complete(str(used.target), walk.values[used].memory)
        return self.most, self.most_later

    def _reach(self, peak: int) -> None:
        peak += self.ahead + sum(self.opened.values())
        self.most, self.most_later = max(self.most, peak), max(self.most_later, peak - self.added_bytes)

    def _open(self, rows: set[int]) -> None:
        """The weights of these rows are read: they are gathered, and those of the rows before begin to be."""
        for row in sorted(rows - self.opened.keys(), reverse=True):
            one = self.traffic.rows[row]
            first = row - self.traffic.prefetch
            self.ahead = sum(r.received_bytes for r in self.traffic.rows[max(0, first + 1) : row])
            self._reach(self.now + one.opening_bytes)
            self.ahead = sum(r.received_bytes for r in self.traffic.rows[max(0, first) : row])
            self.opened[row] = one.whole_bytes
            self._reach(self.now)

    def _scattered(self, row: int, node: fx.Node) -> set[Memory]:
        """The gradients of the weights of a row, which go when all of them are there."""
        one = self.traffic.rows[row]
        if node is not one.nodes[0]:
            return set()
        self.opened.pop(row, None)
        parts = {m for other in one.nodes for used in self.walk.towards(other)
                 for m in memories(self.walk.values[used], lasting=True)} - self.grads  # fmt: skip
        self.grads |= parts
        self._send(one.grad_bytes, sum(memory.size_bytes for memory in parts), True)
        return {m for other in one.nodes for m in memories(self.walk.values[other])} & self.grads

    def _complete(self, name: str, memory: Memory) -> None:
        """The gradient of a parameter is whole."""
        if memory in self.grads and name not in self.apart and name not in self.in_rows:
            self.added_bytes += memory.size_bytes  # nothing gives it a gradient again
        for sent, missing in self.missing.items():
            missing.discard(name)
            if not missing and name in sent.names and (sent.each or self.sends):
                self._sum(sent)

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


def _key(node: fx.Node) -> Any:
    """A value; a parameter wherever it is read."""
    return str(node.target) if node.op == "get_attr" else node


def _size(found: Any) -> int:
    return found.form.size_bytes if isinstance(found, Value) else 0
