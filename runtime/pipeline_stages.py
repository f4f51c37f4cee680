"""Pipeline stages of a rank, and their execution by schedules of `torch.distributed.pipelining`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.profiler import record_function

from autopart.compat.pipelining_internals import schedule_class, split_backward_counts_twice, stage_class
from autopart.compat.torch_internals import LazyGraphModule, generate_code
from autopart.ir.collective_nodes import axis_of
from autopart.ir.program import Boundary, Program, Stage
from autopart.ir.run.schedules import SINGLE_STAGE, WITH_TAIL, check_schedule, schedule_for
from autopart.ops.key_value_cache import has_caches
from autopart.ops.stage_masks import with_mask_structure
from autopart.runtime.batch.batch_split import Arguments, merge_for_tail, stage_arguments
from autopart.runtime.batch.buffer_updates import NewBuffers, buffer_updates_of
from autopart.runtime.comm.collectives import bind, with_flat_names
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.comm.stage_ranks import stage_coordinate, stage_style_of
from autopart.runtime.gradients.reducer import Reducer
from autopart.runtime.gradients.unshard_blocks import UnshardBlocks, insert_unshard_blocks
from autopart.runtime.gradients.unshard_points import insert_unshard_points
from autopart.runtime.gradients.unsharded_params import UnshardedParams
from autopart.runtime.graphs.cached_constants import Constants
from autopart.runtime.graphs.compiled_blocks import compiled
from autopart.runtime.graphs.mask_kernels import MaskStructures, StageMasks, specialize_constant_masks
from autopart.runtime.graphs.recompute_calls import has_regions, with_regions
from autopart.runtime.tail_run import TailRun
from autopart.runtime.training.step_options import scaled
from autopart.tracing.call_cache import Recent


def default_schedule(program: Program) -> str:
    """Return the schedule of a program if the user gave none and the plan was made at the first call.

    The result is GPipe if operators run once for all microbatches, else 1F1B, interleaved if a rank has several stages.
    """
    if program.tail is not None:
        return WITH_TAIL[0]
    return "interleaved_1f1b" if program.num_stages > program.mesh.size("pp") else "1f1b"


_MAX_GRAPHS = 4
"""Maximum number of cached specialised graphs of a stage."""


class _BoundGraph(NamedTuple):
    """A stage graph that is prepared to run on this rank.

    Attributes:
        blocks: with ZeRO-3: the blocks of the graph, whose weights are unsharded before use.
        names: names of the keyword inputs of the graph.
    """

    graph: fx.GraphModule
    blocks: UnshardBlocks | None
    names: frozenset[str]


@dataclass
class _Loaded:
    """Inputs and results of a stage during one call.

    Attributes:
        arguments: {name: keyword input of the stage graph} of each microbatch.
        mask_structures: mask structures (such as causal) of each microbatch.
        graphs: for each microbatch, the graph that is specialised to its mask structures.
        prologue_updates: new buffer values that the prologue has computed.
        graph_updates: new buffer values that the graph has computed for each microbatch.
        other_outputs: {microbatch: outputs other than the loss}, on the last stage in a step.
    """

    arguments: list[Arguments] = field(default_factory=list)
    mask_structures: list[MaskStructures] = field(default_factory=list)
    graphs: list[_BoundGraph] = field(default_factory=list)
    prologue_updates: Sequence[Tensor] = ()
    graph_updates: list[Sequence[Tensor]] = field(default_factory=list)
    other_outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)


class StageModule(nn.Module):
    """One stage on this rank: its graph, and its inputs for the current call.

    `load(inputs)` runs the prologue (masks, position ids) on the global batch. `run(received, microbatch)` runs the
    graph on one microbatch. `torch.distributed.pipelining` calls `forward(*received, microbatch=index)`, with the
    microbatch number as a tensor.
    """

    def __init__(
        self, stage: Stage, program: Program, process: Process, tensors: Mapping[str, Tensor], compile: bool,
        unsharded: UnshardedParams, reducer: Reducer,
    ):  # fmt: skip
        super().__init__()
        self.program, self.process, self.unsharded = program, process, unsharded
        self.compiled = compile and not has_caches(stage.graph.graph.nodes)  # a compiler could overwrite the cache
        self.reducer = reducer
        self.tensors = {**tensors, **unsharded.parameters}
        constant_masks = frozenset[str]()
        if not program.sizes:
            stage, constant_masks = specialize_constant_masks(stage, program, process, self._bind)
        self.stage = stage
        prologue = self._bind(stage.prologue)
        self.constants = Constants(prologue, program.sizes)
        generate_code(prologue)
        self.prologue = prologue.forward  # not a submodule, because it has no trained parameters
        self.masks = StageMasks(stage, self._bind, constant_masks, program.sizes)
        self.specialized_graphs: Recent[_BoundGraph] = Recent(_MAX_GRAPHS)
        """{mask structures: the stage's graph specialised to them}."""
        self.graph = self._specialized_graph(()).graph
        keywords = {stage_input.name for stage_input in stage.inputs}
        placeholders = [node.target for node in stage.graph.graph.nodes if node.op == "placeholder"]
        self.received_names = [str(name) for name in placeholders if name not in keywords]
        self.loaded = _Loaded()
        self.tail: TailRun | None = None
        """The tail of the program, if this is the last pipeline stage and the program has a tail."""

    @property
    def needs_full_backward(self) -> bool:
        """True if the backward must not be split into input gradients and weight gradients.

        A split backward would recompute each region (activation checkpointing) for the inputs, and again for each
        weight. A compiled graph has only one backward. In torch 2.11, a split backward computes wrong gradients of
        parameters that are used more than once.
        """
        return (
            self.compiled
            or has_regions(self.stage.graph.graph)
            or (self.uses_parameter_twice and split_backward_counts_twice())
        )

    @property
    def uses_parameter_twice(self) -> bool:
        """True if the graph uses some parameter more than once."""
        uses: Counter[str] = Counter()
        for node in self.stage.graph.graph.nodes:
            if node.op == "get_attr" and str(node.target) in self.stage.parameters:
                uses[str(node.target)] += _num_uses(node)
        return any(count > 1 for count in uses.values())

    def _bind(self, graph: fx.GraphModule) -> fx.GraphModule:
        process = self.process
        groups = {**process.groups, **process.joined_groups}
        unsharded = self.unsharded.parameters
        return bind(graph, groups, process.coordinates, process.device, self.tensors, unsharded, LazyGraphModule)

    def _specialized_graph(self, mask_structures: MaskStructures) -> _BoundGraph:
        def write() -> _BoundGraph:
            stage = with_mask_structure(self.stage, dict(mask_structures), self.process.device, self.program.sizes)
            graph = self._bind(stage.graph)
            blocks = insert_unshard_blocks(graph, self.program, self.process, self.reducer, self.compiled)
            graph = insert_unshard_points(graph, [*self.reducer.buckets, *self.reducer.shared])
            names = frozenset(stage_input.name for stage_input in stage.inputs)
            return _BoundGraph(self._finalize(graph), blocks, names)

        return self.specialized_graphs.get(mask_structures, write)

    def _finalize(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Compile a stage graph for this rank, or wrap its recompute regions in checkpointed calls."""
        if self.compiled:
            return compiled(graph, serves_all_sizes=self.program.shared_graphs is not None)
        return with_flat_names(with_regions(graph))

    def load(self, inputs: Sequence[Any]) -> None:
        """Run the prologue on the global batch, and split its results into this rank's microbatches."""
        self.constants.use(self.program.sizes)
        values = self.prologue(*inputs, *self.program.sizes.values())
        count = len(self.stage.inputs)
        arguments = stage_arguments(
            self.program, self.stage.inputs, values[:count], self.process.coordinates,
            self.program.runs_of(self.stage),
        )  # fmt: skip
        mask_structures = self.masks.mask_structures(arguments)
        graphs = [self._specialized_graph(one) for one in mask_structures]
        used_arguments = [
            {name: value for name, value in named.items() if name in one.names}
            for named, one in zip(arguments, graphs, strict=True)
        ]
        self.loaded = _Loaded(used_arguments, mask_structures, graphs, prologue_updates=values[count:])

    def use(self, program: Program) -> None:
        """Use `program` in the next calls: the same graphs as the current program, for other input sizes."""
        self.program, self.stage = program, program.stages[self.stage.index]

    def unload(self, failed: bool = False) -> None:
        for bound in self.specialized_graphs.values():
            if bound.blocks is not None:
                bound.blocks.release_weights(failed)
        self.loaded = _Loaded()

    def graphs(self) -> list[fx.GraphModule]:
        """Return the graphs that the stage runs: its prologue, and one stage graph per mask structure."""
        return [self.constants.prologue, *(bound.graph for bound in self.specialized_graphs.values())]

    def new_buffers(self) -> NewBuffers:
        """Return {buffer: new value} that this stage has computed since `load`."""
        return buffer_updates_of(self.stage, self.program, self.loaded.prologue_updates, self.loaded.graph_updates)

    def run(self, received: Sequence[Any], microbatch: int) -> tuple[Any, ...]:
        """Run the graph on a microbatch. Return the values to send to the next stage, or the outputs."""
        named = {**dict(zip(self.received_names, received, strict=True)), **self.loaded.arguments[microbatch]}
        bound = self.loaded.graphs[microbatch]
        with nullcontext() if bound.blocks is None else bound.blocks.forward_of_microbatch():
            outputs = bound.graph.forward(**named)  # call `forward`, to avoid the overhead of nn.Module.__call__
        count = len(self.stage.sends)
        if self.stage.graph_updates:
            self.loaded.graph_updates.append(outputs[count:])
        return self.constants.copy_cached(outputs[:count])

    def forward(self, *received: Tensor, microbatch: Tensor) -> Tensor | tuple[Tensor, ...]:
        if received:
            received = _Received.apply(self.process.device, *received)
        with record_function(f"forward {int(microbatch)}"):
            sends = self.run(received, int(microbatch))
        if self.tail is not None:
            return self.tail.receive(sends)
        if self.is_last:
            self.loaded.other_outputs[int(microbatch)] = tuple(value.detach() for value in sends[1:])
            return _Sends.apply(self.process.device, sends[0])[0]
        return _Sends.apply(self.process.wire, *sends)

    @property
    def is_last(self) -> bool:
        return self.stage.index == self.program.num_stages - 1


class _Received(torch.autograd.Function):
    """Autograd function: move received values to the device on which the stage computes.

    Its backward makes the gradients contiguous, and moves them to the device from which they are sent. Values that the
    stage does not use get zero gradients.
    """

    @staticmethod
    def forward(ctx: Any, device: torch.device, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.wire = values[0].device
        return tuple(value.to(device).view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grad.contiguous().to(ctx.wire) for grad in grads)


class _Sends(torch.autograd.Function):
    """Autograd function: move values to the device from which they are sent.

    Zero-bubble schedules detach the results in place. A result is therefore never a view, a parameter or a received
    value.
    """

    @staticmethod
    def forward(ctx: Any, wire: torch.device, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.device = values[0].device
        return tuple(value.contiguous().to(wire).data for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grad.to(ctx.device) for grad in grads)


class Pipeline:
    """The stages of this rank and the schedule that runs them."""

    def __init__(self, modules: Sequence[StageModule], program: Program, process: Process, schedule: str):
        pp, num_stages = process.mesh.size("pp"), program.num_stages
        schedule = schedule_for(schedule, num_stages, pp, program.microbatches)
        check_schedule(schedule, num_stages, pp, program.microbatches)
        assert program.tail is None or schedule in WITH_TAIL, f"schedule {schedule} runs no tail"
        self.program, self.process, self.stage_style = program, process, stage_style_of(schedule)
        self.modules = [module for module in modules if not module.stage.is_tail]
        self.tail = next((TailRun(module) for module in modules if module.stage.is_tail), None)
        self.loss_scale = 1.0
        stages = [self._pipeline_stage(module) for module in self.modules]
        options: dict[str, Any] = {
            "n_microbatches": program.microbatches,
            "loss_fn": self._loss,
            "scale_grads": False,  # the traced loss is already the mean over the global batch
        }
        self.schedule = schedule_class(schedule)(stages[0] if schedule in SINGLE_STAGE else stages, **options)

    def use(self) -> None:
        """Connect the last stage to this pipeline's tail, before this pipeline runs.

        The tail is the part of a model that runs once for all microbatches. Pipelines for different shapes share the
        stages, but not the tail.
        """
        self.modules[-1].tail = self.tail

    def _pipeline_stage(self, module: StageModule) -> Any:
        returned = _examples(module.stage.sends[:1] if module.is_last else module.stage.sends, self.process)
        if module is self.modules[-1] and self.tail is not None:
            returned = (torch.empty((), device="meta", requires_grad=True),)
        # With example inputs and outputs, pipelining does not run the stage to infer shapes.
        stage = stage_class()(
            module,
            module.stage.index,
            self.program.num_stages,
            self.process.wire,
            input_args=_examples(module.stage.receives, self.process),
            output_args=returned,
            group=self.process.groups["pp"],
            dw_builder=_empty_dw_builder if module.needs_full_backward else None,
        )
        stage.after_backward = module.reducer.after_backward
        return stage

    @property
    def last_coordinate(self) -> int:
        """`pp` coordinate of the last stage."""
        return self.coordinate(self.program.num_stages - 1)

    def coordinate(self, stage: int) -> int:
        return stage_coordinate(stage, self.program.num_stages, self.process.mesh.size("pp"), self.stage_style)

    def step(self, loss_scale: float) -> list[tuple[Tensor, ...]]:
        """Run forward and backward of all microbatches, for `loss_scale` times the loss.

        Returns the outputs of the last stage for each microbatch, and [] on ranks that do not run the last stage. If
        the program has a tail (run once for all microbatches), only the tail's outputs are returned.
        """
        self.loss_scale = loss_scale
        losses: list[Tensor] = []
        if self.tail is not None:
            self.tail.begin(loss_scale)
            self.run_on_indices(losses)
            return [self.tail.outputs]
        self.run_on_indices(losses)
        other_outputs = [module.loaded.other_outputs for module in self.modules if module.is_last]
        return [(loss.detach(), *other_outputs[0][index]) for index, loss in enumerate(losses)]

    def run_on_indices(self, losses: list[Tensor] | None = None) -> None:
        """Run a step of the schedule, which gets microbatch numbers instead of samples.

        Each stage finds the inputs of a microbatch by its number.
        """
        indices, target = torch.arange(self.program.microbatches), torch.zeros(self.program.microbatches)
        with torch.enable_grad():
            self.schedule.step(microbatch=indices, target=target, losses=losses, return_outputs=False)

    def _loss(self, loss: Tensor, target: Tensor) -> Tensor:
        """Return the last stage's loss, wrapped so that its backward multiplies gradients by the loss scale."""
        return loss if self.tail is not None else scaled(loss, self.loss_scale)

    @torch.no_grad()
    def forward(self) -> list[tuple[Tensor, ...]]:
        """Run the forward of all microbatches. Return the last stage's outputs for each microbatch.

        Ranks without the last stage return []. If the program has a tail, only the tail's outputs are returned.

        Each rank runs all microbatches of its first stage, then all of its next stage. With two ranks and several
        stages per rank, both ranks send to and receive from each other. To avoid a deadlock, each rank then receives
        all microbatches of a stage before it sends.
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
            if module.is_last and self.tail is not None:
                outputs = [self.tail.module.run(merge_for_tail(self.program, [*ready.values()]), 0)]
            elif module.is_last:
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
        """Send outputs of microbatches to the next stage, if it is on another rank, and clear `ready`.

        `ready`: {microbatch: outputs that are not sent yet}.
        """
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
    """Return the number of operators that use a value, directly or through a collective."""
    return sum(_num_uses(user) if axis_of(user) else 1 for user in node.users)


def _empty_dw_builder() -> Callable[..., None]:
    """Return a function that does nothing, which PipelineStage calls as the weight backward.

    The stage's input backward has already computed the weight gradients.
    """
    return lambda: None


def _examples(boundaries: Sequence[Boundary], process: Process) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty(
            b.shape_at(process.mesh, process.coordinates), dtype=b.dtype, device="meta",
            requires_grad=b.dtype.is_floating_point,
        ) for b in boundaries
    )  # fmt: skip
