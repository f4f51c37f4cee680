"""A training step of this rank: microbatches, pipeline, and the reduction of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopart.extras.code_export.package_collectives import COORDINATES, GROUPS, device
from autopart.extras.code_export.package_sharding import DimSharding, shard_sizes


class Trainer:
    """The program of this rank.

    Args:
        settings: the module `settings`: mesh, microbatches, and how gradients are reduced.
        stage: the module of this rank's pipeline stage.
        weights: {name: this rank's parameter or buffer}.
    """

    def __init__(self, settings: Any, stage: ModuleType | Any, weights: Mapping[str, Tensor]):
        self.settings, self.stage, self.weights = settings, stage, dict(weights)
        self.first = stage.INDEX == 0
        self.last = stage.INDEX == settings.NUM_STAGES - 1

    def parameters(self) -> list[Tensor]:
        """Return this rank's shards of the parameters that are trained."""
        return [self.weights[name] for name in self.stage.PARAMETERS if self.weights[name].requires_grad]

    def step(self, batch: Mapping[str, Any]) -> float:
        """Run forward and backward of one global batch, and reduce gradients. Return the loss of the batch.

        Args:
            batch: {name: input of the model}, equal on every rank.
        """
        inputs = [*(batch[name] for name in self.settings.INPUTS), *self.settings.SIZES]
        arguments = self._split(self.stage.prologue(self.weights, *inputs))
        losses = self._pipeline(arguments)
        self._reduce_gradients()
        return self._loss(losses)

    # --- The batch

    def _split(self, values: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the keyword arguments of the stage for each microbatch, given those of the global batch."""
        count = self.settings.MICROBATCHES
        index = 0
        for axis in self.settings.BATCH_AXES:
            index = index * self.settings.MESH[axis] + COORDINATES[axis]
        index %= self.settings.BATCH_SHARDS
        arguments: list[dict[str, Any]] = [{} for _ in range(count)]
        for (name, dim, sections), value in zip(self.stage.INPUTS, values, strict=True):
            blocks = [value] * count
            if dim is not None and isinstance(value, Tensor):
                local = _block(value, dim, sections, self.settings.BATCH_SHARDS, index)
                if len(sections) > 1:
                    sections = tuple(size // self.settings.BATCH_SHARDS for size in sections)
                blocks = [_block(local, dim, sections, count, number) for number in range(count)]
            for named, block in zip(arguments, blocks, strict=True):
                named[name] = block
        return arguments

    # --- Forward and backward

    def _pipeline(self, arguments: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Run all microbatches in the order of 1F1B, and return the losses of the last stage.

        A stage first runs as many forwards as stages follow it. It then alternates forwards and backwards, so that it
        never stores the activations of more microbatches than there are stages. With one stage, each backward follows
        its forward.
        """
        count = len(arguments)
        warmup = min(self.settings.NUM_STAGES - 1 - self.stage.INDEX, count)
        losses: list[Tensor] = []
        running: list[tuple[list[Tensor], tuple[Tensor, ...]]] = []
        sends: list[tuple[dist.Work | None, Tensor]] = []

        def forward(number: int) -> None:
            received = [] if self.first else [self._receive(spec) for spec in self.stage.RECEIVES]
            outputs = self.stage.forward(self.weights, *received, **arguments[number])
            if self.last:
                losses.append(outputs[0].detach())
                outputs = outputs[:1]
            for output in () if self.last else outputs:
                sends.append(_send(output.detach(), "pp", self.stage.INDEX + 1))
            running.append((received, outputs))

        def backward() -> None:
            received, outputs = running.pop(0)
            if self.last:
                outputs[0].backward()
            else:
                grads = [_receive_tensor(output.shape, output, "pp backward", self.stage.INDEX + 1)
                         for output in outputs]  # fmt: skip
                pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
                torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
            for value in received:
                grad = torch.zeros_like(value) if value.grad is None else value.grad
                sends.append(_send(grad, "pp backward", self.stage.INDEX - 1))

        for number in range(warmup):
            forward(number)
        for number in range(warmup, count):
            forward(number)
            backward()
        for _ in range(warmup):
            backward()
        for work, _ in sends:
            if work is not None:
                work.wait()
        return losses

    def _receive(self, spec: tuple[tuple[int, ...], torch.dtype]) -> Tensor:
        shape, dtype = spec
        like = torch.empty((), dtype=dtype, device=device())
        return _receive_tensor(shape, like, "pp", self.stage.INDEX - 1).requires_grad_(dtype.is_floating_point)

    # --- After the backward

    def _reduce_gradients(self) -> None:
        """Sum gradients over the axes on which they are partial, and those of weights that stages share."""
        for name, axes in self.stage.REDUCED.items():
            grad = self.weights[name].grad
            if grad is None:
                continue
            flat = grad if self.settings.REDUCE_DTYPE is None else grad.to(self.settings.REDUCE_DTYPE)
            for axis in axes:
                dist.all_reduce(flat, group=GROUPS[axis])
            grad.copy_(flat)
        for name, stages in self.settings.TIED.items():
            if name in self.weights and self.stage.INDEX in stages and self.weights[name].requires_grad:
                parameter = self.weights[name]
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = _sum_over_stages(grad, stages, self.stage.INDEX)

    def _loss(self, losses: Sequence[Tensor]) -> float:
        """Return the loss of the global batch on every rank."""
        total = torch.zeros((), dtype=self.settings.LOSS_DTYPE, device=device())
        if self.last:
            total = torch.stack(list(losses)).sum(0) if self.settings.LOSS_IS_SUM else losses[-1].clone()
            for axis in self.settings.LOSS_AXES:
                dist.all_reduce(total, group=GROUPS[axis])
        if "pp" in GROUPS:
            dist.broadcast(total, group=GROUPS["pp"], group_src=self.settings.NUM_STAGES - 1)
        return float(total)


def _block(value: Tensor, dim: int, sections: tuple[int, ...], count: int, index: int) -> Tensor:
    """Return block `index` of `count` blocks of samples."""
    if sections:
        return DimSharding(dim, value.size(dim), sections, count).take(value, index)
    sizes = shard_sizes(value.size(dim), count)
    return value.narrow(dim, sum(sizes[:index]), sizes[index]).contiguous()


def _send(value: Tensor, axis: str, stage: int) -> tuple[dist.Work | None, Tensor]:
    value = value.contiguous()
    return dist.isend(value, group=GROUPS[axis], group_dst=stage), value


def _receive_tensor(shape: Sequence[int], like: Tensor, axis: str, stage: int) -> Tensor:
    value = torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    dist.recv(value, group=GROUPS[axis], group_src=stage)
    return value


def _sum_over_stages(grad: Tensor, stages: Sequence[int], mine: int) -> Tensor:
    """Sum gradients over stages: each stage sends to the first one, which sends the sum back."""
    first, *others = stages
    grad = grad.contiguous()
    if mine == first:
        for stage in others:
            grad = grad + _receive_tensor(grad.shape, grad, "pp", stage)
        for stage in others:
            dist.send(grad, group=GROUPS["pp"], group_dst=stage)
        return grad
    dist.send(grad, group=GROUPS["pp"], group_dst=first)
    return _receive_tensor(grad.shape, grad, "pp", first)
