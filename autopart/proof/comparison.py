"""Comparison of a traced graph on a single device with its partitioned program on all ranks.

`GraphUnderTest.expected` runs the graph on the global batch. `GraphUnderTest.errors` runs the partitioned program. It
returns the errors of the loss, of outputs, and of gradients on every rank that stores the parameter. Both runs draw
equal random numbers from one seed, as with the option `rng="exact"`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from autopart.errors import InputError
from autopart.ir.decisions import Decisions
from autopart.ir.facts import facts
from autopart.ir.graph import describe, is_floating, short_name
from autopart.ir.layout import Placement
from autopart.ir.program import MICROBATCH_AXIS, Program
from autopart.ir.run.weight_updates import WeightUpdate
from autopart.ir.sharding import local_shard_of
from autopart.ir.trace import OperatorError, Trace
from autopart.passes.write.lower import lower
from autopart.plans.plan import Plan
from autopart.proof.summed_magnitudes import gradient_magnitudes, summed_magnitude
from autopart.runtime.batch.batch_split import merge_microbatches
from autopart.runtime.comm.stage_ranks import owners
from autopart.runtime.gradients.step_reduction import sync_gradients_lockstep
from autopart.runtime.lockstep import OnValue, run_lockstep
from autopart.runtime.shards.shard_state import splits_at

FLOOR = 1e-3
"""Values below this are compared absolutely: a sum that cancels to zero has only rounding errors."""

SEED = 0
"""Random seed of every run: of the model, of its graph, and of the ranks."""

GRAD_FLOOR = 1e-4
"""Gradients are compared absolutely if all gradients are below this.

They are then only rounding errors of sums that cancel. For example, a bias that shifts the logits of all classes
equally does not change the loss.
"""

_OF_DTYPES = "Double", "ComplexDouble", "dtype", "scalar type"
"""Words in errors of operators that accept no float64."""

Shards = dict[int, dict[str, nn.Parameter]]
"""{rank: {name: local shard of the parameter}}"""

Tamper = Callable[[Program, Shards], None]
"""Function that plants a fault in a program or its ranks' parameters, in place, to test `verify`."""


@dataclass(frozen=True)
class Arrangement:
    """Sharding decisions for a graph and the placement of its stages on ranks.

    Args:
        stage_style: placement of several stages per rank: "loop" (rank 0, 1, 0, 1) or "V" (rank 0, 1, 1, 0).
        tamper: function that changes the program or weights to plant a fault. Only tests of `verify` use it.
        plan: the plan from which the decisions come.
    """

    decisions: Decisions
    stage_style: str = "loop"
    tamper: Tamper | None = None
    plan: Plan | None = None


@dataclass(frozen=True)
class Results:
    """Results of one run: flat outputs, gradients of parameters and inputs, and new values of buffers."""

    outputs: list[Any]
    grads: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    input_grads: Mapping[str, Tensor]

    def distance(self, other: Results, buffer_scales: Mapping[str, float]) -> float:
        """Return the largest relative difference between the values of two runs.

        It is infinite if a parameter has a non-zero gradient in one run only.

        Args:
            buffer_scales: {buffer: number by which the difference of its new values is divided}.
        """
        if self.has_other_gradients(other):
            return float("inf")
        pairs = zip(self.outputs, other.outputs, strict=True)
        apart = [relative(a, b.to(a.dtype)) for a, b in pairs if isinstance(a, Tensor)]
        buffers, input_grads = self.buffers.items(), self.input_grads.items()
        apart += [relative(b, other.buffers[name].to(b.dtype), buffer_scales[name]) for name, b in buffers]
        apart += [relative(grad, other.input_grads[name].to(grad.dtype)) for name, grad in input_grads]
        scale = self.grad_scale
        both = self.grads.keys() & other.grads.keys()
        apart += [relative(self.grads[name], other.grads[name].to(self.grads[name].dtype), scale) for name in both]
        return max(apart, default=0.0)

    def has_other_gradients(self, other: Results) -> bool:
        """Return True if a parameter has a non-zero gradient in one run and no gradient in the other.

        A gradient of zeros counts as no gradient. If, for example, a parameter is used only in a branch that does not
        run, its gradient is zero in the program and None in the model.
        """
        alone = self.grads.keys() ^ other.grads.keys()
        return any(bool(grads[name].any()) for grads in (self.grads, other.grads) for name in alone & grads.keys())

    @property
    def grad_scale(self) -> float:
        """Largest finite absolute value in all gradients, at least `GRAD_FLOOR`.

        Errors of gradients are relative to this number.
        """
        return max([GRAD_FLOOR, *(largest(grad) for grad in self.grads.values())])


