"""Stages as `torch.distributed.pipelining` runs them, its schedules by name, and the run of forwards alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from autopart.compat.pipelining_internals import schedule_class, split_backward_counts_twice, stage_class
from autopart.ir.collective_nodes import axis_of
from autopart.ir.program import Boundary, Program, Stage
from autopart.ir.run.schedules import SINGLE_STAGE, check_schedule, schedule_for
from autopart.ops.stage_masks import with_bands
from autopart.runtime.batch.batch_split import Arguments, stage_arguments
from autopart.runtime.batch.buffer_updates import Made, made_by
from autopart.runtime.comm.collectives import bind, with_flat_names
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.comm.stage_ranks import stage_coordinate, stage_style_of
from autopart.runtime.gradients.reducer import Crossing, Reducer
from autopart.runtime.gradients.unshard_blocks import GatheredBlocks, gather_blocks
from autopart.runtime.gradients.unshard_points import with_entries
from autopart.runtime.gradients.unsharded_params import Wholes
from autopart.runtime.graphs.cached_constants import Constants
from autopart.runtime.graphs.compiled_blocks import compiled
from autopart.runtime.graphs.mask_kernels import Bands, Masks, told_of_positions
from autopart.runtime.graphs.recompute_calls import has_regions, with_regions
from autopart.runtime.training.step_options import scaled
from autopart.tracing.call_cache import Recent


def default_schedule(program: Program) -> str:
    """The schedule of a program for which none was named: 1F1B where it has the microbatches for it."""
    pp = program.mesh.size("pp")
    if len(program.stages) > pp:
        return "interleaved_1f1b"
    return "1f1b" if program.microbatches >= pp else "gpipe"


_MOST_WRITTEN = 4
"""How many forms of a stage's graph are kept."""


class _Written(NamedTuple):
    """A stage's graph bound to this rank, the weights that it gathers, and the keyword inputs that it reads."""

    graph: fx.GraphModule
    blocks: GatheredBlocks | None
    names: frozenset[str]


@dataclass
class _Loaded:
    """What a stage has of one call: of each microbatch its keyword inputs, what its masks are and the graph that is
    written for these; the new buffers of its prologue and of each microbatch; the outputs beside the loss, by the
    microbatch, of a step's last stage."""

    arguments: list[Arguments] = field(default_factory=list)
    bands: list[Bands] = field(default_factory=list)
    written: list[_Written] = field(default_factory=list)
    prologue_updates: Sequence[Tensor] = ()
    graph_updates: list[Sequence[Tensor]] = field(default_factory=list)
    beside: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)


