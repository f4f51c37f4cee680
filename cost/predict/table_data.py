"""Conversion of a plan's cost table (`Table`) to and from JSON. Equal operators share one row."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from autopart.cost.predict.operator_work import CHOSEN, NOTHING, Exponents, Size, Work
from autopart.cost.predict.table import RunSetting, Table
from autopart.cost.predict.table_rows import OperatorRow, Parameter
from autopart.cost.update_rules import ADAMW
from autopart.ir.blocks.deduplication import DeduplicatedBlock, DeduplicatedBlocks, NotDeduplicable, expand_blocks
from autopart.ir.mesh import Mesh
from autopart.ir.run.schedules import Schedule
from autopart.ir.run.sync_option import SyncOption

_BlockRun = list[Any]
"""Consecutive operators of one block: `[module path of the list of blocks, block index, [row, ...]]`."""

_NUMBERED = re.compile(r"(.+?)\.(\d+)\.(.+)")
"""Pattern of a parameter's name in a repeated block: module path of the list, block index, rest."""


def plan_setting(
    table: Table, mesh: Mesh, schedule: Schedule, zero: int, prefetch: int, scatter_sends: bool, dp_sync: SyncOption,
    compiled: bool = False,
) -> RunSetting:  # fmt: skip
    """Return the setting for which the cost table of a plan was counted.

    Args:
        mesh, schedule, zero, prefetch, scatter_sends, dp_sync, compiled: fields of the plan.
    """
    rows = table.b * mesh.data_parallel_size * schedule.microbatches
    return RunSetting(
        mesh, schedule, rows, 3 if table.gathers else zero, prefetch=prefetch, scatter_sends=scatter_sends,
        dp_sync=dp_sync, compiled=compiled, cuts=table.cuts[mesh.size("pp") * schedule.virtual_stages],
    )  # fmt: skip


def deduplicated_rows(table: Table, scatter_sends: bool = False, folds: DeduplicatedBlocks = ()) -> Table:
    """Return a cost table in which equal operators share one row, even if they are in different blocks.

    If the counted trace was deduplicated, the result lists all operators of the full model.

    Args:
        scatter_sends: False to set the bytes that can be sent as shards to 0.
        folds: the blocks of the trace that represent several blocks of the model.

    Raises NotDeduplicable if a block in `folds` has other rows than its neighbours in the trace.
    """
    known: dict[Any, int] = {}
    rows, order, parameters = list[OperatorRow](), list[_OrderEntry](), dict[str, Parameter]()
    for position, *block in table.order:
        row = table.rows[position] if scatter_sends else replace(table.rows[position], alike=NOTHING)
        path, number, names = _names_in_first_block((*row.parameters, *row.reads_also), table.parameters)
        read, also = names[: len(row.parameters)], names[len(row.parameters) :]
        sizes = (getattr(row, name) for name in (*_BYTES, *_OPTIONAL_BYTES))
        key = (tuple(row.works.items()), read, also, row.inputs, row.recomputed, row.once, *sizes)
        if key not in known:
            known[key] = len(rows)
            rows.append(replace(row, parameters=read, reads_also=also))
            parameters |= {name: table.parameters[name] for name in names}
        order.append(_OrderEntry(known[key], path, number, f"{block[0]}.{block[1]}"))
    if any(fold.holds(name) for fold in folds for name in parameters):
        raise NotDeduplicable("a parameter of a deduplicated block differs from that of the first block")
    if any(not _are_equivalent(order, fold) for fold in folds):
        raise NotDeduplicable("a deduplicated block has other work or saved tensors than the blocks next to it")
    every = [*expand_blocks(folds, [*enumerate(order)], lambda at: at[1].block, lambda at, i: (at[0], at[1].later(i)))]
    place = {index: at for at, (index, _) in reversed([*enumerate(every)])}
    cuts = {count: tuple(place[index] for index in starts) for count, starts in table.cuts.items()}
    return replace(
        table, rows=tuple(rows), order=tuple(place[:3] for _, place in every), parameters=parameters, cuts=cuts
    )


class _OrderEntry(NamedTuple):
    """One operator of a cost table, with its row, its block, and the block that owns its parameters.

    Args:
        row: index of the operator's row.
        path, number: list and index of the block that owns the parameters; "" and 0 outside of blocks.
        block: the block of the operator, as "path.number".
    """

    row: int
    path: str
    number: int
    block: str

    def later(self, blocks: int) -> _OrderEntry:
        """Return the entry of the equal operator in the block that comes `blocks` blocks later."""
        return self._replace(number=self.number + blocks if self.path else 0)


