"""Optimization problem: choose recomputation, parameter sharding and stage of each repeated block.

A block has six options: three recomputation modes, each with or without parameter sharding. There are 6 ** blocks
combinations of options, times the possible stage boundaries. `BlockProblem` contains the seconds and bytes of every
block under every option. The methods of `search_methods.py` search for the fastest combination.

With stages of `w` seconds per microbatch, a step takes `sum(w) + (microbatches - 1) * max(w)` (Zheng et al. 2022,
arXiv:2201.12023, equation 2, for GPipe and 1F1B). The seconds of a microbatch include its share of once-per-step work.
The memory of a stage is the sum of three numbers: parameters, saved tensors of all microbatches in flight, and the
largest workspace of a block. This sum is an upper bound, because the saved tensors of all blocks are in memory only
while the last block runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.send_costs import scatter_is_cheaper
from autopart.cost.predict.simulate import Simulation
from autopart.cost.predict.table import RunSetting, Table, TableCost, predict
from autopart.cost.predict.table_memory import beyond_kept
from autopart.cost.predict.table_rows import OperatorRow, Parameter
from autopart.errors import OptionError
from autopart.ir.run.recompute_spec import RecomputeMode
from autopart.ir.run.report_terms import TIMING_PARTS

SCHEDULES = (None, "gpipe", "1f1b")


class BlockOption(NamedTuple):
    """Option for one block: its recomputation mode, and True if its matrices are sharded (ZeRO-3)."""

    recompute: RecomputeMode
    cut: bool


class Block(NamedTuple):
    """A repeated block, such as `model.layers.3`: path `model.layers`, number 3.

    Among all operators of the model, the operators `start` to `stop - 1` belong to the block.
    """

    path: str
    number: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.path}.{self.number}"


@dataclass(frozen=True)
class BlockChoice:
    """Choice for all blocks: the option of each block, and the first block of every stage except stage 0.

    `options` are indices into `Blocks.options`.
    """

    options: tuple[int, ...]
    begins: tuple[int, ...] = ()

    @property
    def stage_of(self) -> np.ndarray:
        """Stage of every block, an array of shape [blocks]."""
        return np.searchsorted(self.begins, np.arange(len(self.options)), side="right")


@dataclass(frozen=True, eq=False)
class BlockProblem:
    """Seconds and bytes of every block under every option, and of operators outside of blocks per stage.

    Args:
        time_s: array [blocks, options]: seconds of forward and backward of a microbatch, plus the microbatch's share of
            work that is done once per step, such as gradient reduction.
        state_bytes: array [blocks, options]: bytes of parameters, gradients and optimizer state.
        kept_bytes: array [blocks, options]: bytes that a microbatch saves for backward.
        temporary_bytes: array [blocks, options]: workspace while the block runs.
        in_flight: array [stages]: microbatches in flight.
        base_time_s, base_bytes, base_temporary_bytes: arrays [stages]: seconds, bytes and workspace of operators
            outside blocks (embeddings, the loss).
        microbatches: microbatches of a step.
        memory_bytes: memory limit of a rank.
    """

    time_s: np.ndarray
    state_bytes: np.ndarray
    kept_bytes: np.ndarray
    temporary_bytes: np.ndarray
    in_flight: np.ndarray
    base_time_s: np.ndarray
    base_bytes: np.ndarray
    base_temporary_bytes: np.ndarray
    microbatches: int
    memory_bytes: float

    @property
    def num_blocks(self) -> int:
        return len(self.time_s)

    @property
    def num_options(self) -> int:
        return self.time_s.shape[1]

    @property
    def num_stages(self) -> int:
        return len(self.in_flight)

    @property
    def kinds(self) -> np.ndarray:
        """Array of shape [blocks] in which blocks of equal costs have equal numbers.

        The number is the index of the first block with these costs. For example, `[0, 1, 1, 0]` means that blocks 0 and
        3 have equal costs, and blocks 1 and 2 have equal costs.
        """
        rows = np.hstack([self.time_s, self.state_bytes, self.kept_bytes, self.temporary_bytes])
        _, first, kind = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        return first[kind.reshape(-1)]

    def held_bytes(self, stage: int) -> np.ndarray:
        """Return the bytes that each block, under each option, occupies on a stage for the whole step.

        The array has the shape [blocks, options].
        """
        return self.state_bytes + self.in_flight[stage] * self.kept_bytes

    def price(self, options: np.ndarray, stage_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for several choices, the seconds of a step and the bytes of every stage.

        Args:
            options: option of each block in each choice, an array of shape [choices, blocks].
            stage_of: stage of each block in each choice, an array of shape [choices, blocks].
        Returns:
            Two arrays: seconds of shape [choices], and bytes of shape [choices, stages].
        """
        at = np.arange(self.num_blocks), options
        times, states, kept, temporary = (
            a[at] for a in (self.time_s, self.state_bytes, self.kept_bytes, self.temporary_bytes)
        )
        stages = np.empty((2, len(options), self.num_stages))
        for stage in range(self.num_stages):
            mine = stage_of == stage
            stages[0, :, stage] = self.base_time_s[stage] + (times * mine).sum(1)
            extra = np.maximum((temporary * mine).max(1), self.base_temporary_bytes[stage])
            held = ((states + self.in_flight[stage] * kept) * mine).sum(1)
            stages[1, :, stage] = self.base_bytes[stage] + held + extra
        return stages[0].sum(1) + (self.microbatches - 1) * stages[0].max(1), stages[1]

    def step_time_s(self, choice: BlockChoice) -> float:
        return float(self.price(np.array([choice.options]), choice.stage_of[None])[0][0])

    def stage_bytes(self, choice: BlockChoice) -> np.ndarray:
        return self.price(np.array([choice.options]), choice.stage_of[None])[1][0]

    def fits(self, choice: BlockChoice) -> bool:
        return bool((self.stage_bytes(choice) <= self.memory_bytes).all())

    def repaired(self, choice: BlockChoice) -> BlockChoice | None:
        """Change a choice so that it fits into the memory limit; None if no such change is found.

        In a stage above the limit, the options of blocks are changed one by one. Each step makes the change that saves
        the most bytes per added second.
        """
        options = np.array(choice.options)
        for stage in np.flatnonzero(self.stage_bytes(choice) > self.memory_bytes).tolist():
            (mine,) = np.nonzero(choice.stage_of == stage)
            size = self.held_bytes(stage) + self.temporary_bytes
            for _ in range(len(mine) * self.num_options):
                if self.stage_bytes(replace(choice, options=tuple(options)))[stage] <= self.memory_bytes:
                    break
                now = options[mine]
                saved = size[mine, now][:, None] - size[mine]
                longer = np.maximum(self.time_s[mine] - self.time_s[mine, now][:, None], 1e-12)
                worth = np.where(saved > 0, saved / longer, -1.0)
                block, option = np.unravel_index(worth.argmax(), worth.shape)
                if worth[block, option] <= 0:
                    return None
                options[mine[block]] = option
        changed = replace(choice, options=tuple(map(int, options)))
        return changed if self.fits(changed) else None


