"""Interface of the runtime to data-parallel synchronisation other than an all-reduce of gradients.

`GradientSync` is the default, `dp_sync="all_reduce"`: buckets reduce every gradient, and nothing is left to do. The
extra `dp_sync` subclasses it for methods that compress gradients or average models.
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
        methods: {name: method} of parameters whose gradients buckets leave unreduced over the outermost data axis.
        unsharded: {name: tensor without storage, whose `.grad` receives the full gradient during a step}, for sharded
            parameters with a method.
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
        """Use the module's newest program. It contains the parameters of all earlier programs.

        Args:
            program: the program.
            parameters: {name: local parameter}.
        """

    # --- In a step

    def with_unsharded(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the parameters, each that is in `unsharded` replaced by its tensor there."""
        return parameters

    def reduce_by_method(self, loss_scale: float = 1.0) -> None:
        """Synchronise every `.grad` with a method, which has this rank's partial gradient times `loss_scale`.

        A collective call, after all other reductions of a step.
        """

    def release_full_gradients(self) -> None:
        """Free the gradients of `unsharded` at the end of a step."""

    # --- In the user's own backward

    def synchronise_in_backward(self, outputs: Sequence[Any], leave: Callable[[], bool]) -> tuple[Any, ...]:
        """Hook the outputs of a differentiable call, so that its backward synchronises gradients once.

        Args:
            outputs: the outputs.
            leave: returns True if a later backward is to synchronise the gradients (`no_sync`).
        """
        return tuple(outputs)

    # --- Checks

    def problem(self, in_step: bool) -> UsageError | None:
        """Return an error if gradient hooks would see unsynchronised gradients, else None.

        The result is equal on every rank.

        Args:
            in_step: True if hooks run only after synchronisation.
        """
        return None

    def check_optimizer_attached(self) -> None:
        """Raise UsageError before a second step if no attached optimizer averages the replicas."""

    def check_gradients(self, asked: str) -> None:
        """Raise UsageError if replicas differ, so that there is no global gradient to return."""

    # --- State

    def replica_mean(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return {name: mean over the data ranks} if every data rank has its own model, else the values."""
        return dict(values)


def sync_for(program: Program, current: GradientSync) -> GradientSync:
    """Return `current`, or a new `GradientSync` that runs methods if the program has one."""
    has_method = any(stored.method is not None for stored in program.parameters.values())
    return with_methods(current) if has_method else current


def with_methods(current: GradientSync) -> Any:
    """Return `current` if it runs methods, else a new `GradientSync` of the extra `dp_sync`."""
    return sync_extra().make_sync(current.process) if type(current) is GradientSync else current