class StageModule(nn.Module):
    """One stage on this rank: its bound graph, and the rows of the batch that it reads.

    `load(inputs)` runs the prologue on the global batch. `run(received, microbatch)` is the graph alone;
    `forward(*received, microbatch=index)` is what pipelining calls, with `index` a tensor that holds the number.
    """

    def __init__(
        self, stage: Stage, program: Program, process: Process, tensors: Mapping[str, Tensor], compile: bool,
        wholes: Wholes, reducer: Reducer, splits: bool, shared_buckets: Sequence[Crossing],
    ):  # fmt: skip
        super().__init__()
        self.program, self.process, self.compiled, self.wholes = program, process, compile, wholes
        self.reducer, self.shared_buckets = reducer, shared_buckets
        self.splits = splits  # the backward, where it can be split
        self.tensors = {**tensors, **wholes.parameters}
        stage, known = told_of_positions(stage, program, process, self._bind)
        self.stage = stage
        prologue = self._bind(stage.prologue)
        self.constants = Constants(prologue)
        self.prologue = prologue.forward  # not a submodule: it holds nothing that is trained
        self.masks = Masks(stage, self._bind, known)
        self.written: Recent[_Written] = Recent(_MOST_WRITTEN)
        """The stage's graph as it is written for the bands that its masks are."""
        self.graph = self._written(()).graph
        keywords = {stage_input.name for stage_input in stage.inputs}
        placeholders = [node.target for node in stage.graph.graph.nodes if node.op == "placeholder"]
        self.received_names = [str(name) for name in placeholders if name not in keywords]
        self.loaded = _Loaded()

    @property
    def backward_is_whole(self) -> bool:
        """Whether the backward is not to be split into one of the inputs and one of the weights: either would run the
        regions again, the second every one once for each weight. A compiled graph has one backward."""
        return (
            self.compiled or has_regions(self.stage.graph.graph) or (self.reads_twice and split_backward_counts_twice())
        )

    @property
    def reads_twice(self) -> bool:
        """Whether a parameter has several uses in the graph."""
        uses: Counter[str] = Counter()
        for node in self.stage.graph.graph.nodes:
            if node.op == "get_attr" and str(node.target) in self.stage.parameters:
                uses[str(node.target)] += _num_uses(node)
        return any(count > 1 for count in uses.values())

    def _bind(self, graph: fx.GraphModule) -> fx.GraphModule:
        process = self.process
        groups = {**process.groups, **process.joined_groups}
        return bind(graph, groups, process.coordinates, process.device, self.tensors, self.wholes.parameters)

    def _written(self, bands: Bands) -> _Written:
        def write() -> _Written:
            stage = with_bands(self.stage, dict(bands), self.process.device)
            graph = self._bind(stage.graph)
            blocks = gather_blocks(graph, self.program, self.process, self.reducer, self.splits, self.compiled)
            graph = with_entries(graph, [*self.reducer.buckets, *self.shared_buckets])
            names = frozenset(stage_input.name for stage_input in stage.inputs)
            return _Written(self._runnable(graph), blocks, names)

        return self.written.get(bands, write)

    def _runnable(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Return a bound graph as it runs: compiled, or with its recomputed regions as checkpoints."""
        return compiled(graph) if self.compiled else with_flat_names(with_regions(graph))

    def load(self, inputs: Sequence[Any]) -> None:
        """Computes this stage's inputs from the global `inputs` and cuts them into this rank's microbatches."""
        values = self.prologue(*inputs)
        count = len(self.stage.inputs)
        arguments = stage_arguments(self.program, self.stage.inputs, values[:count], self.process.coordinates)
        bands = self.masks.bands(arguments)
        written = [self._written(one) for one in bands]
        read = [
            {name: value for name, value in named.items() if name in one.names}
            for named, one in zip(arguments, written, strict=True)
        ]
        self.loaded = _Loaded(read, bands, written, prologue_updates=values[count:])

    def unload(self, failed: bool = False) -> None:
        for written in self.written.values():
            if written.blocks is not None:
                written.blocks.rest(failed)
        self.loaded = _Loaded()

    def new_buffers(self) -> Made:
        """{buffer: its new value} of what this stage has made since `load`."""
        return made_by(self.stage, self.program, self.loaded.prologue_updates, self.loaded.graph_updates)

    def run(self, received: Sequence[Any], microbatch: int) -> tuple[Any, ...]:
        """What the graph sends."""
        named = {**dict(zip(self.received_names, received, strict=True)), **self.loaded.arguments[microbatch]}
        written = self.loaded.written[microbatch]
        with nullcontext() if written.blocks is None else written.blocks.forward_of_microbatch():
            outputs = written.graph.forward(**named)  # nn.Module's call has nothing to add
        count = len(self.stage.sends)
        if self.stage.graph_updates:
            self.loaded.graph_updates.append(outputs[count:])
        return self.constants.apart(outputs[:count])

    def forward(self, *received: Tensor, microbatch: Tensor) -> Tensor | tuple[Tensor, ...]:
        if received:
            received = _Received.apply(self.process.device, *received)
        sends = self.run(received, int(microbatch))
        if self.is_last:
            self.loaded.beside[int(microbatch)] = tuple(value.detach() for value in sends[1:])
            return _Sends.apply(self.process.device, sends[0])[0]
        return _Sends.apply(self.process.wire, *sends)

    @property
    def is_last(self) -> bool:
        return self.stage.index == len(self.program.stages) - 1


class _Received(torch.autograd.Function):
    """Identity, from the wire to `device`. Its gradients go over the wire: dense, contiguous, and zeros for what the
    stage does not read."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.wire = values[0].device
        return tuple(value.to(device).view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grad.contiguous().to(ctx.wire) for grad in grads)


class _Sends(torch.autograd.Function):
    """Identity, to the wire. Its results are sent, and detached in place by zero-bubble schedules, which a view, a
    parameter or a value that only travels through would not survive."""

    @staticmethod
    def forward(ctx: Any, wire: torch.device, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.device = values[0].device
        return tuple(value.contiguous().to(wire).data for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grad.to(ctx.device) for grad in grads)


class Pipeline:
    """This rank's stages under one schedule."""

    def __init__(self, modules: Sequence[StageModule], program: Program, process: Process, schedule: str):
        pp = process.mesh.size("pp")
        schedule = schedule_for(schedule, len(program.stages), pp, program.microbatches)
        check_schedule(schedule, len(program.stages), pp, program.microbatches)
        self.modules, self.program, self.process, self.stage_style = modules, program, process, stage_style_of(schedule)
        self.loss_scale = 1.0
        stages = [self._pipeline_stage(module) for module in modules]
        options: dict[str, Any] = {
            "n_microbatches": program.microbatches,
            "loss_fn": self._loss,
            "scale_grads": False,  # the loss says by itself what it is a mean of
        }
        self.schedule = schedule_class(schedule)(stages[0] if schedule in SINGLE_STAGE else stages, **options)

    def _pipeline_stage(self, module: StageModule) -> Any:
        returned = module.stage.sends[:1] if module.is_last else module.stage.sends
        # With example values on both sides of every stage, pipelining runs nothing to find shapes out.
        stage = stage_class()(
            module,
            module.stage.index,
            len(self.program.stages),
            self.process.wire,
            input_args=_examples(module.stage.receives, self.process),
            output_args=_examples(returned, self.process),
            group=self.process.groups["pp"],
            dw_builder=_nothing_left if module.backward_is_whole else None,
        )
        stage.after_backward = module.reducer.after_backward
        return stage

    @property
    def last_coordinate(self) -> int:
        """The `pp` coordinate of the last stage."""
        return self.coordinate(len(self.program.stages) - 1)

    def coordinate(self, stage: int) -> int:
        return stage_coordinate(stage, len(self.program.stages), self.process.mesh.size("pp"), self.stage_style)

    def step(self, loss_scale: float) -> list[tuple[Tensor, ...]]:
        """Forward and backward of all microbatches; the last stage's outputs of each where it runs, else none.

        Gradients are those of `loss_scale` times the loss.
        """
        self.loss_scale = loss_scale
        losses: list[Tensor] = []
        self.give_numbers(losses)
        beside = [module.loaded.beside for module in self.modules if module.is_last]
        return [(loss.detach(), *beside[0][index]) for index, loss in enumerate(losses)]

    def give_numbers(self, losses: list[Tensor] | None = None) -> None:
        """A step of the schedule, on the numbers of the microbatches: the stages look their own rows up."""
        numbers, target = torch.arange(self.program.microbatches), torch.zeros(self.program.microbatches)
        with torch.enable_grad():
            self.schedule.step(microbatch=numbers, target=target, losses=losses, return_outputs=False)

    def _loss(self, loss: Tensor, target: Tensor) -> Tensor:
        """What pipelining differentiates: the last stage computes the loss itself."""
        return scaled(loss, self.loss_scale)

    @torch.no_grad()
    def forward(self) -> list[tuple[Tensor, ...]]:
        """Forward of all microbatches; one tuple of outputs each where the last stage runs, else none.

        Each rank runs all microbatches of its first stage, then of its next. Two ranks that send in both directions
        (a loop of two) finish receiving before they send, so that neither direction waits for the other.
        """
        num_microbatches = self.program.microbatches
        hold_sends = self.process.mesh.size("pp") == 2 and len(self.modules) > 1
        local: dict[int, tuple[Any, ...]] = {}
        outputs: list[tuple[Tensor, ...]] = []
        works: list[dist.Work] = []
        for module in self.modules:
            ready: dict[int, tuple[Any, ...]] = {}
            for microbatch in range(num_microbatches):
                ready[microbatch] = module.run(self._receive(module, local.pop(microbatch, None)), microbatch)
                if not hold_sends:
                    works += self._send(module, ready)
            works += self._send(module, ready)
            if module.is_last:
                outputs = list(ready.values())
            elif self.coordinate(module.stage.index + 1) == self.process.pp:
                local = ready
        for work in works:
            work.wait()
        return outputs

    def _receive(self, module: StageModule, local: tuple[Any, ...] | None) -> tuple[Any, ...]:
        if local is not None:
            return local
        received = []
        for boundary in module.stage.receives:
            shape = boundary.shape_at(self.process.mesh, self.process.coordinates)
            value = torch.empty(shape, dtype=boundary.dtype, device=self.process.wire)
            source = self.coordinate(module.stage.index - 1)
            dist.recv(value, group=self.process.groups["pp"], group_src=source)
            received.append(value.to(self.process.device))
        return tuple(received)

    def _send(self, module: StageModule, ready: dict[int, tuple[Any, ...]]) -> list[dist.Work]:
        """Sends what is ready to the next stage, if that is on another rank, and forgets it."""
        if module.is_last or self.coordinate(module.stage.index + 1) == self.process.pp:
            return []
        works = []
        target = self.coordinate(module.stage.index + 1)
        for microbatch in sorted(ready):
            for value in ready.pop(microbatch):
                work = dist.isend(
                    value.contiguous().to(self.process.wire), group=self.process.groups["pp"], group_dst=target
                )
                assert work is not None
                works.append(work)
        return works


def _num_uses(node: fx.Node) -> int:
    """How many operators read a value, as it is or converted."""
    return sum(_num_uses(user) if axis_of(user) else 1 for user in node.users)


def _nothing_left() -> Callable[..., None]:
    """For PipelineStage's `dw_builder`: the inputs' part runs the whole backward, the weights' part nothing."""
    return lambda: None


def _examples(boundaries: Sequence[Boundary], process: Process) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(
            b.shape_at(process.mesh, process.coordinates), dtype=b.dtype, device="meta",
            requires_grad=b.dtype.is_floating_point,
        ) for b in boundaries
    )  # fmt: skip