class Blocks:
    """The repeated blocks of a model, with their costs under every recomputation mode.

    Args:
        tables: {recomputation mode: cost table of all operators}. All tables are for one set of layouts.
        setting: mesh, schedule and ZeRO stage (0 or 3). The ZeRO stage applies to parameters outside the blocks.

    Raises OptionError for schedules with several stages per rank, and if there are too few blocks.
    """

    def __init__(self, tables: Mapping[RecomputeMode, Table], setting: RunSetting, hardware: Hardware):
        if setting.schedule.name not in SCHEDULES:
            known = ", ".join(filter(None, SCHEDULES))
            raise OptionError(
                f"schedule={setting.schedule.name!r} is not supported by search_blocks", why=f"supported: {known}"
            )
        self.setting, self.hardware = setting, hardware
        self.tables, self.outside_cut = tables, setting.zero == 3
        self.found = {word: _blocks(table) for word, table in tables.items()}
        self.blocks = self.found["none"]
        pp = setting.mesh.size("pp")
        if len(self.blocks) < pp:
            why = f"the model has {len(self.blocks)} adjacent repeated blocks with names"
            raise OptionError(f"search_blocks needs at least one repeated block per pipeline stage (pp={pp})", why=why)
        cuts = (False, True) if setting.mesh.storing_axis is not None else (False,)
        words = [
            word for word, table in tables.items() if word == "none" or any("recompute" in at for at in table.counts)
        ]
        self.options = tuple(
            BlockOption(word, cut) for word in words for cut in cuts
        )  # without modes that recompute nothing
        self._all, self._first = _joined(tables)
        self.priced = TableCost(self._all, replace(setting, zero=3), hardware)

    def problem(self, memory_bytes: float) -> BlockProblem:
        """Build the BlockProblem for ranks with `memory_bytes` bytes of memory."""
        schedule, pp = self.setting.schedule, self.setting.mesh.size("pp")
        priced = [
            [self._cost_of(self._order(option, block)) for option in self.options] for block in range(len(self.blocks))
        ]
        blocks = np.array(priced)
        # Operators between two blocks are counted with the first block.
        for i, outside in enumerate(self._outside()[1:-1]):
            blocks[i] += self._cost_of(outside)
        times, states, kept, temporary = np.moveaxis(blocks, 2, 0)
        first, last = self._outside()[0], self._outside()[-1]
        ends = [[*first, *last]] if pp == 1 else [first, *[[]] * (pp - 2), last]
        base_s, base_states, base_kept, base_temporary = np.array([self._cost_of(order, ends) for order in ends]).T
        flight = np.minimum(schedule.microbatches, np.inf if schedule.name == "gpipe" else pp - np.arange(pp))
        flight = np.broadcast_to(flight, pp)
        crossing = self.priced.crossing(self._all.rows[self._order(self.options[0], len(self.blocks) - 1)[0][0]])
        scatter_sends, on = self.setting.scatter_sends, (self.setting.mesh, self.hardware)
        scatters = scatter_is_cheaper([crossing], *on) if scatter_sends is None else scatter_sends
        sent = crossing.sent_bytes(self.setting.mesh, scatters) if pp > 1 else 0.0
        neighbours = np.array([(i > 0) + (i < pp - 1) for i in range(pp)])
        posted = schedule.microbatches if self.setting.receives_held is None else self.setting.receives_held
        fixed = self._all.buffer_bytes + self._all.input_bytes * self.setting.rows
        return BlockProblem(
            times, states, kept, temporary, flight,
            base_s + neighbours * (crossing.time_s(*on, scatters) if sent else 0.0),
            base_states + flight * base_kept + fixed + neighbours * sent * posted, base_temporary,
            schedule.microbatches, memory_bytes,
        )  # fmt: skip

    def table(self, choice: BlockChoice) -> tuple[Table, tuple[int, ...]]:
        """Return the cost table of all operators under a choice, and the stage boundaries of the choice."""
        outside = self._outside()
        order, starts = list(outside[0]), list[int]()
        for block, option in enumerate(choice.options):
            starts.append(len(order))
            order += [*self._order(self.options[option], block), *outside[block + 1]]
        return replace(self._all, order=tuple(order)), tuple(starts[block] for block in choice.begins)

    def simulation(self, choice: BlockChoice) -> Simulation:
        """Simulate the step of a choice."""
        table, cuts = self.table(choice)
        return predict(table, replace(self.setting, zero=3, cuts=cuts), self.hardware)

    @property
    def outside_matrices(self) -> list[str]:
        """Names of the parameters outside of blocks that ZeRO-3 would shard."""
        table = self.tables["none"]
        read = {name for row, path, _ in table.order if not path for name in table.rows[row].parameters}
        return [name for name in table.parameters if name in read and table.parameters[name].cut]

    def _order(self, option: BlockOption, block: int) -> list[tuple[int, str, int]]:
        run, first = self.found[option.recompute][block], self._first[option]
        return [(first + row, path, n) for row, path, n in self.tables[option.recompute].order[run.start : run.stop]]

    def _outside(self) -> list[list[tuple[int, str, int]]]:
        """Return the operators outside of blocks, as one list for each gap.

        The gaps are before the first block, between two blocks, and after the last block.
        """
        order, first = self.tables["none"].order, self._first[BlockOption("none", self.outside_cut)]
        edges = [0, *(edge for block in self.blocks for edge in (block.start, block.stop)), len(order)]
        return [[(first + row, path, n) for row, path, n in order[a:b]] for a, b in list(pairwise(edges))[::2]]

    def _cost_of(
        self, order: Sequence[tuple[int, str, int]], ends: Sequence[Sequence[tuple[int, str, int]]] = ()
    ) -> tuple[float, float, float, float]:
        """Return (seconds, bytes of states, bytes of saved tensors, bytes of workspace) of some operators.

        Args:
            order: the operators, as entries of `Table.order`.
            ends: for each stage, its operators outside blocks. If several stages use a parameter, the cost includes the
                reduction of its gradient over these stages.
        """
        priced, schedule = self.priced, self.setting.schedule
        rows = np.array([row for row, _, _ in order], dtype=int)
        time = sum(sum(priced.by_row[row][part].values()) for row in rows for part in TIMING_PARTS) - self._hidden(rows)
        held, *others = (priced.table.read_by(part) for part in (order, *ends))
        once = priced.once(held, [set(names) for names in (others or [held])])
        once["gradient_sum_s"] *= 1 - priced.hidden_sums
        states = priced.state_bytes(held)
        beyond, _ = beyond_kept(priced, order, others_beside=True)
        temporary = max(beyond.forward, beyond.backward)
        saved = float(priced.row_bytes.kept[rows].sum())
        return time + sum(once.values()) / schedule.microbatches, states, saved, temporary

    def _hidden(self, rows: np.ndarray) -> float:
        """Return the seconds of ZeRO's collectives that overlap with the compute of these operators.

        The collectives of the first block of a stage count as not overlapped.
        """
        number, stores = len(self.blocks) / self.setting.mesh.size("pp"), self.priced.gathers_or_scatters
        hidden = 0.0
        for parts in (("forward",), ("recompute", "input_backward", "weight_backward")):
            kinds = [(kind, s) for row in rows for part in parts for kind, s in self.priced.by_row[row][part].items()]
            moved = sum(s for kind, s in kinds if kind in stores)
            hidden += min(moved, sum(s for _, s in kinds) - moved)
        return hidden * self.priced.hardware.overlap * max(0.0, 1 - 1 / number)


