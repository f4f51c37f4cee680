"""Detection of NaN and infinity in the results of a model: comparing NaN with NaN proves nothing.

A value that is compared must not contain NaN. Infinity is allowed in outputs and buffers (such as masked logits), but
not in a loss or a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopart.ir.facts import facts
from autopart.ir.graph import describe, tensor_inputs
from autopart.proof.comparison import GraphUnderTest, Results
from autopart.runtime.training.nonfinite import bad_entries

SHOWN = 3
"""Maximum number of values of one kind that a message lists."""


@dataclass(frozen=True)
class NotFinite:
    """NaN, or infinity that is not allowed, in results of the model itself.

    Args:
        values: {compared value: description of its NaN and infinities}, with names such as `loss`, `output 1` or
            `gradient of h.0.up.weight`.
        begins: {parameter, input or buffer: description of the NaN and infinities that it contains before the run}.
        maker: description of the first operator that computes NaN or infinity, with its source line; "" if there is
            none.
        same: True if the partitioned program computes the same non-finite entries as the model.
    """

    values: Mapping[str, str]
    begins: Mapping[str, str]
    maker: str
    same: bool = True

    def __str__(self) -> str:
        lines = ["the model itself computes numbers that are not finite: nothing is proven"]
        lines.append(f"  model    {_listed(self.values)}")
        if self.begins:
            lines.append(f"  begins   {_listed(self.begins)}")
        if self.maker:
            lines.append(f"  made by  {self.maker}")
        lines.append(f"  program  {'the same numbers in the same positions' if self.same else 'different numbers'}")
        hint = "finite weights and inputs" if self.begins else "other weights, a smaller input, or an epsilon there"
        return "\n".join([*lines, f"  try      {hint}"])


def _listed(values: Mapping[str, str]) -> str:
    named = [f"{name} {text}" for name, text in list(values.items())[:SHOWN]]
    return "; ".join([*named, *([f"{len(values) - SHOWN} more"] if len(values) > SHOWN else [])])


def not_finite(subject: GraphUnderTest, results: Results) -> dict[str, str]:
    """Return {name: description of bad entries} of compared values with NaN or forbidden infinity."""
    return {name: bad_entries(value) for name, value, infinities in _compared(subject, results)
            if value.isnan().any() or (not infinities and bad_entries(value))}  # fmt: skip


def infinite(subject: GraphUnderTest, results: Results) -> dict[str, str]:
    """Return {name: description of the infinities} of outputs and buffers, in which infinity is allowed."""
    return {name: bad_entries(value) for name, value, infinities in _compared(subject, results)
            if infinities and not value.isnan().any() and bad_entries(value)}  # fmt: skip


def _compared(subject: GraphUnderTest, results: Results) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, value, True if infinity is allowed) for all floating-point values that are compared."""
    loss = subject.outputs.index(subject.loss) if subject.loss is not None else None
    entries: list[tuple[str, Any, bool]] = []
    for i, value in enumerate(results.outputs):
        entries.append(("loss" if i == loss else f"output {i}", value, i != loss))
    entries += [(f"gradient of {name}", grad, False) for name, grad in results.grads.items()]
    entries += [(f"gradient of input {name}", grad, False) for name, grad in results.input_grads.items()]
    entries += [(f"buffer {name}", value, True) for name, value in results.buffers.items()]
    for name, value, infinities in entries:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            yield name, value.detach(), infinities


def explain(subject: GraphUnderTest, values: Mapping[str, str]) -> NotFinite:
    """Find the operator, parameter or input from which NaN and infinities originate.

    Args:
        values: {compared value: description of its bad entries}, as `not_finite` returns.
    """
    computed = subject.values(retain_grads=True)
    begins = dict(_beginnings(computed))
    ends = [node for node in subject.outputs if isinstance(node, fx.Node)]
    ends += list(subject.traced.buffer_updates.values())
    maker = _first_forward(ends, computed, subject)
    if not maker and not begins:
        subject.seed(subject.flat_outputs(computed)).backward()
        maker = _first_backward(computed)
        for weight in subject.weights.values():
            weight.grad = None
    return NotFinite(values, begins, maker)


def _beginnings(computed: Mapping[fx.Node, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, description of bad entries) of non-finite parameters and inputs, and buffers with NaN."""
    for node, value in computed.items():
        text = bad_entries(value)
        if not text:
            continue
        if node.op == "placeholder" and facts(node).get("input_name"):
            yield f"input {facts(node)['input_name']}", text
        elif node.op == "get_attr" and (isinstance(value, torch.nn.Parameter) or "nan" in text):
            kind = "parameter" if isinstance(value, torch.nn.Parameter) else "buffer"
            yield f"{kind} {node.target}", text


def _first_forward(ends: list[fx.Node], computed: Mapping[fx.Node, Any], subject: GraphUnderTest) -> str:
    """Describe the first forward operator that computes NaN, or an infinity on which the loss depends.

    Returns "" if there is no such operator.
    """
    for end in ends:
        node = _origin(end, computed, torch.isnan)
        if node is not None and node.op == "call_function":
            infinities = [source for source in tensor_inputs(node) if _has(computed[source], torch.isinf)]
            if not infinities:
                return f"{describe(node)} computes nan from finite numbers"
            phrase = _infinity(infinities[0], computed)
            return f"{describe(node)} computes nan from infinities" + (f", which {phrase}" if phrase else "")
    phrase = _infinity(subject.loss, computed) if subject.loss is not None else ""
    return f"infinities, which {phrase}" if phrase else ""


def _infinity(end: fx.Node, computed: Mapping[fx.Node, Any]) -> str:
    """Describe the operator that computes the infinities in the value of `end`; "" if the value has none."""
    node = _origin(end, computed, torch.isinf)
    if node is None or node.op != "call_function":
        return ""
    return f"{describe(node)} computes from finite numbers"


def _origin(end: fx.Node, computed: Mapping[fx.Node, Any], bad: Callable[[Tensor], Tensor]) -> fx.Node | None:
    """Return an ancestor of `end` whose value is bad although the values of all its inputs are good.

    Args:
        bad: elementwise test of a tensor for bad entries, such as `torch.isnan`.
    """
    if not _has(computed[end], bad):
        return None
    node = end
    while True:
        worse = [source for source in tensor_inputs(node) if _has(computed[source], bad)]
        if not worse:
            return node
        node = worse[0]


def _first_backward(computed: Mapping[fx.Node, Any]) -> str:
    """Describe the operator whose backward computes the first gradient with NaN or infinity."""
    grads = {
        node: value.grad
        for node, value in computed.items()
        if isinstance(value, Tensor) and value.requires_grad and value.grad is not None
    }
    for node in reversed(list(grads)):
        if bad_entries(grads[node]):
            readers = [user for user in node.users if user.op == "call_function"]
            kind = "nan" if _has(grads[node], torch.isnan) else "infinity"
            return f"the backward of {describe(readers[-1])} computes {kind}" if readers else ""
    return ""


def _has(value: Any, bad: Callable[[Tensor], Tensor]) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_has(part, bad) for part in value)
    return isinstance(value, Tensor) and bool(bad(value).any())
