"""Comparison of a training step on all ranks with the same step on a single device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopart.ir.program import Program
from autopart.ir.sharding import DimSharding, local_shard_of
from autopart.proof.comparison import largest, relative
from autopart.runtime.optimizers.optimizer_checks import is_elementwise_class
from autopart.runtime.shards.shard_state import splits_at
from autopart.runtime.training.nonfinite import bad_entries

ROUNDING = 1e-12
"""Gradient entries below this, relative to the largest gradient, count as rounding errors.

Such an entry is a sum whose terms cancel.
"""

TERM_ROUNDING = 1e-14
"""Maximum difference of gradients that counts as rounding, relative to the size of their summands."""

SAME_DIGITS = 1e-8
"""Relative difference below which gradients are accepted without considering their summands."""

Magnitudes = Callable[[Collection[str]], Mapping[str, Tensor]]
"""Function that maps parameter names to the total magnitude of the summands of their gradients."""


@dataclass(frozen=True)
class StepMismatch:
    """The first value of a training step that differs from the single device.

    Args:
        kind: "loss", "scale", "norm", "gradient" (after clipping), "weight", "state" (of the optimizer) or "buffer".
        name: name of the parameter or buffer; "" for other kinds.
        rank: the rank with the wrong value; None if the value is wrong on the single device (NaN or infinity).
    """

    step: int
    kind: str
    name: str
    rank: int | None
    error: float
    detail: str
    coordinates: str = ""
    why: str = ""

    def __str__(self) -> str:
        what = f"{self.kind} of {self.name}" if self.name else self.kind
        lines = [f"step {self.step}: {what} differs by {self.error:.3g}"]
        if self.rank is not None:
            lines.append(f"  rank     {self.rank}" + (f" ({self.coordinates})" if self.coordinates else ""))
        lines += [f"  {label:<9}{text}" for label, text in (("values", self.detail), ("why", self.why)) if text]
        return "\n".join(lines)


@dataclass(frozen=True)
class StepReport:
    """Report on a training step: values of the single device, and errors of the ranks relative to them.

    Args:
        norm: gradient norm before clipping.
        scale: loss scale.
        skipped: True if a gradient was infinite or NaN, so that the scaler skipped the step.
        errors: {name: largest error over the ranks}, with names such as `loss`, `norm` or `weight h.0.up.weight`.
        rounding: names of parameters with gradient entries that are only rounding errors. The same entries of weights
            and optimizer state are not compared.
    """

    step: int
    loss: float
    norm: float
    max_norm: float | None
    scale: float | None
    skipped: bool
    errors: Mapping[str, float] = field(repr=False)
    first: StepMismatch | None = None
    rounding: tuple[str, ...] = ()

    @property
    def max_error(self) -> float:
        return max(self.errors.values(), default=0.0)

    def __str__(self) -> str:
        clipped = f" (clipped to {self.max_norm:g})" if self.max_norm is not None and self.norm > self.max_norm else ""
        scale = f", scale {self.scale:g}" if self.scale is not None else ""
        skipped = ", skipped" if self.skipped else ""
        head = f"step {self.step}: loss {self.loss:.6g}, norm {self.norm:.6g}{clipped}{scale}{skipped}"
        return f"{head}: {'exact' if self.first is None else 'WRONG'}, largest error {self.max_error:.3g}"


class StepComparison:
    """Comparison of one training step. Its methods are called in the order in which values are computed."""

    def __init__(self, step: int, program: Program, tolerance: float, rounding: dict[str, Tensor]):
        self.step, self.program, self.tolerance, self.rounding = step, program, tolerance, rounding
        self.optimizer: torch.optim.Optimizer | None = None
        self.errors: dict[str, float] = {}
        self.first: StepMismatch | None = None
        self.cancelled: dict[str, Tensor] = {}
        """{parameter: mask of gradient entries that differ only by the rounding of their terms}, of this step"""

    def numbers(self, kind: str, actual: Mapping[int, Tensor], expected: Tensor, may_overflow: bool = False) -> None:
        """Compare a scalar that every rank computes, such as the gradient norm, with the single device's.

        Args:
            may_overflow: True if NaN or infinity on the single device is no error.
        """
        if not expected.isfinite() and not may_overflow:
            self._not_finite(kind, "", expected)
        for rank, value in actual.items():
            self._note(kind, "", rank, relative(value, expected), f"{float(value):.10g}, not {float(expected):.10g}")

    def skips(self, actual: Mapping[int, bool], expected: bool) -> None:
        """Check that each rank skips the step if and only if the single device skips it."""
        for rank, skipped in actual.items():
            if skipped != expected:
                words = ("the step is skipped", "taken") if skipped else ("the step is taken", "skipped")
                self._note("scale", "", rank, float("inf"), f"{words[0]}, and on one device it is {words[1]}")

    def note_rounding(
        self, actual: Mapping[int, Mapping[str, Tensor | None]], expected: Mapping[str, Tensor | None]
    ) -> None:
        """Exclude entries from later comparisons if their gradient is only a rounding error.

        Adam divides a gradient by its magnitude. If the gradient is a rounding error, the sign of this error decides
        the direction of a full update, so ranks and single device may differ.
        """
        add_rounding(self.rounding, expected, expected)
        limit = _limit(expected)
        for rank, local in actual.items():
            for name, part in local.items():
                whole = self._cut(name, expected[name], rank)
                if part is None or whole is None or part.shape != whole.shape:
                    continue
                alone = _are_rounding(part, whole, limit)
                if bool(alone.any()):  # the single device's gradient may be zero there
                    for cut, index in reversed(self._cuts(name, rank)):
                        alone = cut.place(alone, index)
                    self.rounding[name] = alone | self.rounding.get(name, alone)

    def note_cancelled(
        self, actual: Mapping[int, Mapping[str, Tensor | None]], expected: Mapping[str, Tensor | None],
        magnitudes: Magnitudes,
    ) -> None:  # fmt: skip
        """Exclude gradient entries whose large summands cancel, and which differ only by rounding.

        An example is the gradient of a gain before a batch norm: its summands cancel, because the norm removes the
        gain. The same entries of weights and optimizer state are excluded from later comparisons too.
        """
        apart: dict[str, Tensor] = {}
        for rank, local in actual.items():
            for name, part in local.items():
                whole = self._cut(name, expected[name], rank)
                if part is None or whole is None or part.shape != whole.shape or not part.is_floating_point():
                    continue
                difference = (part - whole).abs()
                difference = torch.where(difference > SAME_DIGITS * whole.abs(), difference, 0.0)
                if bool(difference.any()):
                    for cut, index in reversed(self._cuts(name, rank)):
                        difference = cut.place(difference, index)
                    apart[name] = torch.maximum(difference, apart.get(name, difference))
        terms = magnitudes(apart.keys()) if apart else {}
        for name, difference in apart.items():
            cancelled = (difference > 0) & (difference <= TERM_ROUNDING * terms.get(name, torch.zeros(())))
            if bool(cancelled.any()):
                self.cancelled[name] = cancelled
                self.rounding[name] = cancelled | self.rounding.get(name, cancelled)

    def buffer(self, name: str, rank: int, actual: Tensor, expected: Tensor, scale: float) -> None:
        """Compare the new value of a buffer on one rank with the single device, relative to `scale`."""
        error = relative(actual, expected, scale)
        self._note("buffer", name, rank, error, _worst_entry(actual, expected) if error > self.tolerance else "")

    def tensors(
        self, kind: str, actual: Mapping[int, Mapping[str, Tensor | None]], expected: Mapping[str, Tensor | None],
        floor: float, suffix: str = "",
    ) -> None:  # fmt: skip
        """Compare each rank's shard of a weight, gradient or state with the single device.

        Errors are relative to the largest entry of all expected tensors, at least `floor`. Entries that were excluded
        before (rounding errors) are not compared.
        """
        for name, value in expected.items():
            if value is not None and not bool(value.isfinite().all()):
                self._not_finite(kind, name + suffix, value)
        scale = max([floor, *(largest(value) for value in expected.values() if value is not None)])
        for rank, local in actual.items():
            for name, part in local.items():
                whole = self._cut(name, expected[name], rank)
                masks = self.cancelled if kind == "gradient" else self.rounding
                excluded = self._cut(name, masks.get(name), rank)
                if excluded is not None and part is not None and whole is not None and part.shape == whole.shape:
                    part, whole = part.masked_fill(excluded, 0.0), whole.masked_fill(excluded, 0.0)
                self._part(kind, name + suffix, rank, part, whole, scale)

    def start_equal(
        self, actual: Mapping[int, Mapping[str, Tensor | None]], expected: Mapping[str, Tensor | None]
    ) -> None:
        """Make ranks and single device equal for the next step: copy the excluded entries to the ranks.

        Excluded entries are not compared, because they may differ by rounding. Without the copy, this difference would
        grow in the next step.
        """
        for rank, local in actual.items():
            for name, part in local.items():
                where, whole = self._cut(name, self.rounding.get(name), rank), self._cut(name, expected[name], rank)
                if where is not None and part is not None and whole is not None and part.shape == whole.shape:
                    part.data.copy_(torch.where(where, whole.detach(), part.detach()))

    def _cut(self, name: str, whole: Tensor | None, rank: int) -> Tensor | None:
        return None if whole is None else local_shard_of(whole, self._cuts(name, rank))

    def _cuts(self, name: str, rank: int) -> list[tuple[DimSharding, int]]:
        mesh = self.program.mesh
        return list(splits_at(self.program.parameters[name], mesh, mesh.coordinates(rank)))

    def _part(self, kind: str, name: str, rank: int, part: Tensor | None, whole: Tensor | None, scale: float) -> None:
        if part is None and whole is None:
            return
        if part is None or whole is None:
            there, missing = (part, "none") if part is not None else (whole, "one")
            assert there is not None
            if bool(there.detach().any()):
                here = "there is one" if part is not None else "there is none"
                self._note(kind, name, rank, float("inf"), f"{here}, and one device has {missing}")
            return
        error = relative(part, whole, scale)
        self._note(kind, name, rank, error, _worst_entry(part, whole) if error > self.tolerance else "")

    def _not_finite(self, kind: str, name: str, expected: Tensor) -> None:
        """Record an error for NaN or infinity on the single device, even if the ranks have equal values."""
        self._note(kind, name, None, float("inf"), f"not finite on one device: it {bad_entries(expected)}")

    def _note(self, kind: str, name: str, rank: int | None, error: float, detail: str) -> None:
        entry = f"{kind} {name}" if name else kind
        self.errors[entry] = max(self.errors.get(entry, 0.0), error)
        if self.first is None and not error <= self.tolerance:
            coordinates = {} if rank is None else self.program.mesh.coordinates(rank)
            at = ", ".join(f"{axis} {index}" for axis, index in coordinates.items())
            self.first = StepMismatch(self.step, kind, name, rank, error, detail, at, self._why(kind))

    def _why(self, kind: str) -> str:
        if kind not in ("weight", "state") or self.optimizer is None:
            return ""
        name = type(self.optimizer).__name__
        if is_elementwise_class(type(self.optimizer)):
            return f"the gradients are equal; {name} made a different update on this rank"
        return f"the gradients are equal, except for rounding, which {name} may amplify"


def add_rounding(
    rounding: dict[str, Tensor], actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> None:
    """Mark the gradient entries that are only rounding errors in both runs.

    Earlier marks stay. An entry whose gradient is exactly zero in both runs is not marked.

    Args:
        rounding: {parameter: boolean mask of marked entries}, changed in place.
    """
    limit = _limit(expected)
    for name, grad in expected.items():
        other = actual.get(name)
        if grad is not None and other is not None and grad.shape == other.shape:
            alone = _are_rounding(other, grad, limit)
            if bool(alone.any()):
                rounding[name] = alone | rounding.get(name, alone)


def _limit(grads: Mapping[str, Tensor | None]) -> float:
    return ROUNDING * max([0.0, *(largest(grad) for grad in grads.values() if grad is not None)])


def _are_rounding(one: Tensor, other: Tensor, limit: float) -> Tensor:
    return (one.abs() <= limit) & (other.abs() <= limit) & ((one != 0) | (other != 0))


def _worst_entry(part: Tensor, whole: Tensor) -> str:
    """Describe the entry with the largest error: `entry [3, 0] of its shard is 0.52, not 0.51`."""
    if part.shape != whole.shape:
        return f"shape {list(part.shape)}, not {list(whole.shape)}"
    part, whole = part.detach(), whole.detach()
    flat = int((part - whole).abs().nan_to_num(nan=float("inf")).argmax())
    at = [int(i) for i in torch.unravel_index(torch.tensor(flat), part.shape)] if part.dim() else []
    return f"entry {at} of its shard is {part.flatten()[flat].item():.10g}, not {whole.flatten()[flat].item():.10g}"