def tensor_by_name(model: nn.Module, name: str) -> Tensor:
    """Return the buffer or parameter of a model that has this name."""
    module, _, last = name.rpartition(".")
    holder = model.get_submodule(module)
    buffer = holder._buffers.get(last)
    return holder.get_parameter(last) if buffer is None else buffer


@contextmanager
def restore_buffers(model: nn.Module, written: Collection[str] = ()) -> Iterator[None]:
    """Context manager that restores all buffers, and the parameters in `written`, at the end of its block."""
    parameters = [(p, p.detach().clone()) for p in map(model.get_parameter, written)]
    modules = [(module, dict(module._buffers)) for module in model.modules()]
    before = [(b, b.clone()) for _, buffers in modules for b in buffers.values() if b is not None]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, buffers in modules:
                module._buffers.clear()
                module._buffers.update(buffers)
            for buffer, value in before:
                (buffer if buffer.shape == value.shape else buffer.resize_(value.shape)).copy_(value)
            for parameter, value in parameters:
                parameter.copy_(value)


@contextmanager
def fixed_seed(seed: int = SEED) -> Iterator[None]:
    """Context manager that seeds the default generators on entry and restores their state on exit.

    The generators are those of torch, numpy and Python.
    """
    of_numpy, of_python = np.random.get_state(legacy=False), random.getstate()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)


def _updated(parameter: Tensor, update: WeightUpdate | None, inputs: Sequence[Any]) -> Tensor:
    """Return a parameter as the forward uses it, after any in-place change by the forward itself.

    An example of such a change is `max_norm` of an embedding. The result is then a new leaf tensor.
    """
    if update is None:
        return parameter
    return update.updated_full(parameter.detach(), inputs).clone().requires_grad_(parameter.requires_grad)


