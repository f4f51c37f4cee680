"""Interface for data-parallel methods other than an all-reduce of gradients (option `dp_sync`).

For `dp_sync="all_reduce"`, the default, the runtime uses the class `GradientSync`. Its functions do nothing, because
parameter buckets already reduce all gradients (`param_bucket.py`). The optional package `autopart.extras.dp_sync` has a
subclass for methods that compress gradients or average models.
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
    """Data-parallel synchronisation of one module on this rank. This base class does nothing.

    A `dp_sync` method, such as PowerSGD, replaces the all-reduce of a gradient over the outermost data axis.

    Attributes:
        methods: {name: `dp_sync` method} of the parameters that have such a method.
        unsharded: {name: placeholder of full shape without storage} of those parameters that ZeRO shards. During a
            step, `.grad` of the placeholder receives the full gradient.
    """

    def __init__(self, process: Process):
        self.process = process
        self.methods: Mapping[str, SyncMethod] = {}
        self.unsharded: dict[str, Tensor] = {}

    @property
    def changes_models(self) -> bool:
        """True if the method averages models (as local SGD does): data ranks then have different weights."""
        return False

    def adopt(self, program: Program, parameters: Mapping[str, Tensor]) -> None:
        """Switch to a program and its parameters. It is called for each new program.

        Args:
            program: the new program, which includes the parameters of all earlier programs.
            parameters: {name: local parameter}.
        """

    # --- In a step

    def with_unsharded(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return `parameters`, with each sharded parameter replaced by its placeholder in `unsharded`."""
        return parameters

    def reduce_by_method(self, loss_scale: float = 1.0) -> None:
        """Synchronise the gradients of all parameters that have a `dp_sync` method.

        A collective call, after all other reductions of a step. Before the call, `.grad` has this rank's partial
        gradient times `loss_scale`.
        """

    def release_full_gradients(self) -> None:
        """Free the gradients of the tensors in `unsharded`, at the end of a step."""

    # --- In the user's own backward

    def synchronise_in_backward(self, outputs: Sequence[Any], leave: Callable[[], bool]) -> tuple[Any, ...]:
        """Add hooks to the outputs of a differentiable call, so that its backward synchronises gradients once.

        Returns the outputs with hooks.

        Args:
            outputs: outputs of the call.
            leave: function that returns True if the backward leaves gradients unsynchronised (`no_sync`).
        """
        return tuple(outputs)

    # --- Checks

    def problem(self, in_step: bool) -> UsageError | None:
        """Return an error if gradient hooks would run before gradients are synchronised, else None.

        The result is equal on every rank.

        Args:
            in_step: True in `step`, which runs gradient hooks after synchronisation.
        """
        return None

    def check_optimizer_attached(self) -> None:
        """Raise UsageError before the second step if models are averaged, but no optimizer is attached.

        The method averages models after steps of the attached optimizer (`pm.attach`).
        """

    def check_gradients(self, call: str) -> None:
        """Raise UsageError if data ranks have different weights, and so no common gradient.

        `call`: name of the call that needs the gradient, for the message.
        """

    # --- State

    def replica_mean(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean of `values` over data ranks if `changes_models`; else return them unchanged."""
        return dict(values)


def sync_for(program: Program, current: GradientSync) -> GradientSync:
    """Return the `GradientSync` for a program.

    This is `current`, unless a parameter of the program has a `dp_sync` method that `current` cannot run.
    """
    has_method = any(stored.method is not None for stored in program.parameters.values())
    return with_methods(current) if has_method else current


def with_methods(current: GradientSync) -> Any:
    """Return `current` if it can run `dp_sync` methods, else a new one from `autopart.extras.dp_sync`."""
    return sync_extra().make_sync(current.process) if type(current) is GradientSync else current
