"""Traces a model, makes or reads its plan, and writes programs for its calls: the glue between passes and runtime."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopart.compat import tree_unflatten
from autopart.cost.hardware import DEFAULT, Hardware
from autopart.errors import InputError, OptionError, PlanError
from autopart.graph import DTYPE_NAMES, format_value, is_floating, shape
from autopart.mesh import Mesh
from autopart.passes.analyze import annotate, batch_size
from autopart.passes.batch import choose_batch, mixed_rows
from autopart.passes.decide import batch_strategies, decide, decode, encode
from autopart.passes.lower import Decisions, lower
from autopart.passes.normalize import NORMALIZE, in_double, one_reshape, run_passes
from autopart.passes.summary import collectives, cost, stage_rows
from autopart.plan import Plan, Schedule
from autopart.program import SEEDS, Program
from autopart.runtime.pipeline import check_schedule
from autopart.trace import Call, Trace, WithLoss, bind_call, flatten_call, names_without_loss, trace

_TWO_STAGES_EACH = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev", "looped_bfs")


LIFTED = "the model's casts to lower precision (a loss or norm in float32) are computed in float64 here"


@dataclass(frozen=True)
class Options:
    """The options of `parallelize` and `plan`; None: chosen for you."""

    schedule: str | None = None
    microbatches: int | None = None
    virtual_stages: int | None = None
    hardware: str = DEFAULT

    def __post_init__(self) -> None:
        for name, number in (("microbatches", self.microbatches), ("virtual_stages", self.virtual_stages)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                counted = name.replace("_", " ")
                raise OptionError(f"{name}={number!r} is no number of {counted}", why="it is a whole number from 1")


def prepare(model: nn.Module, arguments: Mapping[str, Any], double: bool = False) -> Trace:
    """Trace, normalise and annotate a model for a call.

    `double`: compute in float64 even where the model casts down.
    """
    traced = trace(model, arguments)
    run_passes(traced.graph, (one_reshape,))
    if double and in_double(traced.graph):
        traced = replace(traced, notes=(*traced.notes, LIFTED))
    run_passes(traced.graph, NORMALIZE)
    annotate(traced)
    return traced


def make_plan(model: nn.Module, traced: Trace, mesh: Mesh, options: Options) -> Plan:
    """Choose a plan for an annotated trace."""
    hardware = Hardware.load(options.hardware)
    schedule = _schedule(traced, mesh, options)
    decisions = decide(traced, mesh, schedule.microbatches, mesh.size("pp") * schedule.virtual_stages, hardware)
    program = lower(traced, decisions, _plan_outputs(traced), whole_outputs=False)
    rows, moved = stage_rows(traced, decisions, program), collectives(traced, program)
    names = {"class": type(_inner(model)).__name__, **_identity(traced), "mode": traced.mode}
    inputs = {
        name: {"shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
        for name, t in zip(traced.call.names, traced.call.tensors, strict=True)
    }
    return Plan(
        dict(mesh.sizes), names, inputs, schedule, **encode(traced, decisions), stages=rows, collectives=moved,
        cost=cost(traced, decisions, rows, moved, hardware), hardware=hardware.name, notes=traced.notes,
    )  # fmt: skip


def _inner(model: nn.Module) -> nn.Module:
    return model.model if isinstance(model, WithLoss) else model


def _identity(traced: Trace) -> dict[str, Any]:
    """A fingerprint of the model: names and shapes of all its parameters."""
    listing = "\n".join(f"{name} {list(p.shape)}" for name, p in sorted(traced.parameters.items()))
    number = sum(p.numel() for p in traced.parameters.values())
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
    virtual = virtual or (2 if name in _TWO_STAGES_EACH else 1)
    microbatches = options.microbatches or _microbatches(traced, mesh, name, pp * virtual)
    if name is None:
        name = "1f1b" if microbatches >= pp else "gpipe"
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


class Compiler:
    """Programs for the calls of one model on one mesh, traced when first needed."""

    def __init__(self, model: nn.Module, mesh: Mesh, options: Options, plan: Plan | None = None):
        self.model, self.mesh, self.options = model, mesh, options
        self._plan = plan
        self._traces: dict[tuple, Trace] = {}
        self._decisions: dict[tuple, Decisions] = {}
        self._programs: dict[tuple, Program] = {}
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
        key = next(iter(self._traces), None)
        return None if key is None else self._write(key, "forward")

    def trace_example(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Trace and plan for an example call."""
        self._prepare((self.model.training, None), bind_call(self.model, args, kwargs), None)

    def program(
        self, args: tuple, kwargs: Mapping[str, Any], *, purpose: str, training: bool,
        loss_fn: Callable[..., Tensor] | None = None, target: Any = None,
    ) -> tuple[Program, tuple[Tensor, ...]]:  # fmt: skip
        """The program for a call and its tensors. Raises InputError where the call is not the traced one."""
        arguments = bind_call(self.model, args, kwargs)
        if loss_fn is not None:
            arguments = {"target": target, "call": arguments}
        key = (training, loss_fn)
        if key not in self._traces:
            self._prepare(key, arguments, loss_fn)
        call = flatten_call(arguments)
        if loss_fn is not None:
            call = replace(call, names=names_without_loss(call.names))
        check_call(type(self.model).__name__, self._traces[key].call, call)
        program = self._write(key, purpose)
        return program, (*call.tensors, *self._seeds(program))

    def reseed(self, seed: int) -> None:
        """Start the sequence of dropout masks anew; the same seed on every rank."""
        self._random.manual_seed(seed)

    def _seeds(self, program: Program) -> list[Tensor]:
        if program.input_names[-1:] != (SEEDS,):
            return []
        first = torch.randint(2**62, (), generator=self._random)
        return [(first + torch.arange(program.microbatches)).repeat(self.mesh.size("dp"))]

    def _prepare(self, key: tuple, arguments: Mapping[str, Any], loss_fn: Callable[..., Tensor] | None) -> None:
        training, _ = key
        with _mode(self.model, training):
            model = self.model if loss_fn is None else WithLoss(self.model, loss_fn).train(training)
            traced = prepare(model, arguments)
        if self._plan is None:
            self._plan = make_plan(model, traced, self.mesh, self.options)
        check_plan_model(self._plan, type(self.model).__name__, traced)
        self._decisions[key] = decode(traced, self._plan, self.mesh, strict=self._plan.model.get("mode") == traced.mode)
        self._traces[key] = traced

    def _write(self, key: tuple, purpose: str) -> Program:
        if (*key, purpose) not in self._programs:
            traced, decisions = self._traces[key], self._decisions[key]
            if purpose == "step":
                loss = find_loss(traced)
                if loss is None:
                    raise _no_scalar(key[1], traced) or InputError(
                        f"{type(self.model).__name__} returns no loss for this call",
                        why="step() needs a scalar to differentiate",
                        hint="pass labels so that the model returns a loss, or step(..., loss_fn=f, target=t)",
                    )  # fmt: skip
                program = lower(traced, decisions, [loss], whole_outputs=False)
            else:
                outputs = list(traced.graph.output_node().args[0])
                # Without stages a call runs the whole batch at once: microbatches are for training steps.
                whole = decisions
                if self.mesh.size("pp") == 1 and decisions.microbatches > 1:
                    whole = replace(decisions, microbatches=1, batch=batch_strategies(traced, self.mesh, 1))
                program = lower(traced, whole, outputs, whole_outputs=True)
            self._programs[*key, purpose] = program
        return self._programs[*key, purpose]


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


