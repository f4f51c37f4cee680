"""Proof of a training function of the user: it runs once with the plain model and once per rank.

All runs are forked processes in float64 that start from one interpreter state and one random seed. The run of the plain
model writes its events (losses, gradients, weights) to a folder. Each rank compares its events with the events in the
folder.
"""

from __future__ import annotations

import copy
import inspect
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopart.common.text import ShownAsText
from autopart.compat.torch_internals import tree_flatten, tree_unflatten
from autopart.errors import AutopartError, InputError, OptionError, RuntimeSetupError
from autopart.ir.mesh import Mesh
from autopart.proof.comparison import SEED
from autopart.proof.training_loop.forked_ranks import Failure, Report, run_forked
from autopart.proof.training_loop.plain_module import with_plain_methods
from autopart.proof.training_loop.recorded_loop import EventComparison, LoopEvent, LoopMismatch, RankResult, Recorder
from autopart.proof.verify import check_weights

REFUSED = {
    "precision": "the proof is in float64",
    "schedule": "its gradients belong to the previous batch, which one process cannot reproduce",
}

ROUNDED = "weight entries whose gradient is only rounding are not compared: {}"
MOST_NAMED = 3

Function = Callable[[Any, Any], Any]


@dataclass(frozen=True, repr=False)
class LoopVerification(ShownAsText):
    """Result of `verify_loop`.

    Args:
        max_error: largest error over all ranks and values.
        first_mismatch: the first wrong value; None if all values agree.
        errors: {kind and name: error}, such as `loss`, `gradient 0.weight`, `weight 0.weight` or `returned 0`.
        steps: number of optimizer steps of the plain model.
    """

    ok: bool
    max_error: float
    first_mismatch: LoopMismatch | None
    errors: Mapping[str, float] = field(repr=False)
    mesh: str
    steps: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        verdict = "exact" if self.ok else "WRONG"
        head = f"{verdict} on {self.mesh}: largest error {self.max_error:.3g} over {len(self.errors)} values"
        head += f" and {self.steps} optimizer step{'s' * (self.steps != 1)}"
        first = f"\nfirst: {self.first_mismatch}" if self.first_mismatch else ""
        return head + first + "".join(f"\nnote: {note}" for note in self.notes)


def prove(
    fn: Function, mesh: Mesh, model: nn.Module, batches: Iterable[Any], parallelize: Callable[..., nn.Module],
    example: Mapping[str, Any], options: Mapping[str, Any], tolerance: float, time_limit_s: float,
) -> LoopVerification:  # fmt: skip
    """Run the training function with the plain model and on all ranks, and compare the runs.

    Args:
        parallelize: function that creates the partitioned model on a rank.
        example: `example_args` or `example_kwargs` for `parallelize`; by default, the first batch.
    """
    _check(fn, model, options)
    model = copy.deepcopy(model).cpu().double()
    batches = listed = _in_double(list(batches))
    example = _in_double(dict(example))
    local_batch = bool(options.get("local_batch"))
    if not example and listed:
        example = _example(model, listed[0])
    with tempfile.TemporaryDirectory(prefix="verify-loop-") as folder:
        run = _LoopRun(fn, model, batches, folder)
        (report,) = run_forked(run.plain, 1, time_limit_s, folder, run.where, connected=False).values()
        if report.failure is not None:
            raise _plain_failure(report.failure)
        count, steps, trains = report.value
        if not trains:
            raise InputError(
                "the training function trains nothing",
                why="it computed no loss, took no optimizer step and changed no weight",
                hint="fn(model, batches) calls model.step(...) and optimizer.step()",
            )

        def on_a_rank(rank: int) -> RankResult:
            made = parallelize(model, mesh, **example, **options)
            return run.compared(made, rank, tolerance, count, local_batch)

        reports = run_forked(on_a_rank, mesh.num_ranks, time_limit_s, folder, run.where, connected=True)
        return _merge_ranks(run, reports, str(mesh), steps, local_batch)


def _check(fn: Any, model: Any, options: Mapping[str, Any]) -> None:
    """Raise OptionError or InputError if the arguments of `verify_loop` are invalid."""
    if not callable(fn):
        raise InputError(f"fn={fn!r:.40} is not a training function", hint="def fn(model, batches): ...")
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model={model!r:.40} is not an nn.Module",
            hint="the nn.Module, before parallelize()",
        )
    check_weights(model)
    if dist.is_initialized():
        raise RuntimeSetupError("verify_loop() starts its own ranks", why="this process is a rank already",
                                hint="call it without torchrun, before init_process_group()")  # fmt: skip
    for name, why in REFUSED.items():
        value = options.get(name)
        if value is not None and (name != "schedule" or value == "1f1b_2bw") and value != "fp32":
            raise OptionError(
                f"verify_loop() does not support {name}={value!r}", why=why,
                hint="verify(...) supports this option; or call verify_loop() without it",
            )  # fmt: skip


def _in_double(values: Any) -> Any:
    flat, spec = tree_flatten(values)
    doubled = [v.detach().cpu() if isinstance(v, Tensor) else v for v in flat]
    doubled = [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in doubled]
    return tree_unflatten(doubled, spec)


