"""Gradients that ranks have not summed yet: `no_sync()` adds up those of several batches, to be summed once.

Until that is done, `.grad` of a parameter whose gradient ranks sum holds this rank's part of it. What was complete in
`.grad` before counts on one of these ranks alone, and is zero on the others, so that it is not summed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from autopart.compat.training_internals import at_end_of_backward
from autopart.errors import UsageError
from autopart.ir.program import Program
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.comm.stage_ranks import owners
from autopart.runtime.gradients.step_reduction import summed_names, sync_gradients


class Unsummed:
    """Which calls of one module leave their gradients unsummed, and whether some are.

    `is_open`: inside `no_sync()`, so calls leave theirs. `are_some`: `.grad` holds parts. `are_expected`: a forward
    inside has a backward to come. All three are the same on every rank. `bring_together`: what comes after the sums.
    """

    def __init__(self, process: Process, stage_style: str, bring_together: Callable[[], None]):
        self.process, self.stage_style = process, stage_style
        self.bring_together = bring_together
        self.is_open = self.are_some = self.are_expected = False
        self.program: Program | None = None
        self.parameters: Mapping[str, Tensor] = {}
        self.are_summed = False
        """Whether ranks sum the gradient of any parameter, on this rank or another."""

    def adopt(self, program: Program, parameters: Mapping[str, Tensor]) -> None:
        """Take the module's newest program, which has the parameters of all before it: {name: local parameter}."""
        self.program, self.parameters = program, parameters
        self.are_summed = any(
            any(program.mesh.size(axis) > 1 for axis in stored.grad_axes)
            or len(set(owners(program, stored, self.stage_style))) > 1
            for stored in program.parameters.values()
        )

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, calls leave their gradients unsummed."""
        before, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = before

    @property
    def matters(self) -> bool:
        """Whether the next call leaves gradients unsummed, or finds some."""
        return self.are_summed and (self.is_open or self.are_some or self.are_expected)

    def problem(self, program: Program) -> UsageError | None:
        """Why the next call cannot leave gradients unsummed, or find some; the same on every rank."""
        if self.is_open and (problem := in_parts(program)) is not None:
            return problem
        for name, parameter in self.parameters.items() if self.matters else ():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                return UsageError(
                    f"'{name}' has a hook on its gradient, and is used with no_sync()",
                    why="the hook would see this rank's part for the gradient of the whole batch",
                    hint="remove it, and change p.grad before optimizer.step()",
                )
        return None

    def begin(self) -> None:
        """From now on `.grad` holds parts."""
        if self.are_some:
            return
        assert self.program is not None
        apart = {name for name in self.parameters if self.program.parameters[name].method is not None}
        for name in summed_names(self.parameters, self.program, self.stage_style) | apart:
            gradient = self.parameters[name].grad
            if gradient is not None and not self._counts_here(name):
                gradient.zero_()
        self.are_some = True
        self.process.unsummed.add(self)

    def leave(self, was_open: bool) -> bool:
        """Whether a backward leaves its gradients unsummed; `was_open`: of a forward inside `no_sync()`.

        One that was outside then has all of them summed at its end.
        """
        if not (was_open or self.are_some or self.are_expected):
            return False
        self.begin()
        if not was_open:
            at_end_of_backward(self.finish)
        return True

    @torch.no_grad()
    def finish(self) -> None:
        """Sum what all calls since `begin` have left. A collective call."""
        if not self.are_some:
            return
        assert self.program is not None
        sync_gradients(self.parameters, self.program, self.process, self.stage_style)
        self.bring_together()
        self.are_some = self.are_expected = False
        self.process.unsummed.discard(self)

    def _counts_here(self, name: str) -> bool:
        """Whether this rank is the first of those that sum this parameter's gradient."""
        assert self.program is not None
        stored, coordinates = self.program.parameters[name], self.process.coordinates
        first_owner = min(owners(self.program, stored, self.stage_style))
        return self.process.pp == first_owner and all(coordinates.get(axis, 0) == 0 for axis in stored.grad_axes)


def in_parts(program: Program) -> UsageError | None:
    """Why a program has no whole gradients that could wait for their sum."""
    for name, stored in program.parameters.items():
        cut = program.mesh.stored_over(stored.layout)
        if cut is not None:
            return UsageError(
                "no_sync() on a model whose parameters are stored in parts (zero=)",
                why=f"'{name}' is cut over {cut}: its gradient is summed as it is cut, in every backward",
                hint="microbatches=4: one step of a batch that is four times as large, in parts; or zero=0",
            )
    return None


def check_summed(process: Process, asked: str) -> None:
    """Raises UsageError, on every rank, where gradients are read that ranks have not summed yet."""
    if process.unsummed:
        raise UsageError(
            f"{asked} needs gradients that are summed over the ranks",
            why="those there are were made inside no_sync(), and each rank has its part of them",
            hint="make the last call before the optimizer's step outside no_sync(): it sums all of them",
        )
