"""Proof by execution: run all ranks of a partitioned model in one process and compare with the model.

`verify` runs the graphs that the runtime executes, forward and backward, in float64. It compares the loss, outputs,
every gradient and every written buffer. If they differ, it compares value by value and names the first wrong value.

With `precision=`, the float64 comparison replaces casts by identities. Then the program runs with its casts and is
compared with a single-device run under the same precision (`verify_precision.py`).

Some models compute parts in float32 (losses and RMS norms of transformers). The program cannot match such a model to
1e-10, because the program adds in another order. The model's trace is then computed in float64. The trace must agree
with the model to the model's own rounding, and the partitioned program with the trace to 1e-10 (`reference.py` explains
what that proves).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor, nn

from autopart.common.progress import phase
from autopart.common.text import ShownAsText
from autopart.errors import InputError, OptionError, RuntimeSetupError
from autopart.ir.mesh import Mesh
from autopart.ir.program import Rng
from autopart.ir.run.mixed_precision import Precision
from autopart.ir.run.sync_option import SyncOption
from autopart.options import TOLERANCE, Options, VerifyOptions, read_options, with_options
from autopart.passes.choose.plan_codec import decode
from autopart.plans.headlines import replicated_operator_text, replicated_operators
from autopart.plans.plan import Plan
from autopart.proof.comparison import Arrangement, Tamper
from autopart.proof.finite_values import NotFinite, infinite
from autopart.proof.length_reports import LengthReport, ProgramOrigins
from autopart.proof.localize.localize import BROKEN, Mismatch, first_mismatch
from autopart.proof.localize.shrink import smallest_failing
from autopart.proof.localize.subgraph import Subgraph
from autopart.proof.reference import Reference
from autopart.proof.scale.scaled_model import (
    ONE_PASS,
    ScaledCopy,
    VerifyLoad,
    check_memory,
    copies_by_kind,
    device_of,
    fits,
    on_device,
    scaled_copy,
)
from autopart.proof.steps.lockstep_steps import train
from autopart.proof.steps.step_comparison import StepMismatch, StepReport
from autopart.proof.steps.training_options import MakeOptimizer, Training, read_training
from autopart.proof.verify_precision import Rounded, SingleDeviceRun
from autopart.recipe.compiler import Compiler
from autopart.recipe.make_plan import find_loss, make_plan, prepare
from autopart.recipe.model_source import ModelSource
from autopart.recipe.plan_checks import check_plan_mesh, check_plan_model, check_plan_options, identity_of
from autopart.recipe.sizes.example_lengths import ExampleLengths, read_lengths
from autopart.runtime.comm.stage_ranks import stage_style_of
from autopart.tracing.python.python_state import SETS
from autopart.tracing.sparse_buffers import check_layouts
from autopart.tracing.trace_model import bind_call, check_values, flatten_call
from autopart.tracing.with_loss import WithLoss

MOST_UNSHARDED = 3
"""Maximum number of kinds of replicated operators that a note lists."""


@dataclass(frozen=True, repr=False)
class Verification(ShownAsText):
    """Result of `verify`. Its text names the largest error and the first wrong value.

    Args:
        ok: True if all values agree and are not NaN.
        max_error: largest error of the loss, outputs (relative to their largest entry) and gradients (relative to the
            largest gradient entry of the model), over all ranks.
        first_mismatch: the first wrong value; None if all values agree.
        errors: {name: error}. Names are `loss`, `output 0`, the name of a parameter (for its gradient), and for example
            `buffer bn.running_mean`, or with `steps=` `step 2 weight h.0.up.weight`.
        mesh: the mesh, as text.
        smallest: with `shrink=True`, the smallest subgraph that is wrong when it runs alone.
        steps: with `steps=`, a report of each training step.
        not_finite: NaN, or an infinite loss or gradient, that the model itself computes. If there is any, nothing is
            proven and `ok` is False.
        rounded: with `precision=`, the comparison with a single-device run in that precision. All other fields are from
            the comparison in float64.
        lengths: with `lengths=`, a report of each sequence length.
    """

    ok: bool
    max_error: float
    first_mismatch: Mismatch | StepMismatch | None
    errors: Mapping[str, float]
    mesh: str
    notes: tuple[str, ...] = ()
    smallest: Subgraph | None = None
    steps: tuple[StepReport, ...] = ()
    not_finite: NotFinite | None = None
    rounded: Rounded | None = None
    lengths: tuple[LengthReport, ...] = ()

    def __str__(self) -> str:
        verdict = "exact" if self.ok else "WRONG" if self.not_finite is None else "NOT FINITE"
        head = f"{verdict} on {self.mesh}: largest error {self.max_error:.3g}"
        head += f" over {len(self.errors)} values"
        worst = "" if self.ok or self.first_mismatch is None else "\nworst: " + ", ".join(
            f"{name} {error:.3g}" for name, error in sorted(self.errors.items(), key=lambda e: -e[1])[:5]
        )  # fmt: skip
        first = f"\nfirst: {self.first_mismatch}" if self.first_mismatch else ""
        notes = "".join(f"\nnote: {note}" for note in self.notes)
        steps = "".join(f"\n{report}" for report in self.steps)
        bad = f"\n{self.not_finite}" if self.not_finite is not None else ""
        rounded = f"\n{self.rounded}" if self.rounded is not None else ""
        steps += "".join(f"\n{report}" for report in self.lengths)
        return head + worst + bad + rounded + steps + first + self._smallest_text() + notes

    def _smallest_text(self) -> str:
        if self.smallest is None:
            return ""
        number = len(self.smallest.operators)
        head = f"\nsmallest part that is wrong alone: {number} operator{'s' * (number > 1)}"
        lines = str(self.smallest).splitlines()
        again = "to rerun: .smallest.errors(); elsewhere Subgraph.parse(these lines).errors(), with random values"
        return "".join([head, *(f"\n  {line}" for line in lines), f"\n{again}"])


@with_options(VerifyOptions)
def verify(
    model: nn.Module, mesh: Any, *, example_args: tuple = (), example_kwargs: Mapping[str, Any] | None = None,
    plan: Plan | str | Path | None = None, loss_fn: Callable[..., Tensor] | None = None, target: Any = None,
    rng: Rng = "exact", tolerance: float = TOLERANCE, shrink: bool = False, scaled: bool | str = "auto",
    tamper: Tamper | None = None, steps: int | None = None, optimizer: MakeOptimizer | None = None,
    max_norm: float | None = None, scaler: Any = None, batches: Sequence[Mapping[str, Any]] | None = None,
    lengths: Iterable[int] | str | None = None, **options: Unpack[VerifyOptions],
) -> Verification:  # fmt: skip
    """Run ALL ranks of the partitioned model in this process and compare with the model.

    No process group is needed. A copy of the model runs in float64, or in its own precision if it does not run in
    float64. The model and all ranks draw random numbers (such as dropout in training mode) from one seed.

    Args:
        model, mesh, example_args, example_kwargs, plan: as in `parallelize`; nothing is compiled here.
        **options: `VerifyOptions`.
        loss_fn, target: loss function and target for a model that returns no loss, as in `ParallelModule.step`. If
            there is no loss, a fixed weighted sum of the outputs is differentiated.
        rng: "exact", or "fast" to turn dropout off (eval mode), for models whose random numbers cannot be reproduced.
        tolerance: largest relative error that counts as equal.
        shrink: if values are wrong, also find the smallest subgraph that is wrong when it runs alone.
        scaled: True verifies a smaller copy, which has only two blocks of each sequence of equal blocks. False verifies
            the model itself. "auto" uses the copy if the model does not fit into memory in float64 or has no weights.
            If `plan`, a plan of the full model, is passed, the copy gets its layouts.
        tamper: function that plants a fault before the run. It gets the program and the ranks' parameters.
        steps: number of training steps to run after the first comparison. Loss, gradient norm, gradients, weights and
            optimizer state are compared after each step. Any of the next four arguments implies 3 steps.
        optimizer: function that makes a rank's optimizer from its [(name, parameter)].  [default: AdamW, lr=1e-3]
        max_norm: gradient clipping norm.
        scaler: True, settings of a `torch.amp.GradScaler`, or a scaler.
        batches: keyword arguments of the call of each step.  [default: the example in every step]
        lengths: further sequence lengths to verify, such as [17, 64, 77]. The report marks derived (untraced) programs.
    Raises the errors of `plan`.

    Example:
        >>> assert autopart.verify(model, "dp2,pp4,tp4", example_kwargs=batch).ok    # doctest: +SKIP
        >>> assert autopart.verify(model, "tp2", example_kwargs=batch, steps=3, max_norm=1.0).ok  # doctest: +SKIP
    """
    asked = read_options(verify, options, rng=rng)
    if not example_args and example_kwargs is None:
        raise InputError("verify() needs an example call", hint="verify(model, mesh, example_kwargs=batch)")
    sizes = Mesh.parse(mesh)
    arguments = bind_call(model, example_args, example_kwargs or {})
    check_values(flatten_call(arguments))
    at_lengths = read_lengths(lengths)
    example = ExampleLengths({"target": target, "call": arguments}, asked.sequence_dims) if at_lengths else None
    training = read_training(model, arguments, steps, optimizer, max_norm, scaler, batches, loss_fn is not None)
    followed = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    precision = Precision.parse((followed or asked).precision, (followed or asked).reduce_dtype)
    if followed is None:
        asked = _check_fits(model, arguments, loss_fn, target, sizes, asked)
    work = VerifyLoad(sizes, training.steps if training is not None else 0, loss_fn is not None)
    verifications = []
    for copied in _copies_to_verify(model, arguments, scaled, work):
        run = VerificationRun(model, arguments, loss_fn, target, copied, asked.rng, precision)
        arrangement = run.arrange(sizes, followed, asked, tamper)
        verifications.append(run.check(arrangement, tolerance, shrink, training))
    result = merge_verifications(verifications)
    if example is None:
        return result
    call = example_args, example_kwargs or {}, target
    followed = followed or (arrangement.plan if run.scaled is None else None)  # of the example, for every length
    again = partial(verify, model, sizes, plan=followed, loss_fn=loss_fn, rng=rng, tolerance=tolerance, scaled=scaled,
                    tamper=tamper, **({} if followed is not None else options))  # fmt: skip
    return _with_lengths(result, run, {n: example.at(call, n) for n in at_lengths}, call, again, asked)


def _with_lengths(
    result: Verification, run: VerificationRun, calls: Mapping[int, Any], example: Any,
    again: partial[Verification], options: Options,
) -> Verification:  # fmt: skip
    """Verify calls of other lengths, and add their results to the verification of the example.

    Args:
        run: the verification of the example.
        calls: {length: positional arguments, keyword arguments and target}.
        again: `verify` with all arguments except `example_args`, `example_kwargs` and `target`.
    """
    plan, loss_fn = again.keywords["plan"] if run.scaled is None else None, again.keywords["loss_fn"]
    purpose = "step" if find_loss(run.traced) is not None else "forward"
    compiler = Compiler(run.source, again.args[1], options, plan)
    origins = ProgramOrigins(compiler, training=run.model.training, loss_fn=loss_fn, purpose=purpose)
    origins.of(*example)
    reports = []
    for length, (args, kwargs, target) in calls.items():
        phase(f"verifying length {length}")
        origin, wrong = origins.of(args, kwargs, target)
        other = again(example_args=args, example_kwargs=kwargs, target=target)
        reports.append(LengthReport(length, origin, other, wrong))
    errors = {f"length {r.length} {name}": error for r in reports for name, error in r.verification.errors.items()}
    first = next((r.verification.first_mismatch for r in reports if not r.ok), None)
    return replace(
        result, ok=result.ok and all(report.ok for report in reports), errors={**result.errors, **errors},
        max_error=max(result.max_error, *(report.verification.max_error for report in reports)),
        first_mismatch=result.first_mismatch or first, lengths=tuple(reports),
    )  # fmt: skip


def can_verify_at_full_size(source: ModelSource, mesh: Mesh, training: Mapping[str, Any], scaled: bool | None) -> bool:
    """Return True if memory suffices to verify the full model, without a reduced copy.

    The model is on the meta device. Raises InputError if memory does not suffice and `scaled=False` forbids a reduced
    copy.
    """
    assert source.example is not None
    arguments = bind_call(source.model, (), source.example)
    asked = read_training(source.model, arguments, **training)
    work = VerifyLoad(mesh, asked.steps if asked is not None else 0)
    if scaled is False:
        check_memory(source.model, arguments, work)
    return scaled is False or fits(source.model, arguments, work)


def _check_fits(
    model: nn.Module, arguments: dict[str, Any], loss_fn: Any, target: Any, mesh: Mesh, options: Options
) -> Options:
    """Check the option `memory=` for the model in its own precision. Return the options without `memory`.

    The float64 copy that is verified may exceed the limit. Raises MemoryLimitError if the model in its own precision
    exceeds the limit.
    """
    if options.memory is None:
        return options
    if loss_fn is not None:
        training = model.training
        model, arguments = WithLoss(model, loss_fn).train(training), {"target": target, "call": arguments}
    precision = Precision.parse(options.precision, options.reduce_dtype)
    make_plan(model, prepare(model, arguments, precision=precision), mesh, replace(options, rng="fast"))
    return replace(options, memory=None)


class VerificationRun:
    """A float64 copy of a model and its trace, with which any number of plans and meshes can be verified.

    Args:
        arguments: the call by argument name, from `bind_call`.
        scaled: as in `verify`, or the reduced copy to verify instead of the model.

    Attributes:
        base: the copy.
        model: the copy with its loss function.
        arguments: the call of the copy.
        traced: the float64 trace of the copy.
        subject: object that runs the trace, unpartitioned or partitioned.

    Example:
        >>> run = VerificationRun(model, bind_call(model, (), batch))              # doctest: +SKIP
        >>> assert all(run.check(run.arrange(mesh)).ok for mesh in ("tp2", "dp4"))    # doctest: +SKIP
    """

    def __init__(
        self, model: nn.Module, arguments: dict[str, Any], loss_fn: Any = None, target: Any = None,
        scaled: bool | str | ScaledCopy | None = False, rng: Rng = "exact", precision: Precision | None = None,
    ):  # fmt: skip
        if isinstance(scaled, (bool, str)):
            (scaled,) = _copies_to_verify(model, arguments, scaled, ONE_PASS)
        self.scaled = scaled.with_weights() if scaled is not None else None
        self.parameters = {name: p.to("meta") for name, p in model.named_parameters()}
        if self.scaled is None:
            check_weights(model)
        check_layouts(model, {})
        check_trained(model)
        self.source = model if self.scaled is None else self.scaled.model
        self.target, self.has_loss_fn = target, loss_fn is not None
        convert_arguments = self.convert_arguments(arguments, target)
        self.reference = Reference(self.source, convert_arguments, loss_fn, rng, precision)
        self.model, self.base, self.arguments = self.reference.model, self.reference.base, self.reference.arguments
        self.traced, self.subject = self.reference.traced, self.reference.subject
        self.one_device: SingleDeviceRun | None = None
        if precision is not None:
            self.one_device = SingleDeviceRun(self.source, convert_arguments, loss_fn, precision, self.model.training)
        self.parameters = {n: p for n, p in self.parameters.items() if n not in self.traced.written}
        self.notes = [*(self.scaled.notes if self.scaled is not None else ()), *self.reference.notes]

    def convert_arguments(self, arguments: Mapping[str, Any], target: Any) -> dict[str, Any]:
        """Convert the arguments of a call of the user's model to a call of the copy."""
        convert_arguments = self.scaled.arguments(arguments) if self.scaled is not None else dict(arguments)
        convert_arguments = {"target": target, "call": convert_arguments} if self.has_loss_fn else convert_arguments
        return on_device(convert_arguments, device_of(self.source))

    def arrange(
        self, mesh: Any, plan: Plan | None = None, options: Options | None = None, tamper: Tamper | None = None
    ) -> Arrangement:
        """Return the sharding decisions of a plan for the model. Without `plan`, choose one for the mesh.

        Raises the errors of `plan`.
        """
        sizes, options = Mesh.parse(mesh), options or Options()
        if plan is not None:
            check_plan_mesh(plan, sizes)
            check_plan_options(options, plan)
            check_plan_model(plan, type(self.base).__name__, self.parameters)
            if self.scaled is not None:
                plan = self.scaled.plan(plan, identity_of(self.traced.parameters), self.traced)
        elif self.scaled is not None and options.recompute is not None:
            options = replace(options, recompute=self.scaled.recompute(options.recompute, self.traced))
        traced = self.traced if self.one_device is None else self.one_device.traced
        chosen = plan or make_plan(self.model, traced, sizes, options)
        decisions = decode(self.traced, chosen, sizes)
        return Arrangement(decisions, stage_style_of(chosen.schedule.name), tamper, chosen)

    def check(
        self, arrangement: Arrangement, tolerance: float = TOLERANCE, shrink: bool = False,
        training: Training | None = None,
    ) -> Verification:  # fmt: skip
        """Run the partitioned program on all ranks and compare it with the model.

        If all values agree, run and compare the training steps too.
        """
        phase("running the model on one device")
        expected, errors, bad = self.reference.expected, dict(self.reference.errors), self.reference.not_finite
        phase(f"running all {arrangement.decisions.mesh.num_ranks} ranks")
        failure: Exception | None = None
        try:
            errors |= self.subject.errors(arrangement, expected)
        except BROKEN as error:  # a fault can also raise an exception
            failure = error
        worst = max(errors.values(), default=0.0) if failure is None else float("inf")
        equal = failure is None and worst <= tolerance
        first: Mismatch | None = None if equal else first_mismatch(self.subject, arrangement, tolerance, errors)
        smallest = None
        if shrink and not equal:
            smallest = smallest_failing(self.subject, arrangement, tolerance, first, failure is not None)
        notes = [
            *self.notes,
            *_unsharded_notes(arrangement.plan),
            *_method_notes(arrangement.decisions.dp_sync),
            *(f"{name} {text}, which is allowed" for name, text in infinite(self.subject, expected).items()),
        ]
        rounded = None
        if self.one_device is not None and equal and bad is None:
            phase(f"running all {arrangement.decisions.mesh.num_ranks} ranks in mixed precision")
            rounded = self.one_device.compared(arrangement, expected)
        verification = Verification(
            equal and bad is None and (rounded is None or rounded.ok), worst, first, errors,
            str(arrangement.decisions.mesh), tuple(notes), smallest,
            not_finite=bad and replace(bad, same=equal), rounded=rounded,
        )  # fmt: skip
        return verification if training is None else self._trained(verification, arrangement, training, tolerance)

    def check_trainable(self, training: Training) -> None:
        """Raise InputError for a model whose forward changes Python values that the next call reads.

        Each training step of such a model needs a new trace.
        """
        if changes := next((note for note in self.traced.notes if note.startswith(SETS)), None):
            raise InputError(
                f"steps={training.steps} is not supported for a model whose {changes.partition(':')[0]}",
                why="each step needs a new trace, and verify() traces once",
                hint="verify_loop(), which calls parallelize()",
            )  # fmt: skip

    def converted_training(self, training: Training) -> Training:
        """Return training steps with batches that are converted to calls of the copy."""
        targets = training.targets or (self.target,) * len(training.batches)
        pairs = zip(training.batches, targets, strict=True)
        batches = tuple(self.reference.converted(self.convert_arguments(batch, target)) for batch, target in pairs)
        return replace(training, example=self.arguments, batches=batches)

    def _trained(
        self, verification: Verification, arrangement: Arrangement, training: Training, tolerance: float
    ) -> Verification:
        """Run and compare training steps, and add their results to a verification."""
        self.check_trainable(training)
        if not verification.ok:
            return replace(
                verification,
                notes=(*verification.notes, "no training step was run, because a single pass is already wrong"),
            )
        reports = train(self.reference, arrangement, self.converted_training(training), tolerance)
        errors = {f"step {r.step} {name}": error for r in reports for name, error in r.errors.items()}
        first = reports[-1].first
        worst = max([verification.max_error, *errors.values()])
        rounding = reports[-1].rounding
        note = f"weights whose gradient is only rounding are not compared: {', '.join(rounding[:3])}"
        note += f" and {len(rounding) - 3} more" * (len(rounding) > 3)
        return replace(
            verification, ok=first is None, max_error=worst, first_mismatch=first,
            errors={**verification.errors, **errors},
            steps=tuple(reports), notes=(*verification.notes, *([note] if rounding else [])),
        )  # fmt: skip


