"""Search for a mesh and its options: formulas evaluate all candidates, and the best are simulated.

The search traces a copy of the model with few of its repeated blocks, once. A layout kind states which of `tp`,
sequence parallelism, `cp` and `ep` are used. For each layout kind and recomputation mode, the search builds a cost
table: FLOPs, bytes and memory of the operators. Formulas (`cost.formula`) and simulations (`cost.predict.table`) use
these tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, Unpack, get_args

import numpy as np
from torch import nn

from autopart.common.progress import numbered, phase
from autopart.common.text import ShownAsText, quantity
from autopart.compat.torch_internals import tree_map
from autopart.cost.count.scaling_exponents import tokens
from autopart.cost.count.tabulate import Blocks, BlocksNotContiguous, each_block, tabulate
from autopart.cost.formula.step_formula import Formula, compiled
from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.simulate import LONGEST, Simulation, simulate
from autopart.cost.predict.table import RunSetting, Table, predict
from autopart.errors import AutopartError, MemoryLimitError, OptionError
from autopart.ir.mesh import Mesh
from autopart.ir.run.mixed_precision import Precision
from autopart.ir.run.recompute_spec import RecomputeMode
from autopart.ir.run.schedules import FLUSHING, Schedule, can_run
from autopart.ir.run.sync_option import ALL_REDUCE, SyncOption, parse_sync
from autopart.ir.trace import Trace
from autopart.ops.grouped_matmul import expert_counts
from autopart.options import Options, SearchOptions, read_options, with_options
from autopart.plans.headlines import step_size
from autopart.plans.plan import Plan
from autopart.proof.scale.scaled_model import with_fewest_blocks
from autopart.recipe.make_plan import drafted, make_plan, prepare
from autopart.recipe.model_source import example_of
from autopart.tracing.trace_model import bind_call
from autopart.tuning.alternatives import reasons, why_others_lose
from autopart.tuning.search_inputs import batch_size, divisors, fixed_axes, with_batch_size

TRACED_ROWS = 2
"""Batch size of the trace whose operators are counted; with 1, the batch dim could not be recognized."""

SHORTEST = 1024
"""Minimum tokens per rank for `cp`. With fewer, sending keys and values costs more than `cp` saves."""

LEVELS = (0, 1, 2, 3)
"""ZeRO stages to try."""

VIRTUAL_STAGES = (1, 2, 3, 4)

SIMULATED, SMALLER = 4, 2
"""Number of candidates to simulate: the fastest by formula, and others on the Pareto front that need less memory."""

RESCHEDULED = 2
"""Number of candidates that are also simulated under all other schedules.

They must have at most `LONGEST` stage forwards.
"""

ACTIONS = 50_000
"""Maximum number of stage forwards in all simulated candidates together.