class GraphUnderTest:
    """A traced graph with parameter values, which can run unpartitioned or partitioned.

    Each run is differentiated: its loss, or, if the graph has none, a fixed weighted sum of all outputs.

    Args:
        random_seed: seed of the random numbers of each run.
    """

    def __init__(self, traced: Trace, loss: fx.Node | None = None, random_seed: int = SEED):
        self.traced, self.loss, self.random_seed = traced, loss, random_seed
        updates, inputs = traced.weight_updates, traced.call.tensors
        self.weights = {name: _updated(p, updates.get(name), inputs) for name, p in traced.parameters.items()}
        self.outputs = list(traced.graph.output_node().args[0])

    # Single device

    def values(self, retain_grads: bool = False) -> dict[fx.Node, Any]:
        """Run the unpartitioned graph on the global batch and return {node: value of the node}.

        Args:
            retain_grads: True to call `retain_grad()` on each value, so that a later backward stores its gradient.
        """
        tensors = {**self.weights, **self.traced.buffers, **self.traced.constants}
        device = next((weight.device for weight in self.weights.values()), None)
        inputs = (tensor.to(device) if device is not None else tensor for tensor in self.traced.call.tensors)
        try:
            with fixed_seed(self.random_seed):
                values = self.traced.values(inputs, tensors)
        except OperatorError as error:
            if not any(word in str(error) for word in _OF_DTYPES):
                raise
            raise InputError(
                f"verify() cannot run {short_name(error.node)} in float64",
                why=str(error).strip().partition("\n")[0], where=describe(error.node),
                hint="pm.step and pm(...) run it in the model's dtype: compare these with the model",
            ) from error  # fmt: skip
        for value in values.values() if retain_grads else ():
            if isinstance(value, Tensor) and value.requires_grad:
                value.retain_grad()
        return values

    def flat_outputs(self, values: Mapping[fx.Node, Any]) -> list[Any]:
        return [values[o] if isinstance(o, fx.Node) else o for o in self.outputs]

    def seed(self, flat: list[Any]) -> Tensor:
        """Return the scalar to differentiate in a run: the loss, or a fixed weighted sum of all outputs."""
        if self.loss is not None:
            return flat[self.outputs.index(self.loss)]
        parts = [(o * weights_like(o)).sum() for o in flat if isinstance(o, Tensor) and o.requires_grad]
        return torch.stack(parts).sum() if parts else torch.zeros((), requires_grad=True)

    def expected(self) -> Results:
        """Run the unpartitioned graph on the global batch and return its results."""
        values = self.values()
        buffers = {name: values[node] for name, node in self.traced.buffer_updates.items()}
        return self.differentiate(self.flat_outputs(values), buffers)

    def differentiate(
        self, flat: list[Any], buffers: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None
    ) -> Results:
        """Differentiate a run and collect outputs, gradients and buffers. `.grad` fields are not written.

        Args:
            weights: {name: parameter} with which the run was computed; by default, the parameters of the graph.
        """
        trained = {name: p for name, p in (weights or self.weights).items() if p.requires_grad}
        call = self.traced.call
        inputs = [t for t, gradient in zip(call.tensors, call.gradients, strict=True) if gradient]
        all_grads = torch.autograd.grad(self.seed(flat), [*trained.values(), *inputs], allow_unused=True)
        pairs = zip(trained, all_grads, strict=False)
        grads = {name: g.to_dense() if g.is_sparse else g for name, g in pairs if g is not None and g.numel()}
        names = self.traced.call.with_gradient
        input_grads = {n: g for n, g in zip(names, all_grads[len(trained) :], strict=True) if g is not None}
        # Copies: an output may be a buffer.
        return Results([o.detach().clone() if isinstance(o, Tensor) else o for o in flat], grads, buffers, input_grads)

    @cached_property
    def buffer_scales(self) -> dict[str, float]:
        """Return {written buffer: number by which the error of its new value is divided}.

        If the new value is a sum, this number is computed from the absolute values of the summands. For example, a
        running mean of large values can be almost zero, but its rounding error is relative to the large values.
        """
        updates = {name: node for name, node in self.traced.buffer_updates.items() if is_floating(node)}
        if not updates:
            return dict.fromkeys(self.traced.buffer_updates, FLOOR)
        with torch.no_grad():
            values = self.values()
            terms = {name: scale_of(summed_magnitude(node, values)) for name, node in updates.items()}
        return dict.fromkeys(self.traced.buffer_updates, FLOOR) | terms

    def gradient_magnitudes(self, names: Collection[str], factor: float = 1.0) -> dict[str, Tensor]:
        """Return {parameter: sum of the absolute values of its gradient's summands, times `factor`}.

        Rounding errors of a gradient are relative to this magnitude.
        """
        values = self.values()
        terms = gradient_magnitudes(self.seed(self.flat_outputs(values)), values, names)
        return {name: magnitude * factor for name, magnitude in terms.items()}

    # Partitioned

    def called(self, decisions: Decisions) -> Program:
        """Generate the partitioned program of a forward call. The program returns all outputs unsharded."""
        return lower(self.traced, decisions, self.outputs, whole_outputs=True, rng="exact")

    def step(self, decisions: Decisions) -> Program:
        """Generate the partitioned program of a training step.

        The program returns the loss, or all outputs if there is no loss.
        """
        if self.loss is None:
            return self.called(decisions)
        return lower(self.traced, decisions, [self.loss], whole_outputs=False, rng="exact")

    def shards(self, program: Program, arrangement: Arrangement, trained: bool = False) -> Shards:
        """Return the weights of all ranks, as {rank: {name of a parameter: local shard}}.

        Ranks with equal shards share one tensor. If shards will change (by an optimizer, by a weight update of the
        forward, or by a planted fault), each rank has a copy.
        """
        mesh, tamper = program.mesh, arrangement.tamper
        shards: Shards = {rank: {} for rank in range(mesh.num_ranks)}
        for name, stored in program.parameters.items():
            owner_stages = owners(program, stored, arrangement.stage_style)
            parts: dict[tuple[int, ...], Tensor] = {}
            for rank, local in shards.items():
                at = mesh.coordinates(rank)
                if at.get("pp", 0) not in owner_stages:
                    continue
                cuts = splits_at(stored, mesh, at)
                place = tuple(index for _, index in cuts)
                if place not in parts:
                    parts[place] = local_shard_of(self.traced.parameters[name].detach(), cuts)
                changes = trained or tamper is not None or name in program.weight_updates
                part = parts[place].clone() if changes else parts[place]
                local[name] = nn.Parameter(part, requires_grad=self.weights[name].requires_grad)
        if tamper is not None:
            tamper(program, shards)
        return shards

    def lockstep(
        self,
        program: Program,
        shards: Shards,
        stage_style: str,
        on_value: OnValue | None = None,
        new_buffers: dict[int, dict[str, Tensor]] | None = None,
    ) -> dict[int, list[tuple]]:
        buffers, inputs = self.traced.buffers, self.traced.call.tensors
        with fixed_seed(self.random_seed):
            return run_lockstep(
                program, shards, buffers, inputs, on_value, stage_style=stage_style, new_buffers=new_buffers
            )  # fmt: skip

    def seeds(self, program: Program, results: Mapping[int, list[tuple]]) -> list[Tensor]:
        """Return the scalars to differentiate on all ranks: their losses, or weighted sums of their outputs."""
        if self.loss is not None:
            return [out for microbatches in results.values() for (out,) in microbatches if out.requires_grad]
        return [
            (value * weights_like(value)).sum()
            for microbatches in results.values()
            for value in merge_microbatches(program, microbatches)
            if value.requires_grad
        ]

    # Comparison

    def errors(self, arrangement: Arrangement, expected: Results) -> dict[str, float]:
        """Run a partitioned program and return the errors of loss, outputs, gradients and buffers, by name.

        Errors of an output are relative to its largest entry. Errors of gradients are relative to the largest entry of
        all gradients. Exceptions that the program raises are not caught.
        """
        errors: dict[str, float] = {}
        if self.loss is not None:
            called = self.called(arrangement.decisions)
            new_buffers: dict[int, dict[str, Tensor]] = {}
            with torch.no_grad():
                shards = self.shards(called, arrangement)
                results = self.lockstep(called, shards, arrangement.stage_style, new_buffers=new_buffers)
            errors |= output_errors(called, results, expected.outputs)
            errors |= buffer_errors(new_buffers, expected, self.buffer_scales)
        step = self.step(arrangement.decisions)
        shards = self.shards(step, arrangement)
        new_buffers = {}
        inputs = _InputGradients(self.traced)
        results = self.lockstep(step, shards, arrangement.stage_style, inputs.keep, new_buffers)
        for name, error in buffer_errors(new_buffers, expected, self.buffer_scales).items():
            errors[name] = max(errors.get(name, 0.0), error)
        seeds = self.seeds(step, results)
        if seeds:
            torch.autograd.backward(seeds)
        if self.loss is not None:
            loss = expected.outputs[self.outputs.index(self.loss)]
            errors["loss"] = relative(global_loss(step, results), loss)
        else:
            errors |= output_errors(step, results, expected.outputs)
        sync_gradients_lockstep(shards, step, stage_style=arrangement.stage_style)
        return errors | gradient_errors(step, shards, expected) | inputs.errors(expected)


