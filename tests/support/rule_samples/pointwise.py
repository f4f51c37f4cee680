"""Calls of operators that work element by element."""

import torch

from .sample import bools, call, data, ints, x, z

UNARY = """abs acos asin atan ceil celu cos cosh elu erf erfc exp exp2 expm1 floor gelu hardsigmoid
    hardswish hardtanh isfinite isinf isnan log log10 log1p log2 log_sigmoid logical_not mish neg reciprocal relu relu6
    round rsqrt selu sgn sigmoid sign silu sin sinc sinh softplus sqrt square tan tanh trunc nan_to_num leaky_relu
    acosh asinh atanh detach zeros_like ones_like tril triu angle conj_physical deg2rad digamma erfinv frac i0
    isposinf isneginf isreal lgamma positive rad2deg real resolve_conj resolve_neg signbit special_entr special_erfcx
    special_i0e special_i1 special_i1e special_log_ndtr special_ndtri logit hardshrink softshrink special_expit"""
BINARY = """atan2.default copysign.Tensor div.Tensor eq.Tensor fmod.Tensor ge.Tensor gt.Tensor
    le.Tensor lt.Tensor ne.Tensor maximum minimum max.other min.other mul.Tensor pow.Tensor_Tensor remainder.Tensor
    rsub.Tensor sub.Tensor add.Tensor xlogy.Tensor logical_and logical_or logical_xor type_as
    fmax fmin hypot logaddexp logaddexp2 multiply.Tensor true_divide.Tensor special_xlog1py"""
INTEGER = """bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor
    bitwise_left_shift.Tensor bitwise_right_shift.Tensor __lshift__.Tensor __rshift__.Tensor gcd lcm"""
LOSSES = "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"

SAMPLES = [
    *(call(name, x(6, 4, low=1.1, high=2.0) if name == "acosh" else x(6, 4)) for name in UNARY.split()),
    *(call(name, x(6, 4), x(6, 4)) for name in BINARY.split()),
    *(call(name, x(2, 6, 4), x(6, 1)) for name in BINARY.split() if name != "max.other"),
    call("floor_divide", data(6, 4), data(4)),
    call("copy", data(6, 4), data(4)),
    call("add.Tensor", x(6, 4), data(6, 1)),
    call("mul.Tensor", data(6, 4), x(6, 1)),
    *(call(name, ints(6, 4), ints(6, 4)) for name in INTEGER.split()),
    call("bitwise_not", bools(6, 4)),
    call("add.Tensor", x(6, 4), 2.5),
    call("add.Tensor", x(6, 4), x(4), alpha=3),
    call("sub.Tensor", x(6, 4), x(4), alpha=3),
    call("mul.Tensor", x(6, 4), 2.5),
    call("mul.Tensor", x(6, 4), x()),
    call("div.Tensor", x(6, 4), 2.5),
    call("div.Tensor", x(6, 4), x()),
    call("div.Tensor_mode", x(6, 4), x(4), rounding_mode="floor"),
    call("div.Tensor_mode", x(6, 4, high=9), 2, rounding_mode="trunc"),
    call("rsub.Scalar", x(6, 4), 1.0),
    call("pow.Tensor_Scalar", x(6, 4), 3),
    call("pow.Scalar", 2.0, x(6, 4)),
    call("leaky_relu", x(6, 4, low=-1), 0.2),
    call("clamp", x(6, 4), 0.3, 0.6),
    call("clamp.Tensor", x(6, 4), x(4, high=0.3), x(6, 1, low=0.6)),
    call("clip", x(6, 4), 0.3, 0.6),
    call("clamp_min", x(6, 4), 0.5),
    call("clamp_max", x(6, 4), 0.5),
    call("threshold", x(6, 4), 0.5, 0.25),
    call("lerp.Scalar", x(6, 4), x(6, 4, low=0.5), 0.3),
    call("lerp.Tensor", x(6, 4), x(4), x(6, 1)),
    call("addcmul", x(6, 4), x(4), x(6, 1), value=2.0),
    call("addcdiv", x(6, 4), x(4), x(6, 1), value=2.0),
    call("full_like", x(6, 4), 3.0),
    call("masked_fill.Scalar", x(6, 4), bools(6, 4), 2.0),
    call("masked_fill.Tensor", x(6, 4), bools(4), x()),
    call("where.self", bools(6, 4), x(6, 4), x(4)),
    call("where.ScalarOther", bools(6, 4), x(6, 4), 0.0),
    call("where.ScalarSelf", bools(6, 1), 1.0, x(6, 4)),
    call("to.dtype", x(6, 4), torch.float32),
    call("_to_copy", x(6, 4), dtype=torch.float32),
    call("to.dtype", ints(6, 4), torch.float64),
    call("to.dtype", x(6, 4), torch.int64),
    call("dropout", x(6, 4), 1e-300, True),
    call("autopart::drop", x(6, 4), data(6, 4), 0.25),
    call("gelu", x(6, 4), approximate="tanh"),
    call("tril", x(3, 6, 4), -1),
    call("triu", x(6, 4), 1),
    *(call(name, x(6, 4), x(6, 4, low=0.2), 0) for name in LOSSES.split()[:4]),
    call("binary_cross_entropy", x(6, 4), x(6, 4), None, 0),
    call("binary_cross_entropy", x(6, 4), x(6, 4), data(4), 0),
    call("binary_cross_entropy_with_logits", x(6, 4), x(6, 4), None, None, 0),
    call("binary_cross_entropy_with_logits", x(6, 4), x(6, 4), data(4), data(6, 1), 0),
    *(call(name, x(6, 4), x(6, 4, low=0.2)) for name in LOSSES.split()),
    call("mse_loss", x(6, 4), x(6, 4), 2),
    call("mse_loss", x(6, 4), x(4), 0),
    call("max", x(6, 4)),
    call("min", x(6, 4)),
    call("clamp.Tensor", x(6, 4), None, x(6, 1, low=0.6)),
    call("float_power.Tensor_Scalar", x(6, 4), 1.5),
    call("heaviside", data(6, 4), data(4)),
    call("special_zeta", data(6, 4, high=3, low=2), data(4)),
    call("polygamma", 2, x(6, 4)),
    call("prelu", x(2, 6, 4, low=-0.9), x(6)),
    call("prelu", x(6, 4, low=-0.9), x(1)),
    call("fill.Scalar", x(6, 4), 2.0),
    call("fill.Tensor", x(6, 4), x()),
    call("new_zeros", x(6, 4), [6, 2]),
    # complex numbers
    call("complex", x(6, 4), x(6, 4)),
    call("polar", x(6, 4), x(6, 4)),
    call("view_as_real", z(6, 4)),
    call("view_as_complex", x(6, 4, 2)),
    *(call(name, z(6, 4)) for name in ("real", "imag", "angle", "abs", "conj_physical", "_conj")),
    call("mul.Tensor", z(6, 4), z(4)),
    call("fft_fftn", x(2, 6, 4), None, [1, 2]),
    call("fft_fft", z(6, 4)),
    call("fft_rfft", x(6, 4)),
    call("fft_irfft", z(6, 3)),
    call("real", x(6, 4)),
]
