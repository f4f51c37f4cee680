"""The memory of every rank from a table's rows, at any setting: what is stored, what is kept for backwards, and how far
a forward or backward goes beyond that, with weights on their way and gradients as they come and go.

The same is counted value by value of a program that is written (`cost.count.peaks`, `cost.count.rank_memory`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autopart.ir.actions import StageBytes, most_at_once, most_held
from autopart.ir.buckets import BUCKET_BYTES, block_runs

from .dp_sync import remembered_bytes
from .rows import named_in
from .traffic import (
    Event,
    Row,
    Traffic,
    Weight,
    backward_peaks,
    forward_peak,
    received_bytes,
    scattered_buckets,
    summed_buckets,
)

if TYPE_CHECKING:
    from .table import Priced

Order = Sequence[tuple[int, str, int]]
"""Operators as in `Table.order`."""


class Reads(NamedTuple):
    """Of a parameter among operators: its name in the table, the first and last operator that reads it, and whether
    these are run again in the backward; `kept`: whether their backward reads it."""

    known: str
    first: int
    last: int
    again: bool
    kept: bool


class Levels(NamedTuple):
    """What is there beside weights and their gradients in bytes, by operator in the order in which they run: `runs`:
    while it does, and when all have; `kept`: what it and those before it in the forward keep."""

    runs: list[float]
    kept: list[float]


class Beyond(NamedTuple):
    """How far operators go beyond what they keep, in bytes: as `StageBytes` has them, with the gradients of their
    weights. `traffic`: what is sent beside them."""

    forward: float
    backward: float
    first_backward: float
    gradients: float
    traffic: Traffic


def rank_rows(priced: Priced) -> list[dict[str, Any]]:
    """What the rank at each `pp` coordinate holds, in bytes: rows as those of `Plan.memory`."""
    setting, table = priced.setting, priced.table
    posted = setting.schedule.microbatches if setting.receives_held is None else setting.receives_held
    posted *= priced.versions
    beyond = [beyond_kept(priced, [table.order[i] for i in stage]) for stage in priced.stages]
    taken = _stages_bytes(priced, beyond)
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
        received = received_bytes(beyond[i].traffic for i in stages)
        passing = max(most_at_once(order, stages, round(grown)), received, gradients + bucket)
        row["total"] = round(lasting + whole + passing)
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


def _stages_bytes(priced: Priced, beyond: Sequence[Beyond]) -> list[StageBytes]:
    """What a microbatch of every stage takes: a stage holds what it sends too where none of its operators keeps it, and
    what it receives lies where it was received."""
    rows, positions, times = priced.table.rows, priced.table.positions, priced.times
    starts = [rows[positions[stage.start]] for stage in priced.stages[1:]]
    unkept = [*(float(row.unkept.at(times)) for row in starts), 0.0]
    received = [0.0, *(float(row.kept_later.at(times)) for row in starts)]
    stages = []
    for i, stage in enumerate(priced.stages):
        gathered = priced.crossings[i].gathered_bytes(priced.mesh, priced.scatters)
        kept = float(priced.kept[positions[stage.start : stage.stop]].sum())
        held = max(0.0, kept - received[i]) + unkept[i] + gathered
        sizes = (held, 0.0, *beyond[i][:4])
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
            reads[name] = Reads(known, i if before is None else before.first, i, again, kept)
    return reads


def beyond_kept(priced: Priced, order: Order, others_beside: bool = False) -> Beyond:
    """How far operators, which follow each other on a rank, go beyond what they keep: at each operator those after it
    keep nothing, and have made the gradients of the weights that they read.

    Args:
        others_beside: there are others like them before and after, whose weights are gathered ahead.
    """
    if not order:
        return Beyond(0.0, 0.0, 0.0, 0.0, Traffic((), (), 0))
    positions, reads = np.array([position for position, _, _ in order]), reads_of(priced, order)
    kept = np.cumsum(priced.kept[positions])
    traffic, beside = traffic_at(priced, reads), priced.setting.prefetch if others_beside else 0
    if beside and traffic.rows:
        rows = (traffic.rows[:1] * beside, traffic.rows, traffic.rows[-1:] * beside)
        traffic = replace(traffic, rows=sum(rows, ()))
    left = priced.crossing(priced.table.rows[positions[0]]).whole
    in_forward = Levels([*(kept + priced.in_forward[positions]).tolist(), 0.0], kept.tolist())
    in_backward = Levels([*(kept + priced.in_backward[positions])[::-1].tolist(), left], kept[::-1].tolist())
    whole = {name: _gradient_bytes(priced, one.known) for name, one in reads.items()}
    steps = [_backward(priced, reads, traffic, beside, in_backward)]
    first, later = backward_peaks(steps, 0.0, traffic, whole, priced.setting.schedule.microbatches)
    forward = forward_peak(_forward(priced, reads, traffic, beside, in_forward))
    beyond = [max(0.0, most - float(kept[-1])) for most in (forward, later, first)]
    gradients = sum(priced.grown_bytes(one.known) for one in reads.values())
    return Beyond(beyond[0], beyond[1], beyond[2], gradients, traffic)


def _forward(priced: Priced, reads: Mapping[str, Reads], traffic: Traffic, beside: int, levels: Levels) -> list[Event]:
    """Weights that are gathered for the operators that read them."""
    begins, ends = _Events(), _Events()
    for row in range(beside, len(traffic.rows) - beside):
        found = [reads[name] for name in traffic.rows[row].names]
        (needed, ahead), first = traffic.opening_bytes(row), min(one.first for one in found)
        begins[first] += (Event("ahead", 0), Event("peak", needed), Event("ahead", ahead))
        for one in found:
            begins[first].append(Event("takes", priced.read_bytes(one.known)))
            ends[one.last].append(Event("takes", -priced.read_bytes(one.known)))
    return _steps(levels, begins, ends)


def _backward(priced: Priced, reads: Mapping[str, Reads], traffic: Traffic, beside: int, levels: Levels) -> list[Event]:
    """Gradients of weights, and weights that are gathered again, from the last operator on."""
    begins, ends, last = _Events(), _Events(), len(levels.kept) - 1
    trained = {name: one for name, one in reads.items() if priced.table.parameters[one.known].trained}
    for one in trained.values():
        begins[last - one.last].append(Event("takes", _gradient_bytes(priced, one.known)))
    for row in range(beside, len(traffic.rows) - beside):
        names = traffic.rows[row].names
        begin, end = (last - index for index in (max(reads[n].last for n in names), min(reads[n].first for n in names)))
        grads = [trained.pop(name).known for name in names if name in trained]
        if any(reads[name].kept for name in names):
            begins[begin] += traffic.opens(row)
            ends[end].append(Event("opens", -traffic.rows[row].whole_bytes))
        if grads:
            parts = sum(map(priced.gradient_bytes, grads))
            ends[end].append(Event("sends", traffic.rows[row].grad_bytes, parts))
            ends[end].append(Event("takes", -sum(_gradient_bytes(priced, known) for known in grads)))
    for name, one in trained.items():
        ends[last - one.first].append(Event("gives", _gradient_bytes(priced, one.known), name=name))
    return _steps(levels, begins, ends)


def _gradient_bytes(priced: Priced, known: str) -> float:
    """Of a gradient while it comes into being: of what is read of the parameter."""
    return priced.read_bytes(known) if priced.is_cut(known) else priced.local_bytes(known)


_Events = partial(defaultdict[int, list[Event]], list)


def _steps(levels: Levels, begins: Mapping[int, list[Event]], ends: Mapping[int, list[Event]]) -> list[Event]:
    """What happens before operators, when what is kept is there, and after them, when there is no more than in them and
    in the next."""
    events, start, runs = list[Event](), 0, levels.runs
    for i in sorted({*begins, *ends}):
        if start < i:
            events.append(Event("peak", max(runs[start:i])))
        after = min(runs[i], runs[i + 1])
        events += (Event("takes", levels.kept[i]), *begins.get(i, ()), Event("takes", -levels.kept[i]))
        events.append(Event("peak", runs[i]))
        events += (Event("takes", after), *ends.get(i, ()), Event("takes", -after))
        start = i + 1
    events.append(Event("peak", max(runs[start:])))
    return events


def traffic_at(priced: Priced, reads: Mapping[str, Reads]) -> Traffic:
    """What is sent beside operators: which parameters are gathered, and gradients summed, together."""
    setting, mesh, parameters = priced.setting, priced.mesh, priced.table.parameters
    summed, scattered, gathered = dict[str, Weight](), dict[str, Weight](), dict[str, Weight]()
    for name, one in reads.items():
        parameter, is_cut = parameters[one.known], priced.is_cut(one.known)
        axes = tuple(axis for axis in parameter.axes if mesh.size(axis) > 1) if parameter.trained else ()
        weight = Weight(priced.local_bytes(one.known), priced.read_bytes(one.known), parameter.read, parameter.summed,
                        (axes, parameter.over if is_cut else ()), True)  # fmt: skip
        if is_cut and setting.zero == 3:
            gathered[name] = weight
        elif parameter.trained and (axes or is_cut):
            (scattered if is_cut else summed)[name] = weight
    rows = [Row.of({name: gathered[name] for name in names}) for names in _gathered_together(gathered, reads)]
    sent = *summed_buckets(summed), *scattered_buckets(scattered, setting.zero, setting.schedule.microbatches)
    return Traffic(sent, tuple(rows), setting.prefetch)


def _gathered_together(gathered: Mapping[str, Weight], reads: Mapping[str, Reads]) -> list[list[str]]:
    """Parameters that are gathered in one collective, as in `ir.storing`: consecutive ones of a block and kind, apart
    those that are read again."""
    rows: dict[Any, list[str]] = {}
    for (name, one), number in zip(gathered.items(), block_runs(gathered), strict=True):
        rows.setdefault((number, reads[name].again, one.kind), []).append(name)
    return sorted(rows.values(), key=lambda names: reads[names[0]].first)
