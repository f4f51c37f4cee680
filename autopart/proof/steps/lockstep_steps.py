"""Proof of training steps: all ranks train in one process and are compared with a single device.

A step is forward, backward, optional loss scaling, the gradient norm, clipping, an optimizer for each rank's shards,
and updated buffers (such as batch norm). Values that need all ranks, such as the norm, are computed by the runtime's
functions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopart.common.progress import phase
from autopart.compat.torch_internals import tree_flatten
from autopart.errors import OptionError
from autopart.ir.program import Program
from autopart.ir.run.schedules import DELAYED
from autopart.ir.run.weight_updates import update_unsharded_weights
from autopart.passes.choose.plan_codec import decided_by, decode
from autopart.proof.comparison import (
    FLOOR,
    GRAD_FLOOR,
    SEED,
    Arrangement,
    GraphUnderTest,
    fixed_seed,
    global_loss,
    restore_buffers,
)
from autopart.proof.reference import Reference, own_statistics
from autopart.proof.steps.step_comparison import StepComparison, StepReport
from autopart.proof.steps.training_options import SCALER_DEFAULTS, Named, Training, check_optimizer
from autopart.recipe.make_plan import find_loss
from autopart.runtime.gradients.step_reduction import sync_gradients_lockstep
from autopart.runtime.optimizers.chained_optimizer import parts_of
from autopart.runtime.optimizers.full_tensor_update import FullTensorUpdate, LocalTensor, StateByName, placeholder
from autopart.runtime.optimizers.optimizer_checks import is_elementwise_class
from autopart.runtime.optimizers.owner_exchange import run_in_lockstep
from autopart.runtime.shards.shard_owners import parameters_of
from autopart.runtime.shards.shard_state import merge_stored, splits_of
from autopart.runtime.training.gradient_norms import grad_norm_lockstep
from autopart.tracing.call_cache import MAX_CALLS, Recent, call_key
from autopart.tracing.trace_model import flatten_call
from autopart.tracing.with_loss import call


@dataclass
class _Outcome:
    """Results of one step on all ranks, before the optimizer step. Each field is {rank: value}.

    `norms`: gradient norm. `scales`: loss scale. `skips`: True if the rank skips the step, because a gradient is
    infinite or NaN.
    """

    losses: dict[int, Tensor]
    norms: dict[int, Tensor]
    scales: dict[int, float]
    skips: dict[int, bool]


class SingleDeviceTraining:
    """Training of the model on a single device, with torch's scaler, clipping and optimizer.

    If the model does not run in float64, its float64 trace is trained.
    """

    def __init__(self, reference: Reference, training: Training):
        self.reference, self.training = reference, training
        self.parameters: dict[str, Any] = dict(reference.traced.parameters)
        self.optimizer = training.make_optimizer(list(self.parameters.items()))
        check_optimizer(self.optimizer)
        settings = {"enabled": False} if training.scaler is None else dict(training.scaler)
        self.scaler = torch.amp.GradScaler("cpu", **settings)

    def backward(self, subject: GraphUnderTest, arguments: Mapping[str, Any]) -> _Outcome:
        loss = subject.seed(self._forward(subject, arguments))
        self.scaler.scale(loss).backward()
        for parameter in self.parameters.values():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        scale = self.scaler.get_scale()
        self.scaler.unscale_(self.optimizer)
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        finite = all(bool(grad.isfinite().all()) for grad in grads)
        if self.training.max_norm is None:
            norm = torch.nn.utils.get_total_norm(grads)
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.training.max_norm)
        return _Outcome({0: loss.detach()}, {0: norm}, {0: scale}, {0: self.scaler.is_enabled() and not finite})

    def _forward(self, subject: GraphUnderTest, arguments: Mapping[str, Any]) -> list[Any]:
        if not self.reference.is_upcast:
            with fixed_seed(subject.random_seed), own_statistics():
                return tree_flatten(call(self.reference.model, dict(arguments)))[0]
        traced = subject.traced
        update_unsharded_weights(traced.parameters, traced.weight_updates, traced.call.tensors)
        # The backward, which runs after the update of the buffers, needs their values from before it.
        before = {name: traced.buffers[name].clone() for name in traced.buffer_updates}
        copied = replace(traced, weight_updates={}, buffers={**traced.buffers, **before})
        subject = GraphUnderTest(copied, subject.loss, subject.random_seed)
        values = subject.values()
        with torch.no_grad():
            for name, node in traced.buffer_updates.items():
                traced.buffers[name].copy_(values[node])
        return subject.flat_outputs(values)

    def names_of_full_tensors(self) -> set[str]:
        """Return the names of parameters whose optimizer is not elementwise, so that it needs full tensors."""
        optimizers = [o for o in parts_of(self.optimizer) if not is_elementwise_class(type(o))]
        updated = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
        return {name for name, parameter in self.parameters.items() if id(parameter) in updated}

    def buffer(self, name: str) -> Tensor:
        """Return the value of a buffer after the last forward."""
        reference = self.reference
        return reference.buffer(name) if reference.is_double else reference.traced.buffers[name]

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


@dataclass
class _LossScale:
    """Loss scale of a rank, updated by the rule of `torch.amp.GradScaler`."""

    value: float
    growth_factor: float = 1.0
    backoff_factor: float = 1.0
    growth_interval: int = 1
    steps: int = 0

    @staticmethod
    def of(settings: Mapping[str, Any] | None) -> _LossScale:
        if settings is None:
            return _LossScale(1.0)
        return _LossScale(*(settings[name] for name in SCALER_DEFAULTS))

    def update(self, infinite: bool) -> None:
        self.steps = 0 if infinite else self.steps + 1
        if infinite:
            self.value *= self.backoff_factor
        elif self.steps == self.growth_interval:
            self.value, self.steps = self.value * self.growth_factor, 0


def any_infinity(infinite: Mapping[int, bool]) -> dict[int, bool]:
    """Return {rank: True} for all ranks if any rank has an infinite gradient, else {rank: False}."""
    return dict.fromkeys(infinite, any(infinite.values()))


class AllRanks:
    """Training of the partitioned model on all ranks. Each rank has weight shards and an optimizer."""

    def __init__(self, subject: GraphUnderTest, arrangement: Arrangement, training: Training, full: set[str]):
        """Create the weight shards and the optimizer of every rank.

        Args:
            full: names of the parameters whose optimizer needs the full tensor.
        """
        self.arrangement, self.training = arrangement, training
        self.program = subject.step(arrangement.decisions)
        self.shards = subject.shards(self.program, arrangement, trained=True)
        self.buffers = _copies(subject.traced.buffers)
        self.updates = self._updates(subject.traced.parameters, full)
        self.scales = {rank: _LossScale.of(training.scaler) for rank in self.shards}

    def _updates(self, parameters: Mapping[str, Tensor], full: set[str]) -> dict[int, FullTensorUpdate]:
        mesh = self.program.mesh
        updates = {}
        others = {name: placeholder(p, tuple(p.shape)) for name, p in parameters.items()}
        for rank, local in self.shards.items():
            tensors = []
            for name, parameter in local.items():
                stored = self.program.parameters[name]
                cuts = tuple(splits_of(stored, mesh))
                tensors.append(LocalTensor(name, parameter, tuple(stored.shape), cuts))

            # Parameters of other stages have no values and no gradient, so all ranks make equal groups.
            def make(named: Named) -> list[torch.optim.Optimizer]:
                return parts_of(self.training.make_optimizer(list({**others, **dict(named)}.items())))

            updates[rank] = FullTensorUpdate(tensors, mesh, mesh.coordinates(rank), make, full)
        return updates

    def state(self) -> dict[int, StateByName]:
        """Return {rank: {name: {key: value}}}, the optimizer state of all ranks, sharded like the parameters."""
        return run_in_lockstep({r: update.shared_state() for r, update in self.updates.items()}, self.program.mesh)

    def load_state(self, states: Mapping[int, StateByName]) -> None:
        """Load the optimizer state of all ranks, in the form that `state` returns."""
        loads = {rank: update.load_state(states[rank]) for rank, update in self.updates.items()}
        run_in_lockstep(loads, self.program.mesh)

    def backward(self, subject: GraphUnderTest) -> _Outcome:
        stage_style = self.arrangement.stage_style
        new_buffers: dict[int, dict[str, Tensor]] = {}
        subject = GraphUnderTest(replace(subject.traced, buffers=self.buffers), subject.loss, subject.random_seed)
        results = subject.lockstep(self.program, self.shards, stage_style, new_buffers=new_buffers)
        # Clone: a new buffer value may be a weight, which the optimizer changes.
        self.new_buffers = {rank: {name: v.clone() for name, v in new.items()} for rank, new in new_buffers.items()}
        seeds, scales = subject.seeds(self.program, results), {rank: s.value for rank, s in self.scales.items()}
        scale = scales[min(results)]  # the last stage computes the loss
        torch.autograd.backward([seed * scale for seed in seeds])
        losses = {0: global_loss(self.program, results)} if subject.loss is not None else dict(enumerate(seeds))
        sync_gradients_lockstep(self.shards, self.program, stage_style=stage_style)
        self.infinite = any_infinity({rank: self._unscale(rank) for rank in self.shards})
        norms = self._norms()
        self._clip(norms)
        skips = {rank: self.training.scaler is not None and infinite for rank, infinite in self.infinite.items()}
        return _Outcome({rank: loss.detach() for rank, loss in losses.items()}, norms, scales, skips)

    def _unscale(self, rank: int) -> bool:
        """Divide the gradients of a rank by the loss scale. Return True if any gradient is infinite or NaN."""
        grads = [p.grad for p in self.shards[rank].values() if p.grad is not None]
        for grad in grads:
            grad.div_(self.scales[rank].value)
        return not all(bool(grad.isfinite().all()) for grad in grads)

    def _norms(self) -> dict[int, Tensor]:
        norm = grad_norm_lockstep(self.shards, self.program, stage_style=self.arrangement.stage_style)
        return dict.fromkeys(self.shards, norm)

    def _clip(self, norms: Mapping[int, Tensor]) -> None:
        if self.training.max_norm is None:
            return
        for rank, local in self.shards.items():
            torch.nn.utils.clip_grads_with_norm_(local.values(), self.training.max_norm, norms[rank])

    def update(self) -> None:
        skips = self.training.scaler is not None and any(self.infinite.values())
        with torch.no_grad():
            if not skips:
                run_in_lockstep({rank: update.step() for rank, update in self.updates.items()}, self.program.mesh)
            for rank, scale in self.scales.items():
                scale.update(self.infinite[rank])
            for new in self.new_buffers.values():
                for name, value in new.items():
                    self.buffers[name].copy_(value)

    def zero_grad(self) -> None:
        for update in self.updates.values():
            update.zero_grad()


def _copies(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy buffers. A buffer with two names is copied once, so that both names stay tied."""
    copies: dict[int, Tensor] = {}
    return {name: copies.setdefault(id(value), value.detach().clone()) for name, value in buffers.items()}


