"""Command `autopart run`: train a partitioned model for some steps, optionally also the plain model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import Tensor, nn

from autopart.api import parallelize
from autopart.cli.console import rank, tell
from autopart.common.model_outputs import loss_entry
from autopart.compat.torch_internals import tree_map
from autopart.ir.mesh import Mesh
from autopart.ir.trace import device_of_weights
from autopart.plans.plan import Plan
from autopart.recipe.model_source import ModelSource


@contextmanager
def ending_processes() -> Iterator[None]:
    """Destroy the process group at the end of a `with` block, even after an error."""
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@dataclass
class TrainingRun:
    """Training of a model for `steps` AdamW steps on one batch.

    The first rank prints each step, or one JSON object at the end.
    """

    source: ModelSource
    mesh: Mesh
    plan: Plan | None
    options: Mapping[str, Any]
    steps: int
    learning_rate: float
    compare: bool
    as_json: bool

    def run(self) -> None:
        if self.compare:
            self.source.model.eval()
        with ending_processes():
            self._train()

    def _train(self) -> None:
        model, example = self.source.model, self.source.example
        assert example is not None
        parallel = parallelize(model, self.mesh, example_kwargs=example, plan=self.plan, **self.options)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=self.learning_rate)
        first = rank() == 0
        plain = None
        if self.compare and first:
            plain = _Plain(deepcopy(model).to(parallel.device), example, self.learning_rate)
        name, schedule = type(model).__name__, parallel.plan.schedule.name
        if first:
            text = f"{name} on {self.mesh}{f', {schedule}' if schedule else ''}, {parallel.device.type}"
            click.echo(text, err=self.as_json)
        rows: list[dict[str, Any]] = []
        for step in range(1, self.steps + 1):
            start_s = time.perf_counter()
            optimizer.zero_grad()
            loss = float(parallel.step(**example))
            optimizer.step()
            if parallel.device.type == "cuda":
                torch.cuda.synchronize(parallel.device)
            rows.append({"step": step, "loss": loss, "seconds": time.perf_counter() - start_s})
            if plain is not None:
                rows[-1]["plain_loss"] = plain.step()
            if first:
                click.echo(_line(rows[-1]), err=self.as_json)
        if first and self.as_json:
            tell(True, {"model": name, "mesh": str(self.mesh), "device": parallel.device.type, "steps": rows}, "")


def _line(row: Mapping[str, Any]) -> str:
    line = f"step {row['step']:<4} loss {row['loss']:.6f}   {row['seconds']:.3f} s"
    if "plain_loss" in row:
        line += f"   plain model {row['plain_loss']:.6f}   difference {abs(row['loss'] - row['plain_loss']):.1e}"
    return line


class _Plain:
    """The unpartitioned model, trained on one device as the reference."""

    def __init__(self, model: nn.Module, example: Mapping[str, Any], rate: float):
        device = device_of_weights(model)
        self.model = model
        self.example = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, dict(example))
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = loss_entry(self.model(**self.example))
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())
