"""Compiler of a model's calls: traces the model, makes or reads its plan, and writes programs."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from autopart.common.flags import flags
from autopart.compat.torch_internals import tree_map
from autopart.errors import AutopartError, InputError, PlanError, TraceError
from autopart.ir.decisions import Decisions
from autopart.ir.graph import format_value
from autopart.ir.mesh import Mesh
from autopart.ir.program import SEEDS, Program
from autopart.ir.run.mixed_precision import Precision
from autopart.ir.trace import Call, Trace, batch_size, device_of_weights
from autopart.ops.key_value_cache import has_caches
from autopart.options import Options
from autopart.passes.choose.plan_codec import OnAxes, decided_by, decode
from autopart.passes.choose.solve.batch_axis import without_microbatches
from autopart.passes.facts.label_count import with_label_count
from autopart.passes.write.lower import lower
from autopart.plans.plan import Plan
from autopart.plans.rank_digest import EXAMPLE, agreed
from autopart.recipe.make_plan import class_of, find_loss, make_plan, plan_outputs, prepare, problem_of, written
from autopart.recipe.plan_checks import check_plan_mesh, check_plan_model, check_plan_options, warn_of_memory
from autopart.recipe.plan_figures import Draft, figures_of, plan_of
from autopart.recipe.sizes.call_family import CallFamily, resized, sizes_of
from autopart.recipe.sizes.largest_batch import LargestBatch
from autopart.recipe.sizes.program_template import check_derived
from autopart.recipe.sizes.size_formula import NotDerivable, Sizes
from autopart.tracing.call_cache import MAX_CALLS, Recent, call_key, format_call, warn_of_copies, warn_of_many
from autopart.tracing.caller_modes import isolated_trace, without_inference
from autopart.tracing.dynamic.input_decisions import Site
from autopart.tracing.local_batch_call import all_ranks_call, are_rows, check_global
from autopart.tracing.meta_copy import Source
from autopart.tracing.model_checks import check_not_empty
from autopart.tracing.python.guards import Guards, check_unstable, shown, warn_of_change
from autopart.tracing.python.layer_settings import NO_SETTINGS, Settings, digest, in_modes, settings_of, with_values
from autopart.tracing.python.number_inputs import NUMBERS, NumberInputs, NumberSlot, number_slots, numbers_of, slots_of
from autopart.tracing.python.recorded_reads import record_reads
from autopart.tracing.trace_model import bind_call, bind_next_call, check_values, flatten_call
from autopart.tracing.with_loss import WithLoss, WithLossAndOutputs

LossFn = Callable[..., Tensor]


@dataclass
class _Traced:
    """One traced call of the model, with the plan's decisions for this call.

    Attributes:
        with_outputs: for a model with a `loss_fn`: True if the trace includes the model's own outputs.
        guards: the Python values on which the trace depends. If one changes, the trace is not used again.
        first_guards: guards of the first trace with the same shapes, dtypes and options.
        changed_values: the differences between `first_guards` and `guards`, as text. Ranks compare this text.
        row_inputs: with `local_batch=True`, names of the inputs that have only this rank's samples; else None.
        programs: {purpose, such as "forward": program} of the programs written so far.
        derived_from: None if the call was traced. Otherwise the call was derived from traced calls with other sizes:
            (these traced calls, sizes of this call). Its programs are computed from theirs, and its other attributes
            are copied from one of them.
    """

    trace: Trace
    decisions: Decisions
    loss_fn: LossFn | None
    with_outputs: bool
    guards: Guards
    first_guards: Guards
    changed_values: str = ""
    row_inputs: frozenset[str] | None = None
    programs: dict[str, Program] = field(default_factory=dict)
    plan: Plan | None = None
    derived_from: tuple[CallFamily[_Traced], Sizes] | None = None

    @property
    def can_be_derived_from(self) -> bool:
        """True if calls with other sizes can be derived from this one.

        The model's Python code must then depend on sizes and dtypes only, not on values that it reads or changes.
        """
        return not (self.changed_values or self.trace.value_guards or self.trace.attribute_updates)


class Compiler:
    """Compiler of the calls of one model on one mesh: traces each kind of call when it first occurs.

    The plan is made at the first trace and serves all calls. A call is traced again if its shapes, dtypes, options,
    loss or mode (train, eval) are new. The `MAX_CALLS` most recently used traces are kept.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, options: Options, plan: Plan | None = None):
        self.source, self.mesh, self.options = Source(model), mesh, options
        self._plan = plan
        self._traced: Recent[_Traced] = Recent(MAX_CALLS)
        self._families: Recent[CallFamily[_Traced]] = Recent(MAX_CALLS)
        # Signatures of forward, which a user may replace.
        self._signatures = WeakKeyDictionary[Any, inspect.Signature]()
        self._example: _Traced | None = None
        self._last: _Traced | None = None
        self._decided: dict[str, OnAxes] = {}
        self.written: frozenset[str] = frozenset()
        self._num_traces, self._trace_s = 0, 0.0
        self.buffers: Mapping[str, Tensor] = {}
        """{name: buffer} of the partitioned module, whose values can differ from the model's."""
        self._values_read: dict[tuple[str, str], set[str]] = {}
        """{(expression, source line): the values that Python read in the traces}."""
        self._read_sites: set[Site] = set()  # the next trace need not find them again
        self._has_warned_of_change = False
        self._numbers: Recent[NumberInputs] = Recent(MAX_CALLS)  # for each set of calls that differ only in numbers
        self._has_number_inputs = False
        self.changed_values = ""
        self.origin = ""
        """Origin of the last new program: "derived", or "traced" with the reason."""
        self._largest = LargestBatch()
        self._random, self._samples = torch.Generator(), torch.Generator()
        self._model_settings = settings_of(model)
        if plan is not None:
            check_plan_mesh(plan, mesh)
            check_plan_options(options, plan)
            warn_of_memory(plan)

    @property
    def model(self) -> nn.Module:
        return self.source.model

    @property
    def has_plan(self) -> bool:
        return self._plan is not None

    @property
    def precision(self) -> Precision | None:
        """Mixed precision of the plan, or of the options if there is no plan. None: the model's own dtypes."""
        settings = self._plan or self.options
        return Precision.parse(settings.precision, settings.reduce_dtype)

    @property
    def scales_loss(self) -> bool:
        """True if the loss must be scaled (fp16)."""
        return self.precision is not None and self.precision.compute == torch.float16

    @property
    def plan(self) -> Plan:
        """The plan. Available after the first trace, or if a plan was passed.

        Its figures (time, memory, FLOPs) depend on `torch.autocast`. If the last training call ran under other autocast
        settings than the call that was planned, the figures are counted for the last call. If a training step had a
        larger batch than the planned call, a note in the plan gives its size.
        """
        if self._plan is None:
            raise PlanError("there is no plan yet", why="the model is traced at the first call",
                            hint="parallelize(model, mesh, example_kwargs=batch)")  # fmt: skip
        if self._last is None or self._last.trace.autocast == self._plan.autocast:
            return self._largest.noted(self._plan)
        if self._last.plan is None:
            self._last.plan = self._plan_as_run(self._plan, self._last)
        return self._largest.noted(self._last.plan)

    def _plan_as_run(self, plan: Plan, call: _Traced) -> Plan:
        """Return the plan, with its figures (time, memory, FLOPs) counted again for another traced call."""
        outputs = plan_outputs(call.trace, call.with_outputs)
        whole = None
        program, walks = written(call.trace, call.decisions, outputs, "fast", plan.compile)
        if call.decisions.scatter_sends:
            sent_whole = replace(call.decisions, scatter_sends=False)
            whole = written(call.trace, sent_whole, outputs, "fast", plan.compile)
        schedule = replace(plan.schedule, microbatches=call.decisions.microbatches)
        options = replace(self.options, hardware=plan.hardware or self.options.hardware, compile=plan.compile,
                          sequence_dims=plan.sequence_dims)  # fmt: skip
        problem = problem_of(call.trace, self.mesh, options, schedule)
        draft = Draft(problem, call.decisions, program, {}, walks, whole)
        figures = figures_of(draft, options.compile, options.optimizer)
        return replace(plan_of(class_of(self.model), draft, options, figures, plan.reasons), pins=plan.pins)

    def ready(self) -> Program | None:
        """Return the forward program of the example call; None if no example call was traced."""
        return None if self._example is None else self._write(self._example, "forward")

    def training_program(self) -> Program:
        """Return the program of a training step for the last training call, or for the example call."""
        call: Any = self._last or self._example
        return self._write(call, "step")

    def agreed(self) -> dict[str, str]:
        """Return {name: text} of versions, options, plan and example. Each text must be equal on all ranks."""
        call = self._example.trace.call if self._example is not None else None
        example = {} if call is None else {EXAMPLE: format_call(call.names, call.tensors).replace(", ", "\n")}
        return {**example, **agreed(self.options, self._plan)}

    def trace_example(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Trace an example call, and make the plan for it."""
        settings = settings_of(self.model)
        arguments = bind_call(self.model, args, kwargs)
        self._example = self._find(arguments, self.model.training, settings, None, "forward")[0]

    def program(
        self, args: tuple, kwargs: Mapping[str, Any], *, purpose: str, training: bool, settings: Settings = NO_SETTINGS,
        loss_fn: Callable[..., Tensor] | None = None, target: Any = None,
    ) -> tuple[Program, tuple[Tensor, ...]]:  # fmt: skip
        """Return the program for a call, and the input tensors of the program.

        A call with new shapes, dtypes, options or mode is traced first, or its program is derived from traced calls.
        """
        arguments = self._bound(args, kwargs)
        if not torch.is_grad_enabled() and purpose == "forward":
            arguments = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, arguments)
        if loss_fn is not None:
            arguments = {"target": target, "call": arguments}
        with with_values(self.model, settings):
            traced, call = self._find(arguments, training, settings, loss_fn, purpose)
        for name, value in traced.trace.attributes_after(call.tensors, self._buffers_of(traced)).items():
            path, _, attribute = name.rpartition(".")
            vars(self.model.get_submodule(path))[attribute] = value
        self.changed_values = traced.changed_values + traced.trace.value_guards.text
        if torch.is_grad_enabled() or purpose != "forward":
            self._last = traced
        if purpose != "forward":
            self._largest.add(call)
        program = self._write(traced, purpose)
        return program, (*call.tensors, *self._seeds(program))

    def _bound(self, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if not self._num_traces:
            return bind_call(self.model, args, kwargs)
        forward = self.model.forward
        function = getattr(forward, "__func__", forward)
        if function not in self._signatures:
            self._signatures[function] = inspect.signature(forward)
        return bind_next_call(self.model, self._signatures[function], args, kwargs)

    def reseed(self, seed: int) -> None:
        """Restart the sequence of dropout masks from this seed, which must be equal on every rank."""
        self._random.manual_seed(seed)
        self._samples.manual_seed(seed ^ 1)

    def random_state(self) -> dict[str, Tensor]:
        """Return the state of the generators of dropout masks and of sampled tokens."""
        return {"masks": self._random.get_state(), "samples": self._samples.get_state()}

    def set_random_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a result of `random_state`."""
        self._random.set_state(state["masks"])
        self._samples.set_state(state["samples"])

    def draw_seed(self) -> int:
        """Draw a seed for the sampling of tokens, equal on every rank. Dropout masks do not depend on it."""
        return int(torch.randint(2**62, (), generator=self._samples))

    def _seeds(self, program: Program) -> list[Tensor]:
        if program.input_names[-1:] != (SEEDS,):
            return []
        first = torch.randint(2**62, (), generator=self._random)
        return [(first + torch.arange(program.microbatches)).repeat(program.data_parallel_size)]

    def _find(
        self, arguments: Mapping[str, Any], training: bool, settings: Settings, loss_fn: LossFn | None, purpose: str
    ) -> tuple[_Traced, Call]:  # fmt: skip
        """Return the trace of a call, and the call with its tensors.

        If no earlier trace can be used, the call is traced. If earlier traces differ from the call in sizes only, the
        program is derived from them when possible.
        """
        arguments, call, inference = _flattened(arguments)
        with_outputs = purpose == "step_outputs" and loss_fn is not None

        def key_of(numbers: bool, sizes: bool = True) -> Hashable:
            return call_key(arguments, call, training, loss_fn, numbers, sizes), settings, with_outputs

        def traced_as(
            key: Hashable, of_all_sizes: Hashable, arguments: Mapping[str, Any], slots: Mapping[str, NumberSlot]
        ) -> _Traced:
            if traced := self._traced.find(key, self._fits(flatten_call(arguments), purpose)):
                return traced
            family = self._families.get(of_all_sizes, self._new_family)

            def trace(arguments: Mapping[str, Any]) -> _Traced:
                with isolated_trace(), number_slots(slots):
                    given = without_inference(arguments) if inference else arguments
                    return self._trace(given, training, settings, loss_fn, with_outputs, slots)

            return self._traced.add(key, self._derived_or_traced(family, key, arguments, purpose, trace))

        key, kind = key_of(True), key_of(False) if self._has_number_inputs else None
        inputs = None if kind is None else self._numbers.get(kind, NumberInputs)
        if not inputs and (known := self._traced.find(key, self._fits(call, purpose))):
            return known, call
        numbers, kind = numbers_of(call.options, loss_fn), kind or key_of(False)
        inputs = inputs or self._numbers.get(kind, NumberInputs)

        def with_numbers() -> dict[str, Any]:
            return {**arguments, NUMBERS: inputs.tensors(numbers, device_of_weights(self.model))}

        key_now = (kind, inputs.key(numbers)) if inputs else key
        given = flatten_call(with_numbers()) if inputs.can_be_tensors() else None
        if given is not None and (known := self._traced.find(key_now, self._fits(given, purpose))):
            return known, given
        earlier = self._traced.of(key_now)
        added = inputs.add(numbers, earlier[0].guards.changed_numbers() if earlier else {})
        while inputs.can_be_tensors() and self.precision is None:
            self._has_number_inputs = True
            named, slots = with_numbers(), {**slots_of(loss_fn), **inputs.slots}
            try:
                key_now, of_all_sizes = (kind, inputs.key(numbers)), (key_of(False, sizes=False), inputs.key(numbers))
                return traced_as(key_now, of_all_sizes, named, slots), flatten_call(named)
            except TraceError:
                if not added:
                    raise
                inputs.refuse(added)  # the model's code branches on a number, or an operator needs a number
                added = set()
        return traced_as(key, key_of(True, sizes=False), arguments, {}), call

    def _new_family(self) -> CallFamily[_Traced]:
        along = {axis: size * (2 if axis == "cp" else 1) for axis, size in self.mesh.sizes.items()}  # 2: zigzag
        data_axes = self.mesh.along("rows")

        def num_shards(call: _Traced, axes: Collection[str] | None) -> Sizes:
            over = {axis: size for axis, size in along.items() if axis != "pp" and (axes is None or axis in axes)}
            of_others = math.prod(size for axis, size in over.items() if axis not in data_axes)
            of_rows = of_others * math.prod(along[axis] for axis in data_axes)
            dims = (dim for tensor in call.trace.call.tensors for dim in range(tensor.dim()))
            return tuple(of_others if dim else of_rows * call.decisions.microbatches for dim in dims)

        return CallFamily(
            self._write, lambda call: call.trace.size_conditions, num_shards, lambda call: call.guards.hold()
        )

    def _derived(self, family: CallFamily[_Traced], sizes: Sizes, purpose: str) -> _Traced | None:
        """Derive a call with these sizes from traced calls of other sizes; return None if that is impossible."""
        try:
            program, traced = family.derived(sizes, purpose)
        except NotDerivable:
            return None
        return replace(traced, programs={purpose: program}, plan=None, derived_from=(family, sizes))

    def _derived_or_traced(
        self, family: CallFamily[_Traced], key: Hashable, arguments: Mapping[str, Any], purpose: str,
        trace: Callable[[Mapping[str, Any]], _Traced],
    ) -> _Traced:  # fmt: skip
        tensors = flatten_call(arguments).tensors
        sizes = sizes_of(tensors)
        if (known := family.traced(sizes)) is not None:
            return known
        derived = self._derived(family, sizes, purpose) or self._derived_by_anchor(
            family, sizes, purpose, lambda anchor: trace(resized(arguments, tensors, anchor))
        )
        self.origin = f"traced: {family.reason}" if derived is None else "derived"
        if derived is not None and not flags().check:
            return derived
        first = next((traced.first_guards for traced in self._traced.of(key)), None)
        changed_values = "" if first is None else self._changed_values(first)
        traced = trace(arguments)
        traced = replace(traced, first_guards=first or traced.guards, changed_values=changed_values)
        if derived is not None:
            check_derived(family.derived(sizes, purpose, constant=True)[0], self._write(traced, purpose))
        if traced.can_be_derived_from:
            family.add(sizes, traced)
        return traced

    def _derived_by_anchor(
        self, family: CallFamily[_Traced], sizes: Sizes, purpose: str, trace: Callable[[Sizes], _Traced]
    ) -> _Traced | None:  # fmt: skip
        """Trace a larger or smaller call (the anchor), and derive this call from it and earlier traces.

        Returns None if the anchor cannot be traced, or this call cannot be derived.
        """
        anchor = family.anchor(sizes)
        if anchor is None:
            return None
        try:
            traced = trace(anchor)
        except AutopartError:  # such as positions beyond the table
            family.anchors.fail(sizes, anchor)
            return None
        if traced.can_be_derived_from:
            family.add(anchor, traced)
        derived = self._derived(family, sizes, purpose)
        if derived is None:
            family.anchors.fail(sizes, anchor)
        return derived

    def _fits(self, call: Call, purpose: str) -> Callable[[_Traced], bool]:
        """Return a function that returns True if a trace can be used for a call.

        The Python values and input values on which the trace depends must be equal in the call. A derived trace must
        also give a program for `purpose`.
        """
        computed: dict[str, Any] = {}

        def fits(traced: _Traced) -> bool:
            if not traced.guards.hold() or not self._values_hold(traced, call, computed):
                return False
            if traced.derived_from is not None:
                try:
                    self._write(traced, purpose)
                except NotDerivable:
                    return False
            return True

        return fits

    def _values_hold(self, traced: _Traced, call: Call, computed: dict[str, Any]) -> bool:
        guards = traced.trace.value_guards
        return not guards or guards.hold(call.tensors, computed, self._buffers_of(traced))

    def _buffers_of(self, traced: _Traced) -> dict[str, Tensor]:
        return {**traced.trace.buffers, **self.buffers}

    def _changed_values(self, first: Guards) -> str:
        """Return, as text, the Python values that have changed since an earlier trace.

        Warn the first time that a value has changed.
        """
        changes = [*first.changes()]
        if changes and not self._has_warned_of_change:
            self._has_warned_of_change = True
            warn_of_change(changes[0])
        return "".join(f", with {change.path} = {shown(change.now)}" for change in changes)

    def _trace(
        self, arguments: Mapping[str, Any], training: bool, settings: Settings, loss_fn: LossFn | None,
        with_outputs: bool, slots: Mapping[str, NumberSlot],
    ) -> _Traced:  # fmt: skip
        start_s = time.perf_counter()
        with in_modes(self.model, training, settings):
            around = WithLossAndOutputs if with_outputs else WithLoss
            model = self.model if loss_fn is None else around(self.model, loss_fn)
            flat = flatten_call(arguments)
            if self.options.local_batch:
                check_not_empty(flat)  # the error shows this rank's shapes
                arguments = all_ranks_call(arguments, flat, self.mesh.data_parallel_size)
            traced, guards = self._prepare(model, arguments, [loss_fn, *flat.options.values()], slots)
        if self.options.local_batch and self.mesh.data_parallel_size > 1:
            check_global(traced.value_guards)
        if settings != self._model_settings:  # other settings than the plan's: operators may differ
            traced = replace(traced, mode=f"{traced.mode}+{digest(settings)}")
        self._check_written(traced)
        if self._plan is None:
            self._plan = make_plan(model, traced, self.mesh, self.options)
            warn_of_memory(self._plan)
        check_plan_model(self._plan, type(self.model).__name__, traced.parameters)
        decisions = decode(traced, self._plan, self.mesh, self._decided)
        # If several traces have an operator, the decision of the first one stays.
        self._decided = {**decided_by(traced, decisions), **self._decided}
        self._num_traces, self._trace_s = self._num_traces + 1, self._trace_s + time.perf_counter() - start_s
        for guard in traced.value_guards:
            self._values_read.setdefault((guard.text, guard.where), set()).add(str(guard.value))
        warn_of_many(self._num_traces, self._trace_s / self._num_traces, self._values_read)
        if decisions.copied:
            warn_of_copies(batch_size(traced), self.mesh)
        own_rows = dict(zip(traced.call.names, are_rows(flat), strict=True))
        row_inputs = (
            frozenset(name for name, is_own in own_rows.items() if is_own) if self.options.local_batch else None
        )
        return _Traced(traced, decisions, loss_fn, with_outputs, guards, guards, row_inputs=row_inputs)

    def _prepare(
        self, model: nn.Module, arguments: Mapping[str, Any], others: list[Any], slots: Mapping[str, NumberSlot]
    ) -> tuple[Trace, Guards]:
        """Trace a call, and record the Python values that its program depends on."""

        def once() -> tuple[Trace, Guards]:
            with record_reads() as reads:
                traced = prepare(model, arguments, written=self.written, precision=self.precision,
                                 buffers=self.buffers, read=self._read_sites).without_values()  # fmt: skip
            device = device_of_weights(self.model) if self.precision is None else None
            return traced, Guards(reads, model, others, slots.values(), device, traced.attribute_updates)

        traced, guards = once()
        if guards.unstable:
            check_unstable(model, guards.unstable, traced, once()[0])
        return traced, guards

    def _check_written(self, traced: Trace) -> None:
        """Raise TraceError if a later trace is the first one that writes to a frozen parameter.

        Earlier traces only read that parameter, so it may be stored sharded.
        """
        late = [name for name in sorted(traced.written - self.written) if self._num_traces]
        self.written |= traced.written
        if late:
            raise TraceError(
                f"this call of {type(self.model).__name__} writes to its frozen parameter '{late[0]}'",
                why="earlier calls only read it, so it may be stored sharded",
                hint="parallelize(model, mesh, example_kwargs=batch) with a call that writes it, in train mode",
            )

    def _write(self, traced: _Traced, purpose: str) -> Program:
        if purpose not in traced.programs and traced.derived_from is not None:
            family, sizes = traced.derived_from
            traced.programs[purpose], _ = family.derived(sizes, purpose)
        elif purpose not in traced.programs:
            decisions, local = traced.decisions, traced.row_inputs is not None
            outputs = list(traced.trace.graph.output_node().args[0])
            if purpose in ("step", "step_outputs"):
                loss = find_loss(traced.trace, traced.with_outputs)
                if loss is None:
                    raise _no_scalar(traced.loss_fn, traced.trace) or InputError(
                        f"{type(self.model).__name__} returns no loss for this call",
                        why="step() needs a scalar to differentiate",
                        hint="pass labels so that the model returns a loss, or step(..., loss_fn=f, target=t)",
                    )  # fmt: skip
                beside = outputs if purpose == "step_outputs" else []
                program = lower(
                    traced.trace, decisions, [loss], whole_outputs=False, rng=self.options.rng, beside=beside,
                    local_rows=local,
                )  # fmt: skip
                program = with_label_count(program, loss)
            else:
                # Without a pipeline, a call runs the full batch at once. Only training steps use microbatches.
                runs_once = self.mesh.size("pp") == 1 or has_caches(traced.trace.graph.nodes)
                if runs_once and decisions.microbatches > 1:
                    decisions = without_microbatches(traced.trace, decisions)
                program = lower(
                    traced.trace, decisions, outputs, whole_outputs=True, rng=self.options.rng, local_rows=local
                )
            traced.programs[purpose] = replace(program, row_inputs=traced.row_inputs)
        return traced.programs[purpose]


def _flattened(arguments: Mapping[str, Any]) -> tuple[Mapping[str, Any], Call, bool]:
    """Return (arguments, call with its tensors, True if there are inference tensors among these).

    Outside of inference mode, inference tensors are replaced by normal tensors, because autograd cannot save them.
    """
    call = flatten_call(arguments)
    check_values(call)
    inference = any(tensor.is_inference() for tensor in call.tensors)
    if inference and not torch.is_inference_mode_enabled():
        arguments, inference = without_inference(arguments), False
        call = flatten_call(arguments)
    return arguments, call, inference


def _no_scalar(loss_fn: Callable[..., Tensor] | None, traced: Trace) -> InputError | None:
    """Return the error for a `loss_fn` that does not return a scalar loss; None if there is no `loss_fn`."""
    if loss_fn is None:
        return None
    returned = [format_value(o) for o in traced.graph.output_node().args[0] if isinstance(o, fx.Node)]
    return InputError(
        f"loss_fn returns {', '.join(returned)}", why="step() needs a scalar to differentiate",
        hint="return a mean or a sum from loss_fn",
    )  # fmt: skip
