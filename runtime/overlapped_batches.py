"""Batches that are still in flight when `step` returns, under the schedule "1f1b_2bw".

Under all other schedules `step` finishes its batch, and the class `OverlappedBatches` does nothing. An optional
package implements "1f1b_2bw" as a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from autopart.errors import UsageError
from autopart.ir.program import Program
from autopart.ir.run.schedules import check_precision, schedule_extra
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.comm.watchdog import meeting
from autopart.runtime.consistency.same_call import Comparison
from autopart.runtime.executable import Executable
from autopart.runtime.training.loss_scaling import LossScaling
from autopart.runtime.training.step_options import StepOptions


class StepRunner(Protocol):
    """Interface of an object that runs training steps of a program, such as `Executable`."""

    def step(
        self, inputs: Sequence[Any], options: StepOptions, comparison: Comparison, scaling: LossScaling | None = None
    ) -> tuple[Tensor, list[Any]]:
        """Run a step. Return the loss and the program's other outputs."""


class OverlappedBatches:
    """Batches that are in flight between calls of a module. This base class never has such batches.

    Args:
        schedule: the module's schedule.
        parameters: {name: local parameter} of the module.
    """

    def __init__(self, schedule: str | None, process: Process, parameters: Mapping[str, Tensor]):
        self.schedule, self.process, self.parameters = schedule, process, parameters

    @property
    def is_cold(self) -> bool:
        """True if the executable of the batch in flight has not finished a batch yet, so it may still compile."""
        return False

    @property
    def needs_own_programs(self) -> bool:
        """True if programs of different sizes must not share graphs.

        Under "1f1b_2bw", two batches with different programs can be in flight at once.
        """
        return False

    def bind(self, program: Program, make: Callable[..., Executable]) -> StepRunner:
        """Return the object that runs the training steps of a program on this rank.

        Args:
            make: function that creates an executable. Its argument is `parameters={name: tensor}`.
        """
        return make(parameters=self.parameters)

    def flush(self) -> Tensor:
        """Finish the batch in flight, and add its gradients to `.grad`.

        Return its loss; NaN if no batch is in flight.
        """
        raise UsageError(
            "flush() is only for schedule='1f1b_2bw'", hint="remove the call",
            why="with other schedules step() finishes its batch, so there is nothing to flush",
        )  # fmt: skip

    def drain(self) -> None:
        """Finish the batch in flight, if any. The next `step` or `flush` adds its gradients to `.grad`.

        All ranks must call this at the same position in their sequence of calls.
        """

    def drained_on_error(self) -> AbstractContextManager[None]:
        """Context manager that finishes the batch in flight if code in the `with` block raises AutopartError.

        Other ranks finish the batch too, so this rank must take part in its communication.
        """
        return nullcontext()

    def check_landed(self, what: str) -> None:
        """Raise UsageError if the gradient of the batch in flight has not been added to `.grad` yet.

        Args:
            what: the call that needs the gradient, for the message.
        """

    def check_step(self, options: StepOptions, leaves_unreduced: bool) -> None:
        """Raise UsageError if the schedule does not support the options of `step`, or `no_sync()`.

        Args:
            leaves_unreduced: True if `step` leaves gradients unreduced, because it runs inside `no_sync()`.
        """


class FlushMethods:
    """Methods of a module whose schedule can delay gradients by one batch."""

    _in_flight: OverlappedBatches
    _process: Process
    _local_parameters: Mapping[str, nn.Parameter]

    def _begin_flight(self, schedule: str | None, scales_loss: bool) -> None:
        check_precision(schedule, "fp16" if scales_loss else None)
        extra = schedule_extra(schedule)
        make = OverlappedBatches if extra is None else extra.make_batches
        self._in_flight = make(schedule, self._process, self._local_parameters)

    @meeting
    def flush(self) -> Tensor:
        """Finish the last batch under `schedule="1f1b_2bw"`.

        Under this schedule, `step` adds the gradient of the previous batch to `.grad`. `flush` adds the gradient of the
        last batch. It returns the loss of that batch on every rank, as a detached scalar, or NaN if no batch has
        started. Raises UsageError under another schedule. A collective call.

        Example:
            for batch in batches:
                loss = pm.step(**batch)  # of the previous batch: NaN, and no gradient, in the first step
                optimizer.step()
                optimizer.zero_grad()
            loss = pm.flush()
            optimizer.step()
        """
        return self._in_flight.flush()