def _example(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return `{"example_kwargs": ...}` or `{"example_args": ...}` for `parallelize`, from a batch.

    The entries of a dict that the model's forward accepts become keyword arguments. A tuple, list or tensor becomes the
    positional arguments.
    """
    signature = inspect.signature(model.forward)
    needs_full_sequence = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if isinstance(batch, Mapping):
        kwargs = {name: v for name, v in batch.items() if needs_full_sequence or name in signature.parameters}
        args: tuple[Any, ...] = ()
    else:
        kwargs, args = {}, tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            "the model cannot be called with the first batch", why=str(error),
            hint="example_args=(x,), or example_kwargs={'input': x}",
        ) from None  # fmt: skip
    return {"example_kwargs": kwargs} if kwargs else {"example_args": args}


class _LoopRun:
    """One run of the training function in a child process, which records its events."""

    def __init__(self, fn: Function, model: nn.Module, batches: Any, folder: str):
        self.fn, self.model, self.batches, self.folder = fn, model, batches, Path(folder)
        self.recorder = Recorder(fn, self._save)
        self.comparison: EventComparison | None = None

    def plain(self, rank: int) -> tuple[int, int, bool]:
        """Run the function with the plain model, and record its events.

        Returns (number of events, number of optimizer steps, True if the function trains the model).
        """
        before = {name: v.clone() for name, v in self.model.state_dict().items() if isinstance(v, Tensor)}
        self._call(with_plain_methods(self.model))
        after = self.model.state_dict()
        changed = any(not torch.equal(v, after[name]) for name, v in before.items())
        return self.recorder.count, self.recorder.steps - 1, changed or self.recorder.count > 2

    def compared(self, model: nn.Module, rank: int, tolerance: float, count: int, local_batch: bool) -> RankResult:
        """Run the function with the partitioned model, and compare its events with those of the plain model.

        Args:
            count: number of events of the plain model.
            local_batch: True if each rank has a loss of its own samples. Losses and returned values are then not
                compared.
        """
        load = partial(model.load_state_dict, strict=False)
        self.comparison = EventComparison(
            rank, lambda i: self._load(i) if i < count else None, tolerance, local_batch, load
        )
        self.recorder.sink = self.comparison.event
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default")
            try:
                self._call(model)
            except Exception as error:
                if self.comparison.found.first is None:
                    raise
                text = f"later rank {rank} raised {type(error).__name__}: {str(error).splitlines()[0]}"
                self.comparison.found.warned.append(text)
        if self.comparison.rounding:
            names = ", ".join(list(self.comparison.rounding)[:MOST_NAMED])
            more = len(self.comparison.rounding) - MOST_NAMED
            self.comparison.found.warned.append(ROUNDED.format(names + f" and {more} more" * (more > 0)))
        if not rank:
            self.comparison.found.warned += dict.fromkeys(str(one.message).splitlines()[0] for one in warned)
        return self.comparison.found

    def where(self, error: BaseException) -> str:
        return self.recorder.line_of(error)

    def _call(self, model: nn.Module) -> None:
        torch.manual_seed(SEED)
        self.recorder.begin(model)
        self.recorder.end(self.fn(model, self.batches))

    def _save(self, index: int, event: LoopEvent) -> None:
        torch.save(event, self.folder / f"event{index}")

    def _load(self, index: int) -> LoopEvent:
        event: LoopEvent = torch.load(self.folder / f"event{index}", weights_only=False)
        return event


def _plain_failure(failure: Failure) -> AutopartError:
    if failure.refusal is not None:
        return failure.refusal
    return InputError(
        "the training function fails with the unpartitioned model", why=failure.text, where=failure.where,
        hint="run it in one process first",
    )  # fmt: skip


def _merge_ranks(
    run: _LoopRun, reports: dict[int, Report], mesh: str, steps: int, local_batch: bool
) -> LoopVerification:
    """Merge the reports of all ranks into one result.

    If ranks raised errors of autopart, raise the earliest error again, with a note that names its rank and line.
    """
    found = {rank: report.value for rank, report in reports.items() if report.failure is None}
    failed = {rank: report.failure for rank, report in reports.items() if report.failure is not None}
    first = min(((c.first_event, rank, c.first) for rank, c in found.items() if c.first), default=None)
    mismatch = first[2] if first is not None else None
    notes = list(dict.fromkeys(text for c in found.values() for text in c.warned))
    if local_batch:
        notes.append("with local_batch=True each rank has a local loss: only gradients and weights are compared")
    if failed and mismatch is None:
        rank = min(failed, key=lambda rank: (failed[rank].time_s, rank))
        failure = failed[rank]
        if failure.refusal is not None:
            failure.refusal.add_note(f"on rank {rank}, at {failure.where}" if failure.where else f"on rank {rank}")
            raise failure.refusal
        detail = f"rank {rank} alone: {failure.text}" if len(failed) < len(reports) else failure.text
        mismatch = LoopMismatch(1, "error", "", rank, float("inf"), detail, failure.where,
                                "one process runs the same line")  # fmt: skip
    errors: dict[str, float] = {}
    for one in found.values():
        for name, error in one.errors.items():
            errors[name] = max(error, errors.get(name, 0.0))
    worst = max([*errors.values(), 0.0 if mismatch is None else mismatch.error])
    return LoopVerification(mismatch is None, worst, mismatch, errors, mesh, steps, tuple(notes))
