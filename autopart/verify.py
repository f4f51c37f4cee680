"""Proof by execution: all ranks of the partitioned program in one process, against the model itself.

`verify` runs the very graphs that the runtime executes, forward and backward, in double precision, and compares loss,
outputs, every gradient and every buffer that is written. Where they differ it compares value by value and names the
first that is wrong.

A model that computes in float32 inside (transformers' losses and RMS norms) cannot be matched to 1e-10 by any other
order of additions. Such casts are lifted to float64 in the trace; the trace is then compared with the model to float32
rounding, and the partitioned program with the trace to 1e-10.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopart.api import read_options
from autopart.compat import tree_flatten, tree_map
from autopart.compiler import (
    LIFTED,
    LIFTED_HALF,
    Options,
    check_plan_mesh,
    check_plan_model,
    check_plan_options,
    find_loss,
    identity_of,
    make_plan,
    prepare,
)
from autopart.entry import call
from autopart.errors import InputError, OptionError, RuntimeSetupError
from autopart.graph import draws_random_numbers
from autopart.localize import BROKEN, Mismatch, first_mismatch
from autopart.mesh import Mesh
from autopart.passes.decide import decode
from autopart.passes.shard import SequenceParallel
from autopart.pins import Pins
from autopart.plan import Plan
from autopart.program import Rng
from autopart.recomputation import Recompute
from autopart.runtime.placement import placement_of
from autopart.scale import ScaledCopy, fits, scaled_copy
from autopart.shrink import smallest_failing
from autopart.subgraph import Subgraph
from autopart.subject import Arrangement, Results, Subject, Tamper, one_seed, relative
from autopart.trace import Trace, WithLoss, bind_call

TOLERANCE = 1e-10
FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-4, 5e-2
"""How far a model that casts down may be from its trace in double precision."""
NOT_DOUBLE = "the model has kernels without float64: it runs in float32, its trace and the program in float64"


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    `max_error`: the largest error of loss, outputs (relative to their largest entry) and gradients (relative to the
    largest gradient entry of the model), over all ranks. `errors`: by name (`loss`, `output 0`, parameters,
    `buffer bn.running_mean`). `first_mismatch`: None if all is well. `smallest`: with `shrink=True`, the smallest part
    that is wrong alone.
    """

    ok: bool
    max_error: float
    first_mismatch: Mismatch | None
    errors: Mapping[str, float]
    mesh: str
    notes: tuple[str, ...] = ()
    smallest: Subgraph | None = None

    def __str__(self) -> str:
        head = f"{'exact' if self.ok else 'WRONG'} on {self.mesh}: largest error {self.max_error:.3g}"
        head += f" over {len(self.errors)} values"
        worst = "" if self.ok else "\nworst: " + ", ".join(
            f"{name} {error:.3g}" for name, error in sorted(self.errors.items(), key=lambda e: -e[1])[:5]
        )  # fmt: skip
        first = f"\nfirst: {self.first_mismatch}" if self.first_mismatch else ""
        notes = "".join(f"\nnote: {note}" for note in self.notes)
        return head + worst + first + self._smallest_text() + notes

    def _smallest_text(self) -> str:
        if self.smallest is None:
            return ""
        number = len(self.smallest.operators)
        head = f"\nsmallest part that is wrong alone: {number} operator{'s' * (number > 1)}"
        lines = str(self.smallest).splitlines()
        again = "again: .smallest.errors(), or elsewhere Subgraph.parse(these lines).errors(), with random values"
        return "".join([head, *(f"\n  {line}" for line in lines), f"\n{again}"])


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
    sequence_parallel: SequenceParallel = "auto",
    hardware: str | None = None,
    pins: Pins | Mapping[str, Any] | str | Path | None = None,
    zero: int | None = None,
    memory: int | str | None = None,
    recompute: Recompute | None = None,
    compile: bool | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    target: Any = None,
    rng: Rng = "exact",
    tolerance: float = TOLERANCE,
    shrink: bool = False,
    scaled: bool | str = "auto",
    tamper: Tamper | None = None,
    **unknown: Any,
) -> Verification:
    """Run ALL ranks of the partitioned model in this process, forward and backward, and compare with the model.

    No process group is needed; the model is copied to float64. What it draws in the mode it is in (dropout when
    training) is drawn from one seed on both sides.

    Args:
        model, mesh, example_args, example_kwargs, plan, schedule, microbatches, virtual_stages, sequence_parallel,
            hardware, pins, zero, memory (in the model's dtype), recompute, compile (not done here): as `parallelize`.
        loss_fn, target: for a model that returns no loss, as `ParallelModule.step`. Without either, gradients are
            compared for a fixed random weighting of the outputs.
        rng: "exact", or "fast" to switch dropout off (eval mode), for models of which no draw can be repeated exactly.
        tolerance, shrink: what counts as equal, relative; also find the smallest part of the graph that is wrong alone.
        scaled: verify a copy with two of every run of equal blocks (True), the model itself (False), or the copy where
            the model does not fit into memory in float64 or has no weights ("auto"). A plan of the model is followed.
        tamper: called with the program and the ranks' parameters before the run, to plant a fault.
    Raises as `plan`.

    Example:
        >>> assert autopart.verify(model, "dp2,pp4,tp4", example_kwargs=batch).ok    # doctest: +SKIP
    """
    options = read_options(
        unknown, schedule=schedule, microbatches=microbatches, virtual_stages=virtual_stages, pins=pins, rng=rng,
        hardware=hardware, sequence_parallel=sequence_parallel, zero=zero, memory=memory, recompute=recompute,
        compile=compile,
    )  # fmt: skip
    if not example_args and not example_kwargs:
        raise InputError("verify() needs an example call", hint="verify(model, mesh, example_kwargs=batch)")
    sizes = Mesh.parse(mesh)
    arguments = bind_call(model, example_args, example_kwargs or {})
    given = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    if given is None:
        options = _check_fits(model, arguments, loss_fn, target, sizes, options)
    run = VerificationRun(model, arguments, loss_fn, target, scaled, options.rng)
    return run.check(run.arrange(sizes, given, options, tamper), tolerance, shrink)


