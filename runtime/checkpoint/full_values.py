"""Full weights and gradients of a partitioned model, gathered on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from autopart.ir.program import Program
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.comm.stage_ranks import stage_style_of
from autopart.runtime.comm.watchdog import meeting
from autopart.runtime.consistency.replicas import Replicas
from autopart.runtime.gradients.gradient_sync import GradientSync
from autopart.runtime.gradients.no_sync import check_reduced
from autopart.runtime.shards.shard_state import gather, names_with_gradient
from autopart.tracing.meta_copy import Source


class FullValueMethods:
    """Methods of a module that gather its full weights and gradients."""

    _process: Process
    _source: Source
    _schedule: str | None
    _traced: Callable[[str], Program]
    _replicas: Replicas
    _data_sync: GradientSync
    _local_parameters: dict[str, nn.Parameter]
    _local_buffers: dict[str, Tensor]
    _extra_state: dict[str, Any]

    @meeting
    def full_state_dict(self) -> dict[str, Any]:
        """Return the original model's `state_dict` with full tensors, on every rank. A collective call."""
        program = self._traced("full_state_dict")
        self._replicas.check_before("full_state_dict", program, self._local_parameters)
        stage_style = stage_style_of(self._schedule)
        local = self._data_sync.replica_mean(self._local_parameters)
        gathered = gather(local, program, self._process, stage_style, list(program.parameters))
        stored_name = program.stored_names
        result: dict[str, Any] = {}
        for name, value in self._source.model.state_dict().items():
            if name in stored_name:
                result[name] = gathered[stored_name[name]]
            elif isinstance(value, Tensor):
                result[name] = self._local_buffers.get(name, value).detach().to(self._process.device, copy=True)
            else:
                result[name] = self._extra_state.get(name, value)
        return result

    @meeting
    def full_grads(self) -> dict[str, Tensor]:
        """Return {name: full gradient} on every rank. A collective call.

        The names are as in the model's `named_parameters`. Parameters without a gradient are left out.
        """
        program = self._traced("full_grads")
        check_reduced(self._process, "full_grads()")
        self._data_sync.check_gradients("full_grads()")
        stage_style = stage_style_of(self._schedule)
        present = names_with_gradient(self._local_parameters, program, self._process, stage_style)
        grads = {name: p.grad for name, p in self._local_parameters.items() if p.grad is not None}
        gathered = gather(grads, program, self._process, stage_style, present)
        stored_name = program.stored_names
        names = [name for name, _ in self._source.model.named_parameters()]
        return {name: gathered[stored_name[name]] for name in names if stored_name.get(name) in gathered}
