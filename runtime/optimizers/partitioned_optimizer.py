"""The optimizer that `pm.optimizer` returns: it updates full tensors of a partitioned model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from autopart.compat.torch_function_internals import full_values, on_local_values
from autopart.errors import UsageError
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.optimizers.full_tensor_update import FullTensorUpdate, StateByName
from autopart.runtime.optimizers.owner_exchange import run_on_groups


class PartitionedOptimizer(Optimizer):
    """Optimizer that updates full tensors of a partitioned model. `pm.optimizer` creates it.

    Schedulers, `GradScaler`, clipping and checkpoints use it like any optimizer. `state` has values only for tensors
    that are updated as shards. Each other tensor has an owner rank, which stores the tensor's state, and an empty entry
    in `state`. In state dicts, this state is sharded like the parameters.
    """

    def __init__(self, update: FullTensorUpdate, parameters: Mapping[str, nn.Parameter], process: Process) -> None:
        self._update, self._process = update, process
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = parameters
        names = {id(parameter): name for name, parameter in update.parameters.items()}
        self._inner_groups = [group for optimizer in update.optimizers for group in optimizer.param_groups]
        groups = [
            {**group, "params": [parameters[names[id(p)]] for p in group["params"]]} for group in self._inner_groups
        ]
        defaults = {
            key: value for optimizer in reversed(update.optimizers) for key, value in optimizer.defaults.items()
        }
        self._is_complete = self._has_state = False
        super().__init__(groups, defaults)
        self._is_complete = True

    @on_local_values
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step of all optimizers. A collective call."""
        loss = None
        if closure is not None:
            with torch.enable_grad(), full_values():
                loss = closure()
        for group, inner in zip(self.param_groups, self._inner_groups, strict=True):
            _copy_options(group, inner)
        with torch.no_grad():
            run_on_groups(self._update.step(), self._process)
        self._has_state = True
        for group, inner in zip(self.param_groups, self._inner_groups, strict=True):
            _copy_options(inner, group)
        self._show_local_state()
        return loss

    @on_local_values
    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, in which state is sharded like the parameters. A collective call."""
        with self.shared_state():
            return super().state_dict()

    @on_local_values
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict. A collective call."""
        super().load_state_dict(state_dict)
        by_name = {self._names[id(parameter)]: values for parameter, values in self.state.items()}
        with torch.no_grad():
            run_on_groups(self._update.load_state(by_name), self._process)
        self._has_state = bool(by_name)
        self._show_local_state()

    @property
    def class_name(self) -> str:
        """Class names of the inner optimizers, such as "Muon+AdamW"."""
        return "+".join(type(optimizer).__name__ for optimizer in self._update.optimizers)

    @contextmanager
    def shared_state(self) -> Iterator[None]:
        """Context manager in which `state` has all optimizer state, sharded like the parameters.

        A collective call.
        """
        with torch.no_grad():
            shared = run_on_groups(self._update.shared_state(), self._process)
        self.state.update({self._parameters[name]: values for name, values in shared.items()})
        try:
            yield
        finally:
            self._show_local_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UsageError, because the owners of tensors are chosen when the optimizer is created."""
        if self._is_complete:
            raise UsageError(
                "a partitioned optimizer takes no further parameter groups",
                why="the ranks that update its tensors were chosen when it was created",
                hint="a new pm.optimizer(...) with all parameters",
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "a partitioned optimizer cannot be pickled or copied",
            why="it holds process groups and tensors of this rank",
            hint="optimizer.state_dict(), or pm.full_optimizer_state_dict(optimizer)",
        )

    def _show_local_state(self) -> None:
        """Set `state` to the state of tensors that are updated as shards. Other tensors get empty entries.

        Without these entries, `state` could be empty, and torch would assume that the optimizer has not run yet.
        """
        state: StateByName = {name: {} for name in self._update.sharded_names} if self._has_state else {}
        state |= self._update.local_state()
        self.state.clear()
        self.state.update({self._parameters[name]: values for name, values in state.items()})


def _copy_options(source: Mapping[str, Any], target: dict[str, Any]) -> None:
    target.update({key: value for key, value in source.items() if key != "params"})
