"""What gradients and weights take on a rank while they travel beside a stage's work: which do so together, and a rank's
memory while the operators of a stage run.

Read by what counts a plan's memory operator by operator (`cost.count`) and by what a table's rows say at other sizes
(`table_memory`): both make `Event`s, and `peaks` follows them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from autopart.ir.run.buckets import ALONE_BYTES, SUMS_UNDER_WAY, UNDER_WAY, bucketed, kinds


class Weight(NamedTuple):
    """A parameter. `part_bytes`: of what a rank stores; `whole_bytes`: of the whole, as it is read; `read`, `summed`:
    bytes that are read of it, and summed of its gradient, for each that is stored. `kind`: what those that travel
    together have alike. `in_order`: its whole is its parts one behind the other. `is_summed`: its gradient is summed
    over axes beside its parts'. `stays_whole`: it is stored in parts, and a method is given its whole gradient."""

    part_bytes: float
    whole_bytes: float
    read: float
    summed: float
    kind: tuple[Any, ...]
    in_order: bool
    is_summed: bool
    stays_whole: bool = False

    @property
    def sum_bytes(self) -> float:
        """Of the gradient of the whole, as it is summed."""
        return self.whole_bytes / self.read * self.summed


class Sent(NamedTuple):
    """A bucket of gradients. `flat_bytes`: copied together, while they are sent. `part_bytes`: of what becomes a rank's
    part. `gather_bytes`: what the wholes are received in, and sent from. `scatters`: the whole gradients are gone then.
    `each`: after every microbatch. `kept_bytes`: of the gradients of earlier microbatches, where these are added up in
    a higher precision. `most_under_way`: how many are sent at a time, with this one."""

    names: tuple[str, ...]
    flat_bytes: int
    part_bytes: int = 0
    gather_bytes: int = 0
    scatters: bool = False
    each: bool = False
    kept_bytes: int = 0
    most_under_way: int = UNDER_WAY


class Row(NamedTuple):
    """Weights that are gathered together. `received_bytes`: what they are received in, and sent from; `opening_bytes`:
    with the wholes that are made of it; `grad_bytes`: what their gradients are sent from. `first`: the node that reads
    them first, of a stage graph."""

    names: tuple[str, ...]
    first: Any
    whole_bytes: int
    received_bytes: int
    opening_bytes: int
    grad_bytes: int

    @staticmethod
    def of(weights: Mapping[str, Weight], first: Any = None) -> Row:
        members = list(weights.values())
        in_order = len(members) == 1 and members[0].in_order
        whole, flat = sum(one.whole_bytes for one in members), sum(one.sum_bytes for one in members)
        received = whole + _sent_copy(members)
        sizes = whole, received, received + (0 if in_order else whole), 0 if in_order and flat == whole else flat
        return Row(tuple(weights), first, *map(round, sizes))


def summed_buckets(weights: Mapping[str, Weight]) -> Iterator[Sent]:
    """Gradients that are summed once a step."""
    for bucket, members in _buckets(weights, {name: one.part_bytes for name, one in weights.items()}, ALONE_BYTES):
        size, summed = sum(one.part_bytes for one in members), members[0].summed
        is_copied = len(bucket) > 1 or summed != 1
        yield Sent(bucket, round(size * summed) if is_copied else 0, most_under_way=SUMS_UNDER_WAY)


def _buckets(
    weights: Mapping[str, Weight], sizes: Mapping[str, float], alone_bytes: float = math.inf
) -> Iterator[tuple[tuple[str, ...], list[Weight]]]:
    """What travels together of weights of so many bytes."""
    for names in kinds(list(weights), {name: one.kind for name, one in weights.items()}):
        for bucket in bucketed({name: round(sizes[name]) for name in names}, alone_bytes=alone_bytes):
            yield bucket, [weights[name] for name in bucket]