def _unsharded_notes(plan: Plan | None) -> list[str]:
    if plan is None or not plan.unsharded:
        return []
    rows = replicated_operators(plan, plan.cost.get("forward_flops", 0))
    rest = [f"{len(rows) - MOST_UNSHARDED} more kinds of operators"] * (len(rows) > MOST_UNSHARDED)
    return ["run in full on every rank: " + "; ".join([*map(replicated_operator_text, rows[:MOST_UNSHARDED]), *rest])]


def _method_notes(dp_sync: SyncOption) -> list[str]:
    if dp_sync.is_default:
        return []
    return [f"dp_sync='{dp_sync}': gradients are compared with exact reduction, the method is not run"]


def _copies_to_verify(
    model: nn.Module, arguments: Mapping[str, Any], scaled: bool | str, work: VerifyLoad
) -> list[ScaledCopy] | list[None]:  # fmt: skip
    """Return the reduced copies to verify in place of the model, or [None] to verify the model itself."""
    if scaled not in (True, False, "auto"):
        raise OptionError(f"scaled={scaled!r} is not a choice", hint='True, False or "auto"')
    if scaled is False:
        check_weights(model)
        check_memory(model, arguments, work)
        return [None]
    is_meta = any(p.is_meta for p in model.parameters())
    if scaled == "auto" and not is_meta and fits(model, arguments, work):
        return [None]
    try:
        return [scaled_copy(model, arguments, work)]
    except InputError as too_large:
        try:
            copies = copies_by_kind(model, arguments, work)
        except Exception:  # a model's own code may raise anything if it lacks some kind of block
            copies = []
        if not copies:
            raise too_large from None
        return copies


def merge_verifications(verifications: Sequence[Verification]) -> Verification:
    """Merge the verifications of several reduced copies of one model into one result."""
    if len(verifications) == 1:
        return verifications[0]
    wrong = next((one for one in verifications if not one.ok), verifications[0])
    errors: dict[str, float] = {}
    for number, one in enumerate(verifications, 1):
        errors |= {f"copy {number}: {name}": error for name, error in one.errors.items()}
    notes = dict.fromkeys(note for one in verifications for note in one.notes)
    worst = max(one.max_error for one in verifications)
    return replace(wrong, max_error=worst, errors=errors, notes=tuple(notes))


def check_weights(model: nn.Module) -> None:
    """Raise RuntimeSetupError if a parameter is on the meta device, without values."""
    meta = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if meta is not None:
        raise RuntimeSetupError(
            f"parameter '{meta}' has no values to run with",
            why="it is on the meta device",
            hint="load the model's weights first; plan() needs none, verify() does",
        )


def check_trained(model: nn.Module) -> None:
    """Raise InputError if no parameter requires a gradient, because `verify` compares gradients."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"{type(model).__name__} has no parameter that needs a gradient",
            why="verify() compares gradients",
            hint="call requires_grad_() on the parameters to train",
        )
