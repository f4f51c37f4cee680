"""`ParallelModule`: the partitioned model as one `nn.Module`, called the same way on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopart.compat.torch_function_internals import on_local_values
from autopart.compat.torch_internals import tree_unflatten
from autopart.errors import AutopartError, OptionError, TraceError
from autopart.ir.mesh import Mesh
from autopart.ir.program import Program
from autopart.plans.rank_digest import TIMEOUT_S
from autopart.runtime.batch.lookup_checks import LookupChecks
from autopart.runtime.batch.loss_module import Criterion, named_criterion
from autopart.runtime.batch.profile_steps import ProfileMethods
from autopart.runtime.batch.step_metrics import MetricsMethods, StepMeter
from autopart.runtime.checkpoint.full_optimizer import OptimizerStateMethods
from autopart.runtime.checkpoint.full_values import FullValueMethods
from autopart.runtime.checkpoint.optimizer_state import connect_state_dicts
from autopart.runtime.checkpoint.pretrained_folder import PretrainedFolderMethods
from autopart.runtime.checkpoint.state_dicts import NO_PARAMETERS, Loading, extra_state, shapes_of, with_shard_offsets
from autopart.runtime.comm.call_random import check_exact
from autopart.runtime.comm.process_mesh import connect, device_of, meet
from autopart.runtime.comm.stage_ranks import stage_style_of, stages_at
from autopart.runtime.comm.watchdog import watched
from autopart.runtime.consistency.rank_checks import check_same_start, model_texts
from autopart.runtime.consistency.replicas import Replicas
from autopart.runtime.consistency.same_call import ComparedCall, Comparison
from autopart.runtime.executable import Executable
from autopart.runtime.export_methods import ExportMethods
from autopart.runtime.generation import GenerateMethods
from autopart.runtime.gradients.gradient_sync import GradientSync
from autopart.runtime.gradients.no_sync import NoSync
from autopart.runtime.optimizers import optimizer_checks, optimizer_methods
from autopart.runtime.overlapped_batches import FlushMethods, StepRunner
from autopart.runtime.saves.save_methods import SaveMethods
from autopart.runtime.sharded_tensor.sharded_tensor import with_spec
from autopart.runtime.shards.shard_owners import make_shard_info, register_placeholder, register_shard
from autopart.runtime.shards.shard_state import equals_shard_of, merge_stored, shard_parameters
from autopart.runtime.shards.shared_parameters import OriginalParams, register_local, tied_shard_of
from autopart.runtime.training import backward_hooks, grad_scaler, gradient_norms
from autopart.runtime.training.backward_hooks import (
    backward_error,
    check_model_hooks,
    frozen_error,
    trained_names,
    without_backward,
)
from autopart.runtime.training.clipping import ClippingMethods
from autopart.runtime.training.loss_scaling import LossScaling, LossScalingMethods
from autopart.runtime.training.mesh_methods import MeshMethods
from autopart.runtime.training.module_methods import ModuleMethods, patch_wrappers
from autopart.runtime.training.step_options import StepOptions
from autopart.runtime.training.surrounding_code import bind_calls, explain_backward, outside_inference_mode
from autopart.runtime.training.sync_methods import SyncMethods
from autopart.runtime.weights.load_weights import Weights
from autopart.tracing.call_cache import MAX_CALLS, Recent, format_call
from autopart.tracing.local_batch_call import num_rows
from autopart.tracing.meta_copy import Source
from autopart.tracing.python.layer_settings import NO_SETTINGS, Settings
from autopart.tracing.trace_model import flatten_call

Purpose = Literal["forward", "step", "step_outputs"]


class ProgramSource(Protocol):
    """Interface of the object that traces calls for a ParallelModule, and returns a program for each call.

    Equal calls get the same Program object. A program can depend on values of the module's `buffers`.
    """

    buffers: Mapping[str, Tensor]

    @property
    def plan(self) -> Any:
        """The plan, which all programs share."""

    def program(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, purpose: Purpose, training: bool,
        settings: Settings = NO_SETTINGS, loss_fn: Callable[..., Tensor] | None = None, target: Any = None,
    ) -> tuple[Program, tuple[Tensor, ...]]:  # fmt: skip
        """Return the program for a call, and the call's tensors in `input_names` order.

        Raises InputError or TraceError for a call that the model does not support.
        """

    def ready(self) -> Program | None:
        """Return a program that was traced when the module was created, or None."""

    @property
    def written(self) -> Collection[str]:
        """Names of frozen parameters that the model writes in its forward.

        The partitioned module registers them as buffers.
        """

    @property
    def changed_values(self) -> str:
        """Text that lists Python values of the model that have changed since the last call was traced."""

    def agreed(self) -> Mapping[str, str]:
        """Return {name: text} of versions, options and the plan, which must be equal on all ranks."""


class ParallelModule(
    GenerateMethods, MeshMethods, LossScalingMethods, ClippingMethods, SyncMethods, optimizer_methods.OptimizerMethods,
    FullValueMethods, OptimizerStateMethods, PretrainedFolderMethods, SaveMethods, FlushMethods, MetricsMethods,
    ExportMethods, ProfileMethods, ModuleMethods,
):  # fmt: skip
    """A model partitioned over a device mesh.

    Every rank creates it from the same model and calls it with the same global batch. With `local_batch` each rank
    passes and gets only its own samples. Parameters have the model's names and hold this rank's shards.
    `full_state_dict` and `full_grads` gather full tensors.

    Example (the same on every rank, under torchrun):
        pm = autopart.parallelize(model, "dp2,tp2", example_kwargs=batch)
        optimizer = torch.optim.AdamW(pm.parameters())
        loss = pm.step(**batch)
        optimizer.step()

    Raises RuntimeSetupError if the processes do not fit the mesh, TraceError if parameters are read before tracing.
    """

    @torch.inference_mode(False)  # parameters created in inference mode could never be trained
    def __init__(
        self,
        model: nn.Module | Source,
        mesh: Mesh,
        compiler: ProgramSource,
        *,
        schedule: str | None = None,
        device_mesh: DeviceMesh | None = None,
        compile: bool = False,
        timeout: float = TIMEOUT_S,
        check_replicas: int | bool | None = None,
        local_batch: bool = False,
        weights: Weights | None = None,
        scales_loss: bool = False,
    ):
        super().__init__()
        source = model if isinstance(model, Source) else Source(model)
        model = source.model
        check_model_hooks(model)
        gradient_norms.patch_gradient_norms()
        grad_scaler.patch_grad_scaler()
        patch_wrappers()
        optimizer_checks.patch_optimizers()
        program = compiler.ready()
        host_group = meet(mesh, device_mesh, timeout, compile)
        weights_subject = {} if weights is None else dict([weights.subject])
        subjects = {**weights_subject, "mesh": str(mesh), **compiler.agreed(), **model_texts(model)}
        check_same_start(model, subjects, host_group, program, weights=program is not None)
        if weights is not None:
            weights.check()
        self._weights = weights
        self._process = connect(mesh, device_of(model), device_mesh, host_group)
        self._compiler = compiler
        self._schedule, self._compile, self._local_batch = schedule, compile, local_batch
        self._source = source
        self._originals = OriginalParams()
        self._program: Program | None = None
        self._local_parameters: dict[str, nn.Parameter] = {}
        self._trained: set[str] = set()  # names of parameters that were not frozen when they were traced
        self._local_buffers: dict[str, Tensor] = {}
        compiler.buffers = self._local_buffers
        self._extra_state = extra_state(model)
        connect_state_dicts()
        bind_calls(self, model)
        # Keys are ids of the model's buffers, so that a buffer with two names stays one tensor.
        self._copies: dict[int, Tensor] = {}
        self._calls: Counter[str] = Counter()
        self._loss_scaling = LossScaling() if scales_loss else None
        self._begin_steps(check_replicas)
        self._begin_layers(source)
        if program is not None:
            self._adopt(program)
        if self._process.watch is not None:
            self._process.watch.made()
        if weights is not None and self._process.rank == 0:
            weights.warn()

    @property
    def plan(self) -> Any:
        """The plan of all programs of this module."""
        return self._compiler.plan

    @watched
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for the global batch, on every rank.

        Without a pipeline axis the call is differentiable, so the module can be part of a larger model. After
        `loss.backward()`, the gradients of inputs and of this rank's parameters are complete.

        With a pipeline axis the call runs without gradients, and `backward()` of its output raises an error. Use `step`
        to train.
        """
        self._originals.warn_of_changes()
        self._check_registered()
        self._in_flight.drain()
        if torch.is_grad_enabled() and "pp" not in self._process.groups:
            self._process.step_scale = None  # unknown after a forward, because the user may scale the loss
        with self._compared_on_error("forward", args, kwargs):
            program, inputs = self._compiler.program(
                args, kwargs, purpose="forward", training=self.training, settings=self._modes.settings
            )
        executable, comparison = self._executable(program, inputs, "forward")
        outputs = executable.forward(inputs, comparison)
        if self.training and torch.is_grad_enabled():
            self._meter.count_step()
        if "pp" in self._process.groups and torch.is_grad_enabled():
            outputs = without_backward(outputs, program, self._local_parameters.values())
        return tree_unflatten(outputs, program.output_spec)

    @watched
    @torch.inference_mode(False)
    def step(
        self,
        *args: Any,
        loss_fn: Callable[..., Tensor] | None = None,
        target: Any = None,
        loss_scale: float | Tensor | None = None,
        num_tokens: int | Tensor | None = None,
        outputs: bool = False,
        on_nonfinite: str | None = None,
        locate: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward of one global batch through the schedule.

        Adds complete gradients to `.grad` of this rank's parameters. Returns the loss of the global batch on every
        rank, as a detached scalar, because its backward has run. A batch of a new shape is traced at its first call.

        With `schedule="1f1b_2bw"`, `step` adds the gradients and returns the loss of the previous batch. The first call
        adds no gradient and returns NaN. `flush()` finishes the last batch.

        Args:
            loss_fn: computes the loss as `loss_fn(outputs, target)`, for a model that returns no loss. It is traced
                with the model.
            loss_scale: a number, or a tensor with one entry. The step adds the gradients of `loss_scale` times the
                loss. The returned loss and earlier gradients in `.grad` are not multiplied. With `precision="fp16"`,
                `step` also multiplies the loss by `pm.loss_scale`, and divides the gradients by it again. If a gradient
                is then not finite, every `.grad` is None.
            num_tokens: for gradient accumulation with a loss that is a mean over labels: number of labels in all
                accumulated batches. Loss and gradients are then sums over this batch's labels, divided by this number.
            outputs: True to return `(loss, outputs)` on every rank. `outputs` are the model's outputs for the global
                batch, detached.
            on_nonfinite: what happens if the loss or a gradient of any rank is NaN or infinite: with "raise", every
                rank raises NonFiniteError; with "skip", `pm.skipped_steps` grows and rank 0 warns. In both cases the
                batch adds no gradients and updates no buffers. With None, nothing is checked.
            locate: True to name the first operator that computes the NaN or infinity, by running the step again. It
                implies `on_nonfinite="raise"` if that is None.
        """
        options = StepOptions.read(
            self._source.model, kwargs, loss_scale=loss_scale, num_tokens=num_tokens, outputs=outputs,
            on_nonfinite=on_nonfinite, locate=locate,
        )  # fmt: skip
        explain_backward()
        self._process.step_scale = options.loss_scale
        self._data_sync.check_optimizer_attached()
        self._originals.warn_of_changes()
        self._check_registered()
        if loss_fn is None and target is not None:  # `target` is an input of the model
            kwargs, target = {**kwargs, "target": target}, None
        purpose: Purpose = "step_outputs" if outputs else "step"
        with self._in_flight.drained_on_error():
            self._in_flight.check_step(options, self._unreduced.is_open)
            with self._compared_on_error("step", args, kwargs):
                program, inputs = self._compiler.program(
                    args, kwargs, purpose=purpose, training=self.training, settings=self._modes.settings,
                    loss_fn=loss_fn, target=target,
                )  # fmt: skip
            criterion = named_criterion(loss_fn, self._source.model)
            executable, comparison = self._executable(program, inputs, "step", options.text, criterion)
            loss, flat = executable.step(inputs, options, comparison, self._loss_scaling)
            self._meter.count_step()
        if not outputs:
            return loss
        returned = tree_unflatten(flat, program.output_spec)
        return loss, returned if loss_fn is None else returned[1]

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        self._traced("parameters()")  # modules that contain this one find parameters through this attribute
        return super().named_modules(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self._traced("parameters()")
        return super().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        self._traced("buffers()")
        return super().named_buffers(*args, **kwargs)

    @on_local_values
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return {name: this rank's shard}. `full_state_dict` returns full tensors.

        `torch.distributed.checkpoint` saves these as shards of the model's tensors, and can load them on any mesh.

        Example:
            torch.distributed.checkpoint.save({"model": pm.state_dict()}, checkpoint_id="step100")
        """
        self._replicas.note_state_dict(self._traced("state_dict()"), self._local_parameters)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        state_dict = super().state_dict(*args, **kwargs)
        with_shard_offsets(self, state_dict, prefix, self._extra_state)
        self._save_loss_scaling(state_dict, prefix)
        return state_dict

    @on_local_values
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights by the model's names. A value is this rank's shard or the full tensor.

        Names of parameters that are on other stages are accepted. Raises OptionError for `assign=True`. Otherwise it
        behaves like `nn.Module.load_state_dict`.
        """
        self._traced("load_state_dict()")
        self._in_flight.check_landed("load_state_dict()")
        if assign:
            raise OptionError(
                "load_state_dict(assign=True) is not supported for a partitioned model",
                why="the program and optimizers hold references to its parameters",
                hint="leave assign out: values are copied into them",
            )
        return super().load_state_dict(state_dict, strict=strict)

    @on_local_values
    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        self._load_loss_scaling(state_dict, prefix)
        loading = Loading(self, shapes_of(self._traced("load_state_dict()"), self._source.model), missing, errors)
        loading.take(state_dict, prefix, self._extra_state)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def _meet(self, name: str) -> None:
        """Wait until every rank calls the method `name`.

        Raise InputError on all ranks if a rank calls another method.
        """
        self._in_flight.drain()
        if self._program is not None:
            none = frozenset[str]() if self._local_batch else None
            called = ComparedCall(name, self._calls[name], f"{name}()", {}, none)
            Comparison(called, self._process).finish_comparison()

    @contextmanager
    def _compared_on_error(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Context manager in which a call is traced. If tracing fails, compare the calls of all ranks.

        Other ranks may pass inputs of other shapes, with which their traces succeed. All ranks then raise an error that
        shows the difference.
        """
        try:
            yield
        except AutopartError as error:
            call = flatten_call({**{f"input {index}": value for index, value in enumerate(args)}, **kwargs})
            rows = num_rows(call) if self._local_batch else 0
            text = f"{name}({format_call(call.names, call.tensors)}), where {str(error).splitlines()[0]}"
            called = ComparedCall(name, self._calls[name], text, {}, frozenset() if self._local_batch else None, rows)
            Comparison(called, self._process).finish_comparison()
            raise

    def _traced(self, subject: str) -> Program:
        if self._program is None:
            raise TraceError(
                f"{subject} is not available yet",
                why="the model is traced at the first call, and its parameters are partitioned then",
                hint="parallelize(model, mesh, example_kwargs=batch), or call the module once before",
            )
        return self._program

    def _stages(self, program: Program) -> list[int]:
        return stages_at(program, self._process.pp, stage_style_of(self._schedule))

    def _executable(
        self, program: Program, inputs: Sequence[Tensor], purpose: Purpose, options: str = "",
        criterion: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> tuple[Executable | StepRunner, Comparison]:  # fmt: skip
        """Return (executable for a call, unfinished check that all ranks make the same call)."""
        text = f"{purpose}({format_call(program.input_names, inputs)}{options}) in {self._modes.text}"
        text += self._compiler.changed_values + (", inside no_sync()" if self._unreduced.is_open else "")
        tensors = {name: t for name, t in zip(program.input_names, inputs, strict=True) if isinstance(t, Tensor)}
        key: Any = program if self._in_flight.needs_own_programs else program.shared_graphs or program
        lookups = self._lookups.get(key, lambda: LookupChecks(program, self._process))
        problem: AutopartError | None = lookups.problem(tensors)
        if purpose == "step" or torch.is_grad_enabled():
            problem = problem or backward_error(self, self._local_parameters, self._trained, purpose == "step")
            if purpose == "step" and not any(t.requires_grad for t in inputs):
                problem = problem or frozen_error(self._source.model, program)
            problem = problem or self._unreduced.problem(program) or self._data_sync.problem(purpose == "step")
        text += "" if problem is None else f", where {str(problem).splitlines()[0]}"
        is_new, compiles = key not in self._executables, self._compile and program not in self._called
        self._called.add(program)
        if self._process.watch is not None:
            self._process.watch.allow(first=is_new or compiles or self._in_flight.is_cold)
        self._meter.begin(inputs if purpose != "forward" or torch.is_grad_enabled() else (), is_new or compiles)
        rows = min((tensors[name].size(0) for name in program.row_inputs or ()), default=0)
        tensors = {**tensors, **criterion}
        trains = purpose != "step" or backward_hooks.trains(self._local_parameters, inputs)
        called = ComparedCall(purpose, self._calls[purpose], text, tensors, program.row_inputs, rows, problem, trains)
        comparison = Comparison(called, self._process)
        if is_new or problem is not None or self._replicas.is_next_due():
            comparison.finish_comparison()
        if problem is not None:
            raise problem

        def make() -> Executable | StepRunner:
            is_first = self._program is None
            subjects = self._compiler.agreed() if is_first else {}
            check_same_start(self._source.model, subjects, self._process.host_group, program, weights=is_first)
            adopted = self._adopt(program)
            buffers = {**self._local_buffers, **criteria.local} if criterion else self._local_buffers
            bound = partial(
                Executable, adopted, self._process, buffers=buffers, schedule=self._schedule,
                compile=self._compile, unreduced=self._unreduced, data_sync=self._data_sync, lookups=lookups,
            )  # fmt: skip
            if purpose == "step":
                return self._in_flight.bind(adopted, bound)
            return bound(parameters=self._local_parameters)

        if criterion:
            criteria = self._criteria.get(key, lambda: Criterion(criterion, self._process.device))
            criteria.follow(criterion, self._in_flight.drain)
        with outside_inference_mode():
            executable = self._executables.get(key, make)
        if isinstance(executable, Executable) and key is program.shared_graphs:
            executable.use(program)
        if self.training and self._program is not None:
            self._replicas.next_step(self._program, self._local_parameters)
        return executable, comparison

    def _adopt(self, program: Program) -> Program:
        """Make `program` the current program, and register its new parameters and buffers.

        Parameters that an earlier program uses keep their layouts. Returns `program` with these layouts. If this rank's
        stages use no parameter, an empty placeholder parameter is registered.
        """
        model = self._source.model
        check_exact(program, self._process.device)
        if self._program is not None:
            program = replace(program, parameters=merge_stored(program.parameters, self._program.parameters))
        known = self._program.parameters if self._program is not None else ()
        self._trained = trained_names(model, program, known, self._trained)
        stages, stage_style = self._stages(program), stage_style_of(self._schedule)
        parameters = shard_parameters(
            model, program, self._process.coordinates,
            stages=stages, device=self._process.device, known=self._local_parameters, weights=self._weights,
        )  # fmt: skip
        for name, parameter in parameters.items():
            full, stored = model.get_parameter(name), program.parameters[name]
            mesh = str(program.mesh)
            owner, original = (self._weights.users_own(name) if self._weights is not None else None) or (model, full)
            shared = tied_shard_of(owner, name, original, mesh, stored.layout)
            if shared is None:
                parameter = with_spec(parameter, make_shard_info(name, program, self._process, stage_style))
            else:
                parameter = shared
            register_local(owner, original, parameter, mesh, stored.layout)
            self._originals.add(name, full, partial(equals_shard_of, parameter, stored, program, self._process))
            self._local_parameters[name] = parameter
            register_shard(parameter, name, program, self._process, stage_style)
        self._register(model, program.stored_names)
        if not self._local_parameters:  # an optimizer needs at least one parameter
            placeholder = self._parameters[NO_PARAMETERS] = nn.Parameter(torch.empty(0, device=self._process.device))
            register_placeholder(placeholder, self._process)
        persistent = set(model.state_dict(keep_vars=True))
        if self._weights is not None:
            self._weights.fill(model, self._compiler.written)
        written_parameters = [(name, model.get_parameter(name)) for name in sorted(self._compiler.written)]
        for name, buffer in (*model.named_buffers(remove_duplicate=False), *written_parameters):
            if name not in self._local_buffers and not buffer.is_meta:
                if id(buffer) not in self._copies:
                    self._copies[id(buffer)] = buffer.detach().to(self._process.device, copy=True)
                self._register_buffer(name, self._copies[id(buffer)], name in persistent)
        if self._program is None or program.parameters.keys() != self._program.parameters.keys():
            self._source.let_go(program.parameters.keys())
        self._program = program
        self._unreduced.adopt(program, self._local_parameters)
        self._adopt_sync(program)
        return program

    def _reset_executables(self) -> None:
        self._executables: Recent[Executable | StepRunner] = Recent(2 * MAX_CALLS)  # for calls and for training steps
        self._called = WeakSet[Program]()
        self._criteria: Recent[Criterion] = Recent(2 * MAX_CALLS)
        self._lookups: Recent[LookupChecks] = Recent(2 * MAX_CALLS)

    def _begin_steps(self, check_replicas: int | bool | None) -> None:
        """Create the objects that count steps or store gradient state, for a new module or a copy of one."""
        stage_style = stage_style_of(self._schedule)
        self._reset_executables()
        self._replicas = Replicas(self._process, stage_style, check_replicas)
        self._meter = StepMeter(self.num_data_ranks if self._local_batch else 1)
        self._data_sync = GradientSync(self._process)
        self._unreduced = NoSync(self._process, stage_style, lambda: self._data_sync.reduce_by_method())
        self._begin_flight(self._schedule, scales_loss=self._loss_scaling is not None)

    @on_local_values
    def _begin_as_copy(self) -> None:
        self._begin_steps(self._replicas.check_replicas)
        self._adopt_sync(self._traced("copy"))
        self._unreduced.adopt(self._traced("copy"), self._local_parameters)
        for name, parameter in self._local_parameters.items():
            register_shard(parameter, name, self._traced("copy"), self._process, stage_style_of(self._schedule))
        self._register(self._source.model, self._traced("copy").stored_names)
        if NO_PARAMETERS in self._parameters:
            register_placeholder(self.get_parameter(NO_PARAMETERS), self._process)