def scattered_buckets(weights: Mapping[str, Weight], zero: int, microbatches: int) -> Iterator[Sent]:
    """Gradients of weights that are held whole for a step, in the order of their use."""
    for bucket, members in _buckets(weights, {name: one.whole_bytes for name, one in weights.items()}):
        size, flat = sum(one.whole_bytes for one in members), sum(one.sum_bytes for one in members)
        alone = len(members) == 1 and members[0].in_order
        parts, received = sum(one.part_bytes for one in members), _sent_copy(members) + (0 if alone else size)
        if members[0].stays_whole:  # in the dtype of its parts
            own_dtype, copied = members[0].read == 1, flat if members[0].is_summed else 0
            grads = 0 if own_dtype else size / members[0].read
            yield Sent(bucket, round(copied), round(grads), round(received), not own_dtype)
            continue
        copied, is_kept = 0 if alone and flat == size else flat, zero == 1 and microbatches > 1 and flat != size
        yield Sent(bucket, round(copied), round(parts), round(received), True, zero == 2,
                   round(flat) if is_kept else 0)  # fmt: skip


def _sent_copy(weights: Sequence[Weight]) -> float:
    """What parts are sent from: their own memory, where it is one that is not cast."""
    is_copied = len(weights) > 1 or weights[0].read != 1
    return sum(one.part_bytes * one.read for one in weights) if is_copied else 0


class Event(NamedTuple):
    """`takes`: bytes more (or less). `needs`: so many beyond what is there, before other events; `peak`: the same now.
    `ahead`: what weights that are gathered ahead take from now on. `sends`: a copy of gradients, for `part` bytes of a
    rank's part of them. `gives`: the whole gradient of the parameter `name`, so many bytes where nothing gives it a
    gradient again."""

    kind: Literal["takes", "needs", "peak", "ahead", "sends", "gives"]
    size: float
    part: float = 0
    name: str = ""


@dataclass(frozen=True)
class Traffic:
    """Of a stage: its buckets of gradients, and the rows of weights in their order; of a stage graph `row_of`: the row
    that each node gathers."""

    sent: tuple[Sent, ...] = ()
    rows: tuple[Row, ...] = ()
    prefetch: int = 0
    row_of: Mapping[Any, int] = field(default_factory=dict)

    def gathers(self, row: int) -> Iterator[Event]:
        """The forward reads a row of weights: they are gathered, and those of the rows after begin to be."""
        yield Event("ahead", self._received_bytes(row + 1, row + self.prefetch))
        yield Event("peak", self.rows[row].opening_bytes)
        yield Event("ahead", self._received_bytes(row + 1, row + 1 + self.prefetch))

    def opens(self, row: int) -> Iterator[Event]:
        """The backward reads a row of weights: they are gathered, and those of the rows before begin to be."""
        first = row - self.prefetch
        yield Event("ahead", self._received_bytes(first + 1, row))
        yield Event("peak", self.rows[row].opening_bytes)
        yield Event("ahead", self._received_bytes(first, row))
        yield Event("takes", self.rows[row].whole_bytes)
        yield Event("peak", 0)

    def _received_bytes(self, start: int, stop: int) -> int:
        return sum(row.received_bytes for row in self.rows[max(0, start) : stop])


def received_bytes(stages: Iterable[Traffic]) -> int:
    """The most that wholes which live for a step are received in on a rank of these stages: one bucket is gathered
    while that before it arrives (`GATHERED_AHEAD` in runtime.state.wholes)."""
    return max(map(sum, pairwise([0, *(sent.gather_bytes for stage in stages for sent in stage.sent)])), default=0)


def forward_peak(steps: Sequence[Sequence[Event]]) -> float:
    """The most there is while the forward runs."""
    return _Running(0.0, Traffic(), {}, False, False, 1).run(steps)[0]