def _check_fits(
    model: nn.Module, arguments: dict[str, Any], loss_fn: Any, target: Any, mesh: Mesh, options: Options
) -> Options:
    """The options without a limit of memory. Raises MemoryLimitError where the model as it is, not its copy in float64,
    does not fit in one."""
    if options.memory is None:
        return options
    if loss_fn is not None:
        training = model.training
        model, arguments = WithLoss(model, loss_fn).train(training), {"target": target, "call": arguments}
    make_plan(model, prepare(model, arguments), mesh, replace(options, rng="fast"))
    return replace(options, memory=None)


class VerificationRun:
    """A double-precision copy of a model, traced once for a call, to be checked under any number of arrangements.

    `arguments`: the call by name, from `bind_call`.

    Example:
        >>> run = VerificationRun(model, bind_call(model, (), batch))              # doctest: +SKIP
        >>> assert all(run.check(run.arrange(mesh)).ok for mesh in ("tp2", "dp4"))    # doctest: +SKIP
    """

    def __init__(
        self, model: nn.Module, arguments: dict[str, Any], loss_fn: Any = None, target: Any = None,
        scaled: bool | str = False, rng: Rng = "exact",
    ):  # fmt: skip
        self.notes: list[str] = []
        self.scaled = _scaled(model, arguments, scaled)
        self.parameters = {name: p.to("meta") for name, p in model.named_parameters()}
        if self.scaled is None:
            check_weights(model)
            self.base = deepcopy(model).double()
        else:
            self.notes += self.scaled.notes
            self.base = self.scaled.model.double()
        check_trained(model)
        arguments = tree_map(_double, arguments)
        self.model = self.base
        if loss_fn is not None:
            self.model = WithLoss(self.base, loss_fn).train(model.training)
            arguments = {"target": _double(target), "call": arguments}
        self.arguments = arguments
        self.traced = prepare(self.model, arguments, double=True)
        if rng == "fast" and _is_random(self.traced):
            self.notes.append("dropout is off: compared in eval mode")
            self.model.eval()
            self.traced = prepare(self.model, arguments, double=True)
        self.notes += self.traced.notes
        self.subject = Subject(self.traced, find_loss(self.traced))

    def arrange(
        self, mesh: Any, plan: Plan | None = None, options: Options | None = None, tamper: Tamper | None = None
    ) -> Arrangement:
        """How the model lies on a mesh: as a plan says, else as is chosen for it. Raises what `plan` raises."""
        sizes, options = Mesh.parse(mesh), options or Options()
        if plan is not None:
            check_plan_mesh(plan, sizes)
            check_plan_options(options, plan)
            check_plan_model(plan, type(self.base).__name__, self.parameters)
            if self.scaled is not None:
                plan = self.scaled.plan(plan, identity_of(self.traced.parameters), self.traced)
        elif self.scaled is not None and options.recompute is not None:
            options = replace(options, recompute=self.scaled.recompute(options.recompute, self.traced))
        chosen = plan or make_plan(self.model, self.traced, sizes, options)
        decisions = decode(self.traced, chosen, sizes)
        return Arrangement(decisions, placement_of(chosen.schedule.name), tamper)

    def check(self, arrangement: Arrangement, tolerance: float = TOLERANCE, shrink: bool = False) -> Verification:
        """Run the program of an arrangement on all ranks, and compare."""
        expected, apart = self._expected
        allowed = HALF_TOLERANCE if LIFTED_HALF in self.notes else FLOAT32_TOLERANCE
        errors = {"trace against model": apart} if apart > allowed else {}
        errors |= {f"buffer {name}": float("inf") for name in self.lost}
        failure: Exception | None = None
        try:
            errors |= self.subject.errors(arrangement, expected)
        except BROKEN as error:  # a fault can break the run itself
            failure = error
        worst = max(errors.values(), default=0.0) if failure is None else float("inf")
        ok = failure is None and worst <= tolerance
        first = None if ok else first_mismatch(self.subject, arrangement, tolerance, errors)
        smallest = None
        if shrink and not ok:
            smallest = smallest_failing(self.subject, arrangement, tolerance, first, failure is not None)
        return Verification(ok, worst, first, errors, str(arrangement.decisions.mesh), tuple(self.notes), smallest)

    @cached_property
    def _expected(self) -> tuple[Results, float]:
        """What the program must compute, and how far the trace is from the model where that is not the same."""
        try:
            own = self._of_model(self.arguments)
        except (RuntimeError, NotImplementedError):
            own = self._of_model_in_float32()
            self.notes.append(NOT_DOUBLE)
        if not {LIFTED, LIFTED_HALF, NOT_DOUBLE} & set(self.notes):
            return own, 0.0
        traced = self.subject.expected()
        return traced, traced.distance(own)

    def _of_model(self, arguments: dict[str, Any]) -> Results:
        """What the model itself computes; notes the buffers that it changes unseen by the trace."""
        before = {name: buffer.clone() for name, buffer in self.base.named_buffers()}
        with buffers_restored(self.base):
            with one_seed():
                flat = tree_flatten(call(self.model, arguments))[0]
            written = {name: self.base.get_buffer(name).detach().clone() for name in self.traced.buffer_updates}
            changed = {name for name, value in before.items() if relative(self.base.get_buffer(name), value) > 0}
            own = self.subject.differentiate(flat, written)
        self.lost = changed - set(written)
        return own

    def _of_model_in_float32(self) -> Results:
        """For a model with kernels that know no float64. Raises what the model raises in float32 too."""
        single = tree_map(lambda leaf: _cast(leaf, torch.float32), self.arguments)
        self.base.float()
        try:
            return self._of_model(single)
        finally:
            self.base.double()


