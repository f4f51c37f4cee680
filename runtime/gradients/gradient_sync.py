"""Interface of the runtime to data-parallel synchronisation: all-reduce, or a `dp_sync` method.

`GradientSync` is the default, `dp_sync="all_reduce"`: buckets reduce every gradient, and it does nothing. The optional
package `autopart.extras.dp_sync` subclasses it for methods that compress gradients or average models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from autopart.errors import UsageError
from autopart.ir.program import Program
from autopart.ir.run.sync_option import SyncMethod, sync_extra
from autopart.runtime.comm.process_mesh import Process


class GradientSync:
    """Data-parallel synchronisation of one module on this rank.

    Attributes:
        methods: {name: method} of parameters whose gradients are reduced by a `dp_sync` method over the outermost data
            axis. Buckets leave them unreduced over that axis.
        unsharded: {name: tensor without storage} for sharded parameters with a method. During a step its `.grad`
            receives the full gradient.
    """

    def __init__(self, process: Process):
        self.process = process
        self.methods: Mapping[str, SyncMethod] = {}
        self.unsharded: dict[str, Tensor] = {}

    @property
    def changes_models(self) -> bool:
        """True if every data rank has its own model."""
        return False

    def adopt(self, program: Program, parameters: Mapping[str, Tensor]) -> None:
        """Use the module's newest program, which contains the parameters of all earlier programs.

        Args:
            program: the program.
            parameters: {name: local parameter}.
        """

    # --- In a step

    def with_unsharded(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the parameters, with tensors of `unsharded` in place of parameters that it contains."""
        return parameters

    def reduce_by_method(self, loss_scale: float = 1.0) -> None:
        """Synchronise the gradients of all parameters with a method.

        `.grad` has this rank's partial gradient times `loss_scale`. A collective call, after all other reductions of a
        step.
        """

    def release_full_gradients(self) -> None:
        """Free the gradients of the tensors in `unsharded`, at the end of a step."""

    # --- In the user's own backward

    def synchronise_in_backward(self, outputs: Sequence[Any], leave: Callable[[], bool]) -> tuple[Any, ...]:
        """Hook the outputs of a differentiable call, so that its backward synchronises gradients once.

        Args:
            outputs: the outputs.
            leave: function that returns True if a later backward will synchronise the gradients (`no_sync`).
        """
        return tuple(outputs)

    # --- Checks

    def problem(self, in_step: bool) -> UsageError | None:
        """Return an error if gradient hooks would get unsynchronised gradients, else None.

        The result is equal on every rank.

        Args:
            in_step: True in `step`, in which hooks run after synchronisation.
        """
        return None

    def check_optimizer_attached(self) -> None:
        """Raise UsageError before the second step if the method averages models and no optimizer is attached."""

    def check_gradients(self, asked: str) -> None:
        """Raise UsageError if every data rank has its own model, so that there is no global gradient."""

    # --- State

    def replica_mean(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Average values over the data ranks if every data rank has its own model; else return them unchanged."""
        return dict(values)


def sync_for(program: Program, current: GradientSync) -> GradientSync:
    """Return the synchronisation that a program needs: `current`, or a new one that runs its methods."""
    has_method = any(stored.method is not None for stored in program.parameters.values())
    return with_methods(current) if has_method else current


def with_methods(current: GradientSync) -> Any:
    """Return `current` if it can run methods, else a new synchronisation that can."""
    return sync_extra().make_sync(current.process) if type(current) is GradientSync else current
