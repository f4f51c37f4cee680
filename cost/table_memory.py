"""The memory of every rank from a table's rows, at any setting: what is stored, what is kept for backwards, and how far
a forward or backward goes beyond that, with weights on their way and gradients as they come and go.

The same is counted value by value of a program that is written (`cost.count.peaks`, `cost.count.rank_memory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autopart.ir.actions import StageBytes, most_at_once, most_held
from autopart.ir.buckets import BUCKET_BYTES, block_runs, bucketed

from .dp_sync import remembered_bytes
from .rows import named_in

if TYPE_CHECKING:
    from .table import Priced

Order = Sequence[tuple[int, str, int]]
"""Operators as in `Table.order`."""


class Reads(NamedTuple):
    """Of a parameter among operators: its name in the table, the first and last operator that reads it, and whether
    these are run again in the backward; `kept`: whether their backward reads it; `uses`: how many give it a gradient,
    but for what gathers it."""

    known: str
    first: int
    last: int
    again: bool
    kept: bool
    uses: int


class TravelBucket(NamedTuple):
    """Parameters that travel together, from the first to the last operator that reads one. `whole_bytes`: of weights
    that are gathered, which `received_bytes` hold while they are, and `again` in the backward; `flat_bytes`: what their
    gradients are sent from; `part_bytes`: what a rank's parts of them are received in."""

    first: int
    last: int
    names: tuple[str, ...]
    whole_bytes: float
    received_bytes: float
    flat_bytes: float
    again: bool
    part_bytes: float = 0.0


class Beyond(NamedTuple):
    """How far operators go beyond what they keep, in bytes: as `StageBytes` has them."""

    forward: float
    backward: float
    first_backward: float


def rank_rows(priced: Priced) -> list[dict[str, Any]]:
    """What the rank at each `pp` coordinate holds, in bytes: rows as those of `Plan.memory`."""
    setting, table = priced.setting, priced.table
    posted = setting.schedule.microbatches if setting.receives_held is None else setting.receives_held
    posted *= priced.versions
    taken = _stages_bytes(priced)
    sent = [row["receives_bytes"] for row in priced.timing["stages"]] + [0.0]
    rows = []
    for held, order in zip(priced.ranks_hold, priced.orders, strict=True):
        stages = {i: taken[i] for i in sorted({action.stage for action in order})}
        most = most_held(order, {i: one.held for i, one in stages.items()}, {})
        gradients = sum(map(priced.gradient_bytes, held.values()))
        bucket = _tied_bucket_bytes(priced, held)
        whole = sum(map(priced.whole_bytes, held.values()))
        grown = sum(map(priced.grown_bytes, held.values()))
        row: dict[str, Any] = {
            "stages": list(stages),
            "parameters": priced.versions * sum(map(priced.local_bytes, held.values())),
            "gradients": gradients, "optimizer": gradients * (setting.state_bytes - 1),
            "buffers": table.buffer_bytes, "activations": most.size_bytes,
            "inputs": priced.versions * table.input_bytes * setting.rows * priced.times.s,
            "temporary": max(max(one.forward, one.backward) for one in stages.values()),
            "communication": posted * sum(sent[i] * (i - 1 not in stages) + sent[i + 1] * (i + 1 not in stages)
                                          for i in stages),
        }  # fmt: skip
        row["communication"] += sum(remembered_bytes(one, priced.data_ranks[0]) for one in priced.carried(held))
        lasting = sum(row[kind] for kind in ("parameters", "optimizer", "buffers", "inputs", "communication"))
        row["total"] = round(lasting + whole + max(most_at_once(order, stages, round(grown)), gradients + bucket))
        row["gathered"] = whole + grown - gradients
        row["communication"] += bucket
        rows.append(row | {"in_flight": [most.in_flight[i] for i in stages]})
    return rows


def _tied_bucket_bytes(priced: Priced, held: Mapping[str, str]) -> float:
    """The flat copy of gradients of tied parameters, which are summed when a step has ended; one alone is not copied,
    unless it is summed in another dtype."""
    tied = [known for name, known in held.items() if sum(name in names for names in priced.ranks_hold) > 1]
    shares = [priced.table.parameters[known].summed for known in tied]
    sizes = [priced.gradient_bytes(known) * share for known, share in zip(tied, shares, strict=True)]
    is_copied = len(sizes) > 1 or any(share != 1 for share in shares)
    return min(BUCKET_BYTES, sum(sizes)) if is_copied else 0.0


