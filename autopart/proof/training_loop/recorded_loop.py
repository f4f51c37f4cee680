"""Recorder of a training function: its losses, gradients and weights, each with a source line."""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopart.compat.torch_internals import tree_flatten
from autopart.errors import UsageError
from autopart.proof.comparison import FLOOR, GRAD_FLOOR, largest, relative
from autopart.proof.steps.step_comparison import add_rounding
from autopart.proof.training_loop.forked_ranks import PACKAGE, TORCH, is_library
from autopart.runtime.module import ParallelModule

KINDS = {"loss": "loss", "gradient": "gradient of ", "weight": "weight ", "returned": "returned value "}


@dataclass(frozen=True)
class LoopMismatch:
    """The first value of a training function that differs between a rank and the plain model.

    Args:
        step: number of the optimizer step, from 1, in which the value was computed.
        kind: "loss", "gradient", "weight", "returned", "order" (the rank's event has another kind than the plain
            model's) or "error" (the rank raised an exception).
        name: name of the parameter or buffer.
        where: source line of the user's function.
    """

    step: int
    kind: str
    name: str
    rank: int
    error: float
    detail: str
    where: str
    why: str = ""

    def __str__(self) -> str:
        what = f"{KINDS.get(self.kind, self.kind)}{self.name}"
        head = f"step {self.step}: {what} differs by {self.error:.3g}"
        if self.kind in ("order", "error"):
            head = f"step {self.step}: {self.detail}"
        rows = [("rank", str(self.rank)), ("values", "" if head.endswith(self.detail) else self.detail),
                ("why", self.why), ("where", self.where)]  # fmt: skip
        return "\n".join([head, *(f"  {label:<9}{text}" for label, text in rows if text)])


@dataclass
class LoopEvent:
    """One event of the training function, such as a computed loss or an optimizer step.

    `values`: {name: tensor} to compare; None if the event has no values.
    """

    kind: str
    step: int
    where: str
    values: dict[str, Any] | None


@dataclass
class RankResult:
    """Differences between the run of one rank and the run of the plain (unpartitioned) model.

    `events`: number of events of the rank.
    """

    errors: dict[str, float] = field(default_factory=dict)
    first: LoopMismatch | None = None
    first_event: int = 0
    events: int = 0
    warned: list[str] = field(default_factory=list)


class Recorder:
    """Recorder of one run of the training function in this process. It calls `sink(index, event)`.

    It patches torch and never removes the patches, so the process must end after the run.
    """

    def __init__(self, fn: Callable[..., Any], sink: Callable[[int, LoopEvent], None]):
        self.code = getattr(fn, "__code__", None)
        self.sink, self.count, self.steps, self.busy = sink, 0, 1, False
        self.model: Any = None

    def begin(self, model: nn.Module) -> None:
        self.model = model
        kind: Any = ParallelModule if isinstance(model, ParallelModule) else type(model)
        kind.step = self._losses_of(kind.step, returned=True)
        torch.Tensor.backward = self._losses_of(torch.Tensor.backward)  # type: ignore[method-assign]
        torch.autograd.backward = self._losses_of(torch.autograd.backward)
        register_optimizer_step_pre_hook(lambda *_: None if _called_by_autopart() else self._gradients())
        register_optimizer_step_post_hook(lambda *_: None if _called_by_autopart() else self._weights())

    def end(self, returned: Any) -> None:
        """Record the final weights and the values that the function returned."""
        self.event("weight", self.model.full_state_dict(), "the end of the function")
        flat = tree_flatten(returned)[0]
        values = {str(i): v for i, v in enumerate(flat) if isinstance(v, (Tensor, int, float, str))}
        self.event("returned", values, "the end of the function")

    def event(self, kind: str, values: dict[str, Any] | None, where: str = "") -> None:
        self.sink(self.count, LoopEvent(kind, self.steps, where or self.line(), values))
        self.count += 1

    def line(self) -> str:
        """Return a text with the innermost line of the user's code that is running."""
        frames = []
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            frames.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        return _line_of(frames, self.code)

    def line_of(self, error: BaseException) -> str:
        """Return a text with the innermost line of the user's code in the traceback of an exception."""
        frames = []
        trace = error.__traceback__
        while trace is not None:
            frames.append((trace.tb_frame.f_code, trace.tb_lineno))
            trace = trace.tb_next
        return _line_of(frames[::-1], self.code)

    def _losses_of(self, function: Callable[..., Any], returned: bool = False) -> Callable[..., Any]:
        @wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self.busy or _called_by_autopart():
                return function(*args, **kwargs)
            self.busy = True
            try:
                result = function(*args, **kwargs)
            finally:
                self.busy = False
            loss = result if returned else next(iter(args), None)
            loss = loss[0] if isinstance(loss, (tuple, list)) and loss else loss
            self.event("loss", {"": loss.detach().clone()} if isinstance(loss, Tensor) else None)
            return result

        return recorded

    def _gradients(self) -> None:
        try:
            grads = self.model.full_grads()
        except UsageError:  # another optimizer runs a step inside no_sync()
            grads = None
        self.event("gradient", grads)

    def _weights(self) -> None:
        self.event("weight", self.model.full_state_dict())
        self.steps += 1


