"""`no_sync()`: accumulate unreduced gradients of several batches, and reduce them once.

Until the reduction, `.grad` of a parameter is this rank's partial gradient. If `.grad` already has a reduced gradient
of earlier calls, all ranks except the first set it to zero. The reduction then counts the earlier gradient once.
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
from autopart.runtime.gradients.step_reduction import all_reduced_names, sync_gradients


class NoSync:
    """State of `no_sync()` for one module. All flags are equal on every rank.

    Attributes:
        is_open: True inside `no_sync()`: calls then leave their gradients unreduced.
        are_some: True if `.grad` contains partial gradients.
        are_expected: True if a differentiable forward ran inside `no_sync()` since the last reduction.
        reduce_by_method: function that reduces gradients of parameters that have a `dp_sync` method. It is called after
            all other reductions.
    """

    def __init__(self, process: Process, stage_style: str, reduce_by_method: Callable[[], None]):
        self.process, self.stage_style = process, stage_style
        self.reduce_by_method = reduce_by_method
        self.is_open = self.are_some = self.are_expected = False
        self.program: Program | None = None
        self.parameters: Mapping[str, Tensor] = {}
        self.are_summed = False
        """True if the gradient of any parameter is all-reduced, on this rank or another."""

    def adopt(self, program: Program, parameters: Mapping[str, Tensor]) -> None:
        """Switch to a program and its parameters. It is called for each new program.

        Args:
            parameters: {name: local parameter}.
        """
        self.program, self.parameters = program, parameters
        self.are_summed = any(
            any(program.mesh.size(axis) > 1 for axis in stored.grad_axes)
            or len(set(owners(program, stored, self.stage_style))) > 1
            for stored in program.parameters.values()
        )

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Context manager in which calls leave their gradients unreduced."""
        before, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = before

    @property
    def matters(self) -> bool:
        """True if the next call leaves gradients unreduced, or if `.grad` already contains partial gradients."""
        return self.are_summed and (self.is_open or self.are_some or self.are_expected)

    def problem(self, program: Program) -> UsageError | None:
        """Return an error if the next call cannot leave its gradients unreduced, else None.

        The result is equal on every rank.
        """
        if self.is_open and (problem := sharded_error(program)) is not None:
            return problem
        for name, parameter in self.parameters.items() if self.matters else ():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                return UsageError(
                    f"the gradient hook of '{name}' cannot run inside no_sync()",
                    why="the hook would see this rank's partial gradient, not that of the whole batch",
                    hint="remove the hook, and change p.grad before optimizer.step()",
                )
        return None

    def begin(self) -> None:
        """Prepare `.grad` for partial gradients, which are added over ranks later.

        Only the first rank keeps gradients that are already reduced, so that the sum contains them once.
        """
        if self.are_some:
            return
        assert self.program is not None
        by_method = {name for name in self.parameters if self.program.parameters[name].method is not None}
        for name in all_reduced_names(self.parameters, self.program, self.stage_style) | by_method:
            gradient = self.parameters[name].grad
            if gradient is not None and not self._is_first_owner(name):
                gradient.zero_()
        self.are_some = True
        self.process.unreduced.add(self)

    def leave(self, was_open: bool) -> bool:
        """Return True if the current backward must leave its gradients unreduced.

        Args:
            was_open: True if the forward ran inside `no_sync()`. If False, all partial gradients are reduced when this
                backward ends.
        """
        if not (was_open or self.are_some or self.are_expected):
            return False
        self.begin()
        if not was_open:
            at_end_of_backward(self.finish)
        return True

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce the gradients that were accumulated since `begin`. A collective call."""
        if not self.are_some:
            return
        assert self.program is not None
        sync_gradients(self.parameters, self.program, self.process, self.stage_style)
        self.reduce_by_method()
        self.are_some = self.are_expected = False
        self.process.unreduced.discard(self)

    def _is_first_owner(self, name: str) -> bool:
        assert self.program is not None
        stored, coordinates = self.program.parameters[name], self.process.coordinates
        first_owner = min(owners(self.program, stored, self.stage_style))
        return self.process.pp == first_owner and all(coordinates.get(axis, 0) == 0 for axis in stored.grad_axes)


def sharded_error(program: Program) -> UsageError | None:
    """Return an error if the program shards parameters over data ranks (ZeRO), else None.

    `no_sync()` does not support such parameters.
    """
    for name, stored in program.parameters.items():
        axis = program.mesh.stored_over(stored.layout)
        if axis is not None:
            return UsageError(
                "no_sync() is not supported for sharded parameters (zero=)",
                why=f"'{name}' is sharded over {axis}: every backward reduce-scatters its gradient",
                hint="microbatches=4 in one step of a batch that is four times as large; or zero=0",
            )
    return None


def check_reduced(process: Process, call: str) -> None:
    """Raise UsageError on every rank if `.grad` contains partial gradients (`no_sync`).

    `call`: name of the call that needs reduced gradients, for the message.
    """
    if process.unreduced:
        raise UsageError(
            f"{call} needs gradients that are reduced over the ranks",
            why="the current gradients were computed inside no_sync(), and each rank has a partial gradient",
            hint="run the last call before the optimizer's step outside no_sync(): it reduces all of them",
        )
