"""Traces a model, makes or reads its plan, and writes programs for its calls: the glue between passes and runtime."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopart.compat import tree_map, tree_unflatten
from autopart.cost.fit import Estimate, does_not_fit, fullest
from autopart.cost.hardware import Hardware
from autopart.cost.memory import RankMemory
from autopart.errors import InputError, LayoutError, OptionError, PlanError
from autopart.ir.graph import format_value, is_floating, shape
from autopart.ir.mesh import Mesh
from autopart.ir.program import SEEDS, Program, Rng
from autopart.ir.schedules import MULTI_STAGE, check_schedule, schedule_for
from autopart.options import Options
from autopart.passes.choose.batch import choose_batch, mixed_rows
from autopart.passes.choose.decide import OnAxes, decide, decided_by, decode, without_microbatches
from autopart.passes.choose.reasons import Reasons
from autopart.passes.choose.recompute import check_recompute, recompute_of_checkpoints
from autopart.passes.choose.storage import choose_parts
from autopart.passes.count.footprint import walked
from autopart.passes.count.memory import cut_again, memory_of
from autopart.passes.dump import check_folder
from autopart.passes.facts.analyze import annotate, batch_size
from autopart.passes.facts.decisions import Decisions
from autopart.passes.facts.labels import with_label_count
from autopart.passes.normalize import AS_TRACED, IN_DOUBLE, NORMALIZE
from autopart.passes.pipeline import run_passes
from autopart.passes.write.lower import lower
from autopart.plan_checks import check_plan_mesh, check_plan_model, check_plan_options, warn_of_memory
from autopart.plan_figures import Draft, plan_of
from autopart.plans.agreed import agreed
from autopart.plans.plan import Plan, Schedule
from autopart.progress import phase
from autopart.tracing.calls import MAX_CALLS, Recent, call_key, warn_of_copies, warn_of_many
from autopart.tracing.lost_gradients import with_gradients_checked
from autopart.tracing.skeleton import Source
from autopart.tracing.trace import (
    Call,
    Trace,
    WithLoss,
    WithLossAndOutputs,
    bind_call,
    check_values,
    flatten_call,
    trace,
)

LIFTED = "the model's casts to lower precision (a loss or norm in float32) are computed in float64 here"
LIFTED_HALF = "the model's casts to half precision (autocast) are computed in float64 here"


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
    check_folder()
    phase("tracing the model")
    traced = trace(model, arguments)
    phase("finding out what may be cut")
    run_passes(traced.graph, AS_TRACED)
    (lifted,) = run_passes(traced.graph, (IN_DOUBLE,)) if double else [set()]
    if lifted:
        traced = replace(traced, notes=(*traced.notes, LIFTED if lifted == {torch.float32} else LIFTED_HALF))
    run_passes(traced.graph, NORMALIZE)
    traced = with_gradients_checked(model, arguments, traced, find_loss(traced))
    annotate(traced)
    return traced


@_without_collections()
def make_plan(model: nn.Module, traced: Trace, mesh: Mesh, options: Options) -> Plan:
    """Choose a plan for an annotated trace."""
    hardware, traced = Hardware.load(options.hardware), traced.without_values()
    options, kept = _with_checkpoints(traced, options)
    options, draft, memory = _fitted(traced, mesh, options)
    phase("counting time, memory and collectives")
    reasons = Reasons(traced, mesh, draft.program, options.pins, draft.solved, hardware)
    return plan_of(_class_of(model), traced, draft, options, memory, reasons, kept)


def _with_checkpoints(traced: Trace, options: Options) -> tuple[Options, tuple[str, ...]]:
    """The options with what the model itself checkpoints, where `recompute` is left open; and notes of it."""
    if not traced.checkpointed:
        return options, ()
    if options.recompute is not None:
        said = f"recompute={options.recompute!r}"
        return options, (f"{said} is used in place of the model's own checkpoints",)
    recompute, notes = recompute_of_checkpoints(traced.graph, traced.checkpointed)
    return replace(options, recompute=recompute), notes


def drafted(traced: Trace, mesh: Mesh, options: Options, known: Draft | None = None) -> Draft:
    """What is chosen, and the program of it; `known`: a draft for as many ranks of `tp`, whose layouts are kept."""
    phase(f"choosing layouts and stages on {mesh}")
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
    stored = choose_parts(traced, mesh, options.zero or 0, decisions.stored, options.pins)
    decisions = replace(decisions, stored=stored, recompute=options.recompute or "none")
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
    draft, needed = first
    estimate, rows = estimator(traced, mesh, options, draft), batch_size(traced)
    raise does_not_fit(needed, int(options.memory), mesh, draft.schedule, rows, estimate, left_open(options))


def estimator(traced: Trace, mesh: Mesh, options: Options, draft: Draft) -> Estimate:
    """The memory of other settings; layouts are the draft's where `tp` has as many ranks."""

    def estimate(other: Mesh, changed: Mapping[str, Any]) -> Sequence[RankMemory]:
        same = _feature_sizes(other) == _feature_sizes(mesh) and "sequence_parallel" not in changed
        found = drafted(traced, other, replace(options, **changed), draft if same else None)
        return memory_of(traced, found.program, found.schedule, found.walks)

    return estimate


