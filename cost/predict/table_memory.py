"""Memory of every rank from a table's rows, at any setting: persistent state, saved tensors and peaks.

The peaks include in-flight weights and gradients. `cost.count.memory_peaks` and `cost.count.rank_memory` count
the same of a lowered program, value by value. Both use `comm_buffers.py` for communication.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autopart.cost.predict.comm_buffers import (
    CommParameter,
    MemoryEvent,
    StageCommBuffers,
    WeightGroup,
    backward_peaks,
    forward_peak,
    received_bytes,
    reduce_buckets,
    reduce_scatter_buckets,
)
from autopart.cost.predict.table_rows import named_in
from autopart.ir.run.buckets import BUCKET_BYTES, block_runs
from autopart.ir.run.schedule_actions import StageBytes, peak_activations, peak_stage_bytes

if TYPE_CHECKING:
    from autopart.cost.predict.table import TableCost

Order = Sequence[tuple[int, str, int]]
"""Operators as in `Table.order`."""


class ParameterUses(NamedTuple):
    """Positions in the operator list at which a parameter is used.

    Args:
        known: its name in the cost table (`Table.parameters`).
        first, last: index of the first and last operator that reads it.
        again: True if the operators are recomputed in backward.
        kept: True if their backward uses it.
        trained: True if it gets a gradient.
    """

    known: str
    first: int
    last: int
    again: bool
    kept: bool
    trained: bool


def rank_rows(priced: TableCost) -> list[dict[str, Any]]:
    """Return the memory of the rank at each `pp` coordinate in bytes, as rows of `Plan.memory`."""
    setting, table = priced.setting, priced.table
    posted = setting.schedule.microbatches if setting.receives_held is None else setting.receives_held
    posted *= priced.versions
    taken, traffic = _stages_bytes(priced)
    sent = [row["receives_bytes"] for row in priced.timing["stages"]] + [0.0]
    rows = []
    for held, order in zip(priced.ranks_hold, priced.orders, strict=True):
        stages = {i: taken[i] for i in sorted({action.stage for action in order})}
        most = peak_activations(order, {i: one.held for i, one in stages.items()}, {})
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
        row["communication"] += sum(one.method.state_bytes(one, priced.data_ranks[0]) for one in priced.carried(held))
        lasting = sum(row[kind] for kind in ("parameters", "optimizer", "buffers", "inputs", "communication"))
        received = received_bytes(traffic[i] for i in stages)
        passing = max(peak_stage_bytes(order, stages, round(grown)), received, gradients + bucket)
        row["total"] = round(lasting + whole + passing)
        row["gathered"] = whole + grown - gradients
        row["communication"] += bucket
        rows.append(row | {"in_flight": [most.in_flight[i] for i in stages]})
    return rows


def _tied_bucket_bytes(priced: TableCost, held: Mapping[str, str]) -> float:
    """Return the bytes of the flat copy of tied parameters' gradients, reduced at the end of a step.

    A single gradient is not copied, unless it is reduced in another dtype.
    """
    tied = [known for name, known in held.items() if sum(name in names for names in priced.ranks_hold) > 1]
    shares = [priced.table.parameters[known].summed for known in tied]
    sizes = [priced.gradient_bytes(known) * share for known, share in zip(tied, shares, strict=True)]
    is_copied = len(sizes) > 1 or any(share != 1 for share in shares)
    return min(BUCKET_BYTES, sum(sizes)) if is_copied else 0.0


def _stages_bytes(priced: TableCost) -> tuple[list[StageBytes], list[StageCommBuffers]]:
    """Return the bytes of a microbatch of every stage, and its overlapped communication.

    A stage also holds the values that it sends, if none of its operators saves them. A received value stays in its
    receive buffer.
    """
    rows, positions, times = priced.table.rows, priced.table.positions, priced.times
    starts = [rows[positions[stage.start]] for stage in priced.stages[1:]]
    unkept = [*(float(row.unkept.at(times)) for row in starts), 0.0]
    received = [0.0, *(float(row.kept_later.at(times)) for row in starts)]
    stages, traffic = list[StageBytes](), list[StageCommBuffers]()
    for i, stage in enumerate(priced.stages):
        beyond, sent = beyond_kept(priced, [priced.table.order[j] for j in stage])
        gathered = priced.crossings[i].gathered_bytes(priced.mesh, priced.scatters)
        kept = float(priced.kept[positions[stage.start : stage.stop]].sum())
        stages.append(beyond._replace(held=round(max(0.0, kept - received[i]) + unkept[i] + gathered)))
        traffic.append(sent)
    return stages, traffic


def reads_of(priced: TableCost, order: Order) -> dict[str, ParameterUses]:
    """Return the uses of the parameters that operators read, in the order of their first use."""
    reads, gathers = dict[str, ParameterUses](), priced.table.gathers
    for i, (position, path, number) in enumerate(order):
        row = priced.table.rows[position]
        for known in (*row.parameters, *row.reads_also):
            name, again = named_in(known, path, number), "recompute" in row.works
            trained = priced.table.parameters[known].trained
            kept = "input_backward" in row.works if gathers else trained
            before = reads.get(name)
            kept = kept or (before is not None and before.kept)
            reads[name] = ParameterUses(known, i if before is None else before.first, i, again, kept, trained)
    return reads


def beyond_kept(priced: TableCost, order: Order, others_beside: bool = False) -> tuple[StageBytes, StageCommBuffers]:
    """Return the peaks of consecutive operators beyond their saved tensors, and their communication.

    At each operator, those after it have freed their saved tensors in backward and have computed the gradients of
    their weights.

    Args:
        others_beside: True if similar operators come before and after, whose weights are prefetched.
    """
    if not order:
        return StageBytes(0, 0, 0, 0, 0, 0), StageCommBuffers()
    positions, reads = np.array([position for position, _, _ in order]), reads_of(priced, order)
    weights = {name: _weight(priced, one.known) for name, one in reads.items()}
    traffic, kept = _traffic(priced, reads, weights), np.cumsum(priced.kept[positions])
    if others_beside and traffic.rows:
        before, after = ([row._replace(names=())] * traffic.prefetch for row in (traffic.rows[0], traffic.rows[-1]))
        traffic = replace(traffic, rows=(*before, *traffic.rows, *after))
    left = priced.crossing(priced.table.rows[positions[0]]).whole
    forward = [*(kept + priced.in_forward[positions]).tolist(), 0.0]
    backward = [*(kept + priced.in_backward[positions])[::-1].tolist(), left]
    steps = _steps(backward, kept[::-1].tolist(), *_backward(reads, weights, traffic, len(order) - 1))
    whole, microbatches = {name: one.whole_bytes for name, one in weights.items()}, priced.setting.schedule.microbatches
    first, later = backward_peaks([steps], 0.0, traffic, whole, microbatches)
    most = forward_peak([_steps(forward, kept.tolist(), *_forward(reads, weights, traffic))])
    gradients = sum(priced.grown_bytes(one.known) for one in reads.values())
    beyond = (max(0.0, peak - float(kept[-1])) for peak in (most, later, first))
    return StageBytes(0, 0, *map(round, (*beyond, gradients))), traffic


def _forward(
    reads: Mapping[str, ParameterUses], weights: Mapping[str, CommParameter], traffic: StageCommBuffers
) -> tuple[Events, Events]:
    """Return the events of gathered weights before and after each operator's forward."""
    begins, ends = _none(), _none()
    for i, row in enumerate(traffic.rows):
        for name in row.names[:1]:  # the first name is read first
            begins[reads[name].first] += (*traffic.gathers(i), MemoryEvent("takes", row.whole_bytes))
        for name in row.names:
            ends[reads[name].last].append(MemoryEvent("takes", -weights[name].whole_bytes))
    return begins, ends