class _InputGradients:
    """Recorder of the gradients of the model's inputs on every rank during a run of the program."""

    def __init__(self, traced: Trace):
        nodes = traced.graph.find_nodes(op="placeholder")
        self.names = {n.name: facts(n)["input_name"] for n in nodes if facts(n).get("input_grad")}
        self.values_by_input: dict[str, list[Tensor]] = {}

    def keep(self, stage: int, microbatch: int, node: fx.Node, value: Mapping[int, Any]) -> None:
        name = self.names.get(facts(node).get("origin", "")) if node.op == "placeholder" else None
        if name is not None:
            self.values_by_input[name] = list(value.values())
            for tensor in self.values_by_input[name]:
                tensor.retain_grad()

    def errors(self, expected: Results) -> dict[str, float]:
        """Return {"input <name>": largest error of the input's gradient over all ranks}.

        Gradients of inputs are not sharded.
        """
        errors = {}
        for name, whole in expected.input_grads.items():
            apart = [
                relative(t.grad, whole) if t.grad is not None else float("inf")
                for t in self.values_by_input.get(name, ())
            ]
            errors[f"input {name}"] = max(apart, default=float("inf"))
        return errors


def output_errors(program: Program, results: Mapping[int, list[tuple]], expected: list) -> dict[str, float]:
    """Return {"output <index>": largest error over all ranks}."""
    errors: dict[str, float] = {}
    for microbatches in results.values():
        merged = merge_microbatches(program, microbatches)
        for i, output in enumerate(program.outputs):
            if output.position is not None:
                actual, reference = merged[output.position], expected[i]
                if output.is_number:
                    reference = torch.as_tensor(reference, dtype=actual.dtype)
                error = relative(actual, reference)
                errors[f"output {i}"] = max(errors.get(f"output {i}", 0.0), error)
    return errors


