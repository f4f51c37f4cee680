"""`pm.metrics()`: throughput, utilization and memory of training, compared with the plan."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from autopart.runtime.comm.process_mesh import Process


class StepMeter:
    """Counts batches and their time, from the start of a batch to the start of the next one.

    Batches that are traced or compiled, and calls without gradients, are not measured.

    Args:
        num_shards: number of ranks that pass different samples of a batch.

    Attributes:
        batches, samples, tokens: numbers of measured batches, and of samples and tokens in them.
        total_steps, total_samples: numbers of all training steps, and of samples of their global batches. A save
            records them.
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self.total_steps = self.total_samples = self._begun_samples = 0
        self.reset()

    def reset(self) -> None:
        """Forget all measured batches."""
        self.batches = self.samples = self.tokens = 0
        self._sizes, self._seconds = (0, 0), 0.0
        self._start_s: float | None = None

    def begin(self, inputs: Iterable[Any], is_new: bool) -> None:
        """Start to measure a batch, and end the previous one.

        Args:
            inputs: inputs of the call; () for a call without gradients, which is not measured.
            is_new: True if the call is traced or compiled.
        """
        self._end()
        samples, tokens = batch_size(
            (list(t.shape), not t.is_floating_point()) for t in inputs if isinstance(t, Tensor)
        )
        self._begun_samples = samples * self.num_shards
        if samples and not is_new:
            self._sizes, self._start_s = (samples * self.num_shards, tokens * self.num_shards), time.perf_counter()

    def count_step(self) -> None:
        """Count the batch that `begin` started as a training step."""
        self.total_steps, self.total_samples = self.total_steps + 1, self.total_samples + self._begun_samples

    def seconds(self) -> float:
        """Return the seconds of all measured batches, up to now."""
        self._end()
        return self._seconds

    def _end(self) -> None:
        if self._start_s is not None:
            self._seconds += time.perf_counter() - self._start_s
            self.batches += 1
            self.samples, self.tokens = self.samples + self._sizes[0], self.tokens + self._sizes[1]
            self._start_s = None


class MetricsMethods(nn.Module):
    """Method `metrics` of a partitioned model."""

    _process: Process
    _meter: StepMeter
    plan: Any

    def metrics(self) -> dict[str, float]:
        """Return figures of the training steps since the previous call, in SI units.

        Call it after `optimizer.step()`. The time of a step includes the optimizer, data loading and everything else in
        the loop. Entries that are unknown are left out:

        - `steps`, `step_time_s`, `samples_per_s`, `tokens_per_s` of the global batch.
        - `tflops_per_device`, `mfu`: model FLOP/s, and their share of the peak of the plan's hardware.
        - `predicted_step_time_s`: the plan's prediction, if all batches have the size of the planned batch.
        - `memory_bytes`: peak memory of this rank, on a GPU. `planned_memory_bytes`: the plan's prediction of it.
        """
        meter, device = self._meter, self._process.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds, plan = meter.seconds(), self.plan
        figures: dict[str, float] = {"steps": meter.batches}
        if meter.batches and seconds:
            figures["step_time_s"] = seconds / meter.batches
            figures["samples_per_s"] = meter.samples / seconds
            if meter.tokens:
                figures["tokens_per_s"] = meter.tokens / seconds
            figures |= _compared(plan, meter, seconds, self._process.mesh.num_ranks)
        if device.type == "cuda":
            figures["memory_bytes"] = torch.cuda.max_memory_allocated(device)
        if plan.memory:
            figures["planned_memory_bytes"] = plan.memory[self._process.pp]["total"]
        meter.reset()
        return figures


def _compared(plan: Any, meter: StepMeter, seconds: float, num_ranks: int) -> dict[str, float]:
    """Return utilization and predicted time, from the plan's FLOPs.

    For batches of other sizes than the planned batch, FLOPs are scaled by the number of tokens.
    """
    forward_flops, samples, tokens = plan.timing.get("forward_flops"), *batch_size(_shapes(plan))
    if not forward_flops or not samples:
        return {}
    share = meter.tokens / tokens if tokens and meter.tokens else meter.samples / samples
    flops_per_s = 3.0 * forward_flops * share / seconds / num_ranks
    figures = {"tflops_per_device": flops_per_s / 1e12}
    if plan.timing.get("peak_flops_per_s"):
        figures["mfu"] = flops_per_s / plan.timing["peak_flops_per_s"]
    if "step_time_s" in plan.cost and meter.samples == samples * meter.batches and share == meter.batches:
        figures["predicted_step_time_s"] = plan.cost["step_time_s"]
    return figures


def _shapes(plan: Any) -> Iterable[tuple[list[int], bool]]:
    return [([int(size) for size in i["shape"]], str(i["dtype"]).startswith("int")) for i in plan.inputs.values()]


def batch_size(shapes: Iterable[tuple[list[int], bool]]) -> tuple[int, int]:
    """Return (samples, tokens) of inputs, which are passed as (shape, True if the dtype is integer).

    The number of tokens is the number of entries of the first integer input with two dims; 0 if there is none.
    """
    shapes = [(shape, is_integer) for shape, is_integer in shapes if shape]
    samples = shapes[0][0][0] if shapes else 0
    tokens = next((shape[0] * shape[1] for shape, is_integer in shapes if is_integer and len(shape) == 2), 0)
    return samples, tokens