def _stages_bytes(priced: Priced) -> list[StageBytes]:
    """What a microbatch of every stage takes: a stage holds what it sends too where none of its operators keeps it, and
    what it receives lies where it was received."""
    rows, positions, times = priced.table.rows, priced.table.positions, priced.times
    starts = [rows[positions[stage.start]] for stage in priced.stages[1:]]
    unkept = [*(float(row.unkept.at(times)) for row in starts), 0.0]
    received = [0.0, *(float(row.kept_later.at(times)) for row in starts)]
    stages = []
    for i, stage in enumerate(priced.stages):
        order = [priced.table.order[j] for j in stage]
        beyond = beyond_kept(priced, order)
        gathered = priced.crossings[i].gathered_bytes(priced.mesh, priced.scatters)
        kept = float(priced.kept[positions[stage.start : stage.stop]].sum())
        gradients = sum(priced.grown_bytes(one.known) for one in reads_of(priced, order).values())
        held = max(0.0, kept - received[i]) + unkept[i] + gathered
        sizes = (held, 0.0, *beyond, gradients)
        stages.append(StageBytes(*map(round, sizes)))
    return stages


def reads_of(priced: Priced, order: Order) -> dict[str, Reads]:
    """The parameters that operators read, in the order of their first use."""
    reads, gathers = dict[str, Reads](), priced.table.gathers
    for i, (position, path, number) in enumerate(order):
        row = priced.table.rows[position]
        for known in (*row.parameters, *row.reads_also):
            name, again = named_in(known, path, number), "recompute" in row.works
            kept = "input_backward" in row.works if gathers else priced.table.parameters[known].trained
            before = reads.get(name)
            kept = kept or (before is not None and before.kept)
            is_use = "weight_backward" in row.works and known in (row.reads_also if gathers else row.parameters)
            uses = is_use + (before.uses if before is not None else 0)
            reads[name] = Reads(known, i if before is None else before.first, i, again, kept, uses)
    return reads


def beyond_kept(priced: Priced, order: Order, others_beside: bool = False) -> Beyond:
    """How far operators, which follow each other on a rank, go beyond what they keep: at each operator those after it
    keep nothing, and have made the gradients of the weights that they read.

    Args:
        others_beside: there are others like them before and after, whose weights are gathered ahead.
    """
    if not order:
        return Beyond(0.0, 0.0, 0.0)
    positions, reads = np.array([position for position, _, _ in order]), reads_of(priced, order)
    kept = np.cumsum(priced.kept[positions])
    forward, backward = kept + priced.in_forward[positions], kept + priced.in_backward[positions]
    gathers, sums = _buckets(priced, reads)
    on_the_way, opening = _weights(priced, gathers, len(order), others_beside)
    backward = backward + on_the_way[1]
    grown, added = np.zeros(len(order)), np.zeros(len(order))  # gradients that stay, and those that are added to others
    scattered = {name: bucket.first for bucket in gathers for name in bucket.names}
    for name, one in reads.items():
        grown[: scattered.get(name, one.last) + 1] += priced.grown_bytes(one.known)
        if name not in scattered:
            added[one.first : one.last + 1] += priced.grown_bytes(one.known)
            continue
        if priced.setting.zero == 3:
            forward[scattered[name] : one.last + 1] += priced.read_bytes(one.known)
        if priced.table.parameters[one.known].trained:
            backward[scattered[name] : one.last + 1] += priced.read_bytes(one.known)  # its whole gradient
            if one.uses > 1:  # and the sum of two of them
                backward[one.first] += priced.read_bytes(one.known)
    once = priced.setting.schedule.microbatches == 1
    first = _flats([*gathers, *sums] if once else gathers, len(order))
    # After the first microbatch of a step parts are received beside those that are there.
    later = np.maximum(_flats(gathers, len(order), True), _flats([*gathers, *sums], len(order), True))
    if priced.setting.zero == 2 and not once and gathers:  # from the microbatch before
        later[max(bucket.first for bucket in gathers) :] += min(gathers).flat_bytes
    peaks = (
        np.maximum(forward + on_the_way[0], kept + opening[0]).max(),
        (np.maximum(backward + later, kept + opening[1]) + added).max(),
        (np.maximum(backward + first, kept + opening[1]) + grown).max(),
    )
    return Beyond(*(max(0.0, float(peak - kept[-1])) for peak in peaks))


