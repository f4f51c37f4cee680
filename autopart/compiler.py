"""Traces a model, makes or reads its plan, and writes programs for its calls: the glue between passes and runtime."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, fx, nn

from autopart.calls import MAX_CALLS, Recent, call_key, warn_of_copies, warn_of_many
from autopart.compat import tree_map, tree_unflatten
from autopart.cost.fit import does_not_fit, fullest
from autopart.cost.hardware import DEFAULT, Hardware
from autopart.cost.memory import RankMemory, parse_size
from autopart.errors import InputError, LayoutError, MemoryLimitError, OptionError, PlanError
from autopart.explain import quantity
from autopart.graph import format_value, is_floating, shape
from autopart.mesh import Mesh
from autopart.passes.analyze import annotate, batch_size
from autopart.passes.batch import choose_batch, mixed_rows
from autopart.passes.decide import NO_PINS, decide, decided_by, decode, encode, without_microbatches
from autopart.passes.footprint import Walk, walked
from autopart.passes.lower import Decisions, lower
from autopart.passes.memory import cut_again, memory_of
from autopart.passes.normalize import AS_TRACED, NORMALIZE, in_double, run_passes
from autopart.passes.pins import pinned_layouts
from autopart.passes.reasons import Reasons, Solved, certificate
from autopart.passes.recompute import check_recompute, recompute_notes
from autopart.passes.shard import SequenceParallel
from autopart.passes.sizes import size_notes
from autopart.passes.storage import choose_over_dp, storage_notes
from autopart.passes.summary import collectives, cost, stage_rows
from autopart.passes.timing import timing
from autopart.passes.unsharded import unsharded
from autopart.pins import Pins
from autopart.plan import MEMORY_KINDS, Plan, Schedule
from autopart.program import SEEDS, Program, Rng
from autopart.recomputation import Recompute, parse_recompute
from autopart.schedules import MULTI_STAGE, check_compile, check_schedule, schedule_for
from autopart.trace import Call, Trace, WithLoss, bind_call, flatten_call, trace

LIFTED = "the model's casts to lower precision (a loss or norm in float32) are computed in float64 here"
LIFTED_HALF = "the model's casts to half precision (autocast) are computed in float64 here"


@dataclass(frozen=True)
class Options:
    """The options of `parallelize` and `plan`; None: chosen for you."""

    schedule: str | None = None
    microbatches: int | None = None
    virtual_stages: int | None = None
    sequence_parallel: SequenceParallel = "auto"
    hardware: str = DEFAULT
    rng: Rng = "fast"
    pins: Pins = NO_PINS
    zero: int | None = None
    memory: int | str | None = None
    recompute: Recompute | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        check_compile(self.compile, self.schedule, self.zero)
        if self.zero in (1, 2) and not isinstance(self.zero, bool):
            cut = "the optimizer's state" if self.zero == 1 else "the optimizer's state and gradients"
            raise OptionError(f"zero={self.zero} is not built yet", why=f"it cuts {cut} over dp, not the parameters",
                              hint="zero=3, which cuts all three, or zero=0")  # fmt: skip
        if self.zero not in (None, 0, 3) or isinstance(self.zero, bool):
            raise OptionError(f"unknown zero={self.zero!r}", hint="0 (parameters whole on dp) or 3 (cut over dp)")
        if self.rng not in get_args(Rng):
            raise OptionError(f"unknown rng={self.rng!r}", hint="rng='fast', or rng='exact'")
        if self.recompute is not None:
            object.__setattr__(self, "recompute", parse_recompute(self.recompute))
        if self.sequence_parallel not in (True, False, "auto"):
            raise OptionError(f"unknown sequence_parallel={self.sequence_parallel!r}", hint="True, False or 'auto'")
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_size(self.memory))
        for name, number in (("microbatches", self.microbatches), ("virtual_stages", self.virtual_stages)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                counted = name.replace("_", " ")
                raise OptionError(f"{name}={number!r} is no number of {counted}", why="it is a whole number from 1")


@contextmanager
def _without_collections() -> Iterator[None]:
    """Inside, Python looks for no cycles of garbage: a graph is very many small objects that stay, and looking through
    them again and again takes a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collections()
def prepare(model: nn.Module, arguments: Mapping[str, Any], double: bool = False) -> Trace:
    """Trace, normalise and annotate a model for a call.

    `double`: compute in float64 even where the model casts down.
    """
    traced = trace(model, arguments)
    run_passes(traced.graph, AS_TRACED)
    lifted = in_double(traced.graph) if double else set()
    if lifted:
        traced = replace(traced, notes=(*traced.notes, LIFTED if lifted == {torch.float32} else LIFTED_HALF))
    run_passes(traced.graph, NORMALIZE)
    annotate(traced)
    return traced


