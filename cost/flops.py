"""FLOPs of traced operators, from their sharding rules or from `torch.utils.flop_counter`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from autopart.ir.facts import facts
from autopart.ir.graph import tuple_values, value
from autopart.ops.operators import autopart_ops


def work(node: fx.Node) -> float:
    """Return the FLOPs of an operator.

    An operator without a matrix product counts one FLOP per output element, or 0 if it only moves data.
    """
    flops = matrix_work(node)
    if flops:
        return float(flops)
    if facts(node)["moves"]:
        return 0.0
    share = math.prod(facts(node).get("shares", {}).values())
    return share * sum(v.numel() for v in tuple_values(node) if hasattr(v, "numel"))


def matrix_work(node: fx.Node) -> int:
    """Return the FLOPs of a matrix product, and 0 for all other operators.

    The FLOPs come from the operator's sharding rule, or from torch's counter if it has no rule.
    """
    pattern = facts(node)["pattern"]
    return pattern.flops if pattern is not None else counted_flops(node)


def counted_flops(node: fx.Node) -> int:
    """Return the FLOPs of a call as `torch.utils.flop_counter` counts them, or 0 if it has no formula.

    The call runs on the fake tensors of the trace. A user's operator is counted if a formula is registered for it
    (`torch.utils.flop_counter.register_flop_formula`).
    """
    if "counted_flops" not in facts(node):
        args, kwargs = fx.map_arg((node.args, node.kwargs), _known)
        with flop_counter() as counter:
            node.target(*args, **kwargs)
        facts(node)["counted_flops"] = counter.get_total_flops()
    return facts(node)["counted_flops"]


def _known(node: fx.Node) -> Any:
    """Return the traced value of a node, or 0 for a node without one.

    Integers that differ by rank have no traced value. FLOPs do not depend on these integers, so 0 stands in.
    """
    return 0 if value(node) is None else value(node)


def flop_counter() -> FlopCounterMode:
    """Return torch's FLOP counter with the additional formulas of `FORMULAS`.

    Torch lacks these formulas or has wrong ones. For example, it counts the backward of a grouped convolution as if
    the convolution were dense.
    """
    return FlopCounterMode(display=False, custom_mapping=FORMULAS)


def _convolution_backward_flops(
    grad_shape: list[int], input_shape: list[int], weight_shape: list[int], _bias: Any, _stride: Any, _padding: Any,
    _dilation: Any, transposed: bool, _output_padding: Any, _groups: int, output_mask: Sequence[bool], **_: Any,
) -> int:  # fmt: skip
    """Return the FLOPs of a convolution's backward: the FLOPs of its forward for each computed gradient.

    Gradients of the input and of the weight count, the gradient of the bias does not. Grouped convolutions are counted
    right, because the weight's shape has the input channels of one group.
    """
    return sum(output_mask[:2]) * conv_flop_count(input_shape, weight_shape, grad_shape, transposed)


def _expert_flops(rows_shape: list[int], weight_shape: list[int], *_: Any, **__: Any) -> int:
    return 2 * rows_shape[0] * math.prod(weight_shape[1:])


def _attention_flops(query_shape: list[int], key_shape: list[int], value_shape: list[int], *_: Any, **__: Any) -> int:
    return 2 * math.prod(query_shape[:-1]) * key_shape[-2] * (query_shape[-1] + value_shape[-1])


FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
    autopart_ops.expert_linear: _expert_flops,
    autopart_ops.attention_dropout: _attention_flops,
    autopart_ops.attention_dropout_forward: _attention_flops,
}
"""{operator: function that returns its FLOPs from the shapes of its arguments}."""