def _called_by_autopart() -> bool:
    """Return True if autopart, not the user, called the optimizer or backward, such as in a trial step."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith((TORCH, "<")):
            return file.startswith(PACKAGE)
        frame = frame.f_back
    return False


def _line_of(frames: list[tuple[types.CodeType, int]], code: types.CodeType | None) -> str:
    """Format the first frame of the user's code as `line 12 of train.py, in train: loss.backward()`.

    Args:
        frames: stack frames, innermost first.
    """
    users = [f for f in frames if not is_library(f[0].co_filename)]
    chosen = next(iter(users), None) or next((f for f in frames if f[0] is code), None)
    if chosen is None:
        return ""
    file, line = chosen[0].co_filename, chosen[1]
    source = linecache.getline(file, line).strip()
    return f"line {line} of {Path(file).name}, in {chosen[0].co_name}" + (f": {source}" if source else "")


class EventComparison:
    """Comparison of a rank's events with the recorded events of the plain model, while the rank runs.

    Args:
        skips_losses: True to compare neither losses nor returned values.
        load: function that loads weights into the partitioned model. Weight entries whose gradients are only rounding
            errors are loaded from the plain model, because Adam makes a full update even from such gradients.
    """

    def __init__(
        self, rank: int, expected: Callable[[int], LoopEvent | None], tolerance: float, skips_losses: bool,
        load: Callable[[dict[str, Tensor]], Any],
    ):  # fmt: skip
        self.rank, self.expected, self.tolerance, self.skips_losses = rank, expected, tolerance, skips_losses
        self.load = load
        self.rounding: dict[str, Tensor] = {}
        self.found = RankResult()
        self.where, self.step = "", 1

    def event(self, index: int, actual: LoopEvent) -> None:
        """Compare an event of this rank with the recorded event of the same index."""
        wanted = self.expected(index)
        self.where, self.step, self.found.events = actual.where, actual.step, index + 1
        if wanted is None or wanted.kind != actual.kind:
            there = "has ended" if wanted is None else f"is at a {wanted.kind} ({wanted.where})"
            self._note(
                index, actual, "order", "", float("inf"), f"this rank is at a {actual.kind}, and one process {there}"
            )
        elif self.skips_losses and actual.kind in ("loss", "returned"):
            return
        elif wanted.values is not None and actual.values is not None:
            values = self._without_rounding(actual.values, wanted.values) if actual.kind == "weight" else actual.values
            self._values(index, actual, values, wanted.values)
            if actual.kind == "gradient":
                add_rounding(self.rounding, _dense(actual.values), _dense(wanted.values))

    def _without_rounding(self, actual: dict[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
        """Replace weight entries whose gradients are only rounding errors by the plain model's entries.

        The entries are also replaced in the partitioned model, so that later events are comparable.
        """
        equal = {
            name: torch.where(where, expected[name].to(actual[name]), actual[name])
            for name, where in self.rounding.items()
            if name in actual and name in expected and where.shape == actual[name].shape == expected[name].shape
        }
        if equal:
            self.load(equal)
        return {**actual, **equal}

    def _values(self, index: int, event: LoopEvent, actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        floor = {"gradient": GRAD_FLOOR, "weight": FLOOR}.get(event.kind)
        scale = None
        if floor is not None:
            scale = max([floor, *(largest(v) for v in expected.values() if isinstance(v, Tensor) and v.numel())])
        for name in dict.fromkeys([*expected, *actual]):
            here, there = actual.get(name), expected.get(name)
            self._note(index, event, event.kind, name, *_value_error(here, there, scale))

    def _note(self, index: int, event: LoopEvent, kind: str, name: str, error: float, detail: str) -> None:
        entry = f"{kind} {name}".strip()
        self.found.errors[entry] = max(self.found.errors.get(entry, 0.0), error)
        if self.found.first is None and not error <= self.tolerance:
            why = "float32 rounds to 1e-7; compare with tolerance=1e-5" if "float32" in detail else ""
            self.found.first_event = index
            self.found.first = LoopMismatch(event.step, kind, name, self.rank, error, detail, event.where, why)


def _dense(grads: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: grad.to_dense() for name, grad in grads.items() if grad is not None}


def _value_error(here: Any, there: Any, scale: float | None) -> tuple[float, str]:
    """Return (largest error of a rank's value, divided by `scale`; description of the entry with it)."""
    if here is None or there is None:
        value = there if here is None else here
        nothing = not isinstance(value, Tensor) or not bool(value.detach().any())
        return (
            (0.0, "")
            if nothing
            else (float("inf"), f"there is {'none' if here is None else 'one'}, unlike in one process")
        )
    if isinstance(here, (bool, str)) or isinstance(there, (bool, str)):
        return (0.0, "") if here == there else (float("inf"), f"{here!r}, not {there!r}")
    here, there = (v.detach().to_dense() if isinstance(v, Tensor) else torch.tensor(v) for v in (here, there))
    if here.shape != there.shape:
        return float("inf"), f"shape {list(here.shape)}, not {list(there.shape)}"
    if there.is_floating_point() and not bool(there.isfinite().all()):
        return float("inf"), "not finite in one process"
    if here.dtype != there.dtype:
        here = here.to(there.dtype)
    error = relative(here, there, scale)
    if not error:
        return error, ""
    flat = int((here.double() - there.double()).abs().nan_to_num(nan=float("inf")).argmax())
    at = [int(i) for i in torch.unravel_index(torch.tensor(flat), here.shape)] if here.dim() else []
    entry = f"entry {at} is " if at else ""
    kind = " (float32)" if there.dtype == torch.float32 else ""
    return error, f"{entry}{here.flatten()[flat].item():.10g}, not {there.flatten()[flat].item():.10g}{kind}"