def _backward(
    reads: Mapping[str, ParameterUses], weights: Mapping[str, CommParameter], traffic: StageCommBuffers, last: int
) -> tuple[Events, Events]:
    """Return the events of gathered weights and weight gradients around each operator's backward.

    Operators are numbered from the `last` one on.
    """
    begins, ends = _none(), _none()
    trained = {name: weight for name, weight in weights.items() if reads[name].trained}
    for name, weight in trained.items():
        begins[last - reads[name].last].append(MemoryEvent("takes", weight.whole_bytes))
    for i, row in enumerate(traffic.rows):
        row_reads, grads = [reads[name] for name in row.names], [trained.pop(n) for n in row.names if n in trained]
        end = last - min((one.first for one in row_reads), default=0)
        if any(one.kept for one in row_reads):
            begins[last - max(one.last for one in row_reads)] += traffic.opens(i)
            ends[end].append(MemoryEvent("takes", -row.whole_bytes))
        if grads:
            ends[end].append(MemoryEvent("sends", row.grad_bytes, sum(weight.part_bytes for weight in grads)))
            ends[end].append(MemoryEvent("takes", -sum(weight.whole_bytes for weight in grads)))
    for name, weight in trained.items():
        ends[last - reads[name].first].append(MemoryEvent("gives", weight.whole_bytes, name=name))
    return begins, ends


