"""Rules of elementwise operators, whose inputs broadcast against each other."""

from __future__ import annotations

import torch
from torch import fx

from autopart.ir.graph import is_floating, is_tensor, operator_name, shape, tensor_inputs
from autopart.ir.pattern import Pattern
from autopart.passes.rules.notation import Rule
from autopart.tracing.autograd.autograd_functions import NAMESPACE

POINTWISE: frozenset[str] = frozenset(
    f"aten::{name}"
    for name in """
    abs acos acosh asin asinh atan atanh atan2 bitwise_and bitwise_not bitwise_or bitwise_xor __and__ __or__ __xor__
    ceil celu clamp clamp_min clamp_max clip copysign cos cosh div elu eq erf erfc exp exp2 expm1 floor floor_divide
    fmod ge gelu gt hardsigmoid hardswish hardtanh isfinite isinf isnan le leaky_relu lerp log log10 log1p
    log2 log_sigmoid logical_and logical_not logical_or logical_xor lt masked_fill maximum minimum min max
    mish mul ne neg pow reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign silu sin sinc sinh
    softplus sqrt square sub add tan tanh threshold trunc where xlogy nan_to_num addcmul addcdiv
    to _to_copy detach zeros_like ones_like full_like
    angle bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ complex conj_physical _conj deg2rad digamma
    erfinv fill float_power fmax fmin frac gcd heaviside hypot i0 imag isposinf isneginf isreal lcm lgamma logaddexp
    logaddexp2 polar polygamma positive rad2deg real resolve_conj resolve_neg signbit special_entr special_erfcx
    special_i0e special_i1 special_i1e special_log_ndtr special_ndtri special_xlog1py special_zeta
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
    """.split()
)
"""Elementwise operators, without their overloads."""

LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    **{f"aten::{name}": ((0, 1),) for name in ("add", "sub", "rsub", "lerp", "addcdiv", "complex")},
    **{f"aten::{name}": ((0,),) for name in """
        div neg xlogy to _to_copy detach real imag conj_physical _conj resolve_conj resolve_neg positive deg2rad
        rad2deg special_xlog1py""".split()},
    "aten::mul": ((0,), (1,)),
    "aten::addcmul": ((0, 1), (0, 2)),
    "aten::where": ((1, 2),),
    "aten::masked_fill": ((0, 2),),
    "aten::fill": ((1,), (0, 1)),
}  # fmt: skip
"""{operator: sets of argument positions in which it is linear}. The arguments of a set can be partial sums at once. A
number among them must be 0 (`x + 1` is not linear)."""


def is_tagged_pointwise(node: fx.Node) -> bool:
    """Return True if a user's autograd.Function was found to be elementwise."""
    return operator_name(node).startswith(f"{NAMESPACE}::") and torch.Tag.pointwise in node.target.tags


def pointwise(node: fx.Node) -> Pattern | None:
    """Return the rule of an operator of `POINTWISE`, None for overloads that reduce (`max(x)`)."""
    shapes = [shape(n) for n in tensor_inputs(node)]
    if not is_tensor(node) or torch.broadcast_shapes(*shapes) != shape(node):
        return None
    text = ", ".join(["..."] * len(shapes)) + " -> ..."
    return Rule(text, linear=_linear_inputs(node)).instantiate(shapes, [shape(node)])


def _linear_inputs(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Return `LINEAR` for this call, as positions among its tensor inputs."""
    if not is_floating(node) or node.kwargs.get("rounding_mode"):
        return ()
    tensors = {i: argument for i, argument in enumerate(node.args) if isinstance(argument, fx.Node)}
    input_of = {position: k for k, position in enumerate(tensors)}
    sets = []
    for positions in LINEAR.get(operator_name(node), ()):
        numbers = [node.args[i] for i in positions if i not in tensors]
        if all(number == 0 for number in numbers) and len(numbers) < len(positions):
            sets.append(tuple(input_of[i] for i in positions if i in tensors))
    return tuple(sets)
