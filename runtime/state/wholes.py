"""ZeRO 1 and 2: the whole of a parameter that a rank stores in parts lives from a step's beginning to its end.

The graphs of stages gather a parameter where they read it. With `zero=3` they do so, and hold the whole for as long as
it is used. Here it is gathered once, in buckets, when a call begins; the graphs read it, and autograd adds to its
gradient, as if it were stored whole. With `zero=1` that gradient is scattered once, when all microbatches have added to
it; with `zero=2` after each one. What optimizers see are the parts. (Rajbhandari et al. 2020, arXiv:1910.02054,
sections 5.1 and 5.2.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopart.ir.operators import axis_of, operator_name
from autopart.ir.program import Program, Stage
from autopart.runtime.comm.pieces import Cut
from autopart.runtime.comm.processes import Process
from autopart.runtime.state.gradients import BUCKET_BYTES
from autopart.runtime.state.part_buckets import PartBucket, Stored, part_buckets

GATHERS = {"all_gather": False, "all_gather_sum": True}
"""{operator that gathers: whether its backward sums}."""


def held_whole(program: Program, stages: Sequence[Stage]) -> dict[str, tuple[Any, ...]]:
    """{parameter: the operator that gathers it, and its arguments} of those whose whole lives for a step: all that these
    stages read in one way, whole over the axis that stores parameters."""
    if program.zero not in (1, 2):
        return {}
    read: dict[str, set[tuple[Any, ...] | None]] = {}
    for node in (node for stage in stages for node in stage.graph.graph.nodes if node.op == "get_attr"):
        for user in node.users:
            gathers = operator_name(user) in GATHERS and axis_of(user) == program.mesh.data_axis
            dim, size, sections = user.args[2:] if gathers else (0, 0, ())
            way = (operator_name(user), dim, size, tuple(sections)) if gathers else None
            read.setdefault(str(node.target), set()).add(way)
    return {name: way for name, ways in read.items() if len(ways) == 1 and (way := next(iter(ways))) is not None}


class Wholes:
    """The whole parameters of a program's stages on this rank; between calls they have no memory.

    `parameters`: {name: the whole}, for graphs to read. `parts`: {name: this rank's part}.
    """

    def __init__(self, program: Program, stages: Sequence[Stage], process: Process, parts: Mapping[str, Tensor]):
        read = held_whole(program, stages)
        self.parts = {name: parts[name] for name in read}
        self.every_microbatch = program.zero == 2
        self.parameters: dict[str, nn.Parameter] = {}
        self.buckets: list[PartBucket] = []
        if not read:
            return
        group = process.groups[program.mesh.data_axis]
        stored = {}
        for name, (operator, dim, size, sections) in read.items():
            part = self.parts[name]
            shape = (*part.shape[:dim], size, *part.shape[dim + 1 :])
            stored[name] = Stored(name, shape, Cut(dim, size, sections, group.size()), part.dtype, GATHERS[operator])
            whole = nn.Parameter(part.new_empty(shape), requires_grad=part.requires_grad)
            whole.untyped_storage().resize_(0)
            self.parameters[name] = whole
        self.buckets = part_buckets(stored, group, BUCKET_BYTES)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, the whole parameters have their values."""
        try:
            waits = [self._gather(bucket) for bucket in self.buckets]
            for wait in waits:
                wait()
            yield
        finally:
            for whole in self.parameters.values():
                whole.grad = None
                whole.untyped_storage().resize_(0)

    def _gather(self, bucket: PartBucket) -> Any:
        wholes = [self.parameters[name] for name in bucket.names]
        for name, whole in zip(bucket.names, wholes, strict=True):
            whole.requires_grad_(self.parts[name].requires_grad)
            whole.untyped_storage().resize_(whole.nbytes)
        with torch.no_grad():
            return bucket.gather([self.parts[name].detach() for name in bucket.names], [w.detach() for w in wholes])

    def stand_ins(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Wholes of these parts for one differentiable call, whose backward scatters their gradients."""
        made: dict[str, Tensor] = {}
        for bucket in self.buckets:
            made.update(zip(bucket.names, _Gathered.apply(bucket, *(parts[name] for name in bucket.names)), strict=True))
        return made

    def end_of_microbatch(self) -> None:
        """After the backward of one."""
        if self.every_microbatch:
            self.scatter()

    @torch.no_grad()
    def scatter(self) -> None:
        """Adds the gradients of the wholes, summed, to those of the parts."""
        for bucket in self.buckets:
            present = [one for one in bucket.stored if self.parameters[one.name].grad is not None]
            if not present:
                continue
            pieces = bucket.scatter([_taken_gradient(self.parameters[one.name]) for one in present], present)()
            for one, piece in zip(present, pieces, strict=True):
                part = self.parts[one.name]
                part.grad = piece.clone() if part.grad is None else part.grad.add_(piece)


def _taken_gradient(whole: nn.Parameter) -> Tensor:
    grad = whole.grad
    assert grad is not None
    whole.grad = None
    return grad


class _Gathered(torch.autograd.Function):
    """Gathers the parts of a bucket; backward scatters the sums of their gradients, in one collective."""

    @staticmethod
    def forward(ctx: Any, bucket: PartBucket, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.bucket = bucket
        return tuple(bucket.gather(parts)())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = {one.name: grad for one, grad in zip(ctx.bucket.stored, grads, strict=True) if grad is not None}
        present = [one for one in ctx.bucket.stored if one.name in found]
        pieces = ctx.bucket.scatter([found[one.name] for one in present], present)() if present else []
        parts = dict(zip((one.name for one in present), pieces, strict=True))
        return None, *(parts.get(one.name) for one in ctx.bucket.stored)