class _DelayedGradients:
    """Gradients of the previous batch, which optimizers use under the asynchronous schedule "1f1b_2bw"."""

    def __init__(self) -> None:
        self.previous_grads: dict[int, Tensor | None] = {}

    def exchange(self, parameters: Iterable[Tensor]) -> None:
        """Replace each parameter's `.grad` by its gradient of the previous batch, and store the current one.

        In the first call the new `.grad` is None.
        """
        for parameter in parameters:
            before = self.previous_grads.get(id(parameter))
            self.previous_grads[id(parameter)], parameter.grad = parameter.grad, before


def train(reference: Reference, arrangement: Arrangement, training: Training, tolerance: float) -> list[StepReport]:
    """Train the model on a single device and on all ranks, and compare each step.

    The run stops at the first step with a difference. With an asynchronous schedule (PipeDream-2BW), all optimizers use
    the gradients of the previous batch. A batch with new shapes is traced again under the same plan. Weights and
    buffers are restored at the end.

    Args:
        reference: the model on a single device, for the example call.
    """
    reports: list[StepReport] = []
    with restore_state(reference):
        one = SingleDeviceTraining(reference, training)
        ranks = AllRanks(reference.subject, arrangement, training, one.names_of_full_tensors())
        calls = TracedBatches(reference, arrangement, training)
        rounding: dict[str, Tensor] = {}
        plan = arrangement.plan
        late = _DelayedGradients() if plan is not None and plan.schedule.name in DELAYED else None
        if late is not None and training.scaler is not None:
            raise OptionError(
                "scaler= cannot be combined with schedule='1f1b_2bw'",
                why="the gradient of a step was computed with an earlier loss scale",
                hint="precision='bf16', or schedule='1f1b'",
            )
        for step in range(1, training.steps + 1):
            phase(f"training step {step} of {training.steps}")
            of_step, program = calls.of(step)
            ranks.program = program
            compared = StepComparison(step, program, tolerance, rounding)
            reports.append(_step(of_step, training.batch(step), one, ranks, compared, late))
            if reports[-1].first is not None:
                break
    return reports


