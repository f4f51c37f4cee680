"""Proof by execution: all ranks of the partitioned program in one process, against the model itself.

`verify` runs the very graphs that the runtime executes, forward and backward, in double precision, and compares loss,
outputs and every gradient. Where they differ it compares value by value and names the first that is wrong.

A model that computes in float32 inside (transformers' losses and RMS norms) cannot be matched to 1e-10 by any other
order of additions. Such casts are lifted to float64 in the trace; the trace is then compared with the model to float32
rounding, and the partitioned program with the trace to 1e-10.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopart.compat import tree_flatten, tree_map
from autopart.compiler import (
    LIFTED,
    Options,
    check_plan_mesh,
    check_plan_model,
    check_plan_options,
    find_loss,
    make_plan,
    prepare,
)
from autopart.errors import InputError, RuntimeSetupError
from autopart.graph import draws_random_numbers
from autopart.layout import Placement
from autopart.localize import BROKEN, Mismatch, MismatchSearch, relative, weights_like
from autopart.mesh import Mesh
from autopart.passes.decide import decode
from autopart.passes.lower import Decisions, lower
from autopart.plan import Plan
from autopart.program import MICROBATCH_AXIS, Program
from autopart.runtime.batch import merge_microbatches
from autopart.runtime.gradients import sync_gradients_lockstep
from autopart.runtime.lockstep import run_lockstep
from autopart.runtime.placement import placement_of
from autopart.runtime.state import join, shard_parameters
from autopart.trace import Trace, WithLoss, bind_call

TOLERANCE = 1e-10
FLOAT32_TOLERANCE = 1e-4
Tamper = Callable[[Program, dict[int, dict[str, nn.Parameter]]], None]


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    `max_error`: the largest error of loss, outputs (relative to their largest entry) and gradients (relative to the
    largest gradient entry of the model). `errors`: by name (`loss`, `output 0`, parameters). `first_mismatch`: None if
    all is well.
    """

    ok: bool
    max_error: float
    first_mismatch: Mismatch | None
    errors: Mapping[str, float]
    mesh: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{'exact' if self.ok else 'WRONG'} on {self.mesh}: largest error {self.max_error:.3g}"
        head += f" over {len(self.errors)} values"
        worst = "" if self.ok else "\nworst: " + ", ".join(
            f"{name} {error:.3g}" for name, error in sorted(self.errors.items(), key=lambda e: -e[1])[:5]
        )  # fmt: skip
        notes = "".join(f"\nnote: {note}" for note in self.notes)
        return f"{head}{worst}" + (f"\nfirst: {self.first_mismatch}" if self.first_mismatch else "") + notes


def verify(
    model: nn.Module,
    mesh: Any,
    *,
    example_args: tuple = (),
    example_kwargs: Mapping[str, Any] | None = None,
    plan: Plan | str | Path | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    virtual_stages: int | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    target: Any = None,
    tolerance: float = TOLERANCE,
    tamper: Tamper | None = None,
) -> Verification:
    """Run ALL ranks of the partitioned model in this process, forward and backward, and compare with the model.

    No process group is needed; the model is copied to float64. Dropout is switched off (the copy is put in eval mode
    where it drops anything), since its masks depend on the rank.

    Args:
        model, mesh, example_args, example_kwargs, plan, schedule, microbatches, virtual_stages: as `parallelize`.
        loss_fn, target: for a model that returns no loss, as `ParallelModule.step`. Without either, gradients are
            compared for a fixed random weighting of the outputs.
        tolerance: what counts as equal, relative.
        tamper: called with the program and the ranks' parameters before the run, to plant a fault.
    Raises:
        As `plan`.

    Example:
        >>> assert autopart.verify(model, "dp2,pp4,tp4", example_kwargs=batch).ok    # doctest: +SKIP
    """
    if not example_args and not example_kwargs:
        raise InputError("verify() needs an example call", hint="verify(model, mesh, example_kwargs=batch)")
    sizes = Mesh.parse(mesh)
    run = VerificationRun(model, sizes, bind_call(model, example_args, example_kwargs or {}), loss_fn, target)
    options = Options(schedule, microbatches, virtual_stages)
    given = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    if given is not None:
        check_plan_mesh(given, sizes)
        check_plan_options(options, given)
        check_plan_model(given, type(model).__name__, run.traced)
    chosen = given or make_plan(run.model, run.traced, sizes, options)
    decisions = decode(run.traced, chosen, sizes, strict=chosen.model["mode"] == run.traced.mode)
    return run.check(decisions, placement_of(chosen.schedule.name), tolerance, tamper)


