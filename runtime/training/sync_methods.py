"""Methods of a partitioned model for `dp_sync`, which replaces the all-reduce of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopart.compat.torch_function_internals import on_local_values
from autopart.errors import UsageError
from autopart.ir.program import Program
from autopart.runtime.comm.watchdog import meeting
from autopart.runtime.gradients.gradient_sync import GradientSync, sync_for, with_methods
from autopart.runtime.shards.shard_owners import parameters_of


class SyncMethods:
    """Mixin of `ParallelModule` for `dp_sync`, which replaces the gradient all-reduce over data ranks."""

    _local_parameters: Mapping[str, nn.Parameter]
    _traced: Callable[[str], Program]
    _data_sync: GradientSync
    _program: Program | None
    _reset_executables: Callable[[], None]

    def _adopt_sync(self, program: Program) -> None:
        """Pass a new program to the object that synchronizes data ranks; replace the object if necessary."""
        self._data_sync = sync_for(program, self._data_sync)
        self._data_sync.adopt(program, self._local_parameters)

    def _sync_with_methods(self, program: Program) -> Any:
        """Return the object that runs `dp_sync` methods. Create it if the module has used all-reduce so far."""
        if (sync := with_methods(self._data_sync)) is not self._data_sync:
            self._data_sync = sync
            sync.adopt(program, self._local_parameters)
        return sync

    @on_local_values
    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Register hooks on an optimizer, so that its steps average the models of the data ranks.

        Call it once before the first step with a `dp_sync` that averages models, such as `"gossip:ring"` or
        `"local:16"`. With other settings of `dp_sync` it does nothing. Raises UsageError if the optimizer has no
        parameters of this module.

        Example: `pm.attach(optimizer); pm.step(**batch); optimizer.step()`
        """
        program = self._traced("attach()")
        optimized = set(map(id, parameters_of(optimizer)))
        if not any(id(parameter) in optimized for parameter in self._local_parameters.values()):
            raise UsageError("attach() is called for an optimizer that has none of this module's parameters",
                             hint="optimizer = torch.optim.AdamW(pm.parameters()); pm.attach(optimizer)")  # fmt: skip
        if self._data_sync.changes_models:
            self._sync_with_methods(program).attach(optimizer)

    @on_local_values
    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Register a DDP communication hook that replaces the gradient all-reduce over the data ranks.

        Hooks written for DDP work without changes: `hook(state, bucket)` returns a future of one tensor. The hook runs
        once per step for every bucket of this rank's parameters. Before it runs, gradients are reduced over other axes
        (`cp`) and between copies of tied parameters. If `state` has no process group, the group of the data ranks is
        used. Raises UsageError for a hook that cannot run, OptionError if another `dp_sync` is set.

        Example:
            state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=2)
            pm.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        """
        program = self._traced("register_comm_hook()")
        sync = self._sync_with_methods(program)
        self._program = sync.register_hook(program, self._local_parameters, state, hook)
        self._reset_executables()

    @meeting
    def dp_sync_state_dict(self, data_ranks: int | None = None) -> dict[str, Any]:
        """Return the state of the `dp_sync` methods: {"steps": ..., "name.error": tensor, ...}.

        Save it with the model. `torch.distributed.checkpoint` saves and loads its tensors on any mesh. State that
        differs between data ranks is a tensor of shape [data ranks, *shape]. State that is added to gradients, such as
        compression errors, has the scale of a gradient of one rank's mean loss.

        Args:
            data_ranks: number of data ranks that saved the checkpoint. Pass it if you load on another number of data
                ranks.

        Example:
            torch.distributed.checkpoint.save({"sync": pm.dp_sync_state_dict()}, checkpoint_id="step100")
            state = {"sync": pm.dp_sync_state_dict(data_ranks=4)}  # saved by four data ranks
            torch.distributed.checkpoint.load(state, checkpoint_id="step100")
            pm.load_dp_sync_state_dict(state["sync"])
        """
        result: dict[str, Any] = self._sync_with_methods(self._traced("dp_sync_state_dict()")).state_dict(data_ranks)
        return result

    @meeting
    def load_dp_sync_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `dp_sync_state_dict` has returned. Load the model's state before this call.

        If another number of data ranks saved it, each rank loads the mean over the ranks that saved it. Raises
        CheckpointError if the state does not fit the module's `dp_sync`.
        """
        self._sync_with_methods(self._traced("load_dp_sync_state_dict()")).load_state_dict(state)
