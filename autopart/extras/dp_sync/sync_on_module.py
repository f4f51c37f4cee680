"""Methods of a partitioned module for `dp_sync`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopart.compat.torch_function_internals import on_local_values
from autopart.errors import OptionError, UsageError
from autopart.extras.dp_sync.data_sync import DataSync
from autopart.extras.dp_sync.ddp_hooks import Hook, check_hook
from autopart.extras.dp_sync.sync_checkpoint import load_state, state_of
from autopart.extras.dp_sync.sync_options import HOOK
from autopart.ir.layout import mesh_axes_of
from autopart.ir.program import Program
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.comm.watchdog import meeting
from autopart.runtime.shards.shard_owners import parameters_of


class SyncsData:
    """Mixin of `ParallelModule` for data-parallel communication other than an all-reduce of gradients."""

    _process: Process
    _local_parameters: Mapping[str, nn.Parameter]
    _traced: Callable[[str], Any]
    _data_sync: DataSync
    _program: Program | None
    _reset_executables: Callable[[], None]

    @on_local_values
    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Hook this optimizer's steps to average the replicas.

        Needed for `"gossip:ring"`, `"local:16"` and other methods of models, once, before the first step. With other
        methods it does nothing. Raises UsageError for an optimizer of other parameters.

        Example: `pm.attach(optimizer); pm.step(**batch); optimizer.step()`
        """
        self._traced("attach()")
        optimized = set(map(id, parameters_of(optimizer)))
        if not any(id(parameter) in optimized for parameter in self._local_parameters.values()):
            raise UsageError("attach() of an optimizer that has none of this module's parameters",
                             hint="optimizer = torch.optim.AdamW(pm.parameters()); pm.attach(optimizer)")  # fmt: skip
        if self._data_sync.changes_models:
            if self._data_sync.is_attached:
                raise UsageError("attach() of a second optimizer", why="replicas would be averaged twice",
                                 hint="one optimizer for all parameters")  # fmt: skip
            self._data_sync.attach(optimizer)

    @on_local_values
    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Register a DDP communication hook that replaces the gradient all-reduce over the data ranks.

        The hook is unchanged: `hook(state, bucket)` returns a future of one tensor. It runs once a step for every
        bucket of this rank's parameters, after their gradients are reduced over other axes (`cp`, tied parameters). A
        state, or `process_group`, without a group gets that of the data ranks. Raises UsageError for a hook that cannot
        run, OptionError in addition to another `dp_sync`.

        Example:
            state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=2)
            pm.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        """
        program = self._traced("register_comm_hook()")
        check_hook(hook, state)
        if self._data_sync.hook is not None:
            raise UsageError("a second communication hook", why="each would reduce the gradients",
                             hint="one hook that does both")  # fmt: skip
        if not program.dp_sync.is_default:
            raise OptionError(f"a communication hook with dp_sync='{program.dp_sync}'", hint="one of the two",
                              why="both define what data-parallel ranks send each other")  # fmt: skip
        axis = next(iter(program.mesh.along("rows")), "")
        if not axis:
            raise UsageError(f"a communication hook on {program.mesh}", why="it has no data-parallel ranks",
                             hint="a mesh with dp: 'dp2'")  # fmt: skip
        zero_axis_of = {name: program.mesh.stored_over(stored.layout) for name, stored in program.parameters.items()}
        sharded = [name for name, axes in zero_axis_of.items() if axes is not None and axis in mesh_axes_of(axes)]
        if sharded:
            raise OptionError(f"a communication hook with parameters stored sharded over {axis}",
                              why=f"the gradient of '{sharded[0]}' is reduce-scattered",
                              hint="zero=0, or a mesh 'dpr2,dp2': shards over dp, the hook over dpr")  # fmt: skip
        hooked = {name: replace(stored, method=HOOK if axis in stored.grad_axes else None)
                  for name, stored in program.parameters.items()}  # fmt: skip
        self._program = replace(program, parameters=hooked)
        self._reset_executables()
        self._data_sync.adopt(self._program, self._local_parameters)
        self._data_sync.register_hook(state, hook)

    @meeting
    def dp_sync_state_dict(self, data_ranks: int | None = None) -> dict[str, Any]:
        """Return the state of the `dp_sync` methods: {"steps": ..., "name.error": tensor, ...}.

        Save it with the model. `torch.distributed.checkpoint` saves and loads its tensors on any mesh. State that
        differs between data ranks is [data ranks, *shape]. State of gradients is in units of a rank's mean gradient.

        Args:
            data_ranks: number of data ranks that saved the checkpoint, to load it on another number.

        Example:
            torch.distributed.checkpoint.save({"sync": pm.dp_sync_state_dict()}, checkpoint_id="step100")
            state = {"sync": pm.dp_sync_state_dict(data_ranks=4)}  # saved by four data ranks
            torch.distributed.checkpoint.load(state, checkpoint_id="step100")
            pm.load_dp_sync_state_dict(state["sync"])
        """
        self._traced("dp_sync_state_dict()")
        return state_of(self._data_sync, data_ranks)

    @meeting
    def load_dp_sync_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `dp_sync_state_dict`, after the model's state.

        If another number of data ranks saved it, each rank takes the mean of all. Raises CheckpointError if it does not
        fit.
        """
        self._traced("load_dp_sync_state_dict()")
        load_state(self._data_sync, state)

    def process_group(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's process group along a mesh axis. Raises UsageError if the axis has one rank."""
        if axis not in self._process.groups:
            raise UsageError(f"no process group of axis '{axis}'", why=f"the mesh is {self._process.mesh}",
                             hint=f"one of {', '.join(self._process.groups) or 'none: there is one rank'}")  # fmt: skip
        return self._process.groups[axis]
