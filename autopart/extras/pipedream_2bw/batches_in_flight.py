"""`schedule="1f1b_2bw"`: asynchronous 1F1B (PipeDream-2BW), without a flush between batches.

`step(batch k)` starts the first microbatches of batch k after the last microbatches of batch k - 1. It finishes the
backwards of batch k - 1, and adds the gradient of batch k - 1 to `.grad`. All stages compute batch k with one version
of the weights: the version that is current when `step(batch k)` begins. While batch k is in flight, the optimizer
changes the other version. Batch k + 1 is therefore computed with

    W(k + 1) = W(k) - step size x gradient of batch k - 1 at W(k - 1)

(PipeDream-2BW: Narayanan et al. 2021, arXiv:2006.09503, section 3.1.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopart.common.scoped import no_autocast
from autopart.errors import AutopartError, UsageError
from autopart.extras.pipedream_2bw.delayed_gradients import check_delayed
from autopart.ir.program import Program
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.consistency.same_call import Comparison
from autopart.runtime.executable import Executable
from autopart.runtime.gradients.step_reduction import accumulate_earlier, sync_tied
from autopart.runtime.overlapped_batches import OverlappedBatches
from autopart.runtime.pipeline_stages import Pipeline
from autopart.runtime.training.backward_hooks import defer_hooks
from autopart.runtime.training.loss_scaling import LossScaling, explain_missing_operators
from autopart.runtime.training.step_options import StepOptions, divide_by


class WeightVersions:
    """Two versions of this rank's weights, each {name: tensor}. Graphs compute with these tensors.

    The module's parameters share the memory of version `current`, which optimizers change.
    """

    def __init__(self, parameters: Mapping[str, Tensor]):
        self.parameters = parameters
        self.current = 0
        self.tensors: tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]] = ({}, {})

    @torch.no_grad()
    def hold(self) -> None:
        """Create both versions of new parameters.

        If the user has moved a parameter to other memory, copy its values into the current version.
        """
        current, other = self.tensors[self.current], self.tensors[1 - self.current]
        for name, parameter in self.parameters.items():
            if name not in current:
                current[name], other[name] = nn.Parameter(parameter.data), nn.Parameter(parameter.data.clone())
            elif current[name].data_ptr() != parameter.data_ptr():  # the user has moved the parameter to other memory
                current[name].data.copy_(parameter.data)
                parameter.data = current[name].data
            for tensor in (current[name], other[name]):
                tensor.requires_grad_(parameter.requires_grad)

    @torch.no_grad()
    def exchange(self) -> None:
        """Copy the parameters into the other version of the weights, and make that version current."""
        current, other = self.tensors[self.current], self.tensors[1 - self.current]
        for name, parameter in self.parameters.items():
            other[name].data.copy_(parameter.data)
            parameter.data = other[name].data
        assert current.keys() == other.keys()
        self.current = 1 - self.current


class StageExchange:
    """Sends to and receives from the neighbouring pipeline stages.

    A receive blocks until the data has arrived. A send does not block: the rank waits for it only after it has started
    the next transfers.
    """

    def __init__(self) -> None:
        self.unsent: list[dist.P2POp] = []
        self.in_flight: list[tuple[dist.Work, Any]] = []
        self.broadcasts: list[tuple[dist.Work, Tensor]] = []

    def receive(self, receives: Sequence[dist.P2POp]) -> None:
        """Start these receives together with the pending sends, and wait for the receives."""
        earlier, self.in_flight = self.in_flight, []
        for work in (*self._begin(receives), *(work for work, _ in earlier)):
            work.wait()

    def send(self) -> None:
        """Start the pending sends."""
        for work in self._begin(()):
            work.wait()

    def finish(self) -> None:
        """Wait for all sends."""
        self.receive(())
        self.receive(())

    def _begin(self, receives: Sequence[dist.P2POp]) -> list[dist.Work]:
        """Start the pending sends and these receives. Return the work objects of the receives.

        The sends are not waited for here. If the backend returns one work object for all transfers (NCCL), the result
        is this object.
        """
        sends, self.unsent = self.unsent, []
        works = dist.batch_isend_irecv([*sends, *receives]) if sends or receives else []
        num_sends = (
            len(sends) if len(works) == len(sends) + len(receives) else 0
        )  # nccl returns one work object for all
        self.in_flight += list(zip(works, sends, strict=False))[:num_sends]
        return works[num_sends:]

    def tell(self, value: Tensor | None, owner: int, process: Process, like: Tensor) -> Tensor:
        """Broadcast a value from the rank at `pp` coordinate `owner` to all ranks along `pp`, and return it.

        The owner does not wait for the other ranks.
        """
        group = process.groups["pp"]
        if value is None:
            value = torch.empty_like(like, device=process.wire)
            dist.recv(value, group=group, group_src=owner)
            return value.to(process.device)
        for earlier, _ in self.broadcasts:  # sends of the last step, which other ranks receive after their backwards
            earlier.wait()
        self.broadcasts, sent = [], value.to(process.wire)
        for other in (pp for pp in range(process.mesh.size("pp")) if pp != owner):
            work = dist.isend(sent, group=group, group_dst=other)
            assert work is not None
            self.broadcasts.append((work, sent))
        return value


class ExecutablePair:
    """Two executables of one program: each computes with one of the two versions of the weights."""

    def __init__(self, program: Program, in_flight: InFlight, make: Callable[..., Executable]):
        assert in_flight.schedule is not None
        check_delayed(in_flight.schedule, program)
        in_flight.drain()
        in_flight.versions.hold()
        self.in_flight, self.num_finished = in_flight, 0
        self.executables = [make(parameters=tensors) for tensors in in_flight.versions.tensors]
        # Torch's stages connect in their first step, which must not overlap with other sends.
        for executable in self.executables:
            pipeline_of(executable).run_on_indices()

    @property
    def is_warm(self) -> bool:
        """True if both executables have run."""
        return self.num_finished > 1

    def step(
        self, inputs: Sequence[Any], options: StepOptions, comparison: Comparison, scaling: LossScaling | None = None
    ) -> tuple[Tensor, list[Any]]:
        """Run a step as `Executable.step` does, but return the loss of the previous batch."""
        assert scaling is None and not options.outputs
        return self.in_flight.step(self, inputs, options, comparison), []


def pipeline_of(executable: Executable) -> Pipeline:
    assert executable.pipeline is not None
    return executable.pipeline


class BatchInFlight:
    """A batch in flight: its first microbatches have started, and its last backwards have not finished."""

    def __init__(
        self, pair: ExecutablePair, version: int, inputs: Sequence[Any], options: StepOptions, comparison: Comparison
    ):
        self.pair, self.loss_scale = pair, options.loss_scale
        self.executable = executable = pair.executables[version]
        self.loss: Tensor | None = None
        self._loaded = ExitStack()
        with self._loaded:
            self._loaded.enter_context(executable.loaded(inputs, comparison, sends=False))
            if options.num_tokens is not None:
                comparison.finish_comparison()
                divide_by(options.num_tokens, executable.modules, executable.program, executable.process)
            self._loaded = self._loaded.pop_all()
        self.pipeline = pipeline_of(executable)
        self.pipeline.run_on_indices()

    @property
    def microbatches(self) -> int:
        return self.executable.program.microbatches

    def unload(self) -> None:
        self._loaded.close()

    def finish(self, exchange: StageExchange) -> None:
        """Reduce gradients of tied parameters and compute the loss.

        It is called after all backwards of the batch have run.
        """
        executable = self.executable
        losses = [loss.detach() for loss in self.pipeline.schedule.losses()]
        sync_tied(executable.parameters, executable.program, executable.process, executable.stage_style)
        loss, owner = executable.all_reduced_loss(losses), self.pipeline.last_coordinate
        self.loss = exchange.tell(loss, owner, executable.process, self.no_loss)
        self.unload()

    @property
    def no_loss(self) -> Tensor:
        boundary = self.executable.program.stages[-1].sends[0]
        return torch.full(boundary.shape, torch.nan, dtype=boundary.dtype, device=self.executable.process.device)


class InFlight(OverlappedBatches):
    """State of the schedule "1f1b_2bw".

    It stores the batch in flight, and at most one finished batch whose gradients have not been added to `.grad` yet.
    """

    def __init__(self, schedule: str, process: Process, parameters: Mapping[str, Tensor]):
        super().__init__(schedule, process, parameters)
        self.versions, self.exchange = WeightVersions(parameters), StageExchange()
        self.batch: BatchInFlight | None = None
        self.finished: BatchInFlight | None = None
        self.is_broken = False

    @property
    def is_cold(self) -> bool:
        return self.batch is not None and not self.batch.pair.is_warm

    @property
    def needs_own_programs(self) -> bool:
        return True

    def bind(self, program: Program, make: Callable[..., Executable]) -> ExecutablePair:
        return ExecutablePair(program, self, make)

    def step(self, pair: ExecutablePair, inputs: Sequence[Any], options: StepOptions, comparison: Comparison) -> Tensor:
        """Start a batch, finish the previous batch, and add the gradients of the previous batch to `.grad`.

        Returns the loss of the previous batch, or NaN if there is none. Raises InputError if ranks pass different
        arguments. In that case, the previous batch is still finished, and the next call adds its gradients to `.grad`.
        """
        if self.batch is not None and self.batch.pair is not pair:
            self.drain()
        self.versions.hold()
        batch = BatchInFlight(pair, self.versions.current, inputs, options, comparison)
        self._advance(batch, options.loss_scale, comparison.finish_comparison)
        loss = self._leave(options.loss_scale)
        return batch.no_loss if loss is None else loss

    def flush(self) -> Tensor:
        self.drain()
        last = self.finished
        loss = self._leave(None if last is None else last.loss_scale)
        return torch.tensor(torch.nan, device=self.process.device) if loss is None else loss

    def drain(self) -> None:
        if self.batch is not None:
            self._advance(None, self.batch.loss_scale, lambda: None)
            self.exchange.finish()

    @contextmanager
    def drained_on_error(self) -> Iterator[None]:
        try:
            yield
        except AutopartError:
            if not self.is_broken:
                self.drain()
            raise

    def check_landed(self, what: str) -> None:
        """Raise UsageError if a batch is in flight, or if its gradients have not been added to `.grad` yet."""
        if self.batch is not None or self.finished is not None:
            raise UsageError(
                f"{what} cannot run while a batch is in flight",
                why="under schedule='1f1b_2bw' the gradient of the last step() is not complete yet",
                hint="loss = pm.flush() and optimizer.step() first",
            )

    def check_step(self, options: StepOptions, leaves_unreduced: bool) -> None:
        why = "with this schedule step() returns the loss and leaves the gradients of the previous batch"
        if options.outputs:
            raise UsageError(
                "outputs=True is not supported with schedule='1f1b_2bw'", why=why,
                hint="with torch.no_grad(): pm(**batch), which first finishes the batch in flight",
            )  # fmt: skip
        if options.on_nonfinite is not None:
            raise UsageError(
                "on_nonfinite= and locate= are not supported with schedule='1f1b_2bw'", why=why,
                hint="check the returned loss: loss.isfinite()",
            )  # fmt: skip
        if leaves_unreduced:
            raise UsageError(
                "step() cannot run inside no_sync() with schedule='1f1b_2bw'", why=why,
                hint="one batch that is as large as all of them, split into more microbatches",
            )  # fmt: skip

    def _advance(self, beginning: BatchInFlight | None, loss_scale: float, meet: Callable[[], None]) -> None:
        """Start the batch `beginning`, unless it is None, and finish the batch in flight, if there is one.

        The ranks call `meet` to compare their calls before the first microbatch of the new batch. If the calls differ,
        the new batch is dropped, the batch in flight is finished, and then the error is raised.
        """
        if self.is_broken:
            raise UsageError(
                "an earlier step failed in the middle of a batch",
                why="ranks have already exchanged some of its microbatches",
                hint="parallelize() the model again",
            )
        finishing, self.batch, self.is_broken = self.batch, None, True
        if finishing is not None:
            # This period has all forwards and backwards of the last stage for this batch.
            finishing.loss_scale = loss_scale
        error = self._run(finishing, beginning, meet)
        if finishing is not None:
            finishing.finish(self.exchange)
            finishing.pair.num_finished += 1
            self.finished = finishing
        self.is_broken = False
        if beginning is not None and error is not None:
            beginning.unload()
        if error is not None:
            raise error
        if beginning is not None:
            self.versions.exchange()
            self.batch = beginning

    def _run(
        self, finishing: BatchInFlight | None, beginning: BatchInFlight | None, meet: Callable[[], None]
    ) -> AutopartError | None:
        """Run one period of the schedule: the end of batch `finishing`, and the start of batch `beginning`.

        Returns the error because of which `beginning` was not started, or None.
        """
        error: AutopartError | None = None
        num_warmup = self.process.mesh.size("pp") - 1 - self.process.pp
        remaining = [(finishing, index) for index in range(num_warmup, finishing.microbatches)] if finishing else []
        first = [(beginning, index) for index in range(num_warmup)] if beginning else []
        backwards = range(finishing.microbatches if finishing else 0)
        reducing = finishing.executable.reduce_during_backward() if finishing else nullcontext()
        with torch.enable_grad(), no_autocast(), explain_missing_operators(), reducing:
            for index, (forward, backward) in enumerate(itertools.zip_longest([*remaining, *first], backwards)):
                if first and index == len(remaining):
                    error = _error_of(meet)
                if forward is not None and (error is None or index < len(remaining)):
                    self._forward(*forward)
                if backward is not None and finishing is not None:
                    self._backward(finishing, backward)
            self.exchange.send()
        return error if first else _error_of(meet)

    def _forward(self, batch: BatchInFlight, microbatch: int) -> None:
        batch.pipeline.loss_scale = batch.loss_scale
        schedule = batch.pipeline.schedule
        self.exchange.receive(schedule.forward_receives(microbatch))
        self.exchange.unsent += schedule.forward(microbatch)

    def _backward(self, batch: BatchInFlight, microbatch: int) -> None:
        schedule = batch.pipeline.schedule
        self.exchange.receive(schedule.backward_receives(microbatch))
        self.exchange.unsent += schedule.backward(microbatch)

    def _leave(self, loss_scale: float | None) -> Tensor | None:
        """Add the gradients of the finished batch to `.grad`, scaled by `loss_scale`, and return its loss.

        Returns None, and changes nothing, if no batch is finished or `loss_scale` is None.
        """
        if self.finished is None or loss_scale is None:
            return None
        last, self.finished = self.finished, None
        factor = loss_scale / last.loss_scale
        earlier_grads: dict[Tensor, Tensor | None] = {}
        with torch.no_grad(), defer_hooks(self.parameters) as hooks:
            for name, version in last.executable.parameters.items():
                if version.grad is not None:
                    parameter = self.parameters[name]
                    earlier_grads[parameter] = parameter.grad
                    parameter.grad, version.grad = version.grad if factor == 1.0 else version.grad * factor, None
            last.executable.data_sync.reduce_by_method(loss_scale)
            hooks.run_gradient_hooks()
            accumulate_earlier(earlier_grads)
        hooks.run_accumulate_hooks()
        return last.loss


def _error_of(meet: Callable[[], None]) -> AutopartError | None:
    try:
        meet()
    except AutopartError as error:
        return error
    return None