def _feature_sizes(mesh: Mesh) -> dict[str, int]:
    return {axis: mesh.size(axis) for axis in mesh.along("features")}


def left_open(options: Options) -> dict[str, Any]:
    """What was asked for of the options that another setting may change to take less memory."""
    return {name: getattr(options, name) for name in ("zero", "sequence_parallel", "recompute", "compile")}


def _open_choices(mesh: Mesh, options: Options) -> list[dict[str, Any]]:
    """What a limit of memory may change, the fastest first: what lies between matrix products, then what is stored."""
    cuts: list[dict[str, Any]] = [{}]
    if options.sequence_parallel == "auto" and mesh.feature_ranks > 1:
        cuts.append({"sequence_parallel": True})
    stores: list[dict[str, Any]] = [{}]
    if options.zero is None and mesh.storing_axis is not None and not options.compile:
        stores.append({"zero": 3})
    return [{**cut, **store} for store in stores for cut in cuts]


def _class_of(model: nn.Module) -> str:
    return type(model.model if isinstance(model, WithLoss) else model).__name__


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
    rows = batch_size(traced) // mesh.row_ranks
    divisors = [m for m in range(min(rows, 4 * mesh.size("pp")), 0, -1) if rows % m == 0]
    for microbatches in divisors:
        parts = mesh.row_ranks * microbatches
        if mixed_rows(traced.graph, choose_batch(traced.graph, parts)) is not None and microbatches > 1:
            continue
        try:
            check_schedule(schedule or "gpipe", num_stages, mesh.size("pp"), microbatches)
        except ValueError:
            continue
        return microbatches
    return divisors[0] if divisors else 1


def _plan_outputs(traced: Trace, with_outputs: bool = False) -> list[Any]:
    """What a plan is made for: the loss where there is one, else all outputs."""
    loss = find_loss(traced, with_outputs)
    return [loss] if loss is not None else list(traced.graph.output_node().args[0])


def find_loss(traced: Trace, with_outputs: bool = False) -> fx.Node | None:
    """The scalar loss among the outputs: the output itself, `output.loss`, `output["loss"]` or the first of a tuple.

    `with_outputs`: the trace is of a WithLossAndOutputs.
    """
    flat = list(traced.graph.output_node().args[0])
    output = tree_unflatten(flat, traced.output_spec)
    output = output[0] if with_outputs else output
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif hasattr(output, "loss"):
        found = output.loss
    elif isinstance(output, (tuple, list)):
        found = output[0] if output else None
    scalar = isinstance(found, fx.Node) and is_floating(found) and shape(found) == ()
    return found if scalar else None


LossFn = Callable[..., Tensor]


@dataclass
class _Traced:
    """One call, traced: what the plan decides for it, and the programs written so far, by purpose.

    `with_outputs`: of a model with a `loss_fn`, its own outputs are traced too.
    """

    trace: Trace
    decisions: Decisions
    loss_fn: LossFn | None
    with_outputs: bool
    programs: dict[str, Program] = field(default_factory=dict)
    plan: Plan | None = None