def _buckets(priced: Priced, reads: Mapping[str, Reads]) -> tuple[list[TravelBucket], list[TravelBucket]]:
    """What is gathered and scattered together, and what is summed together once a step, in order."""
    setting, parameters, mesh = priced.setting, priced.table.parameters, priced.mesh
    cut = {name: one for name, one in reads.items() if setting.zero > 1 and priced.is_cut(one.known)}
    gathers, sums = [], []
    for names in _gathered_together(cut):
        found = [cut[name] for name in names]
        whole = sum(priced.read_bytes(one.known) for one in found)
        part = sum(priced.local_bytes(one.known) * parameters[one.known].read for one in found)
        flat = sum(priced.summed_bytes(one.known) for one in found)
        gathered = whole if setting.zero == 3 else 0.0
        received = (whole + part * (len(found) > 1)) * (setting.zero == 3)
        again = setting.zero == 3 and any(one.kept for one in found)
        parts = sum(priced.grown_bytes(one.known) for one in found)
        gathers.append(TravelBucket(*_ends(found), names, gathered, received, flat, again, parts))
    several = {known for known, parameter in parameters.items()
               if parameter.trained
               and any(mesh.size(axis) > 1 for axis in parameter.axes if axis not in priced.apart(known))}  # fmt: skip
    summed = {name: one for name, one in reads.items() if name not in cut and one.known in several}
    for names in bucketed({name: round(priced.grown_bytes(one.known)) for name, one in summed.items()}):
        found = [summed[name] for name in names]
        flat = sum(priced.grown_bytes(one.known) * parameters[one.known].summed for one in found)
        is_copied = len(found) > 1 or parameters[found[0].known].summed != 1
        sums.append(TravelBucket(*_ends(found), names, 0.0, 0.0, flat * is_copied, False))
    return gathers, sums


def _gathered_together(cut: Mapping[str, Reads]) -> list[tuple[str, ...]]:
    """Parameters that are gathered in one collective, as in `ir.storing`: consecutive ones of a block, apart those that
    are read again."""
    rows: dict[tuple[int, bool], list[str]] = {}
    for (name, one), number in zip(cut.items(), block_runs(cut), strict=True):
        rows.setdefault((number, one.again), []).append(name)
    return sorted(map(tuple, rows.values()), key=lambda names: cut[names[0]].first)


def _ends(found: Iterable[Reads]) -> tuple[int, int]:
    reads = list(found)
    return min(one.first for one in reads), max(one.last for one in reads)


def _weights(
    priced: Priced, gathers: Sequence[TravelBucket], count: int, others_beside: bool
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Of weights: what is gathered ahead while the forward of each operator runs, that and what is gathered whole while
    its backward does; and what there is right before its forward and its backward, while they are gathered."""
    forward, backward, before, again = (np.zeros(count) for _ in range(4))
    prefetch = priced.setting.prefetch
    for i, one in enumerate(gathers):
        later, earlier = gathers[i + 1 : i + 1 + prefetch], gathers[max(0, i - prefetch) : i]
        ahead, behind = (sum(bucket.received_bytes for bucket in buckets) for buckets in (later, earlier))
        if others_beside and prefetch:
            ahead, behind = ahead or one.received_bytes, behind or one.received_bytes
        until = gathers[i + 1].first if i + 1 < len(gathers) else count
        forward[one.first : until] += ahead
        if one.again:
            backward[one.first : one.last + 1] += one.whole_bytes
            until = max((bucket.last + 1 for bucket in gathers if bucket.again and bucket.last < one.last), default=0)
            backward[until : one.last + 1] += behind
            on_the_way = sum(bucket.received_bytes for bucket in earlier[1:])
            again[one.last] = one.whole_bytes + one.received_bytes + on_the_way
        before[one.first] = one.whole_bytes + one.received_bytes + ahead
    return (forward, backward), (before, again)


def _flats(buckets: Sequence[TravelBucket], count: int, with_parts: bool = False) -> np.ndarray:
    """What gradients are sent from while the backward of each operator runs: of the last bucket that was complete, and
    of the one before where another is. What was gathered is gone when its gradients are sent."""
    flats = np.zeros(count)
    ordered = sorted(buckets, key=lambda bucket: -bucket.first)
    for bucket, next_first in zip(ordered, [*(bucket.first for bucket in ordered[1:]), 0], strict=False):
        size = bucket.flat_bytes + bucket.part_bytes * with_parts
        flats[next_first : bucket.first] += size
        if not bucket.again:
            flats[bucket.first] = max(flats[bucket.first], size)
    return flats