def deepcopy(model: nn.Module) -> nn.Module:
    """A copy of a model; also of one whose weights are computed (torch.nn.utils.weight_norm and the like)."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(model, memo)


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """What the model writes to its buffers inside is undone."""
    before = [(module, name, buffer, buffer.clone()) for module in model.modules()
              for name, buffer in module._buffers.items() if buffer is not None]  # fmt: skip
    try:
        yield
    finally:
        for module, name, buffer, value in before:
            module._buffers[name] = buffer.copy_(value)


def _scaled(model: nn.Module, arguments: Mapping[str, Any], scaled: bool | str) -> ScaledCopy | None:
    """The copy to verify in place of the model, if one is asked for or needed."""
    if scaled not in (True, False, "auto"):
        raise OptionError(f"scaled={scaled!r} is no choice", hint='True, False or "auto"')
    needed = scaled is True or (scaled == "auto" and not fits(model.parameters()))
    return scaled_copy(model, arguments) if needed else None


def check_weights(model: nn.Module) -> None:
    """Raises where there is nothing to compute with."""
    meta = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if meta is not None:
        raise RuntimeSetupError(
            f"parameter '{meta}' has no values to run with",
            why="it is on the meta device",
            hint="load the model's weights first; plan() needs none, verify() does",
        )


def check_trained(model: nn.Module) -> None:
    """Raises where there is no gradient to compare."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"{type(model).__name__} has no parameter that needs a gradient",
            why="verify() compares gradients",
            hint="requires_grad_() on what is trained",
        )


def _is_random(traced: Trace) -> bool:
    return any(draws_random_numbers(n) for n in traced.graph.nodes if n.op == "call_function")


def _double(leaf: Any) -> Any:
    return _cast(leaf, torch.float64)


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)
