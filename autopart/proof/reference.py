"""Reference results for a partitioned program: the model on a single device, and its float64 trace.

A verification uses method 1, or method 2 if method 1 fails:

1. **The model in float64.** A copy of the model is converted to float64, run and traced. The program must agree with
   the copy to 1e-10. If the copy casts values down (a loss in float32), the trace computes these operators in float64.
   Then the program must agree with the trace to 1e-10, and the trace must agree with the copy to float32 rounding.
2. **The model in its own precision.** Some models do not run in float64: they add to `torch.zeros(...)`, mix bfloat16
   with other weights, enter autocast inside, store float32 tensors in a cache, or call a kernel without float64. A copy
   of such a model is run and traced in its own precision, and the graph is then converted to float64
   (`passes/normalize/double_precision.py`). The program is compared with that graph to 1e-10, and the graph with the
   model to the rounding of the model's precision. If rounding decides which code runs (which units of a ReLU are on,
   which expert is chosen), the graph is compared with the model before the conversion.

Both comparisons find faults. A fault of the program (a lost sum, a wrong shard) exceeds 1e-10 against the unpartitioned
graph. A fault of the graph (a lost operator, a wrong constant) exceeds the model's rounding against the model's own
Python code. The second comparison misses a fault of the trace only if the fault changes every result by less than that
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopart.common.progress import phase
from autopart.common.scoped import attributes
from autopart.compat.export_internals import quiet_shapes
from autopart.compat.torch_internals import tree_flatten, tree_map
from autopart.errors import Refusal, TraceError
from autopart.ir.graph import draws_random_numbers, is_host_draw
from autopart.ir.program import Rng
from autopart.ir.run.mixed_precision import Precision
from autopart.ir.trace import Trace
from autopart.passes.pass_pipeline import PassError
from autopart.proof.comparison import GraphUnderTest, Results, fixed_seed, relative, restore_buffers, tensor_by_name
from autopart.proof.finite_values import NotFinite, explain, not_finite
from autopart.recipe.make_plan import LIFTED, LIFTED_HALF, find_loss, prepare
from autopart.tracing.dynamic.input_decisions import Site
from autopart.tracing.meta_copy import copy_of, references_to_copy
from autopart.tracing.python.assigned_buffers import FIRST_CALL, changed_shape
from autopart.tracing.python.python_random import DRAWN_BY_TORCH, drawn_by_torch
from autopart.tracing.python.python_state import PythonState
from autopart.tracing.python.user_checkpoints import plain_checkpoints
from autopart.tracing.with_loss import WithLoss, call

FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-4, 5e-2
"""Largest error of the float64 trace against a model that computes in float32, or in half precision."""
NOT_DOUBLE = "the model does not run in float64: it runs in its own precision, its trace and the program in float64"
NOT_FINITE_IN_DOUBLE = (
    "the model makes numbers in float64 that are not finite: it runs in its own precision, its trace and the program "
    "in float64"
)
"""Reason why the model's own precision is used.

