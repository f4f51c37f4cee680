"""One program on one rank: its stages bound to this rank's tensors and groups, its forward and its step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopart.common.scoped import no_autocast
from autopart.ir.collective_nodes import axis_of
from autopart.ir.layout import P
from autopart.ir.program import MICROBATCH_AXIS, SEEDS, Program, Stage
from autopart.ir.run.schedules import SPLIT_BACKWARD
from autopart.runtime.batch.batch_split import merge_microbatches, merged_shapes
from autopart.runtime.batch.buffer_updates import write_buffers
from autopart.runtime.batch.local_batch import LocalBatch
from autopart.runtime.comm.call_random import check_same_state, one_stream
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.comm.stage_ranks import stage_style_of, stages_at
from autopart.runtime.comm.watchdog import sum_over
from autopart.runtime.consistency.same_call import Comparison
from autopart.runtime.dp_sync.data_sync import DataSync
from autopart.runtime.gradients.no_sync import Unsummed
from autopart.runtime.gradients.step_reduction import (
    add_earlier,
    connect_sums,
    connect_tied,
    stage_reducers,
    summed_names,
    sync_tied,
)
from autopart.runtime.gradients.unsharded_params import Wholes
from autopart.runtime.graphs.apply_weight_updates import update_weights
from autopart.runtime.pipeline_stages import Pipeline, StageModule, default_schedule
from autopart.runtime.shards.shard_state import broadcast_from
from autopart.runtime.training.backward_hooks import HeldHooks, held_back
from autopart.runtime.training.loss_scaling import LossScaling, naming_operators
from autopart.runtime.training.step_options import StepOptions, divide_by, scaled


class Executable:
    """Runs `program`; `parameters` and `buffers` are {name: local tensor} and are shared with other executables."""

    def __init__(
        self,
        program: Program,
        process: Process,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        schedule: str | None,
        compile: bool,
        unsummed: Unsummed,
        data_sync: DataSync,
    ):
        self.program, self.process, self.buffers = program, process, buffers
        self.parameters = {name: parameters[name] for name in program.parameters if name in parameters}
        self.stage_style = stage_style_of(schedule)
        self.unsummed, self.data_sync = unsummed, data_sync
        stages = [program.stages[index] for index in stages_at(program, process.pp, self.stage_style)]
        tensors = {**buffers, **parameters}
        connect_sums(program, process)
        self.wholes = Wholes(program, stages, process, self.parameters, self.data_sync.wholes)
        reducers, self.shared_buckets = stage_reducers(program, stages, process, self.parameters, self.wholes, unsummed)
        splits = schedule in SPLIT_BACKWARD
        self.modules = [
            StageModule(stage, program, process, tensors, compile, self.wholes, reducer, splits, self.shared_buckets)
            for stage, reducer in zip(stages, reducers, strict=True)
        ]
        summed = summed_names(self.parameters, program, self.stage_style)
        apart = summed.union(self.wholes.parts, data_sync.methods)
        self.summed_here = [parameter for name, parameter in self.parameters.items() if name in apart]
        """The parameters whose gradients ranks bring together."""
        self.pipeline: Pipeline | None = None
        self.rows = LocalBatch(program, process)
        self._sends = "pp" in process.groups or any(map(has_collectives, program.stages))
        if "pp" in process.groups:
            self.pipeline = Pipeline(self.modules, program, process, schedule or default_schedule(program))
            connect_tied(program, process, self.stage_style)

    def forward(self, inputs: Sequence[Any], comparison: Comparison) -> list[Any]:
        """The model's flat outputs for the global batch. Differentiable where there is no pipeline.

        Raises InputError where the ranks are not called alike, by `comparison`.
        """
        with no_autocast(), compared(comparison), self.loaded(inputs, comparison):
            if self.pipeline is not None:
                with self.wholes.gathered():
                    outputs = self._everywhere(self.pipeline.forward())
            else:
                if torch.is_grad_enabled():
                    self.unsummed.are_expected |= self.unsummed.is_open
                with self._differentiable() if torch.is_grad_enabled() else self.wholes.gathered():
                    runs = [self._chain(microbatch) for microbatch in range(self.program.microbatches)]
                if self.data_sync.methods and torch.is_grad_enabled():
                    leave = partial(self.unsummed.leave, self.unsummed.is_open)
                    runs = [self.data_sync.watched(outputs, leave) for outputs in runs]
                comparison.finish_comparison()
                outputs = self.rows.as_terms(self._everywhere(runs))
            self._write_buffers()
        return [o.constant if o.position is None else outputs[o.position] for o in self.program.outputs]

    def step(
        self, inputs: Sequence[Any], options: StepOptions, comparison: Comparison, scaling: LossScaling | None = None
    ) -> tuple[Tensor, list[Any]]:
        """Forward and backward of one global batch; adds to `.grad`. Raises InputError as `forward`.

        `scaling`: what the loss is multiplied by, and the gradients divided by. Where one is not finite every `.grad`
        is None afterwards, what was there before too: an optimizer then does nothing, as after a step of its own.

        Returns the loss and what the program has beside it, for the global batch, detached.
        """
        with held_back(self.parameters) as hooks:
            runs = self._run(inputs, options, hooks, comparison, scaling)
        if scaling is not None and scaling.overflowed:
            for parameter in self.parameters.values():
                parameter.grad = None
        hooks.see_accumulated()
        loss = self._whole_loss([loss for loss, *_ in runs])
        beside = self.program.outputs[1:]
        outputs = self._everywhere(runs) if any(o.position is not None for o in beside) else []
        return loss, [o.constant if o.position is None else outputs[o.position] for o in beside]

    @contextmanager
    def _differentiable(self) -> Iterator[None]:
        """Inside, stages read parameters so that their gradients become those of all ranks."""
        buckets = [*self.shared_buckets, *(bucket for module in self.modules for bucket in module.reducer.buckets)]
        try:
            for bucket in buckets:
                bucket.begin_call(self.parameters)
            with self.wholes.gathering():
                yield
        finally:
            for bucket in buckets:
                bucket.end_call()

    def _run(
        self, inputs: Sequence[Any], options: StepOptions, hooks: HeldHooks, comparison: Comparison,
        scaling: LossScaling | None,
    ) -> list[tuple[Tensor, ...]]:  # fmt: skip
        """Forward and backward of all microbatches; the last stage's outputs of each, where it is here."""
        loaded, leaves = self.loaded(inputs, comparison), self.unsummed.matters
        fresh = self._fresh_gradients(hooks, scaling is not None)
        loss_scale = options.loss_scale * (scaling.scale if scaling is not None else 1.0)
        if leaves:
            comparison.finish_comparison()
            self.unsummed.begin()
        with torch.enable_grad(), no_autocast(), compared(comparison), loaded, fresh:
            if options.num_tokens is not None:
                comparison.finish_comparison()
                divide_by(options.num_tokens, self.modules, self.program, self.process)
            with self.wholes.gathered(), nullcontext() if leaves else self.summing(comparison.finish_comparison):
                if self.pipeline is not None:
                    runs = self.pipeline.step(loss_scale)
                else:
                    count = self.program.microbatches
                    runs = [self._step_microbatch(index, loss_scale) for index in range(count)]
            comparison.finish_comparison()
            self._write_buffers()
            grown = self.data_sync.with_wholes(self.parameters)
            if not leaves:
                sync_tied(grown, self.program, self.process, self.stage_style)
            if scaling is not None:
                scaling.unscale(grown.values(), self.process)
            if not leaves and not (scaling is not None and scaling.overflowed):
                self.data_sync.bring_together(options.loss_scale)
            if not leaves:
                hooks.see_gradients()
        if leaves and not self.unsummed.is_open:
            self.unsummed.finish()
        return runs

    @contextmanager
    def summing(self, before_first: Callable[[], None]) -> Iterator[None]:
        """Inside, gradients are summed over ranks while backwards run; at the end those of these stages are
        complete. `before_first`: called before anything is sent, maybe more than once."""
        reducers = [module.reducer for module in self.modules]
        try:
            for reducer in reducers:
                reducer.arm(before_first)
            yield
            for reducer in reducers:
                reducer.finish()
        finally:
            for reducer in reducers:
                reducer.abandon()
        before_first()
        finishes = [bucket.begin() for bucket in self.shared_buckets]
        while finishes:
            finishes = [finish() for finish in finishes if finish is not None]

    def _write_buffers(self) -> None:
        new_buffers = {module.stage.index: module.new_buffers() for module in self.modules}
        write_buffers(self.buffers, new_buffers, self.program, self.process, self.stage_style)

    def _step_microbatch(self, microbatch: int, loss_scale: float) -> tuple[Tensor, ...]:
        loss, *beside = self._chain(microbatch)
        beside = [value.detach() for value in beside]  # before the backward: what it alone keeps is freed there
        scaled(loss, loss_scale).backward()
        for module in self.modules:
            module.reducer.after_backward()
        return loss.detach(), *beside

    def _chain(self, microbatch: int) -> tuple[Any, ...]:
        """One microbatch through all stages, which are all here."""
        values: tuple[Any, ...] = ()
        for module in self.modules:
            values = module.run(values, microbatch)
        return values

    def _everywhere(self, runs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The last stage's outputs for the global batch, on every rank along `pp`, from those of each microbatch."""
        sends = self.program.stages[-1].sends
        if self.pipeline is None:
            return merge_microbatches(self.program, runs)
        values: Sequence[Tensor | None] = merge_microbatches(self.program, runs) if runs else [None] * len(sends)
        owner, shapes = self.pipeline.last_coordinate, merged_shapes(self.program)
        return [
            broadcast_from(value, owner, self.process, shape, boundary.dtype)
            for value, shape, boundary in zip(values, shapes, sends, strict=True)
        ]

    def _whole_loss(self, losses: Sequence[Tensor]) -> Tensor:
        total = self.summed_loss(losses)
        if self.pipeline is not None:
            boundary = self.program.stages[-1].sends[0]
            owner = self.pipeline.last_coordinate
            total = broadcast_from(total, owner, self.process, boundary.shape, boundary.dtype)
        assert total is not None
        return total

    def summed_loss(self, losses: Sequence[Tensor]) -> Tensor | None:
        """The loss of the global batch, where the last stage runs, from those of its microbatches; None elsewhere."""
        layout = self.program.outputs[0].layout
        total: Tensor | None = None
        if losses:
            total = torch.stack(list(losses)).sum(0) if layout.get(MICROBATCH_AXIS) == P else losses[-1]
            groups = [group for axis, group in self.process.groups.items() if layout.get(axis) == P]
            total = total.clone() if groups else total
            for group in groups:
                sum_over(group, total)
        return total

    @contextmanager
    def loaded(self, inputs: Sequence[Any], comparison: Comparison, sends: bool = True) -> Iterator[None]:
        """Inside, the stages have these inputs. `sends`: what they send of them follows at once."""
        device = self.process.device
        here = brought_to(device, self.program, inputs)
        if self.rows.travels:
            comparison.finish_comparison()
        here = self.rows.brought_together(here)
        if self.program.draws == "exact":
            comparison.finish_comparison()
            check_same_state(self.program, self.process)
        with one_stream(self.program, here, device) as rewind:
            for module in self.modules:
                rewind()
                module.load(here)
        if self._sends and sends:
            comparison.finish_comparison()
        if self.program.weight_updates:
            comparison.finish_comparison()
            update_weights(self.program, {self.process.rank: self.parameters}, here, self._summed)
        failed = True
        try:
            yield
            failed = False
        finally:
            for module in self.modules:
                module.unload(failed)

    def _summed(self, axis: str, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """What this rank has, added up along an axis."""
        for value in values.values():
            sum_over(self.process.along(axis), value)
        return dict(values)

    @contextmanager
    def _fresh_gradients(self, hooks: HeldHooks, every: bool) -> Iterator[None]:
        """Inside, every `.grad` that ranks sum or a hook sees starts at None (`every`: all); afterwards what was there
        before is added again, once. To all others autograd adds in place."""
        fresh = self.parameters.values() if every else [*self.summed_here, *hooks.parameters]
        before = {parameter: parameter.grad for parameter in fresh if parameter.grad is not None}
        for parameter in before:
            parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, earlier in before.items():
                parameter.grad = earlier
            raise
        finally:
            self.data_sync.let_go()
        add_earlier(before)


def brought_to(device: torch.device, program: Program, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a call on the device of its rank. Seeds of dropout stay on the host, which reads them: every read
    of one on a GPU would wait for all that runs there."""
    return [
        value.to(device) if isinstance(value, Tensor) and name != SEEDS else value
        for name, value in zip(program.input_names, inputs, strict=True)
    ]


def has_collectives(stage: Stage) -> bool:
    """Whether an axis of the mesh is worked on in a stage's graph, so that ranks may send each other something."""
    return any(axis_of(node) is not None for node in stage.graph.graph.nodes)


@contextmanager
def compared(comparison: Comparison) -> Iterator[None]:
    """Around a call. Where it fails and the ranks were called unlike each other, that is what is raised."""
    try:
        with naming_operators():
            yield
    except Exception:
        comparison.finish_comparison()
        raise
