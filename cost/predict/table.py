"""Cost table of a model: its operators, from which a step on any mesh and schedule is predicted.

`autopart.cost.count.tabulate` builds a `Table` once, from a program. For a plan, this is the plan's program. For the
search, it is the program of a copy of the model with few repeated blocks, in which one row represents several
operators. `predict` divides the operators into stages, computes the seconds of the stages, and simulates the
schedule's actions.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.dp_sync_costs import by_method, sync_s
from autopart.cost.predict.operator_work import (
    NOTHING,
    Size,
    Sizes,
    Work,
    chosen_ranks,
    flops_by_dtype,
    gradient_sum_s,
)
from autopart.cost.predict.run_setting import RunSetting
from autopart.cost.predict.send_costs import BoundaryBytes, gather_cost, scatter_is_cheaper
from autopart.cost.predict.simulate import Simulation, simulated
from autopart.cost.predict.stage_balance import shared_by, stage_boundaries
from autopart.cost.predict.table_memory import rank_memory
from autopart.cost.predict.table_rows import OperatorRow, Parameter, RowBytes, Totals, named_in, totals_of
from autopart.cost.systems.host_time import HostRates
from autopart.cost.update_cost import optimizer_bytes, update_row
from autopart.cost.update_rules import ADAMW
from autopart.ir.layout import mesh_axes_of
from autopart.ir.run.report_terms import TIMING_PARTS
from autopart.ir.run.schedule_actions import Action, actions
from autopart.ir.run.schedules import versions_of
from autopart.ir.run.sync_option import MethodParameters


@dataclass(frozen=True)
class Table:
    """Cost table of a model: all operators in order, including the operators of every repeated block.

    Operators were counted at reference sizes (`b`, `s`, `tp`, `cp`, `ep`). A tail is a part of a model that runs once
    for all microbatches.

    Args:
        rows: work and memory of the operators of the trace.
        order: all operators of the model as (index into `rows`, path of the list of blocks, index of the block in it).
        parameters: {name: parameter} of the trace.
        b, s, tp, cp, ep: the reference sizes: samples of a microbatch, tokens per sample, and ranks of each axis.
        row_flops: FLOPs of the forward's matrix products per sample.
        input_bytes: bytes of the inputs per sample.
        prologue: {name: bytes} of values that depend only on the model's inputs, such as masks. In the bytes, `b` is
            the number of samples of the global batch.
        buffer_bytes: bytes of all buffers.
        gathers: True if the rows include the all-gathers and reduce-scatters of ZeRO-3.
        hidden_sums: share of gradients that are not in the bucket that completes last. Their reduction may overlap with
            backward.
        cuts: {number of stages: stage boundaries of the program that was counted}.
        divided: numbers of heads, experts or features that each axis shards (`cost.count.shard_counts`).
        m: microbatches for which the rows of the tail were counted; 1 without a tail.
        optimizer: optimizer of the step, as in `cost.update_rules.UPDATES`.
    """

    rows: tuple[OperatorRow, ...]
    order: tuple[tuple[int, str, int], ...]
    parameters: Mapping[str, Parameter]
    b: int
    s: int
    row_flops: float
    input_bytes: float = 0.0
    buffer_bytes: float = 0.0
    gathers: bool = False
    hidden_sums: float = 0.0
    tp: int = 1
    cp: int = 1
    ep: int = 1
    prologue: Mapping[str, Size] = field(default_factory=dict)
    cuts: Mapping[int, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)
    divided: Mapping[str, Mapping[int, str]] = field(default_factory=dict, repr=False)
    m: int = 1
    optimizer: str = ADAMW

    @cached_property
    def positions(self) -> np.ndarray:
        """Array of shape [operators]: the index into `rows` of each operator."""
        return np.array([position for position, _, _ in self.order])

    def times(self, setting: RunSetting) -> Sizes:
        """Return each size of a setting (`b`, `s`, `tp`, ...) divided by the table's reference size."""
        tokens = self.s if setting.tokens is None else setting.tokens
        ranks = {name: size / getattr(self, name) for name, size in chosen_ranks(setting.mesh).items()}
        return Sizes(setting.b / self.b, tokens / self.s, **ranks)

    @cached_property
    def tail_start(self) -> int | None:
        """Index in `order` of the first operator of the tail, which runs once per step; None without a tail."""
        return next((i for i, (row, _, _) in enumerate(self.order) if self.rows[row].once), None)

    @cached_property
    def counts(self) -> Mapping[tuple[str, Work], float]:
        """{(phase of a step, such as "forward"; kernel or collective): number of runs per microbatch}.

        Work of the tail, which runs once per step, counts as an equal share in each microbatch.
        """
        often_done = defaultdict[tuple[str, Work], float](int)
        for row, number in zip(self.rows, self.often, strict=True):
            for part, works in row.works.items():
                for work in works:
                    often_done[part, work] += number / self.m if row.once else number
        return often_done

    @cached_property
    def often(self) -> list[int]:
        """Number of operators of the model that each row represents, as a list by row."""
        numbers: list[int] = np.bincount(self.positions, minlength=len(self.rows)).tolist()
        return numbers

    @cached_property
    def load(self) -> float:
        """Total load (FLOPs) of all operators at the table's reference sizes."""
        return math.fsum(row.load.value * number for row, number in zip(self.rows, self.often, strict=True)) or 1.0

    @cached_property
    def dtype(self) -> str:
        """Dtype of most matrix FLOPs of the forward; "" without matrix products."""
        forward = ((work, count) for (part, work), count in self.counts.items() if part == "forward")
        flops = flops_by_dtype(forward)
        return max(flops, key=lambda dtype: flops[dtype], default="")

    @cached_property
    def held(self) -> dict[str, str]:
        """All parameters: {key of a parameter of the full model (`named_in`): its name in `parameters`}."""
        return self.read_by(self.order)

    def read_by(self, order: Iterable[tuple[int, str, int]]) -> dict[str, str]:
        """Return {name in the full model: name in `parameters`} of parameters that these operators read."""
        return {named_in(name, path, number): name for position, path, number in order
                for name in self.rows[position].parameters}  # fmt: skip

    @cached_property
    def totals(self) -> Totals:
        """Sums over all operators, from which the closed formulas (`Formula`) are built."""
        return totals_of(self)