class Compiler:
    """Programs for the calls of one model on one mesh, traced when first needed.

    One plan, made at the first trace, serves all calls. A call of other shapes, dtypes or options, in the other mode or
    with another loss is traced anew; the `MAX_CALLS` used last are kept.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, options: Options, plan: Plan | None = None):
        self.source, self.mesh, self.options = Source(model), mesh, options
        self._plan = plan
        self._traced: Recent[_Traced] = Recent(MAX_CALLS)
        self._example: _Traced | None = None
        self._last: _Traced | None = None
        self._decided: dict[str, OnAxes] = {}
        self._num_traces, self._trace_s = 0, 0.0
        self._random = torch.Generator()
        if plan is not None:
            check_plan_mesh(plan, mesh)
            check_plan_options(options, plan)
            warn_of_memory(plan)

    @property
    def model(self) -> nn.Module:
        return self.source.model

    @property
    def has_plan(self) -> bool:
        return self._plan is not None

    @property
    def plan(self) -> Plan:
        """The plan; known once the model has been traced or a plan was given. Where the last call that could train ran
        under another `torch.autocast` than it was made for, with the figures of that."""
        if self._plan is None:
            raise PlanError("there is no plan yet", why="the model is traced at the first call",
                            hint="parallelize(model, mesh, example_kwargs=batch)")  # fmt: skip
        if self._last is None or self._last.trace.autocast == self._plan.autocast:
            return self._plan
        if self._last.plan is None:
            self._last.plan = self._plan_as_run(self._plan, self._last)
        return self._last.plan

    def _plan_as_run(self, plan: Plan, call: _Traced) -> Plan:
        """The plan of a call that follows a plan made for another."""
        outputs = _plan_outputs(call.trace, call.with_outputs)
        program = lower(call.trace, call.decisions, outputs, whole_outputs=False, rng="fast")
        walks = [walked(call.trace, program, stage) for stage in program.stages]
        schedule = replace(plan.schedule, microbatches=call.decisions.microbatches)
        draft = Draft(schedule, call.decisions, program, {}, walks)
        options = replace(self.options, hardware=plan.hardware or self.options.hardware, compile=plan.compile)
        memory = memory_of(call.trace, program, schedule, walks)
        figures = plan_of(_class_of(self.model), call.trace, draft, options, memory, plan.reasons)
        return replace(figures, pins=plan.pins)

    def ready(self) -> Program | None:
        """The program of the whole model's outputs, where it was traced at construction."""
        return None if self._example is None else self._write(self._example, "forward")

    def agreed(self) -> dict[str, str]:
        """What all ranks must have alike of versions, options and the plan, as far as it is known: {subject: text}."""
        return agreed(self.options, self._plan)

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
        traced, call = self._find(arguments, training, loss_fn, purpose == "step_outputs")
        if torch.is_grad_enabled() or purpose != "forward":
            self._last = traced
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
        self, arguments: Mapping[str, Any], training: bool, loss_fn: LossFn | None, with_outputs: bool = False
    ) -> tuple[_Traced, Call]:
        """The trace of a call, made now where it is a new one, and the call's tensors."""
        call = flatten_call(arguments)
        check_values(call)
        with_outputs = with_outputs and loss_fn is not None
        key = call_key(arguments, call, training, loss_fn), with_outputs
        return self._traced.get(key, lambda: self._trace(arguments, training, loss_fn, with_outputs)), call

    def _trace(
        self, arguments: Mapping[str, Any], training: bool, loss_fn: LossFn | None, with_outputs: bool
    ) -> _Traced:
        start_s = time.perf_counter()
        with _mode(self.model, training):
            around = WithLossAndOutputs if with_outputs else WithLoss
            model = self.model if loss_fn is None else around(self.model, loss_fn).train(training)
            traced = prepare(model, arguments).without_values()
        if self._plan is None:
            self._plan = make_plan(model, traced, self.mesh, self.options)
            warn_of_memory(self._plan)
        check_plan_model(self._plan, type(self.model).__name__, traced.parameters)
        decisions = decode(traced, self._plan, self.mesh, self._decided)
        # The first trace to decide an operator decides it for all that follow.
        self._decided = {**decided_by(traced, decisions), **self._decided}
        self._num_traces, self._trace_s = self._num_traces + 1, self._trace_s + time.perf_counter() - start_s
        warn_of_many(self._num_traces, self._trace_s / self._num_traces)
        if decisions.copied:
            warn_of_copies(batch_size(traced), self.mesh)
        return _Traced(traced, decisions, loss_fn, with_outputs)

    def _write(self, traced: _Traced, purpose: str) -> Program:
        if purpose not in traced.programs:
            decisions = traced.decisions
            outputs = list(traced.trace.graph.output_node().args[0])
            if purpose in ("step", "step_outputs"):
                loss = find_loss(traced.trace, traced.with_outputs)
                if loss is None:
                    raise _no_scalar(traced.loss_fn, traced.trace) or InputError(
                        f"{type(self.model).__name__} returns no loss for this call",
                        why="step() needs a scalar to differentiate",
                        hint="pass labels so that the model returns a loss, or step(..., loss_fn=f, target=t)",
                    )  # fmt: skip
                beside = outputs if purpose == "step_outputs" else []
                program = lower(
                    traced.trace, decisions, [loss], whole_outputs=False, rng=self.options.rng, beside=beside
                )
                program = with_label_count(program, loss)
            else:
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


def _no_scalar(loss_fn: Callable[..., Tensor] | None, traced: Trace) -> InputError | None:
    """What is wrong with a `loss_fn`, if it is what should have made the loss."""
    if loss_fn is None:
        return None
    returned = [format_value(o) for o in traced.graph.output_node().args[0] if isinstance(o, fx.Node)]
    return InputError(
        f"loss_fn returns {', '.join(returned)}", why="step() needs a scalar to differentiate",
        hint="a mean or a sum in loss_fn",
    )  # fmt: skip