@contextmanager
def restore_state(reference: Reference) -> Iterator[None]:
    """Context manager that restores weights and buffers, and removes gradients, on exit."""
    traced = reference.traced
    before = [(t, t.detach().clone()) for t in (*traced.parameters.values(), *traced.buffers.values())]
    try:
        with restore_buffers(reference.base):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
                tensor.grad = None


class TracedBatches:
    """Cache of traces and programs of the batches.

    A batch uses a cached trace if its shapes and options are equal, and if its values take the branches of the trace.
    """

    def __init__(self, reference: Reference, arrangement: Arrangement, training: Training):
        self.reference, self.arrangement, self.training = reference, arrangement, training
        self.first = reference.subject.step(arrangement.decisions)
        self.cache: Recent[tuple[GraphUnderTest, Program]] = Recent(MAX_CALLS)
        self.cache.add(self._key(training.example), (reference.subject, self.first))

    def of(self, step: int) -> tuple[GraphUnderTest, Program]:
        """Return (traced graph with the inputs and random seed of a step, program of the step)."""
        arguments = self.training.batch(step)
        key = self._key(arguments)
        tensors = flatten_call(self.reference.in_double(arguments)).tensors

        def fits(cached: tuple[GraphUnderTest, Program]) -> bool:
            return cached[0].traced.value_guards.hold(tensors, {}, cached[0].traced.buffers)

        subject, program = self.cache.find(key, fits) or self.cache.add(key, self._traced(arguments))
        call = replace(subject.traced.call, tensors=tensors)
        return GraphUnderTest(replace(subject.traced, call=call), subject.loss, SEED + step), program

    def _key(self, arguments: Mapping[str, Any]) -> Hashable:
        return call_key(arguments, flatten_call(arguments), self.reference.model.training, None)

    def _traced(self, arguments: Mapping[str, Any]) -> tuple[GraphUnderTest, Program]:
        """Trace a batch under the plan of the example call, as the runtime does for new shapes."""
        assert self.arrangement.plan is not None
        traced = self.reference.trace(arguments)
        decided = decided_by(self.reference.traced, self.arrangement.decisions)
        decisions = decode(traced, self.arrangement.plan, self.arrangement.decisions.mesh, decided)
        subject = GraphUnderTest(traced, find_loss(traced))
        program = subject.step(decisions)
        return subject, replace(program, parameters=merge_stored(program.parameters, self.first.parameters))


