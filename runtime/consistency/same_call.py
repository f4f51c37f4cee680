"""Check that all ranks make the same call: same method, options and step number, on the same batch.

The check compares a dozen numbers of all ranks on the CPU (`HostGroup`). It starts with the call, and ends before any
other communication of the call. It also tells all ranks if one has received SIGTERM.

Integer inputs, such as tokens, are compared exactly. Floating-point inputs are compared up to rounding, because ranks
can round them differently. For this comparison, a sample of their elements is projected on four random vectors of 1 and
-1. The sample changes with the step.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from autopart.errors import AutopartError, InputError, UsageError
from autopart.ir.program import SEEDS
from autopart.runtime.comm import stop_signal
from autopart.runtime.comm.process_mesh import Process, gather_over_all, same_rows
from autopart.runtime.consistency.checksums import checksums
from autopart.runtime.consistency.rank_checks import by_rank, ranks_text

SAMPLE = 256
PROJECTIONS = 4
TOLERANCE = 1e-5
"""Allowed distance of an input's samples on two ranks, relative to the input's mean magnitude.

For dtypes with fewer digits it is four times their precision. Different batches have a distance of about 1.
"""
_LARGEST = 1e100
"""Limit of values whose sum overflows, such as the lowest number of float64 in a mask."""
SMALLEST = 1e-6
"""Mean magnitude below which an input's values are treated as rounding around zero."""
_SAME_BATCH = "pass the same global batch on every rank; or parallelize(..., local_batch=True), and pass local samples"
_SAME_ROWS = "DistributedSampler(data, num_replicas=pm.num_data_ranks, rank=pm.data_rank), and one seed on all ranks"


@dataclass(frozen=True)
class ComparedCall:
    """A call on this rank, to be compared with the calls of other ranks.

    Attributes:
        name: the method.
        number: number of calls of this method so far.
        text: description of options and shapes, which must be equal on all ranks.
    """

    name: str
    number: int
    text: str
    inputs: dict[str, Tensor]
    own_rows: frozenset[str] | None = None
    """With `local_batch`: the inputs that have only this rank's samples. None without `local_batch`.

    Ranks with the same samples compare these inputs. All ranks compare all other inputs.
    """
    num_rows: int = 0
    """With `local_batch`: number of samples of this rank."""
    problem: AutopartError | None = None
    """An error that this rank has found, for example in its parameters. All ranks raise the first rank's error."""
    trains: bool = True
    """False for a step in which no parameter of this rank needs a gradient.

    False on all ranks is an error.
    """

    @functools.cached_property
    def integer_checksums(self) -> dict[str, int]:
        """{integer input: checksum of its values}."""
        exact = {name: t for name, t in self.inputs.items() if not _is_rounded(t)}
        return dict(zip(exact, checksums(exact.values()), strict=True))

    @functools.cached_property
    def floats(self) -> dict[str, list[float]]:
        """{floating-point input: random projections of a sample of its elements, in units of the tolerance}."""
        return {name: _projections(t, self.number) for name, t in self.inputs.items() if _is_rounded(t)}

    def numbers(self) -> list[float]:
        """Return the numbers that this rank sends to describe the call.

        These are the call's number, a hash of its text, and numbers that describe the input values (`_values`). With
        `local_batch`, numbers that describe inputs with different samples on each data rank come last.
        """
        text = hashlib.blake2b(self.text.encode(), digest_size=6).digest()
        rows = [] if self.own_rows is None else self._values(self.own_rows)
        every = self._values(self.inputs.keys() - (self.own_rows or ()))
        return [float(self.number), float(int.from_bytes(text)), *every, *rows]

    def _values(self, names: Collection[str]) -> list[float]:
        """Return numbers with which ranks compare the values of the inputs `names`.

        The first number is a hash of the integer inputs, and must be equal on all ranks. The other numbers are sums of
        projections of the floating-point inputs, and may differ by the tolerance `slack`.
        """
        whole = {name: number for name, number in self.integer_checksums.items() if name in names}
        exact = hashlib.blake2b(repr(whole).encode(), digest_size=6).digest()
        floats = [marks for name, marks in self.floats.items() if name in names]
        columns = zip(*(self._scaled_projections(place, marks) for place, marks in enumerate(floats)), strict=True)
        sums = [math.fsum(column) for column in columns] or [0.0] * (PROJECTIONS + 1)
        return [float(int.from_bytes(exact)), *sums]

    @property
    def slack(self) -> float:
        return 1.5 * len(self.floats)

    def _scaled_projections(self, place: int, marks: Sequence[float]) -> list[float]:
        """Multiply the projections of the input with index `place` by a factor that depends on the index.

        The projections of all inputs are then added. With different factors, differences in two inputs do not cancel.
        """
        factor = 0.5 + (place * 0.6180339887) % 1
        return [factor * mark for mark in marks]


