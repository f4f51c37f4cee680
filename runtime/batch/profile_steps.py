"""`pm.profile`: measured training steps as a trace file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from autopart.common.files import write_whole
from autopart.errors import OptionError
from autopart.ir.run.report_terms import MEASURED_STEP
from autopart.runtime.comm.process_mesh import Process


class ProfileMethods(nn.Module):
    """The method `profile` of a partitioned model."""

    _process: Process
    step: Any

    def profile(self, path: str | Path, *args: Any, steps: int = 3, **kwargs: Any) -> Path:
        """Measure training steps with torch.profiler, and write them in the Chrome trace format.

        A collective call. Each rank runs one step to warm up, then `steps` steps, all on one batch, and drops their
        gradients. Optimizers do not run. `autopart compare plan.json trace.json` compares the trace with the
        prediction. Names are those of `Simulation.save_trace`: `forward 0`, `backward 0`.

        Args:
            path: trace file of rank 0. Rank 3 writes `trace.rank3.json` next to `trace.json`.
            steps: number of measured steps.
            *args, **kwargs: arguments of `step`: the global batch.
        Returns the path of this rank's file. Raises OptionError if it cannot be written.
        """
        path = Path(path) if self._process.rank == 0 else Path(path).with_suffix(f".rank{self._process.rank}.json")
        before = {parameter: parameter.grad for parameter in self.parameters()}
        on_gpu = self._process.device.type == "cuda"
        for parameter in before:
            parameter.grad = None
        try:
            self.step(*args, **kwargs)
            with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
                for _ in range(steps):
                    with record_function(MEASURED_STEP):
                        self.step(*args, **kwargs)
                        if on_gpu:
                            torch.cuda.synchronize()
        finally:
            for parameter, grad in before.items():
                parameter.grad = grad
        try:
            profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
            trace["distributedInfo"] = {**trace.get("distributedInfo", {}), "rank": self._process.rank}
            write_whole(path, json.dumps(trace))
        except OSError as error:
            raise OptionError(f"cannot write the trace to {path}", why=error.strerror or str(error)) from error
        return path
