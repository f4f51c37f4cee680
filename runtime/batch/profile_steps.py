"""`pm.profile`: measured training steps as a trace file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from autopart.common.files import write_whole
from autopart.errors import OptionError, UsageError
from autopart.ir.run.report_terms import MEASURED_STEP
from autopart.runtime.batch.step_metrics import StepMeter
from autopart.runtime.comm.call_random import random_states, restore_random_states
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.gradients.no_sync import check_reduced


class ProfileMethods(nn.Module):
    """The method `profile` of a partitioned model."""

    _process: Process
    _meter: StepMeter
    _in_flight: Any
    _loss_scaling: Any
    step: Any

    def profile(self, path: str | Path, *args: Any, steps: int = 3, **kwargs: Any) -> Path:
        """Measure training steps with torch.profiler, and write them in the Chrome trace format.

        A collective call. Each rank runs one step to warm up, then `steps` steps, all on one batch. Optimizers do not
        run. Gradients, buffers, random state and loss scale are then as before. Numbers that `forward` changes, such as
        a step counter, do advance. `autopart compare plan.json trace.json` compares the trace with the prediction.
        Names are those of `Simulation.save_trace`: `forward 0`, `backward 0`.

        Args:
            path: trace file of rank 0. Rank 3 writes `trace.rank3.json` next to `trace.json`.
            steps: number of measured steps.
            *args, **kwargs: arguments of `step`: the global batch.
        Returns the path of this rank's file. Raises OptionError if it cannot be written, UsageError within gradient
        accumulation (`no_sync`) and for the schedule 1f1b_2bw.
        """
        check_reduced(self._process, "profile()")
        if self._in_flight.needs_own_programs:
            raise UsageError(
                "profile() does not work with schedule='1f1b_2bw'",
                why="a step returns before its gradients are complete, so they cannot be dropped",
                hint="profile the same plan with schedule='1f1b'",
            )
        path = Path(path) if self._process.rank == 0 else Path(path).with_suffix(f".rank{self._process.rank}.json")
        on_gpu = self._process.device.type == "cuda"
        with self._training_state_kept():
            self.step(*args, **kwargs)
            with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
                for _ in range(steps):
                    with record_function(MEASURED_STEP):
                        self.step(*args, **kwargs)
                        if on_gpu:
                            torch.cuda.synchronize()
        try:
            profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
            trace["distributedInfo"] = {**trace.get("distributedInfo", {}), "rank": self._process.rank}
            write_whole(path, json.dumps(trace))
        except OSError as error:
            raise OptionError(f"cannot write the trace to {path}", why=error.strerror or str(error)) from error
        return path

    @contextmanager
    def _training_state_kept(self) -> Iterator[None]:
        """Context manager that restores what a training step changes, except for Python numbers of the model."""
        self._meter.seconds()  # the steps do not count in `metrics`
        meter, scaling = dict(vars(self._meter)), self._loss_scaling
        scale = None if scaling is None else dict(vars(scaling))
        grads = {parameter: parameter.grad for parameter in self.parameters()}
        buffers = {buffer: buffer.clone() for buffer in self.buffers()}
        random = random_states(self._process.device)
        for parameter in grads:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, grad in grads.items():
                parameter.grad = grad
            for buffer, value in buffers.items():
                buffer.copy_(value)
            restore_random_states(random)
            vars(self._meter).update(meter)
            if scale is not None:
                vars(scaling).update(scale)