def _step(
    subject: GraphUnderTest, arguments: Mapping[str, Any], one: SingleDeviceTraining, ranks: AllRanks,
    compared: StepComparison,
    late: _DelayedGradients | None,
) -> StepReport:  # fmt: skip
    buffer_scales = subject.buffer_scales  # run the ranks before the single device writes its buffers
    expected, actual = one.backward(subject, arguments), ranks.backward(subject)
    skipped, scale = expected.skips[0], expected.scales[0]
    compared.numbers("loss", actual.losses, expected.losses[0], may_overflow=skipped)
    compared.numbers("scale", {r: torch.tensor(s) for r, s in actual.scales.items()}, torch.tensor(scale))
    compared.skips(actual.skips, skipped)
    if not skipped:
        compared.numbers("norm", actual.norms, expected.norms[0])
        grads = {name: p.grad for name, p in one.parameters.items()}
        actual_grads = {rank: {n: p.grad for n, p in local.items()} for rank, local in ranks.shards.items()}
        factor = _factor(expected.norms[0], one.training)
        compared.note_cancelled(actual_grads, grads, lambda names: subject.gradient_magnitudes(names, factor))
        floor = GRAD_FLOOR * factor
        compared.tensors("gradient", actual_grads, grads, floor)
        compared.note_rounding(actual_grads, grads)
        compared.start_equal(actual_grads, grads)  # an update of a full tensor depends on all its entries
    if late is not None:
        late.exchange([*one.parameters.values(), *(p for local in ranks.shards.values() for p in local.values())])
    one.update()
    ranks.update()
    compared.optimizer = one.optimizer
    compared.tensors("weight", ranks.shards, one.parameters, FLOOR)
    compared.start_equal(ranks.shards, one.parameters)
    states = ranks.state()
    for key in _state_keys(one):
        whole = {name: _entry(one.optimizer.state.get(p, {}), p, key) for name, p in one.parameters.items()}
        parts = {
            rank: {name: _entry(states[rank].get(name, {}), p, key) for name, p in local.items()}
            for rank, local in ranks.shards.items()
        }
        compared.tensors("state", parts, whole, GRAD_FLOOR**2, suffix=f" {key}")
        compared.start_equal(parts, whole)
    ranks.load_state(states)
    for rank, new in ranks.new_buffers.items():
        for name, value in new.items():
            compared.buffer(name, rank, value, one.buffer(name), buffer_scales[name])
    one.zero_grad()
    ranks.zero_grad()
    return StepReport(
        compared.step, float(expected.losses[0]), float(expected.norms[0]), one.training.max_norm,
        None if one.training.scaler is None else scale, skipped, compared.errors, compared.first,
        tuple(compared.rounding),
    )  # fmt: skip


def _factor(norm: Tensor, training: Training) -> float:
    """Return the factor by which clipping multiplies gradients, given their norm."""
    return 1.0 if training.max_norm is None else min(1.0, training.max_norm / (float(norm) + 1e-6))


def _entry(state: Mapping[str, Any], parameter: Tensor, key: str) -> Tensor | None:
    """Return an entry of a parameter's optimizer state; None unless it has the parameter's shape."""
    kept = state.get(key)
    return kept if isinstance(kept, Tensor) and kept.shape == parameter.shape else None


def _state_keys(one: SingleDeviceTraining) -> list[str]:
    """Return the keys of optimizer state that has the shape of its parameter, such as `exp_avg`."""
    keys = [
        key
        for p in one.parameters.values()
        for key, value in one.optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor) and value.shape == p.shape
    ]
    return list(dict.fromkeys(keys))
