"""Memory of every rank from the rows of a cost table, for any mesh, schedule and options.

Only this file predicts memory. `Plan.memory` is its result at the plan's own sizes. `Plan.cost.at` and the search use
its result at other sizes. `cost.count.symbolic_memory` counts the memory of each row. This file adds weights that are
being gathered and gradients of weights (`comm_buffers.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autopart.cost.memory_kinds import RankMemory
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
from autopart.cost.predict.operator_work import NOTHING, Sizes
from autopart.cost.predict.table_rows import RowBytes, named_in
from autopart.cost.update_cost import optimizer_bytes, rank_update
from autopart.ir.run.buckets import BUCKET_BYTES, block_runs
from autopart.ir.run.schedule_actions import Action, StageBytes, peak_activations, peak_stage_bytes

if TYPE_CHECKING:
    from autopart.cost.predict.table import TableCost

Order = Sequence[tuple[int, str, int]]
"""Operators, each as (index of its row, path of the list of blocks, index of its block in it), as `Table.order`."""


class ParameterUses(NamedTuple):
    """Uses of a parameter in a stage, as indices into the stage's list of operators.

    Args:
        known: its name in the cost table (`Table.parameters`).
        first, last: index of the first and last operator that reads it.
        opened: index of the operator before whose backward it is gathered. This is `last`, or the last operator of the
            recomputed region that contains operator `last`.
        again: True if its last operator is recomputed in backward.
        kept: True if the backward of one of its operators reads it.
        trained: True if it gets a gradient.
    """

    known: str
    first: int
    last: int
    opened: int
    again: bool
    kept: bool
    trained: bool


def rank_memory(priced: TableCost) -> tuple[RankMemory, ...]:
    """Return, for each `pp` coordinate, the memory of its fullest rank.

    The fullest rank has index 0 on all other axes, because the first shards are the largest.
    """
    stages = _stages(priced)
    return tuple(_rank(priced, stages, *rank) for rank in zip(priced.ranks_hold, priced.orders, strict=True))


class _Stage(NamedTuple):
    """Memory and communication of a pipeline stage on one rank.

    Args:
        bytes: memory of one microbatch: what its forward and its backward allocate and save.
        traffic: buffers of collectives that overlap with the compute of the stage.
        received: bytes per microbatch that the stage receives from the previous stage.
        prologue: bytes of values that depend only on the model's inputs, so that they are computed once per call.
        is_recomputed: True if some operators of the stage are recomputed. The runtime then never splits its
            backward into input backward and weight backward.
    """

    bytes: StageBytes
    traffic: StageCommBuffers
    received: float
    prologue: float
    is_recomputed: bool


def _rank(
    priced: TableCost, all_stages: Sequence[_Stage], held: Mapping[str, str], order: tuple[Action, ...]
) -> RankMemory:
    setting, table = priced.setting, priced.table
    stages = {i: all_stages[i] for i in sorted({action.stage for action in order})}
    of_stages = {i: one.bytes for i, one in stages.items()}
    ran = _without_splits(order, {i for i, one in stages.items() if one.is_recomputed})
    saved = {i: one.held for i, one in of_stages.items()}
    most = peak_activations(ran, saved, {i: one.delayed for i, one in of_stages.items()})
    parameters = priced.versions * sum(map(priced.local_bytes, held.values()))
    gradients = sum(map(priced.gradient_bytes, held.values()))
    optimizer = optimizer_bytes(priced, held)
    batch = table.input_bytes * setting.rows * priced.times.s
    inputs = priced.versions * (batch + sum(one.prologue for one in stages.values()))
    bucket = _tied_bucket_bytes(priced, held)
    unsharded = sum(map(priced.whole_bytes, held.values()))
    grown = sum(map(priced.grown_bytes, held.values()))
    communication = _receive_buffers(priced, all_stages, order)
    communication += sum(one.method.state_bytes(one, priced.data_ranks[0]) for one in priced.carried(held))
    received = received_bytes(one.traffic for one in stages.values())
    passing = max(peak_stage_bytes(ran, of_stages, round(grown)), received, gradients + bucket,
                  gradients + rank_update(priced, held).workspace_bytes)  # fmt: skip
    return RankMemory(
        stages=tuple(stage for stage in stages if stage < priced.num_stages),
        parameters=round(parameters),
        gradients=round(gradients),
        optimizer=round(optimizer),
        buffers=round(table.buffer_bytes),
        inputs=round(inputs),
        activations=most.size_bytes,
        temporary=max(max(one.forward, one.backward) for one in of_stages.values()),
        communication=round(communication + bucket),
        gathered=round(unsharded + grown - gradients),
        total=round(parameters + optimizer + table.buffer_bytes + inputs + communication + unsharded + passing),
        in_flight={stage: count for stage, count in most.in_flight.items() if stage < priced.num_stages},
    )


def _without_splits(order: tuple[Action, ...], unsplit: Set[int]) -> tuple[Action, ...]:
    """Replace split backwards (input, weight) by full ones, in stages that the runtime never splits.

    Args:
        order: the actions of a rank.
        unsplit: indices of the stages whose backward is never split.
    """
    return tuple(
        action._replace(kind="B") if action.stage in unsplit and action.kind == "I" else action
        for action in order if not (action.stage in unsplit and action.kind == "W")
    )  # fmt: skip


def _receive_buffers(priced: TableCost, stages: Sequence[_Stage], order: Sequence[Action]) -> float:
    """Return the bytes of a rank's receive buffers, for all receives that are posted at the same time.

    Schedules that split the backward also keep the gradients of received values until the weight backward has run.

    Args:
        order: the actions of the rank.
    """
    setting = priced.setting
    posted = setting.schedule.microbatches if setting.receives_held is None else setting.receives_held
    own, total = {action.stage for action in order}, 0.0
    for i in own:
        before, after = i > 0 and i - 1 not in own, i + 1 < len(stages) and i + 1 not in own
        total += posted * (before * stages[i].received + (after and stages[i + 1].received))
        total += sum(action.kind == "I" and action.stage == i for action in order) * stages[i].received
    return priced.versions * total


def _tied_bucket_bytes(priced: TableCost, held: Mapping[str, str]) -> float:
    """Return the bytes of the largest flat bucket of gradients of tied parameters.

    These gradients are reduced at the end of a step. A single gradient is reduced in place and needs no bucket, unless
    it is reduced in another dtype.
    """
    buckets: dict[Any, list[float]] = defaultdict(list)
    for name, known in held.items():
        owners = tuple(pp for pp, names in enumerate(priced.ranks_hold) if name in names)
        if len(owners) > 1 and priced.table.parameters[known].trained:
            buckets[owners, priced.table.parameters[known].summed].append(priced.gradient_bytes(known))
    copies = (min(sum(sizes), BUCKET_BYTES) * summed for (_, summed), sizes in buckets.items()
              if len(sizes) > 1 or summed != 1)  # fmt: skip
    return max(copies, default=0.0)


def _stages(priced: TableCost) -> list[_Stage]:
    """Return the memory of every stage.

    A value that a stage sends stays in memory on that stage, even if none of its operators saves it. A received value
    stays in its receive buffer.
    """
    table, positions, times = priced.table, priced.table.positions, priced.times
    starts = [table.rows[positions[stage.start]] for stage in priced.stages[1 : priced.num_stages]]
    unkept = [*(float(row.unkept.at(times)) for row in starts), 0.0, 0.0]
    received = [0.0, *(float(row.kept_later.at(times)) for row in starts), 0.0]
    stages = list[_Stage]()
    for i, stage in enumerate(priced.stages):
        peaks, traffic = beyond_kept(priced, [table.order[j] for j in stage])
        crossing, own = priced.crossings[i], positions[stage.start : stage.stop]
        sizes = priced.row_bytes.of(own)
        kept = max(0.0, float(sizes.kept.sum()) - received[i])
        rows = [table.rows[position] for position in dict.fromkeys(own.tolist())]
        is_recomputed = any(row.recomputed is not None for row in rows)
        in_stage = peaks._replace(
            held=round(kept + unkept[i] + crossing.gathered_bytes(priced.mesh, priced.scatters)),
            delayed=round(float(sizes.delayed.sum())) if i and not is_recomputed else 0,
        )
        batch = Sizes(b=priced.setting.rows, s=times.s)
        prologue = sum(float(table.prologue[name].at(batch)) for name in {name for row in rows for name in row.inputs})
        sent = round(crossing.sent_bytes(priced.mesh, priced.scatters))
        stages.append(_Stage(in_stage, traffic, sent, prologue, is_recomputed))
    return stages if table.tail_start is None else [*stages[:-2], *_with_tail_inputs(priced, *stages[-2:])]


def _with_tail_inputs(priced: TableCost, last: _Stage, tail: _Stage) -> tuple[_Stage, _Stage]:
    """Add the memory of the values that the tail receives to the last stage and to the tail.

    The tail runs once for all microbatches. The last stage keeps the values of each microbatch until they are merged
    into a copy for the tail. The tail's backward computes gradients of the merged values, which stay until the last
    microbatch's backward.
    """
    row = priced.table.rows[priced.table.positions[priced.stages[-1].start]]
    merged, unkept, saved = (round(float((size or NOTHING).at(priced.tail_times)))
                             for size in (row.crossing, row.unkept, row.kept_later))  # fmt: skip
    while_merging = unkept + merged - tail.bytes.held
    in_tail = tail.bytes._replace(forward=max(tail.bytes.forward + merged - saved, while_merging))
    in_last = last.bytes._replace(
        backward=last.bytes.backward + merged, first_backward=last.bytes.first_backward + merged
    )
    return last._replace(bytes=in_last), tail._replace(bytes=in_tail)


def reads_of(priced: TableCost, order: Order) -> dict[str, ParameterUses]:
    """Return {parameter that these operators read: its uses}, in the order of first use.

    Args:
        order: consecutive operators of the cost table (`Table.order`).
    """
    reads, gathers = dict[str, ParameterUses](), priced.table.gathers
    region_ends = _region_ends(priced, order)
    for i, (position, path, number) in enumerate(order):
        row = priced.table.rows[position]
        for known in (*row.parameters, *row.reads_also):
            name, again = named_in(known, path, number), "recompute" in row.works
            trained = priced.table.parameters[known].trained
            kept = "input_backward" in row.works if gathers else trained
            before = reads.get(name)
            reads[name] = ParameterUses(
                known=known, first=i if before is None else before.first, last=i, opened=region_ends[i] if again else i,
                again=again, kept=kept or (before is not None and before.kept), trained=trained,
            )  # fmt: skip
    return reads


def _region_ends(priced: TableCost, order: Order) -> list[int]:
    """Return, for each operator, the index of the last operator of its recomputed region.

    For an operator outside of such regions, it is the index at which the next region ends.
    """
    ends = [*range(len(order))]
    for i in range(len(order) - 2, -1, -1):
        if priced.table.rows[order[i][0]].recomputed is None:
            ends[i] = ends[i + 1]
    return ends


def beyond_kept(priced: TableCost, order: Order, others_beside: bool = False) -> tuple[StageBytes, StageCommBuffers]:
    """Return the memory that operators need in addition to their saved tensors, and their communication.

    Returns two results: peak bytes in forward and backward with the bytes of gradients, and buffers of collectives.
    The backward runs from the last operator to the first. It frees an operator's saved tensors, and allocates the
    gradients of the operator's weights.

    Args:
        order: the operators, in the format of `Table.order`.
        others_beside: True if equal blocks run before and after these operators. While these operators run, weights of
            the next block are then prefetched.
    """
    if not order:
        return StageBytes(0, 0, 0, 0, 0, 0), StageCommBuffers()
    positions, reads = np.array([position for position, _, _ in order]), reads_of(priced, order)
    weights = {name: _weight(priced, one.known) for name, one in reads.items()}
    traffic, sizes = _traffic(priced, reads, weights), priced.row_bytes.of(positions)
    if others_beside and traffic.rows:
        before, after = ([row._replace(names=())] * traffic.prefetch for row in (traffic.rows[0], traffic.rows[-1]))
        traffic = replace(traffic, rows=(*before, *traffic.rows, *after))
    kept = np.cumsum(sizes.kept)
    run = kept + sizes.in_forward
    between = np.minimum(run[1:], run[:-1])
    forward = _steps(run, [run[0], *between], [*between, 0.0], *_forward(reads, weights, traffic))
    run, after = (kept + sizes.in_backward)[::-1], (kept - sizes.kept + sizes.after_backward)[::-1]
    backward = _steps(run, [kept[-1], *after[:-1]], after, *_backward(reads, weights, traffic, sizes))
    whole, microbatches = {name: one.whole_bytes for name, one in weights.items()}, priced.setting.schedule.microbatches
    first, later = backward_peaks(backward, traffic, whole, microbatches)
    most = forward_peak(forward)
    gradients = sum(priced.grown_bytes(one.known) for one in reads.values())
    beyond = (max(0.0, peak - float(kept[-1])) for peak in (most, later, first))
    return StageBytes(0, 0, *map(round, (*beyond, gradients))), traffic


def _forward(
    reads: Mapping[str, ParameterUses], weights: Mapping[str, CommParameter], traffic: StageCommBuffers
) -> tuple[Events, Events]:
    """Return the memory events (all-gathers and frees of weights) around each operator's forward.

    Returns two mappings, before and after: {index of the operator: events}.
    """
    begins, ends = _none(), _none()
    for i, row in enumerate(traffic.rows):
        for name in row.names[:1]:  # the group's first weight is read first
            begins[reads[name].first] += (*traffic.gathers(i), MemoryEvent("takes", row.whole_bytes))
        for name in row.names:
            ends[reads[name].last].append(MemoryEvent("takes", -weights[name].whole_bytes))
    return begins, ends


def _backward(
    reads: Mapping[str, ParameterUses], weights: Mapping[str, CommParameter], traffic: StageCommBuffers,
    sizes: RowBytes,
) -> tuple[Events, Events]:  # fmt: skip
    """Return the memory events before and after each operator's backward, for weights and their gradients.

    Returns two mappings, before and after: {index of the operator, counted from the last one: events}. A recomputed
    region gathers its first group of weights before it allocates the recomputed values, and its other groups later.

    Args:
        sizes: bytes of each operator.
    """
    begins, ends, last = _none(), _none(), len(sizes.kept) - 1
    trained = {name: weight for name, weight in weights.items() if reads[name].trained}
    opened: dict[int, list[int]] = defaultdict(list)
    for i, row in enumerate(traffic.rows):
        if any(reads[name].kept for name in row.names):
            opened[max(reads[name].opened for name in row.names)].append(i)
    for at, groups in opened.items():
        recomputed_bytes = float(sizes.recomputed[at])
        before, after = (groups[:1], groups[1:]) if recomputed_bytes else ([], groups)
        begins[last - at] += (event for i in before for event in traffic.opens(i))
        begins[last - at].append(MemoryEvent("takes", recomputed_bytes))
        begins[last - at] += (event for i in reversed(after) for event in traffic.opens(i))
        begins[last - at].append(MemoryEvent("takes", -recomputed_bytes))
    for name, weight in trained.items():
        begins[last - reads[name].last].append(MemoryEvent("takes", weight.whole_bytes))
    for row in traffic.rows:
        row_reads, grads = [reads[name] for name in row.names], [trained.pop(n) for n in row.names if n in trained]
        end = last - min((one.first for one in row_reads), default=0)
        if any(one.kept for one in row_reads):
            ends[end].append(MemoryEvent("takes", -row.whole_bytes))
        if grads:  # the reduction starts before the operator's saved tensors are freed
            saved_bytes, sent = float(sizes.kept[last - end]), sum(weight.part_bytes for weight in grads)
            ends[end].append(MemoryEvent("takes", saved_bytes))
            ends[end].append(MemoryEvent("sends", row.grad_bytes, sent))
            ends[end].append(MemoryEvent("takes", -saved_bytes - sum(weight.whole_bytes for weight in grads)))
    for name, weight in trained.items():
        ends[last - reads[name].first].append(MemoryEvent("gives", weight.whole_bytes, name=name))
    return begins, ends


Events = Mapping[int, Sequence[MemoryEvent]]
_none = partial(defaultdict[int, list[MemoryEvent]], list)


def _steps(
    runs: np.ndarray, before: Sequence[float], after: Sequence[float], begins: Events, ends: Events
) -> list[MemoryEvent]:  # fmt: skip
    """Return the memory events of a forward or backward, operator by operator.

    Args:
        runs: bytes that exist while each operator runs, without weights and their gradients.
        before, after: bytes that exist before and after each operator.
        begins, ends: {index of the operator: its events before and after it runs}.
    """
    events, start = list[MemoryEvent](), 0
    for i in sorted({*begins, *ends}):
        events.append(MemoryEvent("peak", float(runs[start:i].max(initial=0.0))))
        events += (MemoryEvent("takes", before[i]), *begins.get(i, ()), MemoryEvent("takes", -before[i]))
        events.append(MemoryEvent("peak", float(runs[i])))
        events += (MemoryEvent("takes", after[i]), *ends.get(i, ()), MemoryEvent("takes", -after[i]))
        start = i + 1
    return [*events, MemoryEvent("peak", float(runs[start:].max(initial=0.0)))]


def _traffic(
    priced: TableCost, reads: Mapping[str, ParameterUses], weights: Mapping[str, CommParameter]
) -> StageCommBuffers:
    """Return the gradient reductions and weight all-gathers that overlap with a stage's operators.

    Args:
        reads: {parameter: its uses}.
        weights: {parameter: its sizes}.
    """
    zero, cut = priced.setting.zero, {name for name, one in reads.items() if priced.is_cut(one.known)}
    gathered = {name: one for name, one in weights.items() if name in cut and zero == 3}
    trained = {name: one for name, one in weights.items() if reads[name].trained and name not in gathered}
    scattered = {name: one for name, one in trained.items() if name in cut}
    summed = {name: one for name, one in trained.items() if name not in cut and one.is_summed}
    rows: dict[Any, dict[str, CommParameter]] = {}  # one group per block; recomputed weights have a separate group
    for (name, one), run in zip(gathered.items(), block_runs(gathered), strict=True):
        rows.setdefault((run, reads[name].again, one.kind), {})[name] = one
    sent = *reduce_buckets(summed), *reduce_scatter_buckets(scattered, zero, priced.setting.schedule.microbatches)
    return StageCommBuffers(sent, tuple(map(WeightGroup.of, rows.values())), priced.setting.prefetch)


def _weight(priced: TableCost, known: str) -> CommParameter:
    """Return the sizes of a parameter that a rank gathers or whose gradient it reduces.

    Args:
        known: name of the parameter in the table.
    """
    parameter, is_cut, part = priced.table.parameters[known], priced.is_cut(known), priced.local_bytes(known)
    several = (axis for axis in parameter.axes if priced.mesh.size(axis) > 1 and axis not in priced.apart(known))
    axes, keeps_full_gradient = tuple(several) if parameter.trained else (), priced.is_sent_whole(known)
    whole, kind = (
        priced.read_bytes(known) if is_cut else part,
        (axes, parameter.over if is_cut else (), keeps_full_gradient),
    )
    return CommParameter(
        part_bytes=part, whole_bytes=whole, read=parameter.read, summed=parameter.summed, kind=kind,
        in_order=parameter.contiguous, is_summed=bool(axes), keeps_full_gradient=keeps_full_gradient,
    )  # fmt: skip