def _blocks(table: Table) -> list[Block]:
    """Find the repeated blocks whose operators are contiguous in a cost table."""
    blocks, start = list[Block](), 0
    for (path, number), run in groupby(table.order, key=lambda at: at[1:]):
        stop = start + len(list(run))
        blocks += [Block(path, number, start, stop)] * bool(path)
        start = stop
    return blocks


def _joined(tables: Mapping[RecomputeMode, Table]) -> tuple[Table, dict[BlockOption, int]]:
    """Concatenate all cost tables, once with sharded and once with unsharded parameters.

    Returns the combined table, and for each option the index of its first row.
    """
    rows, first, parameters = list[OperatorRow](), dict[BlockOption, int](), dict[str, Parameter]()
    for word, table in tables.items():
        for cut in (False, True):
            first[BlockOption(word, cut)] = len(rows)
            names = {name: name if cut else f"{name} (whole)" for name in table.parameters}
            parameters |= {names[name]: replace(p, over=p.over if cut else ()) for name, p in table.parameters.items()}
            rows += [
                replace(row, parameters=tuple(map(names.__getitem__, row.parameters)),
                        reads_also=tuple(map(names.__getitem__, row.reads_also)))
                for row in table.rows
            ]  # fmt: skip
    return replace(tables["none"], rows=tuple(rows), parameters=parameters, order=(), cuts={}), first