It allows only a few candidates with a very deep pipeline.
"""


@dataclass(frozen=True, repr=False)
class Candidate(ShownAsText):
    """A mesh, its options, and the predicted step.

    `simulation` is None if only a formula has predicted the step.
    """

    mesh: Mesh
    schedule: Schedule
    sequence_parallel: bool
    recompute: RecomputeMode
    zero: int
    step_time_s: float
    memory_bytes: float
    dp_sync: SyncOption = ALL_REDUCE
    simulation: Simulation | None = field(default=None, repr=False, compare=False)

    @property
    def options(self) -> dict[str, Any]:
        """Options with which `autopart.plan` makes the plan of this candidate."""
        asked: dict[str, Any] = {"microbatches": self.schedule.microbatches, "recompute": self.recompute}
        if self.schedule.name is not None:
            asked |= {"schedule": self.schedule.name, "virtual_stages": self.schedule.virtual_stages}
        if self.mesh.size("tp") > 1:
            asked["sequence_parallel"] = self.sequence_parallel
        if self.mesh.storing_axis is not None:
            asked["zero"] = self.zero
        if not self.dp_sync.is_default:
            asked["dp_sync"] = self.dp_sync
        return asked

    def __str__(self) -> str:
        parts = [str(self.mesh), f"microbatches={self.schedule.microbatches}"]
        if self.schedule.name is not None:
            virtual = f" x{self.schedule.virtual_stages}" if self.schedule.virtual_stages > 1 else ""
            parts.append(f"{self.schedule.name}{virtual}")
        parts += ["sequence parallel"] * (self.sequence_parallel and self.mesh.size("tp") > 1)
        parts += [f"zero={self.zero}"] * bool(self.zero)
        parts += [f"recompute={self.recompute}"] * (self.recompute != "none")
        parts += [f"dp_sync={self.dp_sync}"] * (not self.dp_sync.is_default)
        plan = self.simulation.plan if self.simulation is not None else None
        about = "" if plan is not None else "about "
        size = f" of {step_size(plan)}" if plan is not None and step_size(plan) else ""
        cost = (
            f"{about}{quantity(self.step_time_s, 's')} a step{size}, {about}{quantity(self.memory_bytes, 'B')} a rank"
        )
        return f"{', '.join(parts)}: {cost}"

    def planned(self, plan: Plan) -> Candidate:
        """Return a copy of the candidate that has the step time and memory of `plan`."""
        step = simulate(plan)
        return replace(
            self, step_time_s=step.step_time_s, memory_bytes=max(row["total"] for row in plan.memory), simulation=step
        )


class LayoutKind(NamedTuple):
    """Properties of a mesh on which the layouts of tensors depend, such as the use of `tp`.

    Args:
        tensor: True if `tp` has several ranks.
        sequence_parallel: True if sequence parallelism over `tp` is used.
        context: number of `cp` ranks for which the FLOPs and bytes of operators are counted: 1, 2 or 8.
        experts: True if `ep` has several ranks.
    """

    tensor: bool
    sequence_parallel: bool
    context: int = 1
    experts: bool = False

    @staticmethod
    def of(mesh: Mesh, sequence_parallel: bool) -> LayoutKind:
        """Return the layout kind of a mesh.

        Meshes with 2 to 7 `cp` ranks count as 2 ranks, and meshes with 8 or more as 8. From 8 ranks on, another method
        of context-parallel attention (ring or all-to-all) can be the cheapest.
        """
        context = 1 if mesh.size("cp") == 1 else 2 if mesh.size("cp") < 8 else 8
        return LayoutKind(mesh.size("tp") > 1, sequence_parallel, context, mesh.size("ep") > 1)

    @property
    def mesh(self) -> Mesh:
        """Smallest mesh of this layout kind, on which FLOPs, bytes and memory of the operators are counted."""
        sizes = {"cp": self.context, "ep": 1 + self.experts, "tp": 1 + self.tensor}
        return Mesh.parse({axis: size for axis, size in sizes.items() if size > 1} or "dp1")

    def __str__(self) -> str:
        return f"{self.mesh}{', along the sequence' * self.sequence_parallel}"


@dataclass
class Space:
    """Search space of a model: cost tables and formulas for one hardware profile and global batch.

    Args:
        rows: samples of the global batch.
        profile: name of the hardware profile.
        fused: True to count the operators between two matrix products or collectives as one kernel.
        assumed: {field of `cost.predict.run_setting.RunSetting`: value}, such as `{"state_bytes": 8}`, to predict
            another runtime than autopart's.
        precision: compute dtype and reduction dtype.
        methods: gradient synchronization methods (option `dp_sync`) to try, such as PowerSGD.
        balance, sequence_dims, optimizer: the options of `autopart.plan` with these names.
        fixed: {mesh axis: the only size to try}.
        tables: the cost tables built so far.
    """

    model: nn.Module
    example: Mapping[str, Any]
    rows: int
    profile: str
    fused: bool = False
    assumed: Mapping[str, Any] = field(default_factory=dict)
    precision: Precision | None = None
    methods: Sequence[SyncOption] = ()
    balance: float = 1.0
    sequence_dims: Mapping[str, int] | None = None
    optimizer: str = "adamw"
    fixed: Mapping[str, int] = field(default_factory=dict)
    tables: dict[tuple[LayoutKind, RecomputeMode], Table] = field(default_factory=dict)
    _drafts: dict[LayoutKind, Any] = field(default_factory=dict, init=False)
    _sweeps: dict[int, list[Candidate]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        phase("tracing a few of the model's blocks")
        self.hardware = Hardware.load(self.profile)
        self._call = tree_map(lambda x: with_batch_size(x, batch_size(self.example), TRACED_ROWS), dict(self.example))
        small, like = with_fewest_blocks(self.model)
        try:
            self._traced, self._like = prepare(small, bind_call(small, (), self._call), precision=self.precision), like
            self._blocks: Blocks = {**each_block(self._traced), **like}
        except Exception:  # a model's own code may raise any error if the model has fewer blocks
            self._trace_whole()

    def _trace_whole(self) -> None:
        call = bind_call(self.model, (), self._call)
        self._traced, self._like, self._blocks = prepare(self.model, call, precision=self.precision), {}, {}
        self._drafts.clear()
        self.tables.clear()

    def table(self, kind: LayoutKind, recompute: RecomputeMode) -> Table:
        """Return the cost table for a layout kind and a recomputation mode. Build it on first use."""
        if (kind, recompute) not in self.tables:
            phase(f"counting operators on {kind}, recompute={recompute}")
            # With any method set, the table counts the communication of methods.
            method = self.methods[0].as_data() if self.methods else None
            options = Options(sequence_parallel=kind.sequence_parallel, hardware=self.profile, recompute=recompute,
                              balance=self.balance, dp_sync=method, sequence_dims=self.sequence_dims)  # fmt: skip
            draft = drafted(self._traced, kind.mesh, options, self._drafts.get(kind))
            self._drafts[kind] = draft
            try:
                table = tabulate(self._traced, draft.program, draft.walks, self._blocks, self.fused, self.optimizer)
            except BlocksNotContiguous:
                self._trace_whole()
                return self.table(kind, recompute)
            self.tables[kind, recompute] = table
        return self.tables[kind, recompute]

    def meshes(self, devices: int) -> Iterator[Mesh]:
        """Yield the meshes of `devices` ranks that the search tries.

        A node holds all ranks of a `tp` group. `dp` times `ep` divides the batch, and `ep` divides the number of
        experts. With `cp`, every rank has at least `SHORTEST` tokens of a sequence.
        """
        for tp in (n for n in divisors(devices) if n <= self.hardware.devices_per_node):
            for cp in (n for n in divisors(devices // tp) if n == 1 or self.tokens // n >= SHORTEST):
                for ep in (n for n in divisors(devices // (tp * cp)) if self._cuts_experts(n)):
                    for pp in divisors(devices // (tp * cp * ep)):
                        dp = devices // (tp * cp * ep * pp)
                        sizes = {"pp": pp, "dp": dp, "cp": cp, "ep": ep, "tp": tp}
                        is_wanted = all(sizes.get(axis) == size for axis, size in self.fixed.items())
                        if is_wanted and self.rows % (dp * ep) == 0 and pp <= self.num_blocks:
                            yield Mesh.parse({axis: size for axis, size in sizes.items() if size > 1} or {"dp": 1})

    def _cuts_experts(self, ranks: int) -> bool:
        return self.num_experts % ranks == 0 and (ranks == 1 or self.balance <= ranks)

    @cached_property
    def tokens(self) -> int:
        """Number of tokens in one sample."""
        return tokens(self._traced)

    @cached_property
    def num_experts(self) -> int:
        """Greatest common divisor of the expert counts of all layers; 1 without experts."""
        return math.gcd(*(expert_counts(self._traced.graph) or [1]))

    @cached_property
    def num_blocks(self) -> int:
        """Number of repeated blocks. The search tries at most this many pipeline stages."""
        return max([len(like) for like in self._like.values()], default=4)

    def settings(self, devices: int) -> Iterator[tuple[Mesh, Schedule]]:
        for mesh in self.meshes(devices):
            rows, pp = self.rows // mesh.size("dp"), mesh.size("pp")
            for b in divisors(rows):
                if b & (b - 1) or b % mesh.size("ep"):  # powers of two
                    continue
                microbatches = rows // b
                if pp == 1:
                    yield mesh, Schedule(None, microbatches, 1)
                    continue
                yield mesh, Schedule("1f1b", microbatches, 1)
                for virtual in VIRTUAL_STAGES[1:]:
                    if pp * virtual <= self.num_blocks and can_run("interleaved_1f1b", pp * virtual, pp, microbatches):
                        yield mesh, Schedule("interleaved_1f1b", microbatches, virtual)

    def sweep(self, devices: int) -> list[Candidate]:
        """Evaluate all candidates with the formulas, and return them, fastest first.

        Candidates with a pipeline run 1F1B or interleaved 1F1B. `rescheduled` tries other schedules later.
        """
        if devices in self._sweeps:
            return self._sweeps[devices]
        settings = list(self.settings(devices))
        phase(f"sweeping {len(settings):,} meshes and schedules by formula")
        swept: list[Candidate] = []
        kinds: dict[LayoutKind, list[tuple[Mesh, Schedule]]] = {}
        for mesh, schedule in settings:
            for sequence_parallel in (False, True) if mesh.size("tp") > 1 else (False,):
                kinds.setdefault(LayoutKind.of(mesh, sequence_parallel), []).append((mesh, schedule))
        for kind, chosen in numbered([*kinds.items()]):
            swept += self._swept(chosen, kind)
        self._sweeps[devices] = sorted(swept, key=lambda candidate: candidate.step_time_s)
        return self._sweeps[devices]

    def _swept(self, settings: Sequence[tuple[Mesh, Schedule]], kind: LayoutKind) -> Iterator[Candidate]:
        known: dict[Any, Any] = {}
        held = {name: self.assumed[name] for name in ("state_bytes", "receives_held") if name in self.assumed}
        variants = [(recompute, zero) for recompute in get_args(RecomputeMode) for zero in LEVELS]
        formulas = [
            Formula(self.table(kind, recompute).totals, self.hardware, zero, **held, known=known)
            for recompute, zero in variants
        ]
        values = [list(formulas[0].values(mesh, schedule, self.rows).values()) for mesh, schedule in settings]
        columns = np.array(values, dtype=float).T[len(formulas[0].constants) :]
        numbers = [np.broadcast_to(column, len(settings)) for column in compiled(formulas)(*columns)]
        for (recompute, zero), times, sizes in zip(variants, numbers[::2], numbers[1::2], strict=True):
            for (mesh, schedule), time_s, size in zip(settings, times, sizes, strict=True):
                if zero == 0 or mesh.storing_axis is not None:
                    uneven = self._imbalance(mesh.size("pp") * schedule.virtual_stages)
                    figures = float(time_s) * uneven, float(size) * uneven
                    yield Candidate(mesh, schedule, kind.sequence_parallel, recompute, zero, *figures)

    def _imbalance(self, num_stages: int) -> float:
        """Return the load of the most loaded stage divided by the mean load.

        Stages are assumed to begin only at a block, or in the middle of a block.
        """
        halves = 2 * self.num_blocks
        return num_stages * math.ceil(halves / num_stages) / halves if num_stages > 1 else 1.0

    def simulated(self, candidate: Candidate) -> Candidate:
        """Simulate a candidate, and return a copy with the simulation, its step time and its memory."""
        table = self.table(LayoutKind.of(candidate.mesh, candidate.sequence_parallel), candidate.recompute)
        setting = RunSetting(candidate.mesh, candidate.schedule, self.rows, candidate.zero, dp_sync=candidate.dp_sync,
                          **self.assumed)  # fmt: skip
        step = predict(table, setting, self.hardware)
        fullest_bytes = max(step.peak_memory_bytes)
        return replace(candidate, step_time_s=step.step_time_s, memory_bytes=fullest_bytes, simulation=step)

    def rescheduled(self, candidate: Candidate) -> Iterator[Candidate]:
        """Simulate a candidate under all other schedules that its mesh and microbatches allow."""
        pp, microbatches = candidate.mesh.size("pp"), candidate.schedule.microbatches
        for name in FLUSHING if pp > 1 else ():
            for virtual in VIRTUAL_STAGES:
                schedule = Schedule(name, microbatches, virtual)
                runs = pp * virtual <= self.num_blocks and can_run(name, pp * virtual, pp, microbatches)
                if runs and schedule != candidate.schedule and pp * virtual * microbatches <= LONGEST:
                    phase(f"simulating {candidate.mesh} with {name}")
                    try:
                        yield self.simulated(replace(candidate, schedule=schedule))
                    except AutopartError:  # too few stage boundaries
                        continue

    def with_methods(self, candidate: Candidate) -> Iterator[Candidate]:
        """Simulate a candidate with each gradient synchronization method that its ZeRO stage allows.

        Methods that average models need `zero=0`. Methods that compress gradients need `zero=0` or `zero=1`.
        """
        for method in self.methods if candidate.mesh.along("rows") else ():
            if candidate.zero == 0 or (candidate.zero == 1 and not method.changes_models):
                yield self.simulated(replace(candidate, dp_sync=method))

    def best(self, devices: int, memory: float) -> list[Candidate]:
        """Return the Pareto front of time and memory of the simulated candidates that fit into memory.

        The fastest candidate comes first. Raises MemoryLimitError if no candidate fits.
        """
        swept = self.sweep(devices)
        able = [candidate for candidate in swept if candidate.memory_bytes <= memory]
        smaller = _pareto(able)[1:]
        chosen = [*islice(_distinct(able), SIMULATED), *smaller[:: max(1, len(smaller) // SMALLER)][:SMALLER]]
        within: list[Candidate] = []
        left = ACTIONS
        for number, candidate in enumerate({id(c): c for c in (*chosen, *able)}.values()):
            schedule = candidate.schedule
            left -= candidate.mesh.size("pp") * schedule.virtual_stages * schedule.microbatches
            if within and (left < 0 or number >= len(chosen)):
                break
            total = max(len(chosen), number + 1)
            phase(
                f"simulating {number + 1} of {total}: {candidate.mesh}, {candidate.schedule.microbatches} microbatches"
            )
            try:
                simulated = self.simulated(candidate)
            except AutopartError:  # too few stage boundaries
                continue
            if simulated.memory_bytes <= memory:
                within.append(simulated)
        for candidate in sorted(within, key=lambda c: c.step_time_s)[:RESCHEDULED]:
            within += [other for other in self.rescheduled(candidate) if other.memory_bytes <= memory]
        for candidate in list(within):
            within += [other for other in self.with_methods(candidate) if other.memory_bytes <= memory]
        if not within:
            least = min(swept, key=lambda candidate: candidate.memory_bytes, default=None)
            raise MemoryLimitError(
                f"no configuration for {devices} devices fits into {quantity(memory, 'B')}",
                why=f"the configuration with the least memory is {least}"
                if least
                else f"{self.rows} samples cannot be split evenly on a mesh{' with the fixed axes' * bool(self.fixed)}",
                hint="more devices, or a smaller batch",
            )
        return _pareto(within)


def _distinct(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the fastest candidate for every combination of mesh, recomputation and ZeRO stage."""
    seen = set()
    for candidate in candidates:
        key = str(candidate.mesh), candidate.recompute, candidate.zero
        if key not in seen:
            seen.add(key)
            yield candidate