@_without_collections()
def make_plan(model: nn.Module, traced: Trace, mesh: Mesh, options: Options) -> Plan:
    """Choose a plan for an annotated trace."""
    hardware = Hardware.load(options.hardware)
    options, (schedule, decisions, program, solved, walks), memory = _fitted(traced, mesh, options)
    pinned = pinned_layouts(traced, mesh, options.pins).operators
    notes = (*traced.notes, *size_notes(traced, decisions), *storage_notes(traced, decisions, options.zero or 0),
             *recompute_notes(traced.graph, decisions.recompute))  # fmt: skip
    rows, moved = stage_rows(traced, decisions, program), collectives(traced, program)
    names = {"class": type(_inner(model)).__name__, **identity_of(traced.parameters), "mode": traced.mode}
    inputs = {
        name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
        for name, t in zip(traced.call.names, traced.call.tensors, strict=True)
    }
    return Plan(
        dict(mesh.sizes), names, inputs, schedule, **encode(traced, decisions), stages=rows, collectives=moved,
        unsharded=unsharded(traced, decisions, pinned), hardware=hardware.name, compile=options.compile,
        cost=cost(traced, decisions, rows, moved, hardware) | certificate(solved),
        memory=tuple(rank.as_row() for rank in memory),
        timing=timing(traced, program, schedule, hardware, walks, options.compile),
        notes=notes, pins=options.pins.as_data(),
        reasons=Reasons(traced, mesh, program, options.pins, solved, hardware),
    )  # fmt: skip


class Draft(NamedTuple):
    """What is chosen for a plan, the program of it, how the tensor axis was solved (None where that was not), and a
    walk of every stage of the program."""

    schedule: Schedule
    decisions: Decisions
    program: Program
    solved: Solved | None
    walks: Sequence[Walk]


def drafted(traced: Trace, mesh: Mesh, options: Options, known: Draft | None = None) -> Draft:
    """What is chosen, and the program of it; `known`: a draft for as many ranks of `tp`, whose layouts are kept."""
    check_recompute(traced.graph, options.recompute or "none")
    schedule = _schedule(traced, mesh, options)
    stages, microbatches = mesh.size("pp") * schedule.virtual_stages, schedule.microbatches
    if known is None:
        hardware = Hardware.load(options.hardware)
        decisions, solved = decide(
            traced, mesh, microbatches, stages, hardware, options.pins, options.sequence_parallel, options.zero or 0
        )
    else:
        decisions = cut_again(traced, known.decisions, mesh, microbatches, stages, options.pins)
        solved = known.solved
    over_dp = choose_over_dp(traced, mesh, options.zero or 0, decisions.stored, options.pins)
    decisions = replace(decisions, stored_over_dp=over_dp, recompute=options.recompute or "none")
    rng: Rng = "fast" if options.memory is None else options.rng  # a limit is for the program that will be run
    program = lower(traced, decisions, _plan_outputs(traced), whole_outputs=False, rng=rng)
    walks = [walked(traced, program, stage) for stage in program.stages]
    return Draft(schedule, decisions, program, solved, walks)


def _fitted(traced: Trace, mesh: Mesh, options: Options) -> tuple[Options, Draft, Sequence[RankMemory]]:
    """The fastest choice of what the options leave open whose fullest rank needs no more memory than it may.

    Raises MemoryLimitError, with what would take less, where there is none.
    """
    first: tuple[Draft, Sequence[RankMemory]] | None = None
    for choice in _open_choices(mesh, options):
        asked = replace(options, **choice)
        try:
            draft = drafted(traced, mesh, asked)
        except LayoutError:
            if first is None:
                raise
            continue  # nothing to cut over dp
        ranks = memory_of(traced, draft.program, draft.schedule, draft.walks)
        if options.memory is None or fullest(ranks).total <= int(options.memory):
            return asked, draft, ranks
        first = first or (draft, ranks)
    assert first is not None and options.memory is not None
    draft, _ = first

    def estimate(other: Mesh, changed: Mapping[str, Any]) -> Sequence[RankMemory]:
        same = other.size("tp") == mesh.size("tp") and "sequence_parallel" not in changed
        found = drafted(traced, other, replace(options, **changed), draft if same else None)
        return memory_of(traced, found.program, found.schedule, found.walks)

    rows = batch_size(traced)
    given = {name: getattr(options, name) for name in ("zero", "sequence_parallel", "recompute", "compile")}
    raise does_not_fit(first[1], int(options.memory), mesh, draft.schedule, rows, estimate, given)


