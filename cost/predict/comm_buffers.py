"""Memory of communication that overlaps with compute: gradient buckets and weight all-gathers.

`table_memory` lists the changes of a stage's memory, in time order, as `MemoryEvent`s. `backward_peaks` and
`forward_peak` add up these changes and return the peak.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from autopart.ir.run.buckets import ALONE_BYTES, SHARD_BUCKETS_IN_FLIGHT, SUM_BUCKETS_IN_FLIGHT, bucketed, kinds


class CommParameter(NamedTuple):
    """Sizes of a parameter that a rank gathers or whose gradient it reduces, in bytes.

    Args:
        part_bytes: the shard that a rank stores.
        whole_bytes: the full parameter, in the compute dtype.
        read: element size of the compute dtype, divided by that of the stored dtype.
        summed: element size of the dtype in which its gradient is reduced, divided by that of the stored dtype.
        kind: grouping key. Only parameters with equal keys share a bucket.
        in_order: True if the full parameter is its shards concatenated.
        is_summed: True if a collective reduces its gradient over at least one axis.
        keeps_full_gradient: True if it is sharded and a data-parallel method receives its unsharded gradient.
    """

    part_bytes: float
    whole_bytes: float
    read: float
    summed: float
    kind: tuple[Any, ...]
    in_order: bool
    is_summed: bool
    keeps_full_gradient: bool = False

    @property
    def sum_bytes(self) -> float:
        """Bytes of the full gradient in the reduction dtype."""
        return self.whole_bytes / self.read * self.summed


class GradientBucket(NamedTuple):
    """A bucket of gradients that are reduced together. Sizes are in bytes.

    Args:
        names: the parameters.
        flat_bytes: the flat buffer that is reduced; 0 if gradients are reduced in place.
        part_bytes: the result of the reduction: this rank's shards of the gradients.
        gather_bytes: buffers of the all-gather that unshards the parameters once a step.
        scatters: True if the unsharded gradients are freed after the reduction.
        each: True if the bucket is reduced after every microbatch, False if once a step.
        kept_bytes: the accumulated gradients, if they are accumulated in a higher precision.
        max_in_flight: maximum number of buckets whose reductions run at the same time.
    """

    names: tuple[str, ...]
    flat_bytes: int
    part_bytes: int = 0
    gather_bytes: int = 0
    scatters: bool = False
    each: bool = False
    kept_bytes: int = 0
    max_in_flight: int = SHARD_BUCKETS_IN_FLIGHT


class WeightGroup(NamedTuple):
    """Weights that one all-gather unshards. Sizes are in bytes.

    Args:
        names: the parameters.
        whole_bytes: the unsharded weights.
        received_bytes: input and output buffer of the all-gather.
        opening_bytes: these two buffers, and the unsharded weights if they are copied out of the output buffer.
        grad_bytes: the buffer from which the gradients are reduce-scattered.
    """

    names: tuple[str, ...]
    whole_bytes: int
    received_bytes: int
    opening_bytes: int
    grad_bytes: int

    @staticmethod
    def of(weights: Mapping[str, CommParameter]) -> WeightGroup:
        members = list(weights.values())
        in_order = len(members) == 1 and members[0].in_order
        whole, flat = sum(one.whole_bytes for one in members), sum(one.sum_bytes for one in members)
        received = whole + _sent_copy(members)
        sizes = whole, received, received + (0 if in_order else whole), 0 if in_order and flat == whole else flat
        return WeightGroup(tuple(weights), *map(round, sizes))


def reduce_buckets(weights: Mapping[str, CommParameter]) -> Iterator[GradientBucket]:
    """Yield the buckets of gradients that are all-reduced once a step."""
    for bucket, members in _buckets(weights, {name: one.part_bytes for name, one in weights.items()}, ALONE_BYTES):
        size, summed = sum(one.part_bytes for one in members), members[0].summed
        is_copied = len(bucket) > 1 or summed != 1
        yield GradientBucket(bucket, round(size * summed) if is_copied else 0, max_in_flight=SUM_BUCKETS_IN_FLIGHT)


def _buckets(
    weights: Mapping[str, CommParameter], sizes: Mapping[str, float], alone_bytes: float = math.inf
) -> Iterator[tuple[tuple[str, ...], list[CommParameter]]]:
    """Yield (names, parameters) of each bucket of weights.

    Args:
        sizes: {name: bytes}, in the order of use.
        alone_bytes: a weight of at least this size has its own bucket.
    """
    for names in kinds(list(weights), {name: one.kind for name, one in weights.items()}):
        for bucket in bucketed({name: round(sizes[name]) for name in names}, alone_bytes=alone_bytes):
            yield bucket, [weights[name] for name in bucket]


def reduce_scatter_buckets(
    weights: Mapping[str, CommParameter], zero: int, microbatches: int
) -> Iterator[GradientBucket]:
    """Yield the gradient buckets of weights that ZeRO 1 or 2 keeps unsharded for a step.

    Args:
        zero: ZeRO stage, 1 or 2.
    """
    for bucket, members in _buckets(weights, {name: one.whole_bytes for name, one in weights.items()}):
        size, flat = sum(one.whole_bytes for one in members), sum(one.sum_bytes for one in members)
        alone = len(members) == 1 and members[0].in_order
        parts, received = sum(one.part_bytes for one in members), _sent_copy(members) + (0 if alone else size)
        if members[0].keeps_full_gradient:  # the gradients have the dtype of the shards
            own_dtype, copied = members[0].read == 1, flat if members[0].is_summed else 0
            grads = 0 if own_dtype else size / members[0].read
            yield GradientBucket(bucket, round(copied), round(grads), round(received), not own_dtype)
            continue
        copied, is_kept = 0 if alone and flat == size else flat, zero == 1 and microbatches > 1 and flat != size
        yield GradientBucket(bucket, round(copied), round(parts), round(received), True, zero == 2,
                   round(flat) if is_kept else 0)  # fmt: skip


def _sent_copy(weights: Sequence[CommParameter]) -> float:
    """Return the bytes of the input buffer of an all-gather of these weights.

    The all-gather of a single shard that is not cast needs no input buffer: it sends the shard itself.
    """
    is_copied = len(weights) > 1 or weights[0].read != 1
    return sum(one.part_bytes * one.read for one in weights) if is_copied else 0


class MemoryEvent(NamedTuple):
    """One change of a rank's memory during forward or backward. Sizes are in bytes.

    Kinds of changes:

    - "takes": `size` bytes are allocated, or freed if `size` is negative.
    - "peak": `size` bytes more than the current memory are in use for a moment. This changes only the peak.
    - "ahead": prefetched weights have `size` bytes from now on.
    - "sends": a reduce-scatter of gradients starts. Its flat buffer has `size` bytes, and its result (this rank's
      shards) has `part` bytes.
    - "gives": the gradient of the parameter `name`, of `size` bytes, is complete. If an earlier microbatch has computed
      a gradient, the new one is added to it and freed.
    """

    kind: Literal["takes", "peak", "ahead", "sends", "gives"]
    size: float
    part: float = 0
    name: str = ""


@dataclass(frozen=True)
class StageCommBuffers:
    """Collectives of a stage that overlap with its compute, and their buffers.

    Args:
        sent: the buckets of gradients that the stage reduces.
        rows: the groups of weights that it gathers, in the order of their use.
        prefetch: number of groups that it gathers ahead of their use.
    """

    sent: tuple[GradientBucket, ...] = ()
    rows: tuple[WeightGroup, ...] = ()
    prefetch: int = 0

    def gathers(self, row: int) -> Iterator[MemoryEvent]:
        """Yield the memory events of the all-gather of a group of parameters in forward.

        The next groups are prefetched.

        Args:
            row: index of the group in `rows`.
        """
        yield MemoryEvent("ahead", self._received_bytes(row + 1, row + self.prefetch))
        yield MemoryEvent("peak", self.rows[row].opening_bytes)
        yield MemoryEvent("ahead", self._received_bytes(row + 1, row + 1 + self.prefetch))

    def opens(self, row: int) -> Iterator[MemoryEvent]:
        """Yield the memory events of a group's all-gather in backward, and of the prefetch of earlier groups.

        Args:
            row: index of the group in `rows`.
        """
        first = row - self.prefetch
        yield MemoryEvent("ahead", self._received_bytes(first + 1, row))
        yield MemoryEvent("peak", self.rows[row].opening_bytes)
        yield MemoryEvent("ahead", self._received_bytes(first, row))
        yield MemoryEvent("takes", self.rows[row].whole_bytes)
        yield MemoryEvent("peak", 0)

    def _received_bytes(self, start: int, stop: int) -> int:
        return sum(row.received_bytes for row in self.rows[max(0, start) : stop])


def received_bytes(stages: Iterable[StageCommBuffers]) -> int:
    """Return a rank's peak bytes of all-gather buffers, for parameters that stay unsharded for a step.

    The runtime starts the all-gather of a bucket before the all-gather of the previous bucket has ended
    (`NUM_PREFETCHED`). The peak is therefore the largest sum of two consecutive buckets.

    Args:
        stages: the stages that the rank runs.
    """
    return max(map(sum, pairwise([0, *(sent.gather_bytes for stage in stages for sent in stage.sent)])), default=0)


def forward_peak(events: Sequence[MemoryEvent]) -> float:
    """Return the peak bytes of a forward. `events` are the changes of memory while it runs."""
    return _MemoryTracker(StageCommBuffers(), {}, False, False, 1).run(events)[0]


def backward_peaks(
    events: Sequence[MemoryEvent], traffic: StageCommBuffers, whole: Mapping[str, float], microbatches: int
) -> tuple[float, float]:  # fmt: skip
    """Return the peak bytes of a step's first backward, and of its later backwards.

    The bytes are those of gradients and saved tensors. Gradients that are reduced once a step are reduced during the
    last backward.

    Args:
        events: the changes of memory while a backward runs.
        traffic: collectives that overlap with the backward.
        whole: {parameter: its bytes in the compute dtype}.
        microbatches: number of microbatches of a step.
    """

    def peaks(sends: bool, is_later: bool = False) -> tuple[float, float]:
        return _MemoryTracker(traffic, whole, sends, is_later, microbatches).run(events)

    if microbatches == 1 or not traffic.sent:
        return peaks(True)
    first, later = peaks(False)
    last = peaks(True, True)[1]
    return first, max(later if microbatches > 2 else 0, last)


class _MemoryTracker:
    """Memory of a rank during the forward or backward of one microbatch, updated event by event.

    Args:
        whole: {parameter: bytes of it in the compute dtype}.
        sends: True in the last backward of a step, which reduces the gradients that are reduced once a step.
        is_later: True if the backward of an earlier microbatch of the step has run.
    """

    def __init__(
        self, traffic: StageCommBuffers, whole: Mapping[str, float], sends: bool, is_later: bool, microbatches: int
    ):
        self.now = self.most = self.most_later = 0.0
        self.whole, self.sends = whole, sends
        self.added_bytes = self.ahead = 0.0
        # A bucket that is reduced after every microbatch may be in flight when the next backward begins.
        # (flat buffer, receive buffer if the result is added to accumulated gradients) of each bucket in flight.
        is_second = microbatches == 2  # no accumulated gradient exists yet
        self.flats = deque[tuple[float, float]](
            (sent.flat_bytes, 0 if is_second else sent.part_bytes)
            for sent in traffic.sent[:1] if sent.each and is_later)  # fmt: skip
        self.now += sum(map(sum, self.flats))
        self.sent = traffic.sent
        self.missing = [set(sent.names) for sent in traffic.sent]
        self.bucket_of = {name: number for number, sent in enumerate(traffic.sent) for name in sent.names}
        self.apart = {name for sent in traffic.sent if sent.scatters and (sent.each or sent.kept_bytes)
                      for name in sent.names}  # fmt: skip

    def run(self, events: Sequence[MemoryEvent]) -> tuple[float, float]:
        """Process the events, and return two peaks: as a step's first backward, and as a later backward.

        A later backward frees each weight gradient after adding it to the accumulated gradient. Gradients that earlier
        backwards accumulated are not included.
        """
        for kind, size, part, name in events:
            if kind == "takes":
                self.now += size
            elif kind == "peak":
                self._reach(self.now + size)
            elif kind == "gives":
                self._complete(name, size)
            elif kind == "ahead":
                self.ahead = size
            else:
                self._send(size, part, True, SHARD_BUCKETS_IN_FLIGHT)
        return self.most, self.most_later

    def _reach(self, peak: float) -> None:
        peak += self.ahead
        self.most, self.most_later = max(self.most, peak), max(self.most_later, peak - self.added_bytes)

    def _complete(self, name: str, added_bytes: float) -> None:
        if name not in self.apart:
            self.added_bytes += added_bytes
        if name in self.bucket_of:
            sent, missing = self.sent[self.bucket_of[name]], self.missing[self.bucket_of[name]]
            missing.discard(name)
            if not missing and (sent.each or self.sends):
                self._sum(sent)

    def _sum(self, sent: GradientBucket) -> None:
        grads = sum(self.whole[name] for name in sent.names) if sent.scatters else 0
        before = grads if sent.kept_bytes else 0  # the results are added to accumulated gradients
        self.now -= before
        self._send(sent.flat_bytes, sent.part_bytes, sent.each, sent.max_in_flight)
        self.now -= grads - before + sent.kept_bytes

    def _send(self, flat_bytes: float, part_bytes: float, is_added: bool, max_in_flight: int) -> None:
        """Copy gradients into a flat buffer and start their reduction.

        If `max_in_flight` reductions run already, the rank first waits for the earliest of these reductions.

        Args:
            flat_bytes: bytes of the flat buffer.
            part_bytes: bytes of the reduction's result.
            is_added: True if later microbatches add the result to the accumulated gradients.
        """
        if flat_bytes or part_bytes:
            while len(self.flats) >= max_in_flight:
                flat, part = self.flats.popleft()
                self.now -= flat
                self.added_bytes += part
            self.flats.append((flat_bytes, part_bytes * is_added))
        self.now += flat_bytes + part_bytes
        self._reach(self.now)