def predict(table: Table, setting: RunSetting, hardware: Hardware) -> Simulation:
    """Predict a training step of the model under a setting.

    Plans, `Plan.cost.at` and the search all use this prediction. Raises StageError if the model has too few stage
    boundaries.
    """
    if setting.cuts is None:
        setting = replace(setting, cuts=stage_boundaries(table, setting, hardware))
    priced = TableCost(table, setting, hardware)
    memory = [rank.as_row() for rank in rank_memory(priced)]
    return simulated(priced.timing, setting.schedule, setting.mesh, memory, setting.overlap_sends)


class TableCost:
    """Predicted seconds and bytes of a cost table's operators, for a setting and a device."""

    def __init__(self, table: Table, setting: RunSetting, hardware: Hardware):
        self.table, self.setting, self.hardware, self.mesh = table, setting, hardware, setting.mesh
        self.times = table.times(setting)
        self.tail_times = self.times._replace(b=self.times.b * setting.schedule.microbatches / table.m)
        self.seconds: dict[tuple[Work, bool], float] = {}
        """{(kernel or collective, True if it is in the tail, which runs once per step): its duration}."""
        self._later = 0.0 if setting.fused_sums else (setting.schedule.microbatches - 1) / setting.schedule.microbatches

    @cached_property
    def by_row(self) -> list[dict[str, dict[str, float]]]:
        """Seconds of each row of the table: {part of a step, such as "forward": {kind of work: seconds}}."""
        return [self._row(row) for row in self.table.rows]

    def times_of(self, row: OperatorRow) -> Sizes:
        """Return each size of the setting (`b`, `s`, ranks) divided by the size at which a row was counted."""
        return self.tail_times if row.once else self.times

    @cached_property
    def host(self) -> HostRates:
        """Seconds that the CPU needs to issue a kernel and a collective."""
        return HostRates.of(self.hardware, self.setting.system, self.setting.compiled, self.mesh)

    def _host(self, often: Mapping[int, int]) -> dict[str, float]:
        """Return {part of a step: seconds of the CPU per microbatch} of a stage.

        Args:
            often: {index of a row of the table: number of its operators in the stage}.
        """
        seconds = dict.fromkeys(TIMING_PARTS, 0.0)
        for position, count in often.items() if any(self.host) else ():
            for part, works in self._works(self.table.rows[position]):
                share, target = (self._later, "weight_backward") if part == "accumulate" else (1.0, part)
                seconds[target] += count * share * self.host.seconds(works, self.mesh)
        return {part: _digits(taken) for part, taken in seconds.items() if taken}

    @cached_property
    def row_bytes(self) -> RowBytes:
        """Arrays of shape [rows] with the bytes of each row of the cost table."""
        rows, again, ranks = self.table.rows, self.setting.gathers_again, self.mesh.size(self.mesh.tensor_axis)
        gathered = [sum(float(work.size.at(self.times_of(row))) for work in row.gathers(again)) for row in rows]
        return RowBytes.of_rows(rows, self.times_of).without(np.array(gathered), ranks)

    @cached_property
    def stages(self) -> list[range]:
        """Indices of the operators of each stage, and finally of the tail, which runs once per step.

        Raises StageError if the model has too few stage boundaries.
        """
        cuts = self.setting.cuts
        cuts = stage_boundaries(self.table, self.setting, self.hardware) if cuts is None else cuts
        tail = () if self.table.tail_start is None else (self.table.tail_start,)
        return [range(a, b) for a, b in pairwise((0, *cuts, *tail, len(self.table.order)))]

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages. The tail, which runs once per step, does not count."""
        return len(self.stages) - (self.table.tail_start is not None)

    def crossing(self, row: OperatorRow) -> BoundaryBytes:
        """Return the bytes that a stage boundary before an operator sends."""
        whole = row.crossing if row.crossing is not None else NOTHING
        return BoundaryBytes(float(whole.at(self.times)), float(row.alike.at(self.times)))

    @cached_property
    def crossings(self) -> list[BoundaryBytes]:
        """Bytes that each stage receives per microbatch; 0 for the tail, which runs on the last stage's rank."""
        starts = [self.table.rows[self.table.positions[stage.start]] for stage in self.stages[1 : self.num_stages]]
        nothing = BoundaryBytes(0.0, 0.0)
        return [nothing, *map(self.crossing, starts), *[nothing] * (len(self.stages) - self.num_stages)]

    @cached_property
    def scatters(self) -> bool:
        """True if stages send values as shards, which the receivers gather (scatter-gather)."""
        asked = self.setting.scatter_sends
        return scatter_is_cheaper(self.crossings, self.mesh, self.hardware) if asked is None else asked

    @cached_property
    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """Actions of the schedule on each rank of the pipeline (by `pp` coordinate)."""
        schedule, pp = self.setting.schedule, self.mesh.size("pp")
        return actions(schedule.name, self.num_stages, pp, schedule.microbatches, len(self.stages) > self.num_stages)

    @cached_property
    def ranks_hold(self) -> list[dict[str, str]]:
        """For each `pp` coordinate, the stored parameters: {key (`named_in`): name in `Table.parameters`}."""
        homes = [sorted({action.stage for action in order}) for order in self.orders]
        return [self.table.read_by(self.table.order[i] for s in home for i in self.stages[s]) for home in homes]

    @cached_property
    def timing(self) -> dict[str, Any]:
        """`Plan.timing`: the seconds and FLOPs that `autopart.simulate` needs.

        - `peak_flops_per_s`: peak FLOP/s of a device for the dtypes of the model's products
        - `forward_flops`: FLOPs of the model's matrix products on the global batch
        - `recomputed_flops`: recomputed FLOPs over all ranks
        - `stages`: one mapping per stage, with seconds per microbatch
        - `ranks`: one mapping per `pp` coordinate, with seconds per step
        """
        counts, mesh, microbatches = self.table.counts, self.mesh, self.setting.schedule.microbatches
        forward = ((work, count) for (part, work), count in counts.items() if part == "forward")
        peak, dtype = self.hardware.peak_of(flops_by_dtype(forward, self.times))
        again = math.fsum(count * work.flops.at(self.times) * work.times
                          for (part, work), count in counts.items() if part == "recompute")  # fmt: skip
        everywhere = [set(names) for names in self.ranks_hold]
        return {
            "peak_flops_per_s": peak, "peak_dtype": dtype,
            "forward_flops": round(self.table.row_flops * self.setting.rows),
            "recomputed_flops": round(again * microbatches * mesh.num_ranks / mesh.size("pp")),
            "stages": [self.stage(index, stage) for index, stage in enumerate(self.stages)],
            "ranks": [self.once(names, everywhere) for names in self.ranks_hold], "hidden_sums": self.hidden_sums,
            **({"host_waits": True} if self.setting.system.host_waits else {}),
            **({"tied": shared_by(self.ranks_hold, self.table.parameters)} if self.versions > 1 else {}),
        }  # fmt: skip

    @property
    def hidden_sums(self) -> float:
        """Share of the gradient reduction that costs no time, because it overlaps with a step's last backward."""
        asked = self.setting.hidden_sums
        return self.table.hidden_sums * self.hardware.overlap if asked is None else asked

    def is_cut(self, name: str) -> bool:
        """Return True if ZeRO shards a parameter. `name` is its name in the table."""
        return self.table.parameters[name].cut and self.setting.zero > 0

    def is_sent_whole(self, name: str) -> bool:
        """Return True if a `dp_sync` method receives the full gradient of a parameter that ZeRO 1 shards."""
        return self.setting.zero == 1 and not set(self.apart(name)).isdisjoint(mesh_axes_of(self.zero_axis(name)))

    def apart(self, name: str) -> tuple[str, ...]:
        """Return the axes over which a `dp_sync` method replaces the all-reduce of a parameter's gradient.

        The tuple has at most one axis, which shards the batch. `name` is the parameter's name in the table.
        """
        return self.mesh.along("rows")[:1] if self.setting.dp_sync.method_of(name) is not None else ()

    def zero_axis(self, name: str) -> str:
        """Return the flattened axis over which ZeRO shards a parameter; "" if the parameter is unsharded."""
        return self.mesh.joined(self.table.parameters[name].over) if self.is_cut(name) else ""

    @cached_property
    def gathers_or_scatters(self) -> frozenset[str]:
        """Labels (`Work.name`) of the collectives with which ZeRO gathers parameters or reduces gradients."""
        over = {self.mesh.joined(parameter.over) for parameter in self.table.parameters.values() if parameter.cut}
        return frozenset(f"{axis} {kind}" for axis in over for kind in ("all_gather", "reduce_scatter"))

    def _row(self, row: OperatorRow) -> dict[str, dict[str, float]]:
        seconds_by_part: dict[str, dict[str, float]] = {part: {} for part in TIMING_PARTS}
        for part, works in self._works(row):
            share, target = (self._later, "weight_backward") if part == "accumulate" else (1.0, part)
            for work in works:
                key = work, row.once
                if key not in self.seconds:
                    seconds = work.seconds(self.hardware, self.mesh, self.times_of(row))
                    self.seconds[key] = seconds * self.setting.shown_share(work.axis, work.kind)
                seconds_by_part[target][work.name] = (
                    seconds_by_part[target].get(work.name, 0.0) + self.seconds[key] * share
                )
        return seconds_by_part

    def _works(self, row: OperatorRow) -> Iterator[tuple[str, tuple[Work, ...]]]:
        """Yield the work of an operator for one microbatch, as (part of a step, kernels and collectives).

        ZeRO's collectives and casts of parameters are included.
        """
        yield from row.works.items()
        yield "input_backward", row.gathers(self.setting.gathers_again)
        zero = self.setting.zero
        for name in row.parameters:
            parameter, is_cut, axis = self.table.parameters[name], self.is_cut(name), self.zero_axis(name)
            if (
                parameter.casts and self.setting.system.casts_weights and not (is_cut and zero < 3)
            ):  # else it is cast once a step
                cast = (parameter.cast(self.mesh.size(axis)),)
                yield "forward", cast
                if parameter.trained:
                    yield "weight_backward", cast
                if parameter.cast_again:
                    yield "input_backward", cast
            if is_cut and zero > 1 and not self.table.gathers:
                gather = Work("all_gather", parameter.size * parameter.read, axis=axis)
                if zero == 3:
                    yield "forward", (gather,)
                if parameter.trained and zero == 3:
                    yield "input_backward", (gather,)
                if parameter.trained:
                    yield "weight_backward", (Work("reduce_scatter", parameter.size * parameter.summed, axis=axis),)

    def stage(self, index: int, stage: range) -> dict[str, Any]:
        """Return the entry of stage `index` in `Plan.timing`. Seconds and bytes are per microbatch.

        The last index can be the tail, which runs once per step. Its seconds and bytes are per step, and it receives
        nothing from another rank.

        Args:
            stage: the indices of the stage's operators.
        """
        often = Counter(self.table.positions[stage.start : stage.stop].tolist())
        parts: dict[str, dict[str, float]] = {part: {} for part in TIMING_PARTS}
        moved: dict[tuple[str, str], list[float]] = {}
        for position, count in often.items():
            for part, kinds in self.by_row[position].items():
                for kind, seconds in kinds.items():
                    parts[part][kind] = parts[part].get(kind, 0.0) + seconds * count
            operator = self.table.rows[position]
            for _, works in self._works(operator):
                for work in works:
                    if work.axis:
                        row = moved.setdefault((work.axis, work.kind), [0, 0.0, 0.0])
                        sent = work.sent_bytes(self.mesh, self.times_of(operator))
                        for i, much in enumerate((1, sent, self.seconds[work, operator.once])):
                            row[i] += much * count
        received, sent_on = self.crossings[index], self.crossings[index + 1 : index + 2]
        for crossing in (received, *sent_on):  # gathers received values, and the gradients of sent values
            if gathered := crossing.gathered_bytes(self.mesh, self.scatters):
                row = moved.setdefault((self.mesh.tensor_axis, "all_gather"), [0, 0.0, 0.0])
                for i, much in enumerate(gather_cost(gathered, self.mesh, self.hardware)):
                    row[i] += much
        collectives = [
            {"axis": axis, "kind": kind, "count": int(count), "bytes": round(sent), "seconds": _digits(took)}
            for (axis, kind), (count, sent, took) in moved.items()
        ]
        self._subtract_overlap(parts, stage)
        host = self._host(often)
        shown = {part: {kind: _digits(s) for kind, s in parts[part].items() if s} for part in TIMING_PARTS}
        return {
            "stage": index, **({"tail": True} if index == self.num_stages else {}), **shown, "collectives": collectives,
            **({"host": host} if host else {}),
            "receives_bytes": round(received.sent_bytes(self.mesh, self.scatters)),
            "receives_s": _digits(received.time_s(self.mesh, self.hardware, self.scatters)),
        }  # fmt: skip

    def _subtract_overlap(self, parts: Mapping[str, dict[str, float]], stage: range) -> None:
        """Subtract the seconds of ZeRO's collectives that overlap with compute.

        The collectives of the first block cannot overlap. The collectives of the other blocks overlap, at most for as
        long as the stage computes.

        Args:
            parts: {part of a step: {kind of work: seconds}}, which is updated.
            stage: the indices of the stage's operators.
        """
        overlap = self.hardware.overlap
        read = [(path, number, self.table.rows[position].parameters)
                for position, path, number in (self.table.order[i] for i in stage)]  # fmt: skip
        gathering_blocks = {(path, number) for path, number, names in read
                 if any(self.is_cut(name) for name in names)}  # fmt: skip
        blocks = len(gathering_blocks)
        if blocks < 2 or not overlap or (self.setting.zero == 3 and not self.setting.prefetch):
            return
        for group in (("forward",), ("recompute", "input_backward", "weight_backward")):
            kinds = [(part, kind) for part in group for kind in sorted(self.gathers_or_scatters)]
            moved_s = math.fsum(parts[part].get(kind, 0.0) for part, kind in kinds)
            works_s = math.fsum(s for part in group for s in parts[part].values()) - moved_s
            shown_s = moved_s / blocks + max(0.0, moved_s - works_s) * (1 - 1 / blocks)
            share = 1 - overlap * (1 - min(1.0, shown_s / moved_s)) if moved_s else 1.0
            for part, kind in kinds:
                if kind in parts[part]:
                    parts[part][kind] *= share

    def state_bytes(self, held: Mapping[str, str]) -> float:
        """Return the bytes of these parameters on a rank, with their gradients and optimizer state."""
        stored = sum(self.local_bytes(known) + self.gradient_bytes(known) for known in held.values())
        return stored + optimizer_bytes(self, held)

    def local_bytes(self, name: str) -> float:
        """Return the bytes of a rank's shard of a parameter. `name` is its name in the table."""
        return self.bytes_before_zero(name) / self.mesh.size(self.zero_axis(name))

    def sent_bytes(self, name: str) -> float:
        """Return the bytes, in the stored dtype, of a gradient that is reduced or synchronized once a step."""
        return self.bytes_before_zero(name) if self.is_sent_whole(name) else self.local_bytes(name)

    def bytes_before_zero(self, name: str) -> float:
        return float(self.table.parameters[name].size.at(self.times))

    def read_bytes(self, name: str) -> float:
        """Return the bytes of a parameter in its compute dtype, without ZeRO sharding."""
        return self.bytes_before_zero(name) * self.table.parameters[name].read

    def summed_bytes(self, name: str) -> float:
        """Return the bytes of a parameter's gradient in the reduction dtype, without ZeRO sharding."""
        return self.bytes_before_zero(name) * self.table.parameters[name].summed * self.table.parameters[name].trained

    def whole_bytes(self, name: str) -> float:
        """Return the bytes of the unsharded copy that ZeRO 1 or 2 keeps during a step; 0 if there is none."""
        return self.read_bytes(name) if self.is_cut(name) and self.setting.zero < 3 else 0.0

    def once(self, parameters: Mapping[str, str], everywhere: Sequence[set[str]]) -> dict[str, float]:
        """Return a rank's entry in `Plan.timing`: the seconds of the work that runs once a step.

        Args:
            parameters: {parameter of the rank: its name in the table}.
            everywhere: for each `pp` coordinate, the names of the parameters that its rank stores.
        """
        sums = self._reduced_bytes(parameters, everywhere)
        seconds = sum(gradient_sum_s(size, groups, self.hardware, bucket_bytes=self.setting.bucket_bytes)
                      for groups, size in sums.items())  # fmt: skip
        copied = (self.versions - 1) * sum(map(self.local_bytes, parameters.values()))
        methods_s = sum(sync_s(one, *self.data_ranks, self.hardware) for one in self.carried(parameters))
        gathers_s = 0.0
        for axis in sorted(set(map(self.zero_axis, parameters.values()))):
            stored_there = [known for known in parameters.values() if self.zero_axis(known) == axis]
            ranks = ((axis, self.mesh.size(axis), self.mesh.stride(axis)),) if axis else ()
            if self.setting.zero == 1:
                scattered = [self.summed_bytes(known) for known in stored_there
                             if self.is_cut(known) and not self.is_sent_whole(known)]  # fmt: skip
                seconds += self._zero_s(scattered, ranks, "reduce_scatter")
            gathers_s += self._zero_s([self.whole_bytes(known) for known in stored_there], ranks, "all_gather")
        gathers_s *= 1 - self.table.hidden_sums * self.hardware.overlap
        row = {"gradient_sum_s": seconds, **update_row(self, parameters, copied)}
        row |= {"gather_s": gathers_s} if gathers_s else {}
        row |= {"methods_s": methods_s} if methods_s else {}
        return {name: _digits(taken) if name.endswith("_s") else taken for name, taken in row.items()}

    def _zero_s(self, sizes: Sequence[float], ranks: Sequence[tuple[str, int, int]], kind: str) -> float:
        messages = sizes if self.setting.system.zero_by_parameter else [sum(sizes)]
        return sum(gradient_sum_s(size, ranks, self.hardware, kind, self.setting.bucket_bytes) for size in messages)

    @property
    def versions(self) -> int:
        return versions_of(self.setting.schedule.name)

    @property
    def data_ranks(self) -> tuple[int, int]:
        """Number of data-parallel ranks of a `dp_sync` method, and the distance in ranks between neighbours."""
        axis = (*self.mesh.along("rows"), self.mesh.data_axis)[0]
        return self.mesh.size(axis), self.mesh.stride(axis)

    def carried(self, held: Mapping[str, str]) -> list[MethodParameters]:
        """Return the bytes that each `dp_sync` method exchanges for a rank's parameters.

        The result is empty if no axis shards the batch.
        """
        if not self.mesh.along("rows"):
            return []
        sizes = {known: self.sent_bytes(known) for known in held.values()}
        return by_method(self.table.parameters, sizes, held.values(), self.setting.dp_sync)

    def _reduced_bytes(
        self, held: Mapping[str, str], everywhere: Sequence[set[str]]
    ) -> dict[tuple[tuple[str, int, int], ...], float]:  # fmt: skip
        """Return {groups of ranks: bytes of the gradients that are reduced over these groups}.

        A group is (axis, number of ranks, stride in ranks). If a key has several groups, the gradients are reduced over
        one group after another.
        """
        mesh, sizes = self.mesh, dict[Any, float]()
        for name, known in held.items():
            parameter = self.table.parameters[known]
            cut = () if self.is_sent_whole(known) else mesh_axes_of(self.zero_axis(known))
            axes = [(axis, mesh.size(axis), mesh.stride(axis)) for axis in parameter.axes
                    if mesh.size(axis) > 1 and axis not in (*cut, *self.apart(known))]  # fmt: skip
            owners = sum(name in names for names in everywhere)
            groups = (*axes, *([("pp", owners, mesh.stride("pp"))] if owners > 1 else []))
            if groups and parameter.trained:
                sizes[groups] = sizes.get(groups, 0.0) + self.sent_bytes(known) * parameter.summed
        return sizes

    def gradient_bytes(self, name: str) -> float:
        """Return the bytes of a rank's shard of a parameter's gradient, in the parameter's dtype."""
        return self.local_bytes(name) * self.table.parameters[name].trained

    def grown_bytes(self, name: str) -> float:
        """Return the bytes of a parameter's accumulated gradient right before the optimizer step.

        ZeRO 1 keeps the gradient unsharded during the step: in the compute dtype with one microbatch, else in the
        reduction dtype. A gradient that a `dp_sync` method receives has the parameter's stored dtype.
        """
        if self.is_sent_whole(name):
            return self.sent_bytes(name) * self.table.parameters[name].trained
        is_first = self.setting.schedule.microbatches == 1
        is_whole = self.setting.zero == 1 and self.table.parameters[name].trained
        whole = (self.whole_bytes(name) if is_first else self.summed_bytes(name) * self.is_cut(name)) * is_whole
        return max(self.gradient_bytes(name), whole)


def _digits(seconds: float) -> float:
    """Round seconds to the 9 digits that plans store."""
    return float(f"{seconds:.9g}")