def _are_equivalent(order: Sequence[_OrderEntry], fold: DeduplicatedBlock) -> bool:
    """Return True if a deduplicated block has the same rows as the blocks next to it in the trace.

    Args:
        order: the operators of the table.
        fold: the block that represents several blocks.
    """
    numbers = fold.number - 1, fold.number, fold.number + fold.times
    before, block, behind = ([place.row for place in order if place.block == f"{fold.path}.{number}"]
                             for number in numbers)  # fmt: skip
    return before == block == behind


def _names_in_first_block(
    names: tuple[str, ...], parameters: Mapping[str, Parameter]
) -> tuple[str, int, tuple[str, ...]]:
    """Return the block of some parameters (path, index), and the names of the same parameters in block 0.

    If the parameters are not all in one block, or differ from block 0's parameters, returns ("", 0, names).
    """
    matches = [_NUMBERED.fullmatch(name) for name in names]
    places = {(match[1], int(match[2])) if match else None for match in matches}
    if len(places) == 1 and None not in places:
        path, number = places.pop() or ("", 0)
        first = tuple(f"{path}.0.{match[3]}" for match in matches if match)
        if all(parameters.get(a) == parameters[b] for a, b in zip(first, names, strict=True)):
            return path, number, first
    return "", 0, names


def as_data(table: Table) -> dict[str, Any]:
    """Convert a cost table to the JSON data that a plan stores."""
    works = list(dict.fromkeys(work for row in table.rows for part_works in row.works.values() for work in part_works))
    index = {work: i for i, work in enumerate(works)}
    rows = [
        {"works": {part: [index[work] for work in part_works] for part, part_works in row.works.items()},
         **{name: _size_data(size) for name in _BYTES if (size := getattr(row, name)) is not None},
         **{name: list(names) for name in _NAMES if (names := getattr(row, name))},
         **{name: _size_data(size) for name in _OPTIONAL_BYTES if (size := getattr(row, name)).terms},
         **({} if row.recomputed is None else {"recomputed": _size_data(row.recomputed)}),
         **({"once": True} if row.once else {})}
        for row in table.rows
    ]  # fmt: skip
    parameters = {
        name: {
            "size": _size_data(p.size),
            "axes": list(p.axes),
            "trained": p.trained,
            "cut": list(p.over),
            **_cast_data(p),
        }
        for name, p in table.parameters.items()
    }
    runs = [[path, number, [row for row, *_ in run]] for (path, number), run in groupby(table.order, lambda o: o[1:])]
    return {
        **{name: getattr(table, name) for name in _NUMBERS},
        **{name: ranks for name in _RANKS if (ranks := getattr(table, name)) > 1},
        **({"optimizer": table.optimizer} if table.optimizer != ADAMW else {}),
        **({"prologue": {name: _size_data(size) for name, size in table.prologue.items()}} if table.prologue else {}),
        "cuts": [list(cuts) for cuts in table.cuts.values()],
        "divided": {axis: {str(count): name for count, name in of.items()} for axis, of in table.divided.items()},
        "parameters": parameters, "works": [*map(_work_data, works)], "rows": rows, "order": list(_repeated(runs)),
    }  # fmt: skip


def from_data(data: Mapping[str, Any]) -> Table:
    """Convert the JSON data that a plan stores to a cost table."""
    works = [
        Work(row["kind"], _read(row["bytes"]), times=row.get("times", 1.0),
             **_optional(row))
        for row in data["works"]
    ]  # fmt: skip
    rows = tuple(_row(row, works) for row in data["rows"])
    parameters = {
        name: Parameter(_read(p["size"]), tuple(p["axes"]), p["trained"], tuple(p["cut"]),
                        **_optional_fields(p))
        for name, p in data["parameters"].items()
    }  # fmt: skip
    order = tuple((row, path, n) for entry in data["order"] for path, n, run in _unrolled(entry) for row in run)
    cuts = {len(starts) + 1: tuple(starts) for starts in data["cuts"]}
    divided = {axis: {int(count): name for count, name in counts.items()} for axis, counts in data["divided"].items()}
    numbers = {name: data[name] for name in (*_NUMBERS, *_RANKS) if name in data}
    prologue = {name: _read(size) for name, size in data.get("prologue", {}).items()}
    numbers["optimizer"] = data.get("optimizer", ADAMW)
    return Table(rows, order, parameters, **numbers, prologue=prologue, cuts=cuts, divided=divided)


