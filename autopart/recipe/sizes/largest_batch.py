"""The largest batch that a module has trained on, with a note on its size and predicted memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopart.cost.formula.plan_cost import Cost
from autopart.errors import AutopartError
from autopart.ir.trace import Call
from autopart.plans.headlines import fit_text, step_size
from autopart.plans.plan import Plan
from autopart.tracing.with_loss import inputs_with_loss


class LargestBatch:
    """Record of the training call with the most elements in its inputs."""

    def __init__(self) -> None:
        self._num_elements = 0
        self._shapes: Mapping[str, list[int]] = {}

    def add(self, call: Call) -> None:
        """Record the shapes of a training call if it is larger than all earlier ones."""
        num_elements = sum(tensor.numel() for tensor in call.tensors)
        if num_elements > self._num_elements:
            self._num_elements = num_elements
            names = inputs_with_loss(call.names)
            self._shapes = {name: [*tensor.shape] for name, tensor in zip(names, call.tensors, strict=True)}

    def noted(self, plan: Plan) -> Plan:
        """Return the plan. If the largest batch exceeds the planned batch, add a note on its size and memory."""
        planned = sum(math.prod(entry["shape"]) for entry in plan.inputs.values())
        if self._num_elements <= planned or self._shapes.keys() != plan.inputs.keys():
            return plan
        inputs = {name: {**plan.inputs[name], "shape": shape} for name, shape in self._shapes.items()}
        largest = replace(plan, inputs=inputs)
        text = f"the largest batch of a training step so far was {step_size(largest)}"
        if needed := _memory_text(plan, inputs):
            text += f", with a predicted memory of {needed}"
        return replace(plan, notes=(*plan.notes, text))


def _memory_text(plan: Plan, inputs: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe the predicted memory of a batch; "" if it is unknown."""
    pairs = [(plan.inputs[name]["shape"], entry["shape"]) for name, entry in inputs.items() if entry["shape"]]
    rows = {new[0] / old[0] for old, new in pairs}
    lengths = {new_size / old_size for old, new in pairs for old_size, new_size in zip(old[1:], new[1:], strict=True)}
    try:
        cost = Cost.of(plan)
        table = cost.table
        if len(rows) > 1 or len(lengths - {1.0}) > 1 or (lengths != {1.0} and not table.s):
            return ""
        tokens = {"s": table.s * max(lengths)} if lengths - {1.0} else {}
        memory_bytes = cost.at(b=table.b * rows.pop(), **tokens).memory_bytes
    except AutopartError:  # a plan from a file of an older version, or sizes at which no schedule runs
        return ""
    return fit_text(replace(plan, memory=({"total": memory_bytes},)))