Finite weights can give NaN only in float64: a mask with the smallest float64 becomes -inf if softmax casts to float32.
"""
OLD_STATISTICS = (
    "a norm in eval mode is compared with the running statistics that its forward used: a later write to them makes "
    "its gradient in eager PyTorch wrong"
)
NO_DROPOUT = "dropout is off: compared in eval mode"
_DOUBLE = {False: torch.float64, True: torch.complex128}
_SINGLE = {torch.float64: torch.float32, torch.complex128: torch.complex64}
_NOT_DIFFERENTIABLE = {
    "derivative for": "plain operations in its place",
    "modified by an inplace operation": "a clone() of the tensor before it is written",
    "returned an invalid gradient": (
        "other operations in its place; for torch.nested.narrow with unequal lengths, "
        "torch.nested.nested_tensor_from_jagged(x[mask], offsets)"
    ),
    "aten._nested": "padded tensors in place of nested ones: torch has no derivative of this operator",
}
"""{text of torch's error for a model that cannot be differentiated: what the user can do}."""
_CANNOT = (TraceError, RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError)
"""Exceptions that a model raises if it does not run in float64."""


class Reference:
    """A copy of a model on a single device, its trace, and the results that the program must match.

    Args:
        source: the model, which is not changed.
        arguments: arguments of the call.
        loss_fn: loss function for a model that returns no loss, as in `verify`.
        precision: mixed precision of the trace. Its casts change nothing here, because all values are float64.

    Attributes:
        base: the copy.
        model: the copy with its loss function.
        arguments: arguments of the call in the copy's precision.
        traced: the trace of `model`, with graph, weights, buffers and inputs in float64.
        is_double: True if the copy is in float64 too. Then the trace shares the copy's weights and buffers.
        lost: names of buffers that the model changes and the trace does not change.
        infinite: {result of the model: description of its NaN and forbidden infinities}, from `not_finite`.
    """

    def __init__(
        self, source: nn.Module, arguments: Mapping[str, Any], loss_fn: Any, rng: Rng,
        precision: Precision | None = None,
    ):  # fmt: skip
        self.precision = precision
        self.rng, self.loss_fn, self.training = rng, loss_fn, source.training
        self._loss_fn = loss_fn  # a loss function that is a module is copied
        self._read_sites = set[Site]()  # the next trace need not find them again
        try:
            with quiet_shapes():
                self._use(source, in_double, arguments)
        except PassError:
            raise
        except _CANNOT:
            self._use(source, _in_single, arguments, NOT_DOUBLE)
        else:
            if self.infinite and not _is_double(source):
                self._use(source, _in_single, arguments, NOT_FINITE_IN_DOUBLE)

    def _copy(self, source: nn.Module, convert: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Copy and convert the model. A loss module is copied with the model, because both can share tensors."""
        if not isinstance(self.loss_fn, nn.Module):
            return convert(copy_of(source, {}))
        copied = convert(copy_of(WithLoss(source, self.loss_fn), {}))
        self._loss_fn = copied.get_submodule("loss_fn")
        return copied.get_submodule("model")

    def _use(
        self, source: nn.Module, convert: Callable[[nn.Module], nn.Module], arguments: Mapping[str, Any],
        why_single: str = "",
    ) -> None:  # fmt: skip
        """Copy the model, trace the copy, run it, and store the trace and results. Exceptions are not caught.

        Args:
            convert: casts the copy.
            why_single: reason why the copy is not in float64; "" if it is in float64.
        """
        self.base, self.is_double = self._copy(source, convert), not why_single
        self.notes = [why_single] if why_single else []
        with references_to_copy(source, self.base):
            self._trace_and_run(self.base, arguments, not why_single)

    def _trace_and_run(self, base: nn.Module, arguments: Mapping[str, Any], is_double: bool) -> None:
        self.model = base if self.loss_fn is None else WithLoss(base, self._loss_fn).train(self.training)
        self.arguments = self.converted(arguments)
        phase("tracing the model")
        traced = prepare(self.model, self.arguments, double=True, precision=self.precision, read=self._read_sites)
        if self.rng == "fast" and any(map(_draws_by_torch, traced.graph.nodes)):
            self.notes.append(NO_DROPOUT)
            self.model.eval()
            traced = prepare(self.model, self.arguments, double=True, precision=self.precision, read=self._read_sites)
        self.notes += [note for note in traced.notes if is_double or note != LIFTED]
        phase("running the model on one device")
        self.of_model = self._of_model(GraphUnderTest(traced, find_loss(traced)))
        self.traced = traced if is_double else _doubled(traced)
        self.subject = GraphUnderTest(self.traced, find_loss(self.traced))
        self.infinite = not_finite(self.subject, self.of_model)

    def converted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the arguments of a call to the precision of the copy."""
        return dict(tree_map(_to_double if self.is_double else _to_single, dict(arguments)))

    def trace(self, arguments: Mapping[str, Any]) -> Trace:
        """Trace another call of the copy. The new trace uses the weights and buffers of the first trace."""
        traced = prepare(self.model, arguments, double=True, precision=self.precision, read=self._read_sites)
        if self.is_double:
            return traced
        return replace(_doubled(traced), parameters=self.traced.parameters, buffers=self.traced.buffers)

    def in_double(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the arguments of a call to float64, the precision of the trace."""
        return dict(tree_map(_to_double, dict(arguments)))

    def buffer(self, name: str) -> Tensor:
        """Return the current value of a buffer, or of a frozen parameter that the forward writes."""
        return tensor_by_name(self.base, name)

    @property
    def is_upcast(self) -> bool:
        """True if the trace computes in a higher precision than the copy."""
        return not self.is_double or not {LIFTED, LIFTED_HALF}.isdisjoint(self.notes)

    @cached_property
    def expected(self) -> Results:
        """Float64 results that the program must match.

        These are results of the copy. If the copy computes anything in a lower precision, these are results of the
        trace.
        """
        return self.subject.expected() if self.is_upcast else self.of_model

    @cached_property
    def errors(self) -> dict[str, float]:
        """Faults of the trace: {name: difference between trace and model}, for differences above rounding."""
        apart = self.expected.distance(self.of_model, self.subject.buffer_scales) if self.is_upcast else 0.0
        allowed = HALF_TOLERANCE if LIFTED_HALF in self.notes else FLOAT32_TOLERANCE
        if apart > allowed:
            as_traced = prepare(self.model, self.arguments, read=self._read_sites)
            subject = GraphUnderTest(as_traced, find_loss(as_traced))
            apart = subject.expected().distance(self.of_model, subject.buffer_scales)
        errors = {"trace against model": apart} if apart > allowed else {}
        return errors | {f"buffer {name}": float("inf") for name in self.lost}

    @cached_property
    def not_finite(self) -> NotFinite | None:
        """NaN and infinities that the model computes, with their origin; None if there are none."""
        return explain(self.subject, self.infinite) if self.infinite else None

    def _of_model(self, subject: GraphUnderTest) -> Results:
        """Run the copy of the model, not its trace, and differentiate the result.

        If the model computes gradients itself, torch must differentiate twice. Attention kernels have no second
        derivative, so the run is then repeated with attention as plain operations. Raises TraceError if that fails too.
        """
        try:
            return self._run_model(subject)
        except RuntimeError as error:
            if not any(text in str(error) for text in _NOT_DIFFERENTIABLE):
                raise
        try:
            with sdpa_kernel(SDPBackend.MATH):
                return self._run_model(subject)
        except RuntimeError as error:
            if (hint := next((hint for text, hint in _NOT_DIFFERENTIABLE.items() if text in str(error)), None)) is None:
                raise
            raise TraceError(
                f"{type(self.base).__name__} cannot be differentiated by torch itself", refusal=Refusal.GRADIENT,
                why=str(error).strip().partition("\n")[0], hint=hint,
            ) from error  # fmt: skip

    def _run_model(self, subject: GraphUnderTest) -> Results:
        before = {name: buffer.clone() for name, buffer in self.base.named_buffers()}
        inputs = [leaf for leaf in tree_flatten(self.arguments)[0] if isinstance(leaf, Tensor)]
        versions = [(leaf, leaf._version, leaf.detach().clone()) for leaf in inputs]
        written_parameters = {*subject.traced.written, *subject.traced.weight_updates}
        with restore_buffers(self.base, written_parameters), PythonState(self.model):
            by_torch = DRAWN_BY_TORCH in subject.traced.notes
            draws = drawn_by_torch(as_numbers=True) if by_torch else nullcontext()
            with fixed_seed(), plain_checkpoints(), draws, own_statistics() as used:
                flat = tree_flatten(call(self.model, self.arguments))[0]
            if not all(torch.equal(statistic, copy) for statistic, copy in used):
                self.notes.append(OLD_STATISTICS)
            for name, value in before.items():
                if self.buffer(name).shape != value.shape:
                    now = self.buffer(name)
                    raise changed_shape(type(self.base).__name__, name, value, now, FIRST_CALL)
            written = {name: self.buffer(name).detach().clone() for name in subject.traced.buffer_updates}
            changed = {name for name, value in before.items() if relative(self.buffer(name), value) > 0}
            results = subject.differentiate(flat, written, subject.traced.parameters)
        for leaf, version, value in versions:  # the forward augments this input in place
            if leaf._version != version:
                leaf.detach().copy_(value)
        self.lost = changed - set(written)
        return results


@contextmanager
def own_statistics() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Give norms in eval mode copies of their running statistics, in a `with` block.

    If a later call of the norm in training mode updates the statistics in place, the backward of torch's operator uses
    the updated ones without an error. Yields a list of (statistic, its copy), which grows.
    """
    used: list[tuple[Tensor, Tensor]] = []

    def copied(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def called(
            x: Any, weight: Any, bias: Any, mean: Tensor | None, variance: Tensor | None, of_batch: bool, *rest: Any
        ) -> Tensor:
            if not of_batch and mean is not None and variance is not None:
                used.extend(zip((mean, variance), copies := (mean.clone(), variance.clone()), strict=True))
                mean, variance = copies
            return norm(x, weight, bias, mean, variance, of_batch, *rest)

        return called

    with attributes({(torch, name): copied(getattr(torch, name)) for name in ("batch_norm", "instance_norm")}):
        yield used


def _draws_by_torch(node: fx.Node) -> bool:
    return draws_random_numbers(node) and not is_host_draw(node)


def _is_double(model: nn.Module) -> bool:
    return all(parameter.dtype in _SINGLE for parameter in model.parameters())


def in_double(model: nn.Module) -> nn.Module:
    """Convert the weights and buffers of a model to float64, in place."""
    model.double()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_complex():  # `double()` does not convert tensors that are plain attributes
            tensor.data = tensor.data.to(torch.complex128)
    return model


def _in_single(model: nn.Module) -> nn.Module:
    """Convert the float64 weights and buffers of a model to float32, in place.

    It is called for models that do not run in float64.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.to(_SINGLE.get(tensor.dtype, tensor.dtype))
    return model


def _doubled(traced: Trace) -> Trace:
    """Return a copy of a trace with all tensors in float64. Tied tensors stay tied."""
    double_by_id: dict[int, Tensor] = {}

    def double(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: double_by_id.setdefault(id(t), _to_double(t)) for name, t in tensors.items()}

    parameters = {name: nn.Parameter(_to_double(p), p.requires_grad) for name, p in traced.parameters.items()}
    tensors = tuple(_to_double(tensor) for tensor in traced.call.tensors)
    call_ = replace(traced.call, tensors=tensors)
    return replace(traced, call=call_, parameters=parameters, buffers=double(traced.buffers))


def _to_double(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    return _cast(leaf, _DOUBLE[leaf.is_complex()])


def _to_single(leaf: Any) -> Any:
    return _cast(leaf, _SINGLE.get(leaf.dtype, leaf.dtype)) if isinstance(leaf, Tensor) else leaf


def _cast(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)