Events = Mapping[int, Sequence[MemoryEvent]]
_none = partial(defaultdict[int, list[MemoryEvent]], list)


def _steps(runs: Sequence[float], kept: Sequence[float], begins: Events, ends: Events) -> list[MemoryEvent]:
    """Return all events, operator by operator.

    Args:
        runs: bytes that exist while each operator runs, without weights and their gradients. The last entry is the
            memory after all of them.
        kept: the part of `runs` that exists before the operator. After an operator, the memory is at most that of
            the operator and of the next one.
    """
    events, start = list[MemoryEvent](), 0
    for i in sorted({*begins, *ends}):
        after = min(runs[i], runs[i + 1])
        events.append(MemoryEvent("peak", max(runs[start:i], default=0.0)))
        events += (MemoryEvent("takes", kept[i]), *begins.get(i, ()), MemoryEvent("takes", -kept[i]))
        events.append(MemoryEvent("peak", runs[i]))
        events += (MemoryEvent("takes", after), *ends.get(i, ()), MemoryEvent("takes", -after))
        start = i + 1
    return [*events, MemoryEvent("peak", max(runs[start:]))]


def _traffic(
    priced: TableCost, reads: Mapping[str, ParameterUses], weights: Mapping[str, CommParameter]
) -> StageCommBuffers:
    """Return the communication that overlaps with operators."""
    zero, cut = priced.setting.zero, {name for name, one in reads.items() if priced.is_cut(one.known)}
    gathered = {name: one for name, one in weights.items() if name in cut and zero == 3}
    trained = {name: one for name, one in weights.items() if reads[name].trained and name not in gathered}
    scattered = {name: one for name, one in trained.items() if name in cut}
    summed = {name: one for name, one in trained.items() if name not in cut and one.is_summed}
    rows: dict[Any, dict[str, CommParameter]] = {}  # one group per block; recomputed reads separately
    for (name, one), run in zip(gathered.items(), block_runs(gathered), strict=True):
        rows.setdefault((run, reads[name].again, one.kind), {})[name] = one
    sent = *reduce_buckets(summed), *reduce_scatter_buckets(scattered, zero, priced.setting.schedule.microbatches)
    return StageCommBuffers(sent, tuple(map(WeightGroup.of, rows.values())), priced.setting.prefetch)


def _weight(priced: TableCost, known: str) -> CommParameter:
    """Return a parameter as it is communicated, given by its name in the table."""
    parameter, is_cut, part = priced.table.parameters[known], priced.is_cut(known), priced.local_bytes(known)
    several = (axis for axis in parameter.axes if priced.mesh.size(axis) > 1 and axis not in priced.apart(known))
    axes, keeps_full_gradient = tuple(several) if parameter.trained else (), priced.is_sent_whole(known)
    whole, kind = (
        priced.read_bytes(known) if is_cut else part,
        (axes, parameter.over if is_cut else (), keeps_full_gradient),
    )
    return CommParameter(part, whole, parameter.read, parameter.summed, kind, True, bool(axes), keeps_full_gradient)