def _row(data: Mapping[str, Any], works: Sequence[Work]) -> OperatorRow:
    sizes: dict[str, Any] = {name: _read(data[name]) for name in ("in_forward", "in_backward")}
    sizes |= {name: _read(data.get(name, ())) for name in _OPTIONAL_BYTES}
    sizes |= {name: _read(data[name]) if name in data else None for name in ("crossing", "recomputed")}
    names: dict[str, Any] = {name: tuple(data.get(name, ())) for name in _NAMES}
    return OperatorRow({part: tuple(works[i] for i in at) for part, at in data["works"].items()}, **sizes, **names,
                       once=data.get("once", False))  # fmt: skip


def _repeated(runs: Sequence[_BlockRun]) -> Iterator[dict[str, Any]]:
    """Compress the runs of a model: yield each repeated sequence once, with its number of repetitions.

    A run is a sequence of consecutive operators of one block. The items are {"runs": runs, "times": repetitions}, where
    "times" is omitted if it is 1.

    Args:
        runs: all runs of the model, in order.
    """
    start = single = 0
    while start < len(runs):
        period, times = _repetition(runs, start)
        if times > 1:
            if single < start:
                yield {"runs": runs[single:start]}
            yield {"runs": runs[start : start + period], "times": times}
            single = start + period * times
        start += period * times
    if single < start:
        yield {"runs": runs[single:]}


def _repetition(runs: Sequence[_BlockRun], start: int) -> tuple[int, int]:
    """Find runs of operators, starting at index `start`, that repeat in the following blocks.

    Returns (number of runs, number of repetitions), or (1, 1) if there is no repetition.
    """
    if not runs[start][0]:
        return 1, 1
    (next_first,) = _shifted_blocks(runs[start : start + 1], 1)
    for stop in range(start + 1, (start + len(runs)) // 2 + 1):
        if runs[stop] == next_first:
            period, times = stop - start, 1
            while (
                _shifted_blocks(runs[start:stop], times) == runs[start + times * period : start + (times + 1) * period]
            ):
                times += 1
            if times > 1:
                return period, times
    return 1, 1


def _shifted_blocks(runs: Sequence[_BlockRun], later: int) -> list[_BlockRun]:
    """Return copies of runs of operators, with block indices increased by `later`."""
    return [[path, number + later if path else number, rows] for path, number, rows in runs]


def _unrolled(entry: Mapping[str, Any]) -> Iterator[_BlockRun]:
    return (run for copy in range(entry.get("times", 1)) for run in _shifted_blocks(entry["runs"], copy))


_CASTS = {"read": 1.0, "summed": 1.0, "cast_again": False, "itemsize": 4, "rows": 0, "contiguous": True,
          "full": False, "matrix": (), "joined": False}  # fmt: skip
"""Optional fields of a parameter with their defaults: mixed precision, `dp_sync`, shards, full-tensor updates."""
_MORE_SIZES = ("flops", "depth", "causal")
_WORDS = ("dtype", "axis", "in_place", "unaligned", "in_order")
_RANKS = (*CHOSEN, "m")
"""Reference sizes that are stored only if they exceed one: ranks of axes, microbatches of a tail."""
_BYTES = ("in_forward", "in_backward", "crossing")
_OPTIONAL_BYTES = ("kept", "load", "alike", "unkept", "kept_later", "after_backward", "delayed")
"""Fields of an `OperatorRow` that are stored if they are not zero."""
_NAMES = ("parameters", "reads_also", "inputs")
_NUMBERS = ("b", "s", "row_flops", "input_bytes", "buffer_bytes", "gathers", "hidden_sums")


def _optional_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optional fields of a parameter that its JSON data has."""
    return {name: tuple(data[name]) if name == "matrix" else data[name] for name in _CASTS if name in data}


def _cast_data(parameter: Parameter) -> dict[str, Any]:
    return {name: value for name, usual in _CASTS.items() if (value := getattr(parameter, name)) != usual}


def _work_data(work: Work) -> dict[str, Any]:
    return {
        "kind": work.kind, "bytes": _size_data(work.size),
        **{name: _size_data(size) for name in _MORE_SIZES if (size := getattr(work, name)).terms},
        **{name: value for name in _WORDS if (value := getattr(work, name))},
        **({"times": work.times} if work.times != 1 else {}),
    }  # fmt: skip


def _optional(row: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {name: _read(row[name]) for name in _MORE_SIZES if name in row}
    return sizes | {name: row[name] for name in _WORDS if name in row}


def _size_data(size: Size) -> list[list[float]]:
    """Convert a `Size` to terms `[value, exponent of b, of s, of 1 / tp, ...]`, without trailing zeros."""
    terms = [[value, *powers] for powers, value in size.terms]
    return [term[: max(4, 1 + max((i for i, power in enumerate(term) if power), default=0))] for term in terms]


def _read(terms: Sequence[Sequence[float]]) -> Size:
    return Size(tuple((Exponents(*map(int, powers)), value) for value, *powers in terms))
