"""What each operator may do: one line per operator. No logic here; `rules.pattern_for` reads these tables.

Notation: `passes/rules/notation.py`. `linear` lists the sets of inputs that may be partial sums together.
"""

from __future__ import annotations

from .notation import Rule

LINES: dict[str, Rule] = {
    "aten::linear": Rule("... k, n k -> ... n", linear=((0,), (1,)), matmul=("... k n",)),
    "aten::bmm": Rule("b m k, b k n -> b m n", linear=((0,), (1,)), matmul=("b m k n",)),
    "aten::matmul": Rule("... m k, ... k n -> ... m n", linear=((0,), (1,)), matmul=("... m k n",)),
    "aten::embedding": Rule("v h, ... -> ... h", whole="h", linear=((0,),), lookup="v"),  # by rows, as its tied head
    "aten::layer_norm": Rule("... n, n, n -> ... n", whole="n"),
    "aten::rms_norm": Rule("... n, n -> ... n", whole="n"),
    "aten::scaled_dot_product_attention": Rule(
        "... q d, ... k d, ... k e -> ... q e", whole="d k q", matmul=("... q k d", "... q k e")
    ),
    "aten::cross_entropy_loss": Rule("n c ..., n ... -> n ...", lookup="c"),
    "aten::nll_loss_nd": Rule("n c ..., n ... -> n ...", whole="c"),
    "aten::conv1d": Rule("b c x, o c i -> b o y", whole="x i y", linear=((0,), (1,)), matmul=("b c o i y",)),
    "aten::conv2d": Rule(
        "b c x y, o c i j -> b o u w", whole="x y i j u w", linear=((0,), (1,)), matmul=("b c o i j u w",)
    ),
    "aten::max_pool2d": Rule("... x y -> ... u w", whole="x y u w"),
    "aten::avg_pool2d": Rule("... x y -> ... u w", whole="x y u w", linear=((0,),)),
    "aten::adaptive_avg_pool2d": Rule("... x y -> ... u w", whole="x y u w", linear=((0,),)),
    "aten::gather": Rule("... x, ... y -> ... y", whole="x y", linear=((0,),)),
}
"""Operators whose factors do not depend on their arguments."""

ALTERNATIVES: dict[str, tuple[str, ...]] = {
    "aten::matmul": ("... k, k -> ...", "k, ... k n -> ... n"),
    "aten::layer_norm": ("... n -> ... n", "... n, n -> ... n"),
    "aten::rms_norm": ("... n -> ... n",),
    "aten::scaled_dot_product_attention": (
        "... q d, ... k d, ... k e, ... q k -> ... q e",
        "b (g r) q d, b g k d, b g k e -> b (g r) q e",
        "b (g r) q d, b g k d, b g k e, b (g r) q k -> b (g r) q e",
    ),
}
"""Other forms of the same operators: without optional weights, with a mask, with fewer key-value heads."""

POINTWISE: frozenset[str] = frozenset(
    f"aten::{name}"
    for name in """
    abs acos acosh asin asinh atan atanh atan2 bitwise_and bitwise_not bitwise_or bitwise_xor __and__ __or__ __xor__
    ceil celu clamp clamp_min clamp_max clip copysign cos cosh div elu eq erf erfc exp exp2 expm1 floor floor_divide
    fmod ge gelu gt hardsigmoid hardswish hardtanh isfinite isinf isnan le leaky_relu lerp log log10 log1p
    log2 log_sigmoid logical_and logical_not logical_or logical_xor lt masked_fill maximum minimum min max
    mish mul ne neg pow reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign silu sin sinc sinh
    softplus sqrt square sub add tan tanh threshold tril triu trunc where xlogy nan_to_num addcmul addcdiv
    to _to_copy detach zeros_like ones_like full_like dropout type_as
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
    """.split()
)
"""Operators that work element by element, their inputs broadcast against each other."""

LINEAR_POINTWISE: dict[str, tuple[tuple[int, ...], ...]] = {
    "aten::add": ((0, 1),),
    "aten::sub": ((0, 1),),
    "aten::mul": ((0,), (1,)),
    "aten::div": ((0,),),
    "aten::neg": ((0,),),
    "aten::where": ((1, 2),),
    "aten::to": ((0,),),
    "aten::_to_copy": ((0,),),
}
"""Which inputs of a pointwise operator may be partial sums, all tensor inputs given (`x + 1` is not linear)."""

SCALAR_LINEAR: frozenset[str] = frozenset({"aten::mul", "aten::div", "aten::neg", "aten::to", "aten::_to_copy"})
"""Pointwise operators that stay linear with a number as their other operand."""

LOSS_REDUCTIONS: dict[str, int] = {
    "aten::cross_entropy_loss": 3, "aten::nll_loss_nd": 3, "aten::mse_loss": 2, "aten::l1_loss": 2,
    "aten::smooth_l1_loss": 2, "aten::huber_loss": 2, "aten::binary_cross_entropy": 3,
    "aten::binary_cross_entropy_with_logits": 4,
}  # fmt: skip
"""Losses with a `reduction` argument, and its position: 0 none, 1 mean (the default), 2 sum."""

SHAPE_ARGUMENT: dict[str, int] = {"aten::reshape": 1, "aten::expand": 1}
"""Operators that name their output's shape in an argument, and its position: it is rewritten to the local shape."""
