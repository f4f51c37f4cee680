"""Gather the global batch if every rank passes only its own samples (`local_batch=True`).

A stage's prologue is the graph that computes masks, positions and label counts from the global batch. Inputs that a
prologue computes with, such as tokens and labels, are therefore all-gathered over the data ranks. Inputs that a
prologue only splits into samples, such as images in most models, stay local.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from autopart.ir.program import Program
from autopart.ir.run.weight_updates import RowNorms
from autopart.ir.sharding import DimSharding
from autopart.runtime.batch.batch_split import LocalSamples
from autopart.runtime.batch.local_outputs import as_loss_terms, kind_of
from autopart.runtime.comm.collectives import PRIMITIVES
from autopart.runtime.comm.process_mesh import Process


def globally_used_inputs(program: Program) -> frozenset[str]:
    """Return the names of the inputs that must be all-gathered: every rank needs all samples of them.

    A prologue (the graph that runs on the global batch) computes masks or positions from such an input, or the input
    selects embedding rows to renormalise (`max_norm`). All other inputs are only split into samples.
    """
    tables = (update for update in program.weight_updates.values() if isinstance(update, RowNorms))
    used = {program.input_names[position] for table in tables for position in table.reads}
    for stage in program.stages:
        graph = stage.prologue.graph
        outputs: Any = graph.output_node().args[0]
        split_outputs = {index for index, one in enumerate(stage.inputs) if one.batch_dim == 0 and not one.sections}
        global_outputs = {output for index, output in enumerate(outputs) if index not in split_outputs}
        for name, node in zip(program.input_names, graph.find_nodes(op="placeholder"), strict=False):
            if node in global_outputs or any(user.op != "output" for user in node.users):
                used.add(name)
    return frozenset(used)


class LocalBatch:
    """Gathers inputs, and adapts outputs, of one program with `local_batch=True`."""

    def __init__(self, program: Program, process: Process):
        assert program.row_inputs is None or not program.copied, "rows of equal number divide over the ranks"
        self.program, self.process = program, process
        rows = program.row_inputs or frozenset()
        self.axes = program.mesh.along("rows")
        self.gathered_inputs = rows & globally_used_inputs(program) if self.axes else frozenset()
        self.local_inputs = rows - self.gathered_inputs if self.axes else frozenset()

    @property
    def is_communicated(self) -> bool:
        """True if a call gathers any input."""
        return bool(self.gathered_inputs)

    def gather_batch(self, inputs: Sequence[Any]) -> list[Any]:
        """All-gather the inputs of a call that every rank needs in full. Return all inputs.

        Inputs that stay local become `LocalSamples`.
        """
        named = dict(zip(self.program.input_names, inputs, strict=True))
        names = [name for name in named if name in self.gathered_inputs]
        gathered = dict(zip(names, self._gathered([named[name] for name in names]), strict=True))
        own_rows = {name: LocalSamples(named[name]) for name in self.local_inputs}
        return [gathered.get(name, own_rows.get(name, value)) for name, value in named.items()]

    def as_loss_terms(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Adapt outputs so that each rank can compute one term of the loss from them, for its own samples.

        The backward of the returned outputs sums the gradients of replicated outputs over the data ranks.
        """
        if self.program.row_inputs is None or not self.axes or not torch.is_grad_enabled():
            return list(outputs)
        kinds = {o.position: kind_of(o, self.program, self.axes) for o in self.program.outputs}
        groups = [self.process.groups[axis] for axis in self.axes]
        weight = 1 / self.process.mesh.data_parallel_size if self.process.averages_losses else 1.0
        return as_loss_terms(outputs, [kinds[position] for position in range(len(outputs))], groups, weight)

    def _gathered(self, parts: Sequence[Tensor]) -> list[Tensor]:
        if not parts:
            return []
        values = _gather([part.detach() for part in parts], self.axes, self.process)
        index = self.process.mesh.row_index(self.process.coordinates)

        def gather(rows: Tensor) -> Tensor:
            return _gather([rows.detach()], self.axes, self.process)[0]

        return [
            _GlobalValue.apply(part, value, index, gather) if part.requires_grad and torch.is_grad_enabled() else value
            for part, value in zip(parts, values, strict=True)
        ]


def _gather(parts: Sequence[Tensor], axes: Sequence[str], process: Process) -> list[Tensor]:
    """All-gather the samples of each tensor in rank order.

    The bytes of all tensors are packed into one vector, so that each mesh axis needs only one all-gather.
    """
    packed = torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in parts])
    rows, gathered = 1, packed
    for axis in reversed(axes):  # innermost axis first, because its ranks are adjacent
        size = process.mesh.size(axis)
        cut = DimSharding(0, gathered.numel() * size, (), size)
        gathered = PRIMITIVES["all_gather"](gathered, process.groups[axis].group_name, cut)
        rows *= size
    columns = gathered.view(rows, -1).split([part.nbytes for part in parts], dim=1)
    return [
        column.contiguous().reshape(-1).view(part.dtype).view(rows * part.size(0), *part.shape[1:])
        for column, part in zip(columns, parts, strict=True)
    ]


class _GlobalValue(Function):
    """Autograd function: return the all-gathered tensor `whole` in place of the local input.

    Its backward returns the part of the gradient that belongs to the local samples.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor, index: int, gather: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.rows, ctx.index, ctx.gather = part.size(0), index, gather
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _LocalSlice.apply(grad, ctx.rows, ctx.index, ctx.gather), None, None, None


class _LocalSlice(Function):
    """Autograd function: take this rank's samples of a gathered tensor. Backward all-gathers gradients."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, rows: int, index: int, gather: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.index, ctx.gather = index, gather
        return whole.narrow(0, index * rows, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _GlobalValue.apply(grad, ctx.gather(grad), ctx.index, ctx.gather), None, None, None
