"""Proof of mixed precision: the program with its casts is compared with a single-device run.

`verify` proves the partition in float64, where casts change nothing. This module checks the casts. The single-device
run executes the model's own Python code with parameters that are cast to the compute dtype. Their gradients are cast
back to the stored dtype. The program runs with every cast, and reduces gradients in its reduction dtype. Both must
agree as closely as rounding allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopart.compat.torch_internals import tree_flatten
from autopart.ir.run.mixed_precision import Precision
from autopart.passes.choose.plan_codec import decode
from autopart.proof.comparison import Arrangement, GraphUnderTest, Results, fixed_seed, restore_buffers, tensor_by_name
from autopart.recipe.make_plan import find_loss, prepare
from autopart.tracing.compute_dtype import cast_at_boundary
from autopart.tracing.meta_copy import copy_of
from autopart.tracing.python.hidden_tensors import HiddenTensors
from autopart.tracing.python.user_checkpoints import plain_checkpoints
from autopart.tracing.with_loss import WithLoss, call, users_model

ROUNDINGS = 4
"""Largest allowed error against the single device, in units of rounding of the coarsest dtype.

Each reduction over ranks rounds differently, and later layers pass the difference on.
"""

MOST = 0.25
"""Distance from float64 above which the single-device run proves nothing.

Its rounding then decides which code runs (which expert is chosen, which unit of a ReLU is on), so that another order of
additions gives other results.
"""


@dataclass(frozen=True)
class Rounded:
    """Differences between the partitioned program and the single-device run in mixed precision.

    Args:
        errors: {name of a compared value: error}, with the names of `Verification.errors`.
        own: distance of the single-device run in mixed precision from the float64 run.
        tolerance: largest error allowed: `ROUNDINGS` times the machine epsilon of the coarsest dtype, or three times
            `own`, whichever is larger. Infinite if `own` is above `MOST`; then nothing is compared.
    """

    precision: Precision
    errors: Mapping[str, float]
    own: float
    tolerance: float

    @property
    def max_error(self) -> float:
        return max(self.errors.values(), default=0.0)

    @property
    def ok(self) -> bool:
        return self.max_error <= self.tolerance

    def __str__(self) -> str:
        name, rounding = self.precision.name, f"the rounding error of one device is {self.own:.2g}"
        if self.tolerance == float("inf"):
            return f"{name}: not compared with one device in {name}, because rounding decides values there: {rounding}"
        head = (
            f"{name}: {'agrees' if self.ok else 'DISAGREES'} with one device in {name}: "
            f"largest difference {self.max_error:.2g}"
        )
        worst = max(self.errors, key=self.errors.__getitem__, default="")
        return f"{head} ({worst}) over {len(self.errors)} values, allowed {self.tolerance:.2g}; {rounding}"


class SingleDeviceRun:
    """Run of a copy of a model on a single device in mixed precision: its results and its trace.

    It takes the arguments of `Reference`.
    """

    def __init__(
        self, source: nn.Module, arguments: Mapping[str, Any], loss_fn: Any, precision: Precision, training: bool
    ):  # fmt: skip
        if isinstance(loss_fn, nn.Module):  # copy both: they may share tensors, and a run may write to its buffers
            copied = copy_of(WithLoss(source, loss_fn), {})
            base, loss_fn = copied.get_submodule("model"), copied.get_submodule("loss_fn")
        else:
            base = copy_of(source, {})
        base = base.train(training)
        self.model = base if loss_fn is None else WithLoss(base, loss_fn).train(training)
        self.arguments, self.precision = dict(arguments), precision
        self.traced = prepare(self.model, self.arguments, precision=precision)
        self.subject = GraphUnderTest(self.traced, find_loss(self.traced))
        self.results = self._run(base)

    def _run(self, base: nn.Module) -> Results:
        traced, prefix = self.traced, "model.model." if users_model(self.model) is not self.model else "model."
        cast = {f"{prefix}{name}": self.precision.cast(parameter) for name, parameter in traced.parameters.items()}
        with restore_buffers(base, {*traced.written, *traced.weight_updates}), HiddenTensors(self.model):
            with fixed_seed(), plain_checkpoints(), cast_at_boundary(base, self.precision):
                returned = torch.func.functional_call(_Call(self.model), cast, (self.arguments,), tie_weights=True)
            written = {name: tensor_by_name(base, name).detach().clone() for name in traced.buffer_updates}
            return self.subject.differentiate(tree_flatten(returned)[0], written, traced.parameters)

    def compared(self, arrangement: Arrangement, in_double: Results) -> Rounded:
        """Run the partitioned program on all ranks in mixed precision, and compare it with this run.

        Args:
            arrangement: sharding decisions for the float64 trace. Their plan is applied to the trace of this run.
            in_double: results of the model in float64.
        """
        plan = arrangement.plan
        assert plan is not None, "decisions for one trace are another's only through their plan"
        if in_double.has_other_gradients(self.results):
            return Rounded(self.precision, {"which parameters have a gradient": float("inf")}, 0.0, 0.0)
        rounding = in_double.distance(_in_double(self.results), self.subject.buffer_scales)
        kinds = self.precision.compute, self.precision.reduce
        tolerance = max(ROUNDINGS * max(torch.finfo(dtype).eps for dtype in kinds), 3 * rounding)
        if rounding > MOST:
            return Rounded(self.precision, {}, rounding, float("inf"))
        decisions = decode(self.traced, plan, arrangement.decisions.mesh)
        cut = Arrangement(decisions, arrangement.stage_style, arrangement.tamper, plan)
        return Rounded(self.precision, self.subject.errors(cut, self.results), rounding, tolerance)


class _Call(nn.Module):
    """Module whose forward takes the arguments of a call as one dict, for `functional_call`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, arguments: Mapping[str, Any]) -> Any:
        return call(self.model, arguments)


def _in_double(results: Results) -> Results:
    """Return a copy of the results in float64, for comparison."""

    def double(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    def each(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: double(value) for name, value in values.items()}

    outputs = [double(output) for output in results.outputs]
    return Results(outputs, each(results.grads), each(results.buffers), each(results.input_grads))