def gradient_errors(program: Program, shards: Shards, expected: Results) -> dict[str, float]:
    """Return {parameter: largest error of its gradient over all ranks}.

    The error is infinite if a rank has no gradient, or has a non-zero gradient although none is expected.
    """
    scale = expected.grad_scale
    errors: dict[str, float] = {}
    for rank, local in shards.items():
        at = program.mesh.coordinates(rank)
        for name, parameter in local.items():
            grad, whole = parameter.grad, expected.grads.get(name)
            if whole is None:
                if grad is not None and bool(grad.any()):
                    errors[name] = float("inf")
                continue
            whole = local_shard_of(whole, splits_at(program.parameters[name], program.mesh, at))
            apart = relative(grad, whole, scale) if grad is not None else float("inf")
            errors[name] = max(errors.get(name, 0.0), apart)
    return {name: float("inf") for name in expected.grads} | errors


def buffer_errors(
    buffers: Mapping[int, Mapping[str, Tensor]], expected: Results, scales: Mapping[str, float]
) -> dict[str, float]:
    """Return {"buffer <name>": largest error of the new value over the ranks that compute it}.

    Args:
        scales: {buffer: number by which the error of its new value is divided}, from `buffer_scales`.
    """
    errors = {f"buffer {name}": float("inf") for name in expected.buffers}
    for name, whole in expected.buffers.items():
        differences = [relative(new[name], whole, scales[name]) for new in buffers.values() if name in new]
        errors[f"buffer {name}"] = max(differences, default=float("inf"))
    return errors


def global_loss(program: Program, results: Mapping[int, list[tuple]]) -> Tensor:
    """Return the loss of the global batch, computed from the losses of ranks and microbatches.

    If the losses are partial sums over ranks or microbatches, they are added. A loss that is replicated on several
    ranks counts once.
    """
    layout = program.outputs[0].layout
    at = {rank: program.mesh.coordinates(rank) for rank in results}
    ranks = [r for r in results if all(p.kind == "P" or at[r].get(a, 0) == 0 for a, p in layout.items())]
    parts = [torch.stack([out.detach() for (out,) in results[rank]]) for rank in ranks]
    partial = layout.get(MICROBATCH_AXIS, Placement("R")).kind == "P"
    return torch.stack([part.sum() if partial else part[0] for part in parts]).sum()


def weights_like(output: Tensor) -> Tensor:
    """Return constant weights, one per entry (0.5 to 1.5, all different), for a weighted sum of a tensor."""
    return torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype, device=output.device).reshape(output.shape)


def relative(actual: Tensor, expected: Tensor, scale: float | None = None) -> float:
    """Return the largest absolute difference of two tensors, divided by `scale`.

    Returns infinity if shapes differ, or if an entry is infinite or NaN in one tensor only. For tensors of integers or
    booleans, returns 1 if any entry differs, else 0.

    Args:
        scale: by default, the largest finite absolute value in the expected tensor, at least `FLOOR`.
    """
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    actual, expected = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (actual, expected))
    if actual.is_complex() and expected.is_complex():
        actual, expected = (torch.view_as_real(t.resolve_conj()) for t in (actual, expected))
    if not expected.is_floating_point():
        return float((actual != expected).any())
    scale = scale or scale_of(expected)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    apart = torch.where(same, 0.0, actual - expected).abs()
    return float(apart.nan_to_num(nan=float("inf"), posinf=float("inf")).max()) / scale


def scale_of(value: Tensor) -> float:
    """Return the largest finite absolute value in a tensor, at least `FLOOR`."""
    return max(largest(value), FLOOR)


def largest(value: Tensor) -> float:
    """Return the largest absolute finite entry of a tensor; 0 for an empty tensor."""
    if not value.numel():
        return 0.0
    value = value.detach()
    size = value.abs().double() if value.is_complex() else value.double().abs()
    return float(size.nan_to_num(0.0, 0.0, 0.0).max())
