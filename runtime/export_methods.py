"""`pm.export`: the program of a partitioned model as a Python package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autopart.compat.torch_function_internals import on_local_values
from autopart.errors import AutopartError, PlanError
from autopart.ir.program import Program
from autopart.plans.code_package import code_export
from autopart.runtime.comm.process_mesh import Process, is_on_any_rank
from autopart.runtime.comm.watchdog import meeting
from autopart.runtime.training.layer_modes import LayerModes


class ExportMethods:
    """The method `export` of a partitioned model."""

    training: bool
    _compiler: Any
    _modes: LayerModes
    _process: Process
    _traced: Callable[[str], Program]
    _local_parameters: dict[str, nn.Parameter]
    _local_buffers: dict[str, Tensor]

    @meeting
    @on_local_values
    def export(
        self, folder: str | Path, *, example_args: tuple = (), example_kwargs: Mapping[str, Any] | None = None
    ) -> Path:  # fmt: skip
        """Write the training program as a Python package of plain tensors and `torch.distributed` calls.

        `torchrun folder/run.py` trains the package without autopart, from the current weights, with equal losses. Every
        rank must call it, with a folder that all ranks share. Returns the folder, when all ranks have written.

        Args:
            folder: a new or empty folder, or an exported package to overwrite.
            example_args, example_kwargs: the global batch that `run.py` trains on.  [default: no batch is saved, and
                the package is for the model's last training call or its example]
        Raises PlanError if the program has a part that exported code does not support, such as dropout.

        Example:
            pm.export("llama_tp2", example_kwargs=batch)
        """
        self._traced("export()")
        has_batch = bool(example_args) or example_kwargs is not None
        if has_batch:
            program, inputs = self._compiler.program(
                example_args, example_kwargs or {}, purpose="step", training=self.training,
                settings=self._modes.settings,
            )  # fmt: skip
        else:
            program, inputs = self._compiler.training_program(), None
        problem: Exception | None = None
        try:
            code_export().export_module(
                Path(folder), self._process.rank, program, self._compiler.plan, self._local_parameters,
                self._local_buffers, inputs,
            )  # fmt: skip
        except (AutopartError, OSError) as error:
            problem = error
        has_failed = is_on_any_rank(problem is not None, self._process)  # waits until all ranks have written
        if problem is not None:
            raise problem
        if has_failed:
            raise PlanError(f"cannot export to {folder}", why="another rank failed", hint="see the error of that rank")
        return Path(folder)
