"""`Executable`: a program on one rank, with the rank's tensors, process groups and stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from autopart.common.scoped import no_autocast
from autopart.ir.collective_nodes import axis_of
from autopart.ir.layout import P
from autopart.ir.program import MICROBATCH_AXIS, SEEDS, Program, Stage
from autopart.ir.run.schedules import SPLIT_BACKWARD
from autopart.runtime.batch.batch_split import merge_microbatches, merged_shapes
from autopart.runtime.batch.buffer_updates import write_buffers
from autopart.runtime.batch.local_batch import LocalBatch
from autopart.runtime.batch.lookup_checks import LookupChecks
from autopart.runtime.comm.call_random import (
    check_same_state,
    has_host_functions,
    one_stream,
    random_states,
    restore_random_states,
)
from autopart.runtime.comm.process_mesh import Process
from autopart.runtime.comm.stage_ranks import stage_style_of, stages_at
from autopart.runtime.comm.watchdog import sum_over
from autopart.runtime.consistency.same_call import Comparison
from autopart.runtime.gradients.gradient_sync import GradientSync
from autopart.runtime.gradients.no_sync import NoSync
from autopart.runtime.gradients.reductions import ReductionQueue
from autopart.runtime.gradients.step_reduction import (
    accumulate_earlier,
    all_reduced_names,
    create_reduce_groups,
    create_tied_groups,
    stage_reducers,
    sync_tied,
)
from autopart.runtime.gradients.unsharded_params import UnshardedParams
from autopart.runtime.graphs.apply_weight_updates import update_weights
from autopart.runtime.pipeline_stages import Pipeline, StageModule, default_schedule
from autopart.runtime.shards.shard_state import broadcast_from
from autopart.runtime.training.backward_hooks import DeferredHooks, defer_hooks
from autopart.runtime.training.loss_scaling import LossScaling, explain_missing_operators
from autopart.runtime.training.nonfinite import (
    nonfinite_results,
    origins_on_all_ranks,
    report_nonfinite,
    searching,
)
from autopart.runtime.training.step_options import StepOptions, divide_by, scaled
from autopart.tracing.call_cache import Recent

_MAX_PIPELINES = 8
"""Maximum number of sequence lengths and batch sizes for which a pipeline is cached."""


class Executable:
    """Runs one program on this rank: the forward, or a training step.

    Args:
        parameters: {name: local parameter}, shared with the executables of other programs.
        buffers: {name: local buffer}, shared with the executables of other programs.
    """

    def __init__(
        self,
        program: Program,
        process: Process,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        schedule: str | None,
        compile: bool,
        unreduced: NoSync,
        data_sync: GradientSync,
        lookups: LookupChecks,
    ):
        self.program, self.process, self.buffers = program, process, buffers
        self.parameters = {name: parameters[name] for name in program.parameters if name in parameters}
        self.stage_style = stage_style_of(schedule)
        self.unreduced, self.data_sync, self.lookups = unreduced, data_sync, lookups
        stages = [program.stages[index] for index in stages_at(program, process.pp, self.stage_style)]
        tensors = {**buffers, **parameters}
        create_reduce_groups(program, process)
        self.reductions = ReductionQueue()
        self.unsharded = UnshardedParams(
            program, stages, process, self.parameters, self.data_sync.unsharded, self.reductions
        )
        reducers, self.shared_buckets = stage_reducers(
            program, stages, process, self.parameters, self.unsharded, unreduced, self.reductions,
            splits_backward=schedule in SPLIT_BACKWARD,
        )  # fmt: skip
        self.modules = [
            StageModule(stage, program, process, tensors, compile, self.unsharded, reducer)
            for stage, reducer in zip(stages, reducers, strict=True)
        ]
        reduced_names = all_reduced_names(self.parameters, program, self.stage_style)
        separate_names = reduced_names.union(self.unsharded.shards, data_sync.methods)
        self.reduced_parameters = [parameter for name, parameter in self.parameters.items() if name in separate_names]
        """Parameters whose gradients ranks reduce after their backwards."""
        self.schedule = schedule
        self.rows = LocalBatch(program, process)
        self._sends = "pp" in process.groups or any(map(has_collectives, program.stages))
        if "pp" in process.groups:
            create_tied_groups(program, process, self.stage_style)
        self._pipelines: Recent[Pipeline] = Recent(_MAX_PIPELINES)
        self.pipeline = self._pipeline_of(program)
        self._in_use: Program | None = None

    def use(self, program: Program) -> None:
        """Use `program` in the next calls: the same graphs as the current program, for other input sizes."""
        if program is self._in_use:
            return
        self._in_use = program
        program = replace(program, parameters=self.program.parameters)
        self.program = self.rows.program = program
        for module in self.modules:
            module.use(program)
        self.pipeline = self._pipeline_of(program)

    def _pipeline_of(self, program: Program) -> Pipeline | None:
        """Return the pipeline for a program, cached by the shapes that its stages send.

        Returns None if the mesh has no `pp`.
        """
        if "pp" not in self.process.groups:
            return None
        schedule = self.schedule or default_schedule(program)
        boundaries = [one for stage in program.stages for one in (*stage.receives, *stage.sends)]
        shapes = [one.shape_at(self.process.mesh, self.process.coordinates) for one in boundaries]
        pipeline = self._pipelines.get(
            (program.microbatches, *shapes), lambda: Pipeline(self.modules, program, self.process, schedule)
        )
        pipeline.use()
        return pipeline

    def forward(self, inputs: Sequence[Any], comparison: Comparison) -> list[Any]:
        """Run a forward. Return the model's flat outputs for the global batch.

        The outputs are differentiable if the mesh has no pipeline.

        Raises InputError if `comparison` finds that ranks make different calls.
        """
        with no_autocast(), compared(comparison), self.loaded(inputs, comparison):
            if self.pipeline is not None:
                with self.unsharded.gathered():
                    outputs = self._merge_on_all_ranks(self.pipeline.forward())
            else:
                if torch.is_grad_enabled():
                    self.unreduced.are_expected |= self.unreduced.is_open
                with self._differentiable() if torch.is_grad_enabled() else self.unsharded.gathered():
                    runs = [self._chain(microbatch) for microbatch in range(self.program.microbatches)]
                if self.data_sync.methods and torch.is_grad_enabled():
                    leave = partial(self.unreduced.leave, self.unreduced.is_open)
                    runs = [self.data_sync.synchronise_in_backward(outputs, leave) for outputs in runs]
                comparison.finish_comparison()
                outputs = self.rows.as_loss_terms(self._merge_on_all_ranks(runs))
            self._write_buffers()
        return [output.of(outputs) for output in self.program.outputs]

    def step(
        self, inputs: Sequence[Any], options: StepOptions, comparison: Comparison, scaling: LossScaling | None = None
    ) -> tuple[Tensor, list[Any]]:
        """Run forward and backward of one global batch. Gradients are accumulated into `.grad`.

        Raises InputError if `comparison` finds that ranks make different calls.

        Args:
            scaling: dynamic loss scaling. If a gradient is not finite, every `.grad` becomes None, including gradients
                of earlier calls. The next step of the optimizer then changes nothing.

        Returns:
            The loss and the program's other outputs, for the global batch, detached.

        Raises NonFiniteError on every rank if `options` ask for it, and the loss or a gradient is not finite.
        """
        random = random_states(self.process.device) if options.locate else {}
        with defer_hooks(self.parameters) as hooks:
            runs, found = self._run(inputs, options, hooks, comparison, scaling)
            origins = ""
            if found and options.locate:
                graphs = [graph for module in self.modules for graph in module.graphs()]
                restore_random_states(random)
                with searching(graphs) as search:
                    self._run(inputs, options, hooks, comparison, scaling, updates_weights=False)
                given = dict(zip(self.program.input_names, inputs, strict=True))
                origins = origins_on_all_ranks(search.origin, {**given, **self.parameters}, self.process)
        if found:
            report_nonfinite(found, origins, options, self.process)
            if not self.unreduced.is_open:
                self.unreduced.finish()  # earlier batches may have left partial gradients
        if scaling is not None and scaling.overflowed:
            for parameter in self.parameters.values():
                parameter.grad = None
        if not found:
            hooks.run_accumulate_hooks()
        loss = self._global_loss([loss for loss, *_ in runs])
        other_outputs = self.program.outputs[1:]
        outputs = self._merge_on_all_ranks(runs) if any(o.position is not None for o in other_outputs) else []
        return loss, [output.of(outputs) for output in other_outputs]

    @contextmanager
    def _differentiable(self) -> Iterator[None]:
        """Context manager in which graphs run so that their backward reduces the gradients of parameters."""
        buckets = [*self.shared_buckets, *(bucket for module in self.modules for bucket in module.reducer.buckets)]
        try:
            for bucket in buckets:
                bucket.begin_call()
            with self.unsharded.gathering():
                yield
        finally:
            for bucket in buckets:
                bucket.end_call()

    def _run(
        self, inputs: Sequence[Any], options: StepOptions, hooks: DeferredHooks, comparison: Comparison,
        scaling: LossScaling | None, updates_weights: bool = True,
    ) -> tuple[list[tuple[Tensor, ...]], str]:  # fmt: skip
        """Run forward and backward of all microbatches.

        Args:
            updates_weights: False if the model's own changes of its parameters were already applied for this batch.

        Returns:
            The last stage's outputs for each microbatch, [] on ranks that do not run the last stage; and a description
            of NaN and infinities that the check `options.on_nonfinite` has found, else "". If the check finds any,
            gradients are dropped and buffers are not updated.
        """
        loaded = self.loaded(inputs, comparison, updates_weights=updates_weights)
        is_unreduced = self.unreduced.matters
        fresh_gradients = self._fresh_gradients(hooks, scaling is not None or options.on_nonfinite is not None)
        loss_scale = options.loss_scale * (scaling.scale if scaling is not None else 1.0)
        if is_unreduced:
            comparison.finish_comparison()
            self.unreduced.begin()
        with torch.enable_grad(), no_autocast(), compared(comparison), loaded, fresh_gradients:
            if options.num_tokens is not None:
                comparison.finish_comparison()
                divide_by(options.num_tokens, self.modules, self.program, self.process)
            with (
                self.unsharded.gathered(),
                nullcontext() if is_unreduced else self.reduce_during_backward(),
            ):
                if self.pipeline is not None:
                    runs = self.pipeline.step(loss_scale)
                else:
                    count = self.program.microbatches
                    runs = [self._step_microbatch(index, loss_scale, comparison) for index in range(count)]
            all_parameters = self.data_sync.with_unsharded(self.parameters)
            if not is_unreduced:
                sync_tied(all_parameters, self.program, self.process, self.stage_style)
            if options.on_nonfinite is not None and (found := self._nonfinite(runs, all_parameters, scaling)):
                return runs, found
            self._write_buffers()
            if scaling is not None:
                scaling.unscale(all_parameters.values(), self.process)
            if not is_unreduced and not (scaling is not None and scaling.overflowed):
                self.data_sync.reduce_by_method(options.loss_scale)
            if not is_unreduced:
                hooks.run_gradient_hooks()
        if is_unreduced and not self.unreduced.is_open:
            self.unreduced.finish()
        return runs, ""

    def _nonfinite(
        self, runs: Sequence[Sequence[Tensor]], parameters: Mapping[str, Tensor], scaling: LossScaling | None
    ) -> str:
        """Describe NaN and infinities of a step, and then drop its gradients. A collective call.

        With loss scaling only the loss is checked: `LossScaling` drops gradients that are not finite.
        """
        grads = {name: p.grad for name, p in parameters.items() if scaling is None and p.grad is not None}
        found = nonfinite_results([loss for loss, *_ in runs], grads, self.process)
        for parameter in (*parameters.values(), *self.parameters.values()) if found else ():
            parameter.grad = None
        return found

    @contextmanager
    def reduce_during_backward(self) -> Iterator[None]:
        """Context manager that reduces gradients while backwards run in it.

        At its end, all reductions have finished.
        """
        reducers = [module.reducer for module in self.modules]
        self.reductions.clear()
        try:
            for reducer in reducers:
                reducer.arm()
            yield
            for bucket in self.shared_buckets:
                bucket.reduce_accumulated()
            self.reductions.finish()
        finally:
            for reducer in reducers:
                reducer.disarm()
            self.reductions.clear()

    def _write_buffers(self) -> None:
        new_buffers = {module.stage.index: module.new_buffers() for module in self.modules}
        write_buffers(self.buffers, new_buffers, self.program, self.process, self.stage_style)

    def _step_microbatch(self, microbatch: int, loss_scale: float, comparison: Comparison) -> tuple[Tensor, ...]:
        with record_function(f"forward {microbatch}"):
            loss, *other_outputs = self._chain(microbatch)
        other_outputs = [
            value.detach() for value in other_outputs
        ]  # delete references before the backward, so that it can free memory
        comparison.finish_comparison()  # the user's backward reduces gradients
        with record_function(f"backward {microbatch}"):
            scaled(loss, loss_scale).backward()
        for module in self.modules:
            module.reducer.after_backward()
        return loss.detach(), *other_outputs

    def _chain(self, microbatch: int) -> tuple[Any, ...]:
        """Run one microbatch through all stages, on a rank that has all stages."""
        values: tuple[Any, ...] = ()
        for module in self.modules:
            values = module.run(values, microbatch)
        return values

    def _merge_on_all_ranks(self, runs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Merge the last stage's outputs of all microbatches, and broadcast them along `pp`."""
        sends = self.program.stages[-1].sends
        if self.pipeline is None:
            return merge_microbatches(self.program, runs)
        values: Sequence[Tensor | None] = merge_microbatches(self.program, runs) if runs else [None] * len(sends)
        owner, shapes = self.pipeline.last_coordinate, merged_shapes(self.program)
        return [
            broadcast_from(value, owner, self.process, shape, boundary.dtype)
            for value, shape, boundary in zip(values, shapes, sends, strict=True)
        ]

    def _global_loss(self, losses: Sequence[Tensor]) -> Tensor:
        total = self.all_reduced_loss(losses)
        if self.pipeline is not None:
            boundary = self.program.stages[-1].sends[0]
            owner = self.pipeline.last_coordinate
            total = broadcast_from(total, owner, self.process, boundary.shape, boundary.dtype)
        assert total is not None
        return total

    def all_reduced_loss(self, losses: Sequence[Tensor]) -> Tensor | None:
        """Return the loss of the global batch on ranks of the last stage, None on other ranks."""
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
    def loaded(
        self, inputs: Sequence[Any], comparison: Comparison, sends: bool = True, updates_weights: bool = True
    ) -> Iterator[None]:
        """Context manager that loads the inputs of a call into the stages, and unloads them at its end.

        Args:
            sends: True if graphs communicate in the block. The comparison of the ranks' calls is then finished first.
            updates_weights: True to apply the changes that the model's forward makes to its parameters.
        """
        device = self.process.device
        local_inputs = move_to_device(device, self.program, inputs)
        if self.rows.is_communicated:
            comparison.finish_comparison()
        local_inputs = self.rows.gather_batch(local_inputs)
        named_inputs = dict(zip(self.program.input_names, local_inputs, strict=True))
        self.lookups.check_computed(named_inputs, self.program.sizes)
        if self.program.draws == "exact":
            comparison.finish_comparison()
            check_same_state(self.program, self.process)
        if has_host_functions(self.program):
            comparison.finish_comparison()
        with one_stream(self.program, local_inputs, device, self.process) as rewind:
            for module in self.modules:
                rewind()
                module.load(local_inputs)
        if self._sends and sends:
            comparison.finish_comparison()
        if updates_weights and self.program.weight_updates:
            comparison.finish_comparison()
            update_weights(self.program, {self.process.rank: self.parameters}, local_inputs, self._sum_along)
        failed = True
        try:
            yield
            failed = False
        finally:
            for module in self.modules:
                module.unload(failed)

    def _sum_along(self, axis: str, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        for value in values.values():
            sum_over(self.process.along(axis), value)
        return dict(values)

    @contextmanager
    def _fresh_gradients(self, hooks: DeferredHooks, every: bool) -> Iterator[None]:
        """Context manager that sets `.grad` of parameters to None, and adds the earlier gradients at its end.

        It applies to parameters that have hooks or whose gradients are reduced, because hooks and reductions must get
        only the new gradients. For other parameters, autograd accumulates into the earlier `.grad`.

        Args:
            every: True to apply it to all parameters.
        """
        parameters = self.parameters.values() if every else [*self.reduced_parameters, *hooks.parameters]
        before = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        for parameter in before:
            parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, earlier in before.items():
                parameter.grad = earlier
            raise
        finally:
            self.data_sync.release_full_gradients()
        accumulate_earlier(before)


def move_to_device(device: torch.device, program: Program, inputs: Sequence[Any]) -> list[Any]:
    """Move the inputs of a call to the device of this rank.

    Dropout seeds stay on the CPU, because CPU code reads them. Reading them from a GPU would wait for its kernels.
    """
    return [
        value.to(device) if isinstance(value, Tensor) and name != SEEDS else value
        for name, value in zip(program.input_names, inputs, strict=True)
    ]


def has_collectives(stage: Stage) -> bool:
    """Return True if a stage graph has an operator that communicates between ranks."""
    return any(axis_of(node) is not None for node in stage.graph.graph.nodes)


@contextmanager
def compared(comparison: Comparison) -> Iterator[None]:
    """Context manager in which a call runs. If the call fails, compare it with the calls of other ranks.

    If ranks passed different arguments, the comparison raises an error that names them instead of the original error.
    """
    try:
        with explain_missing_operators():
            yield
    except Exception:
        comparison.finish_comparison()
        raise