def check_plan_model(plan: Plan, name: str, traced: Trace) -> None:
    """Raises PlanError where a plan is for another model."""
    identity = _identity(traced)
    if plan.model["fingerprint"] != identity["fingerprint"]:
        raise PlanError(
            f"the plan is for another model than this {name}",
            why=f"it is for {plan.model['class']} with {plan.model['num_parameters']:,} parameters; this one has "
            f"{identity['num_parameters']:,}, or other names or shapes",
            where=plan.where("model"), hint="make a new plan: autopart.plan(model, mesh, example_kwargs=...)",
        )  # fmt: skip


def check_call(model: str, traced: Call, call: Call) -> None:
    """Raises InputError where a call has other inputs, shapes, dtypes or options than the traced one."""
    missing = [n for n in traced.names if n not in call.names]
    extra = [n for n in call.names if n not in traced.names]
    if missing or extra:
        parts = [f"{', '.join(missing)} missing"] * bool(missing) + [f"{', '.join(extra)} new"] * bool(extra)
        raise InputError(
            f"{model} was traced with the inputs {', '.join(traced.names)} and is called with {', '.join(call.names)}",
            why="; ".join(parts), hint="call it with the same inputs, or parallelize again with this example",
        )  # fmt: skip
    for name, old, new in zip(traced.names, traced.tensors, call.tensors, strict=True):
        if old.shape != new.shape or old.dtype != new.dtype:
            fix = "pad the batch to the traced shape" if old.shape != new.shape else f"cast {name} to the traced dtype"
            raise InputError(
                f"{model} was traced with {name} {_typed(old)} and is called with {_typed(new)}",
                why="a trace holds for one shape and dtype", hint=f"{fix}, or parallelize again",
            )  # fmt: skip
    before, now = traced.options, call.options
    other = [name for name in {**before, **now} if before.get(name, _ABSENT) != now.get(name, _ABSENT)]
    if other:
        raise InputError(
            f"{model} is called with other options than it was traced with",
            why="; ".join(_changed(name, before, now) for name in other), hint="parallelize again with these options",
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


_ABSENT = object()


def _changed(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    was = f"was {before[name]!r}" if name in before else "was not given"
    return f"{name} {was}, and is {now[name]!r}" if name in now else f"{name} {was}, and is not given now"


def _typed(t: Tensor) -> str:
    return f"{DTYPE_NAMES.get(t.dtype, t.dtype)}{list(t.shape)}"