class VerificationRun:
    """One verification: a double-precision copy of the model, traced, and what it computes."""

    def __init__(self, model: nn.Module, mesh: Mesh, arguments: dict[str, Any], loss_fn: Any, target: Any):
        self.mesh = mesh
        self.notes: list[str] = []
        check_weights(model)
        self.base = copy.deepcopy(model).double()
        arguments = tree_map(_double, arguments)
        self.model = self.base
        if loss_fn is not None:
            self.model = WithLoss(self.base, loss_fn).train(model.training)
            arguments = {"target": _double(target), "call": arguments}
        self.arguments = arguments
        self.traced = prepare(self.model, arguments, double=True)
        if _is_random(self.traced):
            self.notes.append("dropout is off: compared in eval mode")
            self.model.eval()
            self.traced = prepare(self.model, arguments, double=True)
        self.notes += self.traced.notes

    def check(self, decisions: Decisions, placement: str, tolerance: float, tamper: Tamper | None) -> Verification:
        outputs = list(self.traced.graph.output_node().args[0])
        loss = find_loss(self.traced)
        called = lower(self.traced, decisions, outputs, whole_outputs=True)
        step = lower(self.traced, decisions, [loss], whole_outputs=False) if loss is not None else called
        expected, expected_grads = self._reference(loss is not None)
        errors: dict[str, float] = {}
        if LIFTED in self.notes:
            traced, traced_grads = self._traced_reference()
            apart = self._distance(traced, traced_grads, expected, expected_grads)
            if apart > FLOAT32_TOLERANCE:
                errors["trace against model"] = apart
            expected, expected_grads = traced, traced_grads
        failure: Exception | None = None
        try:
            if loss is not None:
                errors |= self._output_errors(called, placement, expected, tamper)
            errors |= self._gradient_errors(step, placement, expected, expected_grads, tamper, loss is not None)
        except BROKEN as error:  # a fault can break the run itself
            failure = error
        worst = max(errors.values(), default=0.0) if failure is None else float("inf")
        ok = failure is None and worst <= tolerance
        first = None
        if not ok:
            first = self._first_mismatch(
                step, called, MismatchSearch(self, step, placement, tolerance, tamper), errors, failure
            )
        return Verification(ok, worst, first, errors, str(self.mesh), tuple(self.notes))

    def _first_mismatch(
        self,
        step: Program,
        called: Program,
        search: MismatchSearch,
        errors: Mapping[str, float],
        failure: Exception | None,
    ) -> Mismatch | None:
        """Where the step's values differ, else where the call's do, else the parameter that is most wrong."""
        first = search.first(failure)
        if first is None and called is not step:
            other = MismatchSearch(self, called, search.placement, search.tolerance, search.tamper)
            first = other.first(failure, gradients=False)
        wrong = {name: error for name, error in errors.items() if name in step.parameters and error > search.tolerance}
        if first is None and wrong:
            worst = max(wrong, key=lambda name: wrong[name])
            first = search.parameter(worst, wrong[worst])
        return first

    def seeds(self, program: Program, results: Mapping[int, list[tuple]]) -> list[Tensor]:
        """What every rank differentiates: its losses, or its weighted outputs."""
        if find_loss(self.traced) is not None:
            return [out for microbatches in results.values() for (out,) in microbatches if out.requires_grad]
        return [
            (value * weights_like(value)).sum()
            for microbatches in results.values()
            for value in merge_microbatches(program, microbatches)
            if value.requires_grad
        ]

    def _reference(self, has_loss: bool) -> tuple[list[Any], dict[str, Tensor]]:
        """The model's own flat outputs and gradients."""
        self.model.zero_grad(set_to_none=True)
        flat = [o for o in tree_flatten(self.model(**self.arguments))[0]]
        self.seed(flat, has_loss, self.traced).backward()
        grads = {name: p.grad.clone() for name, p in self.base.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return [o.detach() if isinstance(o, Tensor) else o for o in flat], grads

    def _traced_reference(self) -> tuple[list[Any], dict[str, Tensor]]:
        """Outputs and gradients of the traced graph on the global batch, in one piece."""
        self.model.zero_grad(set_to_none=True)
        values = self.values(lambda value: None)
        flat = [values[o] if isinstance(o, fx.Node) else o for o in self.traced.graph.output_node().args[0]]
        self.seed(flat, find_loss(self.traced) is not None, self.traced).backward()
        grads = {name: p.grad.clone() for name, p in self.base.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return [o.detach() if isinstance(o, Tensor) else o for o in flat], grads

    def values(self, keep: Callable[[Tensor], None]) -> dict[fx.Node, Any]:
        """Every value of the traced graph on the global batch; `keep` is called with each that has a gradient."""
        tensors = {**dict(self.base.named_parameters()), **self.traced.buffers, **self.traced.constants}
        inputs = iter(self.traced.call.tensors)
        values: dict[fx.Node, Any] = {}
        for node in self.traced.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                values[node] = tensors[node.target]
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
                if isinstance(values[node], Tensor) and values[node].requires_grad:
                    keep(values[node])
        return values

    def _distance(
        self, found: list, found_grads: Mapping[str, Tensor], expected: list, grads: Mapping[str, Tensor]
    ) -> float:
        """The largest relative difference of outputs and gradients; infinite where other parameters have gradients."""
        if set(found_grads) != set(grads):
            return float("inf")
        scale = max((float(g.abs().max()) for g in grads.values()), default=1.0) or 1.0
        outputs = [relative(a, b.to(a.dtype)) for a, b in zip(found, expected, strict=True) if isinstance(a, Tensor)]
        return max(outputs + [float((found_grads[n] - g).abs().max()) / scale for n, g in grads.items()], default=0.0)

    def seed(self, flat: list[Any], has_loss: bool, traced: Trace) -> Tensor:
        """A scalar to differentiate: the loss, or a fixed weighting of all outputs."""
        if has_loss:
            scalar = flat[list(traced.graph.output_node().args[0]).index(find_loss(traced))]
        else:
            parts = [(o * weights_like(o)).sum() for o in flat if isinstance(o, Tensor) and o.requires_grad]
            scalar = torch.stack(parts).sum()
        return scalar

    def parameters(self, program: Program, tamper: Tamper | None) -> dict[int, dict[str, nn.Parameter]]:
        """Every rank's shards."""
        local = {r: shard_parameters(self.base, program, self.mesh.coordinates(r)) for r in range(self.mesh.num_ranks)}
        if tamper is not None:
            tamper(program, local)
        return local

    def lockstep(
        self, program: Program, parameters: Any, placement: str, on_value: Any = None
    ) -> dict[int, list[tuple]]:
        buffers = dict(self.base.named_buffers(remove_duplicate=False))
        return run_lockstep(program, parameters, buffers, self.traced.call.tensors, on_value, placement=placement)

    def _output_errors(
        self, program: Program, placement: str, expected: list, tamper: Tamper | None
    ) -> dict[str, float]:
        with torch.no_grad():
            results = self.lockstep(program, self.parameters(program, tamper), placement)
        return self._merged_errors(program, results, expected)

    def _merged_errors(self, program: Program, results: Mapping[int, list[tuple]], expected: list) -> dict[str, float]:
        """The largest error over all ranks of every output."""
        errors: dict[str, float] = {}
        for microbatches in results.values():
            merged = merge_microbatches(program, microbatches)
            for i, output in enumerate(program.outputs):
                if output.position is not None:
                    error = relative(merged[output.position], expected[i])
                    errors[f"output {i}"] = max(errors.get(f"output {i}", 0.0), error)
        return errors

    def _gradient_errors(
        self,
        program: Program,
        placement: str,
        expected: list,
        grads: Mapping[str, Tensor],
        tamper: Tamper | None,
        has_loss: bool,
    ) -> dict[str, float]:
        parameters = self.parameters(program, tamper)
        results = self.lockstep(program, parameters, placement)
        errors: dict[str, float] = {}
        torch.autograd.backward(self.seeds(program, results))
        if has_loss:
            index = list(self.traced.graph.output_node().args[0]).index(find_loss(self.traced))
            errors["loss"] = relative(self._whole_loss(program, results), expected[index])
        else:
            errors |= self._merged_errors(program, results, expected)
        sync_gradients_lockstep(parameters, program, placement=placement)
        local = {r: {n: p.grad for n, p in ps.items() if p.grad is not None} for r, ps in parameters.items()}
        full = join(local, program, placement=placement)
        scale = max((float(g.abs().max()) for g in grads.values()), default=1.0) or 1.0
        for name, grad in grads.items():
            found = full.get(name)
            errors[name] = float("inf") if found is None else float((found - grad).abs().max()) / scale
        return errors

    def _whole_loss(self, program: Program, results: Mapping[int, list[tuple]]) -> Tensor:
        """The loss of the global batch: partial sums over dp and microbatches added, whole ones taken once."""
        layout = program.outputs[0].layout
        ranks = [
            r
            for r in results
            if all(p.kind == "P" or self.mesh.coordinates(r).get(a, 0) == 0 for a, p in layout.items())
        ]
        parts = [torch.stack([out.detach() for (out,) in results[rank]]) for rank in ranks]
        partial = layout.get(MICROBATCH_AXIS, Placement("R")).kind == "P"
        return torch.stack([part.sum() if partial else part[0] for part in parts]).sum()


def check_weights(model: nn.Module) -> None:
    """Raises where there is nothing to compute or compare with."""
    meta = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if meta is not None:
        raise RuntimeSetupError(
            f"parameter '{meta}' has no values to run with",
            why="it is on the meta device",
            hint="load the model's weights first; plan() needs none, verify() does",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"{type(model).__name__} has no parameter that needs a gradient",
            why="verify() compares gradients",
            hint="requires_grad_() on what is trained",
        )


def _is_random(traced: Trace) -> bool:
    return any(draws_random_numbers(n) for n in traced.graph.nodes if n.op == "call_function")


def _double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