def _open_choices(mesh: Mesh, options: Options) -> list[dict[str, Any]]:
    """What a limit of memory may change, the fastest first: what lies between matrix products, then what is stored."""
    cuts: list[dict[str, Any]] = [{}]
    if options.sequence_parallel == "auto" and mesh.size("tp") > 1:
        cuts.append({"sequence_parallel": True})
    stores: list[dict[str, Any]] = [{}]
    if options.zero is None and mesh.size("dp") > 1 and not options.compile:
        stores.append({"zero": 3})
    return [{**cut, **store} for store in stores for cut in cuts]


def _inner(model: nn.Module) -> nn.Module:
    return model.model if isinstance(model, WithLoss) else model


def identity_of(parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """A fingerprint of a model: names and shapes of all its parameters."""
    listing = "\n".join(f"{name} {list(p.shape)}" for name, p in sorted(parameters.items()))
    number = sum(p.numel() for p in parameters.values())
    return {"fingerprint": hashlib.sha256(listing.encode()).hexdigest(), "num_parameters": number}


def _schedule(traced: Trace, mesh: Mesh, options: Options) -> Schedule:
    """The schedule asked for, or 1F1B with as many microbatches as divide the batch, up to four per stage."""
    pp = mesh.size("pp")
    name, virtual = options.schedule, options.virtual_stages
    if pp == 1:
        if name is not None or (virtual or 1) > 1:
            asked = f"schedule={name!r}" if name is not None else f"virtual_stages={virtual}"
            why, hint = f"the mesh {mesh} has no axis pp", "mesh='pp2', or leave it out"
            raise OptionError(f"{asked} needs a pipeline", why=why, hint=hint)
        return Schedule(None, options.microbatches or 1, 1)
    if name is None and (virtual or 1) > 1:
        name = "interleaved_1f1b"
    virtual = virtual or (2 if name in MULTI_STAGE else 1)
    microbatches = options.microbatches or _microbatches(traced, mesh, name, pp * virtual)
    if name is None:
        name = schedule_for("1f1b", pp, pp, microbatches)
    check_schedule(name, pp * virtual, pp, microbatches)
    return Schedule(name, microbatches, virtual)


def _microbatches(traced: Trace, mesh: Mesh, schedule: str | None, num_stages: int) -> int:
    rows = batch_size(traced) // mesh.size("dp")
    divisors = [m for m in range(min(rows, 4 * mesh.size("pp")), 0, -1) if rows % m == 0]
    for microbatches in divisors:
        parts = mesh.size("dp") * microbatches
        if mixed_rows(traced.graph, choose_batch(traced.graph, parts)) is not None and microbatches > 1:
            continue
        try:
            check_schedule(schedule or "gpipe", num_stages, mesh.size("pp"), microbatches)
        except ValueError:
            continue
        return microbatches
    return divisors[0] if divisors else 1


def _plan_outputs(traced: Trace) -> list[Any]:
    """What a plan is made for: the loss where there is one, else all outputs."""
    loss = find_loss(traced)
    return [loss] if loss is not None else list(traced.graph.output_node().args[0])


def find_loss(traced: Trace) -> fx.Node | None:
    """The scalar loss among the outputs: the output itself, `output.loss`, `output["loss"]` or the first of a tuple."""
    flat = list(traced.graph.output_node().args[0])
    output = tree_unflatten(flat, traced.output_spec)
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, (tuple, list)):
        found = output[0] if output else None
    scalar = isinstance(found, fx.Node) and is_floating(found) and shape(found) == ()
    return found if scalar else None


@dataclass
class _Traced:
    """One call, traced: what the plan decides for it, and the programs written so far, by purpose."""

    trace: Trace
    decisions: Decisions
    loss_fn: Callable[..., Tensor] | None
    programs: dict[str, Program] = field(default_factory=dict)


