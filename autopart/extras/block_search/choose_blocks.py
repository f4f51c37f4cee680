"""Choice of recomputation, weight sharding and stage boundaries for each block (`search_blocks`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from torch import nn

from autopart.common.memory_size import parse_size
from autopart.common.text import ShownAsText, quantity
from autopart.cost.hardware.profile import DEFAULT
from autopart.cost.predict.simulate import Simulation
from autopart.cost.predict.table import RunSetting
from autopart.errors import OptionError
from autopart.extras.block_search.block_problem import BlockOption, Blocks
from autopart.extras.block_search.search_methods import BlockSearchResult, Method, solve
from autopart.ir.mesh import Mesh
from autopart.ir.run.mixed_precision import Precision
from autopart.ir.run.recompute_spec import Recompute, RecomputeMode
from autopart.ir.run.schedules import Schedule
from autopart.options import Options
from autopart.tuning.search import LayoutKind, Space, space_of


@dataclass(frozen=True, repr=False)
class BlockSearch(ShownAsText):
    """Result of `search_blocks`, with the simulated step of the choice.

    The simulation uses the cost tables of the search. `autopart.plan` counts the costs again, so the predicted time of
    its plan can differ slightly.

    Attributes:
        found: the result of the search method, with the choice.
    """

    blocks: Blocks = field(repr=False)
    found: BlockSearchResult
    simulation: Simulation = field(repr=False)
    sequence_parallel: bool
    precision: Precision | None = None

    @property
    def chosen(self) -> dict[str, BlockOption]:
        """The chosen option of each block, by name of the block."""
        options = self.found.choice.options
        return {block.name: self.blocks.options[i] for block, i in zip(self.blocks.blocks, options, strict=True)}

    @property
    def recompute(self) -> Recompute:
        words = {name: option.recompute for name, option in self.chosen.items()}
        ((usual, _),) = Counter(words.values()).most_common(1)
        others = {name: word for name, word in words.items() if word != usual}
        return {**others, **{f"{block.path}.*": usual for block in self.blocks.blocks}} if others else usual

    @property
    def pins(self) -> dict[str, Any]:
        """Value of the option `pins=`, which fixes parts of a plan.

        It fixes the stage boundaries, and which parameters stay replicated while other parameters are sharded.
        """
        pins: dict[str, Any] = {}
        if self._is_cut:
            whole = [] if self.blocks.outside_cut else self.blocks.outside_matrices
            whole += [name for name, option in self.chosen.items() if not option.cut]
            pins |= {name: {self.blocks.setting.mesh.data_axis: "R"} for name in whole}
        begins = [self.blocks.blocks[i].name for i in self.found.choice.begins]
        return pins | ({"stages": {"cut_before": begins}} if begins else {})

    @property
    def _is_cut(self) -> bool:
        return self.blocks.outside_cut or any(option.cut for option in self.chosen.values())

    @property
    def options(self) -> dict[str, Any]:
        """Options for `autopart.plan` and `parallelize` that make them use this choice."""
        mesh, schedule = self.blocks.setting.mesh, self.blocks.setting.schedule
        options: dict[str, Any] = {
            "microbatches": schedule.microbatches,
            "recompute": self.recompute,
            "pins": self.pins,
        }
        options |= {"schedule": schedule.name} if schedule.name is not None else {}
        options |= {"sequence_parallel": self.sequence_parallel} if mesh.tensor_parallel_size > 1 else {}
        if self.precision is not None:
            options |= {"precision": self.precision.name, "reduce_dtype": self.precision.reduce_name}
        return options | ({"zero": 3 if self._is_cut else 0} if mesh.storing_axis is not None else {})

    @property
    def step_time_s(self) -> float:
        return self.simulation.step_time_s

    @property
    def memory_bytes(self) -> int:
        return max(self.simulation.peak_memory_bytes)

    def __str__(self) -> str:
        options = self.chosen.values()
        words = Counter(option.recompute for option in options)
        begins = self.pins.get("stages", {}).get("cut_before", ())
        parts = [
            f"about {quantity(self.step_time_s, 's')} a step, about {quantity(self.memory_bytes, 'B')} a rank",
            f"recompute of {', '.join(f'{number} blocks {word}' for word, number in words.items())}",
            f"{sum(option.cut for option in options)} of {len(options)} blocks stored sharded",
        ]
        parts += [f"stages begin with {', '.join(begins)}"] * bool(begins)
        return "; ".join(parts)


def search_blocks(
    model: nn.Module,
    mesh: Any,
    *,
    schedule: str | None = None,
    microbatches: int | None = None,
    sequence_parallel: bool = True,
    zero: int = 0,
    hardware: str = DEFAULT,
    global_batch: int | None = None,
    memory: int | str | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    precision: str | None = None,
    reduce_dtype: str | None = None,
    method: Method = "dynamic_programming",
    seed: int = 0,
    budget: int | None = None,
) -> BlockSearch:
    """Find the options of each repeated block with which a training step is fastest and fits into memory.

    For each repeated block, the search chooses a recomputation mode, and whether the block's weights are sharded over
    `dp`. It also chooses the blocks with which pipeline stages begin.

    Args:
        model: the model; can be on `meta`.
        mesh: the mesh, such as "pp4,tp8", as in `plan`.
        schedule: "1f1b" or "gpipe", for a mesh with `pp`.
        microbatches: microbatches per step. None: as many as divide the batch, up to four per stage.
        sequence_parallel: use sequence parallelism over `tp`.
        zero: ZeRO stage of parameters outside of blocks (embeddings, the head): 0 replicates, 3 shards them.
        hardware, global_batch, memory, example_kwargs, precision, reduce_dtype: as in `search`.
        method, seed, budget: search method and its parameters, see `autopart.extras.block_search.search_methods`.
    Returns:
        The choice. `autopart.plan(model, mesh, example_kwargs=..., **choice.options)` makes a plan from it.
    Raises:
        MemoryLimitError if nothing fits, OptionError with fewer blocks than stages, and the errors of `search`.

    Example:
        >>> choice = autopart.search_blocks(model, "pp4,tp8", memory="80GB")    # doctest: +SKIP
        >>> plan = autopart.plan(model, "pp4,tp8", example_kwargs=batch, **choice.options)    # doctest: +SKIP
    """
    asked = Options(precision=precision, reduce_dtype=reduce_dtype)
    computed = Precision.parse(asked.precision, asked.reduce_dtype)
    space, sizes = space_of(model, hardware, global_batch, example_kwargs, computed), Mesh.parse(mesh)
    limit = parse_size(memory) if memory is not None else space.hardware.memory_bytes
    chosen = completed(space.rows, sizes, schedule, microbatches)
    blocks = blocks_of(space, sizes, chosen, sequence_parallel, zero)
    solution = solve(blocks.problem(limit), method, seed, budget)
    return BlockSearch(blocks, solution, blocks.simulation(solution.choice), sequence_parallel, computed)


def blocks_of(space: Space, mesh: Mesh, schedule: Schedule, sequence_parallel: bool = True, zero: int = 0) -> Blocks:
    """Return the blocks of a model, with their costs for each recomputation mode."""
    tables = {
        word: space.table(LayoutKind.of(mesh, sequence_parallel and mesh.tensor_parallel_size > 1), word)
        for word in get_args(RecomputeMode)
    }
    return Blocks(tables, RunSetting(mesh, schedule, space.rows, zero, **space.assumed), space.hardware)


def completed(rows: int, mesh: Mesh, schedule: str | None, microbatches: int | None) -> Schedule:
    """Return the schedule of a search, with defaults for values that are None.

    The default of `schedule` is 1F1B. The default of `microbatches` is 1 without pipeline stages, else the largest
    number that divides the samples of a data rank and is at most four times the number of stages. Raises OptionError if
    `microbatches` does not divide the batch.

    Args:
        rows: number of samples in the global batch.
    """
    dp, pp = mesh.data_parallel_size, mesh.size("pp")
    if rows % (dp * (microbatches or 1)):
        parts = f"dp={dp} x microbatches={microbatches or 1}"
        raise OptionError(f"a batch of {rows} samples cannot be split into {parts} equal parts")
    if pp == 1:
        return Schedule(None, microbatches or 1, 1)
    rows_per_rank = rows // dp
    number = microbatches or max(m for m in range(1, min(rows_per_rank, 4 * pp) + 1) if rows_per_rank % m == 0)
    return Schedule(schedule or "1f1b", number, 1)