def _pareto(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the Pareto front, fastest first: each candidate needs less memory than all faster candidates."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.step_time_s, c.memory_bytes)):
        if not front or candidate.memory_bytes < front[-1].memory_bytes:
            front.append(candidate)
    return front


@with_options(SearchOptions)
def search(
    model: nn.Module,
    devices: int,
    *,
    global_batch: int | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    count: int = 3,
    dp_sync: Sequence[str | Mapping[str, Any]] = (),
    mesh: str | Mapping[str, int] | None = None,
    **options: Unpack[SearchOptions],
) -> list[Plan]:
    """Find the best plans for a number of devices: the Pareto front of time and memory, fastest first.

    Closed formulas evaluate every mesh, microbatch size, schedule, sequence parallelism, recomputation and ZeRO stage.
    The best candidates are split into stages and simulated, also under the other schedules. The first `count` of them
    become complete plans.

    Args:
        model: may be on `meta`.
        devices: number of ranks. The hardware profile has the number of ranks per node.
        global_batch: samples per step. None: the batch size of the example.
        example_kwargs: keyword arguments of a call of the model, with any batch size. None: generated token ids, for
            language models of transformers.
        count: number of plans to return.
        dp_sync: gradient synchronization methods to try in addition to all-reduce, such as `["powersgd:4", "local:8"]`.
            They change convergence, which is not predicted, so the search tries only the methods that you list.
        mesh: axes with a fixed size, such as "tp2" or "pp=1,tp=8". The search chooses the sizes of all other axes.
        **options: `SearchOptions`.
    Returns:
        Plans, fastest simulated step first. The last note of each plan has its prediction, and the reason why it is
        listed. Other notes of the fastest plan say why well-known configurations are slower.
    Raises:
        MemoryLimitError if no plan fits, OptionError for invalid numbers, InputError without an example.

    Example:
        >>> plans = autopart.search(model, 64, hardware="a100-80gb-sxm", global_batch=512)    # doctest: +SKIP
        >>> print(autopart.simulate(plans[0]))                                               # doctest: +SKIP
    """
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise OptionError(f"devices={devices!r} is not a number of devices", why="it must be an integer from 1")
    asked = read_options(search, options)
    precision = Precision.parse(asked.precision, asked.reduce_dtype)
    methods = [parse_sync(method) for method in dp_sync]
    space = space_of(model, asked.hardware, global_batch, example_kwargs, precision, methods, asked.balance)
    space.sequence_dims, space.optimizer, space.fixed = asked.sequence_dims, asked.optimizer, fixed_axes(mesh, devices)
    limit = int(asked.memory) if asked.memory is not None else space.hardware.memory_bytes
    candidates = space.best(devices, limit)
    rows = tree_map(lambda x: with_batch_size(x, batch_size(space.example), space.rows), dict(space.example))
    traced = prepare(model, bind_call(model, (), rows), precision=precision)
    phase("planning the best")
    best = _planned(model, traced, candidates, replace(asked, memory=None), limit, count)
    if not best:
        raise MemoryLimitError(
            f"no plan for {devices} devices fits into {quantity(limit, 'B')}",
            why=f"the candidate with the least estimated memory is {candidates[-1]}",
            hint="more devices, or a smaller batch",
        )  # fmt: skip
    lost = list(why_others_lose(space, devices, best[0].estimated, limit))
    with_reasons = zip(best, reasons([one.candidate for one in best]), strict=True)
    return [
        replace(one.plan, notes=(*one.plan.notes, *lost * (one is best[0]), f"found by search: {one.candidate}; {why}"))
        for one, why in with_reasons
    ]


class _Planned(NamedTuple):
    """A candidate with its plan.

    Args:
        candidate: the candidate with the step time and memory of its plan.
        estimated: the candidate as it was before planning.
    """

    candidate: Candidate
    estimated: Candidate
    plan: Plan


def _planned(
    model: nn.Module, traced: Trace, candidates: Sequence[Candidate], options: Options, limit: float, count: int
) -> list[_Planned]:
    """Plan candidates, fastest first, until `count` plans fit into memory and are on the Pareto front."""
    best: list[_Planned] = []
    for estimated in candidates:
        if len(best) == count:
            break
        try:
            plan = make_plan(model, traced, estimated.mesh, replace(options, **estimated.options))
        except AutopartError:  # for example, sizes that are not divisible, which the formulas ignore
            continue
        if max(row["total"] for row in plan.memory) <= limit:
            best.append(_Planned(estimated.planned(plan), estimated, plan))
            kept = [id(candidate) for candidate in _pareto([one.candidate for one in best])]
            best = sorted((one for one in best if id(one.candidate) in kept), key=lambda o: kept.index(id(o.candidate)))
    return best


def space_of(
    model: nn.Module, hardware: str, global_batch: int | None, example_kwargs: Mapping[str, Any] | None,
    precision: Precision | None = None, methods: Sequence[SyncOption] = (), balance: float = 1.0,
) -> Space:  # fmt: skip
    """Return the search space that `search` uses for these arguments.

    Raises the errors that `search` raises for invalid arguments.
    """
    example = example_kwargs if example_kwargs is not None else example_of(model)
    example_rows = batch_size(example)
    rows = global_batch if global_batch is not None else example_rows
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise OptionError(f"global_batch={rows!r} is not a number of samples", why="it must be an integer from 1")
    return Space(model, example, rows, hardware, precision=precision, methods=methods, balance=balance)