FLAGS = 2
"""Number of flags before `ComparedCall.numbers`: the step trains, the rank has received SIGTERM."""
CALL = 2
VALUES = CALL + 2 + PROJECTIONS
"""End indices of two sections of `ComparedCall.numbers`: the call, and inputs that all ranks share."""


def all_frozen() -> UsageError:
    """Return the error for a step in which every parameter is frozen."""
    return UsageError(
        "step() has nothing to train", why="every parameter of pm is frozen now",
        hint="pm(...) for the loss alone, under torch.no_grad(); or p.requires_grad_(True) on what is trained",
    )  # fmt: skip


class Comparison:
    """Comparison of a call between ranks. The constructor starts an all-gather of the call's description.

    Every rank must call `finish_comparison`, and must not communicate before it has returned.
    """

    def __init__(self, called: ComparedCall, process: Process):
        self.given, self.process = called, process
        if process.host_group is None and not called.trains:
            raise all_frozen()
        stops = stop_signal.is_received()
        if process.host_group is None:
            process.stop_requested = stops
            self._wait = None
        else:
            numbers = [float(called.trains), float(stops), *called.numbers()]
            num_shared = len(numbers) if called.own_rows is None else FLAGS + VALUES
            self._wait = process.host_group.begin_extremes(numbers, num_shared)

    def finish_comparison(self) -> None:
        """Wait for the other ranks, and compare the calls. A second call of this method does nothing.

        Raises InputError on every rank if ranks make different calls, or the first error that a rank has reported in
        `ComparedCall.problem`. Raises UsageError if a step trains no parameter.
        """
        if self._wait is None:
            return
        wait, self._wait = self._wait, None
        (trains, stops, *_), (_, _, *differences) = wait()
        self.process.stop_requested = bool(stops)
        if not trains:
            raise all_frozen()
        call, shared, rows = differences[:CALL], differences[CALL:VALUES], differences[VALUES:]
        if any(call) or not all(self._same_values(values) for values in (shared, rows)):
            if problem := self._first_problem():
                raise problem
            raise _error(self.given, self.process)

    def _first_problem(self) -> AutopartError | None:
        """Return the first error that a rank has reported in `ComparedCall.problem`, or None."""
        problems = gather_over_all(self.given.problem, self.process)
        return next((problem for problem in problems if problem is not None), None)

    def _same_values(self, differences: Sequence[float]) -> bool:
        """Return True if ranks have equal input values.

        `differences`: largest difference between ranks, for each number of `ComparedCall._values`.
        """
        exact, *others = differences or [0.0]
        return not exact and max(others, default=0.0) <= self.given.slack


def _error(called: ComparedCall, process: Process) -> InputError:
    group = process.host_group
    assert group is not None
    sums, floats = called.integer_checksums, called.floats
    mine = (process.rank, called.name, called.number, called.text, sums, floats, called.num_rows)
    everyones = group.gather_objects(mine)
    _, names, numbers, texts, _, _, num_rows = zip(*everyones, strict=True)
    where, is_local = f"{names[0]} {numbers[0]}", called.own_rows is not None
    if is_local and len(set(names)) == 1 and len(set(num_rows)) > 1:
        return InputError(
            "the ranks are given different numbers of samples",
            why=by_rank([f"{rows} samples" for rows in num_rows], group),
            where=where, hint="DistributedSampler(..., drop_last=True) and DataLoader(..., drop_last=True)",
        )  # fmt: skip
    if len(set(texts)) > 1:
        hint = "the same shapes, options and mode on every rank" if is_local else _SAME_BATCH
        return InputError(
            "the ranks are called with different inputs", why=by_rank(texts, group), where=where, hint=hint
        )
    if len(set(numbers)) > 1:
        steps = [f"{name} {number}" for name, number in zip(names, numbers, strict=True)]
        return InputError(
            "the ranks are not at the same step", why=by_rank(steps, group),
            hint="make the same calls on every rank, also where one rank skips a batch or catches an error",
        )  # fmt: skip
    return _values_error(called, everyones, where, process)