def backward_peaks(
    steps: Sequence[Sequence[Event]], kept: float, traffic: Traffic, whole: Mapping[str, float], microbatches: int
) -> tuple[float, float]:
    """The most that gradients and what is still kept take while the backward runs: the first of a step, and later
    ones. Gradients that are summed once a step are sent in the last.

    Args:
        kept: bytes, when it begins.
        whole: {parameter: bytes of it, as it is read}.
    """

    def peaks(sends: bool, is_later: bool = False) -> tuple[float, float]:
        return _Running(kept, traffic, whole, sends, is_later, microbatches).run(steps)

    if microbatches == 1 or not traffic.sent:
        return peaks(True)
    first, later = peaks(False)
    last = peaks(True, True)[1]
    return first, max(later if microbatches > 2 else 0, last)


class _Running:
    """A rank's memory during the forward or backward of a microbatch, in which the gradients of a step are sent, or
    not."""

    def __init__(
        self, kept: float, traffic: Traffic, whole: Mapping[str, float], sends: bool, is_later: bool, microbatches: int
    ):  # fmt: skip
        self.now = self.most = self.most_later = kept
        self.whole, self.sends = whole, sends
        self.added_bytes = self.ahead = 0.0
        # What is sent after every microbatch may be under way when the next backward begins.
        # Of each what it is sent from, and what it is received in if that is added to what is there.
        is_second = microbatches == 2  # where nothing is there to add it to
        self.flats = deque[tuple[float, float]](
            (sent.flat_bytes, 0 if is_second else sent.part_bytes)
            for sent in traffic.sent[:1] if sent.each and is_later)  # fmt: skip
        self.now += sum(map(sum, self.flats))
        self.sent = traffic.sent
        self.missing = [set(sent.names) for sent in traffic.sent]
        self.bucket_of = {name: number for number, sent in enumerate(traffic.sent) for name in sent.names}
        self.apart = {name for sent in traffic.sent if sent.scatters and (sent.each or sent.kept_bytes)
                      for name in sent.names}  # fmt: skip

    def run(self, steps: Sequence[Sequence[Event]]) -> tuple[float, float]:
        """The most bytes, all in all and without the gradients of weights that earlier microbatches have left."""
        needed = 0.0
        for events in steps:
            for kind, size, part, name in events:
                if kind == "takes":
                    self.now += size
                elif kind == "needs":
                    needed = max(needed, self.now + size)
                elif kind == "peak":
                    self._reach(max(needed, self.now + size))
                    needed = 0.0
                elif kind == "gives":
                    self._complete(name, size)
                elif kind == "ahead":
                    self.ahead = size
                else:
                    self._send(size, part, True, UNDER_WAY)
        return self.most, self.most_later

    def _reach(self, peak: float) -> None:
        peak += self.ahead
        self.most, self.most_later = max(self.most, peak), max(self.most_later, peak - self.added_bytes)

    def _complete(self, name: str, added_bytes: float) -> None:
        """The gradient of a parameter is whole."""
        if name not in self.apart:
            self.added_bytes += added_bytes
        if name in self.bucket_of:
            sent, missing = self.sent[self.bucket_of[name]], self.missing[self.bucket_of[name]]
            missing.discard(name)
            if not missing and (sent.each or self.sends):
                self._sum(sent)

    def _sum(self, sent: Sent) -> None:
        grads = sum(self.whole[name] for name in sent.names) if sent.scatters else 0
        before = grads if sent.kept_bytes else 0  # they are added to those of earlier microbatches
        self.now -= before
        self._send(sent.flat_bytes, sent.part_bytes, sent.each, sent.most_under_way)
        self.now -= grads - before + sent.kept_bytes

    def _send(self, flat_bytes: float, part_bytes: float, is_added: bool, most_under_way: int) -> None:
        """Gradients are copied together and sent, when of what was sent before enough has arrived. `is_added`: after
        the first microbatch what arrives is added to what is there."""
        if flat_bytes or part_bytes:
            while len(self.flats) >= most_under_way:
                flat, part = self.flats.popleft()
                self.now -= flat
                self.added_bytes += part
            self.flats.append((flat_bytes, part_bytes * is_added))
        self.now += flat_bytes + part_bytes
        self._reach(self.now)