class Compiler:
    """Programs for the calls of one model on one mesh, traced when first needed.

    One plan, made at the first trace, serves all calls. A call of other shapes, dtypes or options, in the other mode or
    with another loss is traced anew; the `MAX_CALLS` used last are kept.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, options: Options, plan: Plan | None = None):
        self.model, self.mesh, self.options = model, mesh, options
        self._plan = plan
        self._traced: Recent[_Traced] = Recent(MAX_CALLS)
        self._example: _Traced | None = None
        self._decided: dict[str, str] = {}
        self._num_traces, self._trace_s = 0, 0.0
        self._random = torch.Generator()
        if plan is not None:
            check_plan_mesh(plan, mesh)
            check_plan_options(options, plan)

    @property
    def has_plan(self) -> bool:
        return self._plan is not None

    @property
    def plan(self) -> Plan:
        """The plan; known once the model has been traced or a plan was given."""
        if self._plan is None:
            raise PlanError("there is no plan yet", why="the model is traced at the first call",
                            hint="parallelize(model, mesh, example_kwargs=batch)")  # fmt: skip
        return self._plan

    def ready(self) -> Program | None:
        """The program of the whole model's outputs, where it was traced at construction."""
        return None if self._example is None else self._write(self._example, "forward")

    def trace_example(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Trace and plan for an example call."""
        self._example = self._find(bind_call(self.model, args, kwargs), self.model.training, None)[0]

    def program(
        self, args: tuple, kwargs: Mapping[str, Any], *, purpose: str, training: bool,
        loss_fn: Callable[..., Tensor] | None = None, target: Any = None,
    ) -> tuple[Program, tuple[Tensor, ...]]:  # fmt: skip
        """The program for a call and its tensors; traces the call where it is a new one."""
        arguments = bind_call(self.model, args, kwargs)
        if not torch.is_grad_enabled() and purpose == "forward":
            arguments = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, arguments)
        if loss_fn is not None:
            arguments = {"target": target, "call": arguments}
        traced, call = self._find(arguments, training, loss_fn)
        program = self._write(traced, purpose)
        return program, (*call.tensors, *self._seeds(program))

    def reseed(self, seed: int) -> None:
        """Start the sequence of dropout masks anew; the same seed on every rank."""
        self._random.manual_seed(seed)

    def _seeds(self, program: Program) -> list[Tensor]:
        if program.input_names[-1:] != (SEEDS,):
            return []
        first = torch.randint(2**62, (), generator=self._random)
        return [(first + torch.arange(program.microbatches)).repeat(program.row_ranks)]

    def _find(
        self, arguments: Mapping[str, Any], training: bool, loss_fn: Callable[..., Tensor] | None
    ) -> tuple[_Traced, Call]:
        """The trace of a call, made now where it is a new one, and the call's tensors."""
        call = flatten_call(arguments)
        key = call_key(arguments, call, training, loss_fn)
        return self._traced.get(key, lambda: self._trace(arguments, training, loss_fn)), call

    def _trace(self, arguments: Mapping[str, Any], training: bool, loss_fn: Callable[..., Tensor] | None) -> _Traced:
        start_s = time.perf_counter()
        with _mode(self.model, training):
            model = self.model if loss_fn is None else WithLoss(self.model, loss_fn).train(training)
            traced = prepare(model, arguments)
        if self._plan is None:
            self._plan = make_plan(model, traced, self.mesh, self.options)
        check_plan_model(self._plan, type(self.model).__name__, traced.parameters)
        decisions = decode(traced, self._plan, self.mesh, self._decided)
        # The first trace to decide an operator decides it for all that follow.
        self._decided = {**decided_by(traced, decisions), **self._decided}
        self._num_traces, self._trace_s = self._num_traces + 1, self._trace_s + time.perf_counter() - start_s
        warn_of_many(self._num_traces, self._trace_s / self._num_traces)
        if decisions.copied:
            warn_of_copies(batch_size(traced), self.mesh.size("dp"))
        return _Traced(traced, decisions, loss_fn)

    def _write(self, traced: _Traced, purpose: str) -> Program:
        if purpose not in traced.programs:
            decisions = traced.decisions
            if purpose == "step":
                loss = find_loss(traced.trace)
                if loss is None:
                    raise _no_scalar(traced.loss_fn, traced.trace) or InputError(
                        f"{type(self.model).__name__} returns no loss for this call",
                        why="step() needs a scalar to differentiate",
                        hint="pass labels so that the model returns a loss, or step(..., loss_fn=f, target=t)",
                    )  # fmt: skip
                program = lower(traced.trace, decisions, [loss], whole_outputs=False, rng=self.options.rng)
            else:
                outputs = list(traced.trace.graph.output_node().args[0])
                # Without stages a call runs the whole batch at once: microbatches are for training steps.
                if self.mesh.size("pp") == 1 and decisions.microbatches > 1:
                    decisions = without_microbatches(traced.trace, decisions)
                program = lower(traced.trace, decisions, outputs, whole_outputs=True, rng=self.options.rng)
            traced.programs[purpose] = program
        return traced.programs[purpose]


@contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in train or eval mode, and as it was afterwards."""
    before = {module: module.training for module in model.modules()}
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, was in before.items():
            module.training = was


def check_plan_mesh(plan: Plan, mesh: Mesh) -> None:
    """Raises PlanError where a plan is for another mesh."""
    of_plan = Mesh.parse(plan.mesh)
    if any(of_plan.size(axis) != mesh.size(axis) for axis in ("pp", "dp", "cp", "ep", "tp")):
        raise PlanError(
            f"the plan is for the mesh {of_plan}, not {mesh}", where=plan.where("mesh"),
            hint=f"parallelize(model, '{of_plan}', plan=...), or make a plan for {mesh}",
        )  # fmt: skip


def check_plan_options(options: Options, plan: Plan) -> None:
    """Raises OptionError where options and a plan say different things."""
    for name in ("schedule", "microbatches", "virtual_stages"):
        asked, planned = (
            getattr(options, name),
            plan.schedule.name if name == "schedule" else getattr(plan.schedule, name),
        )
        if asked is not None and asked != planned:
            raise OptionError(
                f"{name}={asked!r} contradicts the plan, which says {planned!r}",
                where=plan.where("schedule"), hint=f"leave {name} out, or edit the plan",
            )  # fmt: skip
    said = (("recompute", options.recompute, plan.recompute), ("compile", options.compile or None, plan.compile))
    for name, asked, planned in said:
        if asked not in (None, planned):
            raise OptionError(
                f"{name}={asked!r} contradicts the plan, which says {planned!r}",
                where=plan.where(name), hint=f"leave {name} out, or edit the plan",
            )  # fmt: skip
    over_dp = any(entry.get("dp", "R").startswith("S") for entry in plan.parameters.values())
    pinned = any("dp" in places for name, places in plan.pins.items() if name != "stages")
    if (options.zero and not over_dp) or (options.zero == 0 and over_dp and not pinned):
        raise OptionError(
            f"zero={options.zero} contradicts the plan, which cuts {'' if over_dp else 'no '}parameters over dp",
            where=plan.where("parameters"), hint="leave zero out, or make a new plan",
        )  # fmt: skip
    _check_given_memory(options.memory, plan)
    if options.pins and options.pins.as_data() != plan.pins:
        asked = "other pins" if plan.pins else "none"
        raise OptionError(f"pins= contradict the plan, which was made with {asked}", where=plan.where("pins"),
                          hint="leave pins out, edit the plan, or make a new one")  # fmt: skip


def _check_given_memory(limit: int | str | None, plan: Plan) -> None:
    """Raises MemoryLimitError where a given plan needs more than a rank may."""
    if limit is None:
        return
    if not plan.memory:
        raise OptionError("memory= asks what the plan does not say", why="it was made by an older version of autopart",
                          hint="make a new plan, or leave memory out")  # fmt: skip
    row = max(plan.memory, key=lambda row: row["total"])
    if row["total"] > int(limit):
        raise MemoryLimitError(
            f"the plan needs {quantity(row['total'], 'B')} on a rank, and memory is {quantity(int(limit), 'B')}",
            why=", ".join(f"{kind} {quantity(row.get(kind, 0), 'B')}" for kind in MEMORY_KINDS if row.get(kind)),
            where=plan.where("memory"), hint="a new plan with memory=, which says what would take less",
        )  # fmt: skip


def check_plan_model(plan: Plan, name: str, parameters: Mapping[str, Tensor]) -> None:
    """Raises PlanError where a plan is for another model."""
    identity = identity_of(parameters)
    if plan.model["fingerprint"] != identity["fingerprint"]:
        raise PlanError(
            f"the plan is for another model than this {name}",
            why=f"it is for {plan.model['class']} with {plan.model['num_parameters']:,} parameters; this one has "
            f"{identity['num_parameters']:,}, or other names or shapes",
            where=plan.where("model"), hint="make a new plan: autopart.plan(model, mesh, example_kwargs=...)",
        )  # fmt: skip


def _no_scalar(loss_fn: Callable[..., Tensor] | None, traced: Trace) -> InputError | None:
    """What is wrong with a `loss_fn`, if it is what should have made the loss."""
    if loss_fn is None:
        return None
    returned = [format_value(o) for o in traced.graph.output_node().args[0] if isinstance(o, fx.Node)]
    return InputError(
        f"loss_fn returns {', '.join(returned)}", why="step() needs a scalar to differentiate",
        hint="a mean or a sum in loss_fn",
    )  # fmt: skip