def _values_error(called: ComparedCall, everyones: Sequence[tuple], where: str, process: Process) -> InputError:
    """Return the error for calls that are equal on all ranks except for the values of inputs.

    Args:
        everyones: for each rank, the description of its call that `_error` has gathered.
    """
    group, own_rows = process.host_group, called.own_rows or frozenset()
    assert group is not None
    compared: list[tuple[Sequence[int], Set[str]]] = [(range(len(everyones)), called.inputs.keys() - own_rows)]
    compared += [(ranks, own_rows) for ranks in same_rows(process.mesh)]
    differ: set[str] = set()
    unlike: dict[int, list[int]] = {}
    for ranks, names in compared:
        first, *rest = [index for index, row in enumerate(everyones) if row[0] in ranks]
        for index in rest:
            others = names & set(_differing(everyones[first], everyones[index]))
            differ |= others
            if others:
                unlike.setdefault(first, []).append(index)
    named = ["the seeds of dropout" if name == SEEDS else name for name in called.inputs if name in differ]
    pairs = [f"{ranks_text(who, group)} unlike {ranks_text([first], group)}" for first, who in unlike.items()]
    where += f": {', '.join(pairs)}" if pairs else ""
    why, hint = "every rank must be passed the full global batch, of which it computes its shard", _SAME_BATCH
    if called.own_rows is not None:
        why, hint = "an input without batch dimension must be equal on all ranks", "pass the same values on every rank"
    if not own_rows.isdisjoint(differ):
        why, hint = "ranks with equal data_rank compute the same samples", _SAME_ROWS
    return InputError(
        f"the ranks are called with different values of {', '.join(named or called.floats)}", why=why, where=where,
        hint=hint,
    )  # fmt: skip


def _differing(one: tuple, other: tuple) -> list[str]:
    """Return the names of inputs whose values differ between two ranks."""
    exact = [name for name, number in one[4].items() if other[4][name] != number]
    pairs = {name: zip(marks, other[5][name], strict=True) for name, marks in one[5].items()}
    return exact + [name for name, pair in pairs.items() if any(abs(a - b) > 1 for a, b in pair)]


def _is_rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _projections(tensor: Tensor, number: int) -> list[float]:
    """Return random projections of a sample of a tensor's elements, then the log of its mean magnitude.

    A projection is the dot product with a random vector of 1 and -1. All numbers are in units of the tolerance.
    """
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.numel() == 0:
        return [0.0] * (PROJECTIONS + 1)
    count = min(SAMPLE, values.numel())
    stride = values.numel() // count
    first = number * 7919 % stride
    if values.is_contiguous():
        sample = values.as_strided((count,), (stride,), values.storage_offset() + first)
    else:  # gather the sample without copying the tensor
        places = first + stride * torch.arange(count, device=values.device)
        sample = values[torch.unravel_index(places, values.shape)]
    array = sample.resolve_neg().to("cpu", torch.float64).numpy()  # read-only: it may share memory with the input
    total = float(np.abs(array).sum())
    if not math.isfinite(total):
        array = np.nan_to_num(array, nan=3.0, posinf=5.0, neginf=-5.0).clip(-_LARGEST, _LARGEST)
        total = float(np.abs(array).sum())
    size = max(total / count, SMALLEST)
    unit = max(TOLERANCE, 4 * torch.finfo(values.dtype).eps)
    projections = _signs()[:, :count] @ array / (size * math.sqrt(count) * unit)
    return [*projections.tolist(), math.log(size) / unit]


@functools.cache
def _signs() -> np.ndarray:
    """Return a float64 array [PROJECTIONS, SAMPLE] of random 1 and -1, equal on every rank."""
    bits = hashlib.shake_256(b"signs").digest(PROJECTIONS * SAMPLE)
    return np.array([1.0 if byte & 1 else -1.0 for byte in bits]).reshape(PROJECTIONS, SAMPLE)
