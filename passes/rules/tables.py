"""Table of operators, with one row (`Rule`) per operator. A row has the operator's sharding rule.

`notation.py` explains the notation of sharding rules and the other fields of a row.
"""

from __future__ import annotations

from autopart.ir.facts import CostNotes
from autopart.passes.rules.notation import Rule
from autopart.passes.rules.operators import (
    attention_rules,
    concat_rules,
    dropout_rules,
    einsum_rules,
    embedding_rules,
    indexing_rules,
    norm_rules,
    recurrent_rules,
    reduction_rules,
    selection_rules,
    view_rules,
    window_rules,
)
from autopart.passes.rules.operators.pointwise_rules import elementwise
from autopart.passes.rules.rule_conditions import (
    adds_to_itself,
    has_unscaled_gradients,
    of_class_indices,
    of_class_probabilities,
    writes_zeros_or_tensors,
)

_ATTENTION = ("... b g r q k d", "... b g r q k e")
"""The two matrix products of attention, to count FLOPs.

A factor that a rule lacks (`g`, `r`: grouped heads) has size 1.
"""

_REMADE = CostNotes(joins="remade")
"""Cost of operators that torch.compile fuses, and recomputes in backward if that saves memory.

Elementwise operators and views have this cost too (`get_default_op_list` in torch/_functorch/partitioners.py).
"""
_CROSS_ENTROPY = CostNotes(joins="remade", passes=(2, 4))
"""Cross entropy runs log_softmax, which reads the logits and writes as many values, and a lookup per token.

Its backward writes zeros for the gradient of the lookup. log_softmax's backward reads that gradient and its own output,
and writes the gradient of the logits.
"""
_ARITHMETIC = CostNotes(gradients="each")


def _rows(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten::{name}": rule for name in names.split()}


RULES: dict[str, Rule] = {
    # matrix products
    "aten::linear": Rule("... k, n k -> ... n", linear=((0,), (1,)), matmul=("... k n",), also=("... k, k -> ...",)),
    "aten::bmm": Rule("b m k, b k n -> b m n", linear=((0,), (1,)), matmul=("b m k n",)),
    "aten::_cdist_forward": Rule("... p m, ... r m -> ... p r", whole="m"),
    "aten::matmul": Rule("... m k, ... k n -> ... m n", linear=((0,), (1,)), matmul=("... m k n",), also=(
        "... k, k -> ...", "k, ... k n -> ... n")),
    # mixture of experts: rows of other ranks' experts give zeros
    "autopart::expert_linear": Rule("s k, e k n, s -> s n", linear=((0,), (1,)), lookup="e", matmul=("s k n",),
        local=embedding_rules.expert_linear),
    "autopart::to_experts": Rule("t ..., (t k) -> (t k) ...", whole="k", linear=((0,),),
        local=embedding_rules.to_experts,
        routes="out"),
    "autopart::from_experts": Rule("(t k) ..., (t k) -> t ...", whole="k", linear=((0,),),
        local=embedding_rules.from_experts,
        routes="back"),
    # attention: q, k and v; with a mask (a pass makes causal masks explicit); with grouped heads of k and v
    "aten::scaled_dot_product_attention": Rule("... q d, ... k d, ... k e -> ... q e", whole="d k", matmul=_ATTENTION,
        local=attention_rules.ring, context="ring", cost=CostNotes(kind="attention", backward_work=2.5), also=(
        "... q d, ... k d, ... k e, ... q k -> ... q e",
        "b (g r) q d, b g k d, b g k e -> b (g r) q e",
        "b (g r) q d, b g k d, b g k e, b (g r) q k -> b (g r) q e",
        "b (g r) q d, b g k d, b g k e, q k -> b (g r) q e")),
    "autopart::update_cache": Rule("... q d, q -> ... k d", whole="q k", has_gradient=False,
        local=attention_rules.update_cache),
    # the sparse matrix is replicated
    "aten::_sparse_mm": Rule("m k, k n -> m n", whole="m k", linear=((1,),), takes_sparse=True),
    # tables and classes; embeddings are sharded by rows, like the head that may be tied to them
    "aten::embedding": Rule("v h, ... -> ... h", whole="h", linear=((0,),), lookup="v", when=has_unscaled_gradients,
        local=embedding_rules.embedding, cost=CostNotes(looks_up=True)),
    "aten::cross_entropy_loss": Rule("n c ..., n ... -> n ...", lookup="c", all_reduces=3, when=of_class_indices,
        local=embedding_rules.cross_entropy, has_reduction=True, cost=_CROSS_ENTROPY, otherwise=(
        Rule("n c ..., n ..., c -> n ...", whole="c", when=of_class_indices),
        Rule("n c ..., n c ... -> n ...", whole="c", when=of_class_probabilities, also=(
            "n c ..., n c ..., c -> n ...",)))),
    "aten::nll_loss_nd": Rule("n c ..., n ... -> n ...", whole="c", linear=((0,),), when=of_class_indices,
        has_reduction=True, cost=_REMADE, also=("n c ..., n ..., c -> n ...",)),
    "autopart::ctc_loss": Rule("t n c, n s, n, n -> n", whole="t c s"),
    "aten::one_hot": Rule("... -> ... c", whole="c", cost=_REMADE),
    "autopart::drop": Rule("..., ... -> ...", local=dropout_rules.drop, draws_noise=True, cost=_REMADE),
    # sampling of images, complex numbers as pairs
    "aten::grid_sampler_2d": Rule("b c x y, b u w t -> b c u w", whole="x y t", linear=((0,),)),
    "aten::grid_sampler_3d": Rule("b c x y z, b u v w t -> b c u v w", whole="x y z t", linear=((0,),)),
    "aten::view_as_real": Rule("... -> ... p", whole="p", linear=((0,),)),
    "aten::view_as_complex": Rule("... p -> ...", whole="p", linear=((0,),)),
    **_rows("tril triu", Rule("... q k -> ... q k", whole="q k", linear=((0,),), cost=_REMADE)),
    # pooling and resizing: spatial dims cannot be sharded
    **{f"aten::{name}": Rule(text, whole="x y z u v w", linear=linear) for text, linear, operators in (
        ("... x -> ... u", (), "max_pool1d"),
        ("... x y -> ... u w", (), "max_pool2d"),
        ("... x y z -> ... u v w", (), "max_pool3d"),
        ("... x -> ... u, ... u", (), "adaptive_max_pool1d"),
        ("... x y -> ... u w, ... u w", (), "max_pool2d_with_indices adaptive_max_pool2d"),
        ("... x y z -> ... u v w, ... u v w", (), "max_pool3d_with_indices adaptive_max_pool3d"),
        ("... x -> ... u", ((0,),), "avg_pool1d adaptive_avg_pool1d upsample_nearest1d upsample_linear1d"),
        ("... x y -> ... u w", ((0,),), """avg_pool2d adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d
            upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"""),
        ("... x y z -> ... u v w", ((0,),), "avg_pool3d adaptive_avg_pool3d upsample_nearest3d upsample_trilinear3d"),
    ) for name in operators.split()},
    # views and moves of elements
    "aten::reshape": Rule(of_call=view_rules.view, moves=True, keeps_weights=True, keeps_masks=True, cost=_REMADE),
    "aten::permute": Rule(of_call=view_rules.permute, moves=True, keeps_weights=True, keeps_masks=True),
    "aten::transpose": Rule(of_call=view_rules.transpose, moves=True, keeps_weights=True, keeps_masks=True),
    "aten::unsqueeze": Rule(of_call=view_rules.unsqueeze, moves=True, keeps_weights=True, keeps_masks=True),
    "aten::squeeze": Rule(of_call=view_rules.squeeze, moves=True, keeps_weights=True, keeps_masks=True),
    "aten::t": Rule(of_call=view_rules.reverse, moves=True, keeps_weights=True),
    "aten::movedim": Rule(of_call=view_rules.movedim, moves=True, keeps_masks=True),
    "aten::expand": Rule(of_call=view_rules.expand, moves=True, cost=CostNotes(gradients="repeated")),
    "aten::swapaxes": Rule(of_call=view_rules.transpose, moves=True),
    "aten::swapdims": Rule(of_call=view_rules.transpose, moves=True),
    "aten::numpy_T": Rule(of_call=view_rules.reverse, moves=True),
    "aten::mT": Rule(of_call=view_rules.matrix_transpose, moves=True),
    "aten::flip": Rule(of_call=reduction_rules.along_dim("dims", linear=True), moves=True),
    "aten::roll": Rule(of_call=reduction_rules.along_dim("dims", linear=True), moves=True),
    "aten::slice": Rule(of_call=concat_rules.cut, moves=True, cost=CostNotes(gradients="part")),
    "aten::narrow": Rule(of_call=concat_rules.cut, moves=True, cost=CostNotes(gradients="part")),
    "aten::select": Rule(of_call=concat_rules.cut, moves=True, selects=True, cost=CostNotes(gradients="part")),
    "aten::split_with_sizes": Rule(of_call=concat_rules.split, moves=True, cost=CostNotes(gradients="parts")),
    "aten::unbind": Rule(of_call=concat_rules.cut, moves=True, cost=CostNotes(gradients="parts")),
    "aten::cat": Rule(of_call=concat_rules.join, moves=True, cost=CostNotes(joins="copied")),
    "aten::stack": Rule(of_call=concat_rules.stack, moves=True, cost=CostNotes(joins="copied")),
    "aten::pad": Rule(of_call=window_rules.pad, moves=True, cost=_REMADE),
    "aten::constant_pad_nd": Rule(of_call=window_rules.pad, moves=True, cost=_REMADE),
    "aten::unfold": Rule(of_call=window_rules.unfold, moves=True),
    "aten::im2col": Rule(of_call=window_rules.im2col, moves=True),
    "aten::diagonal": Rule(of_call=view_rules.diagonal, moves=True),
    "aten::slice_scatter": Rule(of_call=concat_rules.overwrite, moves=True),
    "aten::select_scatter": Rule(of_call=concat_rules.overwrite, moves=True),
    "aten::gather": Rule(of_call=indexing_rules.gather, moves=True, cost=_REMADE),
    "aten::index_select": Rule(of_call=indexing_rules.index_select, moves=True, cost=_REMADE),
    "aten::index": Rule(of_call=indexing_rules.index, moves=True, cost=_REMADE),
    # reductions, and operators along one dim
    "aten::mean": Rule(of_call=reduction_rules.mean, cost=_REMADE),
    "aten::sum": Rule(of_call=reduction_rules.reduction, cost=CostNotes(gradient_is_view=True, joins="remade")),
    **_rows("nansum count_nonzero", Rule(of_call=reduction_rules.reduction)),
    **_rows("amax amin var std logsumexp", Rule(of_call=reduction_rules.unsharded_reduction, cost=_REMADE)),
    **_rows("""argmax argmin any all var_mean std_mean linalg_vector_norm prod norm median nanmedian mode
        kthvalue""", Rule(of_call=reduction_rules.unsharded_reduction)),
    **_rows("max min", Rule(of_call=reduction_rules.extreme, otherwise=(Rule(of_call=elementwise()),))),
    **_rows("softmax log_softmax", Rule(of_call=reduction_rules.along_dim("dim"), cost=_REMADE)),
    **_rows("_softmax _log_softmax cumprod logcumsumexp cummax cummin sort",
        Rule(of_call=reduction_rules.along_dim("dim"))),
    **_rows("cumsum _fft_c2c", Rule(of_call=reduction_rules.along_dim("dim", linear=True))),
    **_rows("_fft_r2c _fft_c2r", Rule(of_call=reduction_rules.half_spectrum)),
    "aten::topk": Rule(of_call=reduction_rules.topk),
    # norms, products, windows, recurrent layers
    **_rows("layer_norm rms_norm", Rule(of_call=norm_rules.layer_norm, cost=_REMADE)),
    "aten::group_norm": Rule(of_call=norm_rules.group_norm, cost=_REMADE),
    "aten::batch_norm": Rule(of_call=norm_rules.batch_norm),
    "aten::einsum": Rule(of_call=einsum_rules.einsum),
    **_rows("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
        Rule(of_call=window_rules.convolution)),
    "aten::col2im": Rule(of_call=window_rules.col2im),
    **_rows("lstm gru rnn_tanh rnn_relu", Rule(of_call=recurrent_rules.recurrent)),
    # writes at indices, searches
    "aten::scatter": Rule(of_call=indexing_rules.scatter(writes_zeros_or_tensors)),
    "aten::scatter_add": Rule(of_call=indexing_rules.scatter(lambda node: True)),
    "aten::scatter_reduce": Rule(of_call=indexing_rules.scatter(adds_to_itself)),
    **_rows("index_add index_copy index_fill", Rule(of_call=indexing_rules.index_write)),
    "aten::index_put": Rule(of_call=indexing_rules.index_put),
    **_rows("searchsorted bucketize", Rule(of_call=indexing_rules.searchsorted)),
    "aten::isin": Rule(of_call=indexing_rules.isin),
    "autopart::positions": Rule(of_call=selection_rules.positions),
    # elementwise
    **_rows("add sub", Rule(of_call=elementwise((0, 1)), cost=CostNotes(gradients="handed on"))),
    **_rows("rsub lerp addcdiv complex", Rule(of_call=elementwise((0, 1)))),
    "aten::mul": Rule(of_call=elementwise((0,), (1,)), cost=_ARITHMETIC),
    **_rows("div neg", Rule(of_call=elementwise((0,)), cost=_ARITHMETIC)),
    "aten::square": Rule(of_call=elementwise(), cost=_ARITHMETIC),
    "aten::contiguous": Rule(of_call=elementwise((0,)), cost=_REMADE),
    **_rows("to _to_copy", Rule(of_call=elementwise((0,)), keeps_weights=True, keeps_masks=True, cost=_REMADE)),
    "aten::detach": Rule(of_call=elementwise((0,)), keeps_weights=True, has_gradient=False),
    **_rows("""xlogy real imag conj_physical _conj resolve_conj resolve_neg positive deg2rad rad2deg special_xlog1py""",
        Rule(of_call=elementwise((0,)))),
    "aten::addcmul": Rule(of_call=elementwise((0, 1), (0, 2))),
    "aten::where": Rule(of_call=elementwise((1, 2)), cost=_REMADE),
    "aten::masked_fill": Rule(of_call=elementwise((0, 2))),
    "aten::fill": Rule(of_call=elementwise((1,), (0, 1))),
    "aten::ne": Rule(of_call=elementwise(), keeps_masks=True),
    "aten::eq": Rule(of_call=elementwise(), selects=True),
    **_rows("relu leaky_relu hardtanh", Rule(of_call=elementwise(), cost=CostNotes(keeps_sign=True))),
    **_rows("zeros_like ones_like full_like", Rule(of_call=elementwise(), cost=_REMADE)),
    "aten::mse_loss": Rule(of_call=elementwise(), has_reduction=True, cost=_REMADE),
    **_rows("l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits",
        Rule(of_call=elementwise(), has_reduction=True)),
    **_rows("""
        abs acos acosh asin asinh atan atanh atan2 bitwise_and bitwise_not bitwise_or bitwise_xor __and__ __or__ __xor__
        ceil celu clamp clamp_min clamp_max clip copysign cos cosh elu erf erfc exp exp2 expm1 floor floor_divide
        fmod ge gelu gt hardsigmoid hardswish isfinite isinf isnan le log log10 log1p
        log2 log_sigmoid logical_and logical_not logical_or logical_xor lt maximum minimum
        mish pow reciprocal relu6 remainder round rsqrt selu sgn sigmoid sign silu sin sinc sinh
        softplus sqrt tan tanh threshold trunc nan_to_num
        angle bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ digamma
        erfinv float_power fmax fmin frac gcd heaviside hypot i0 isposinf isneginf isreal lcm lgamma logaddexp
        logaddexp2 polar polygamma signbit special_entr special_erfcx
        special_i0e special_i1 special_i1e special_log_ndtr special_ndtri special_zeta""", Rule(of_call=elementwise())),
    # without a sharding rule
    **_rows("arange clone expand_as flatten full glu nll_loss ones repeat type_as zeros",
        Rule(cost=_REMADE)),
    "autopart::cast": Rule(cost=_REMADE),
    "autopart::pick_class": Rule(cost=CostNotes(looks_up=True, joins="remade")),
    "aten::dropout": Rule(cost=CostNotes(joins="drawn")),
    "autopart::dropout": Rule(cost=CostNotes(joins="drawn")),
    "autopart::attention_dropout": Rule(cost=CostNotes(kind="attention", backward_work=2.5)),
    "autopart::embedding_shard": Rule(cost=CostNotes(looks_up=True)),
    **_rows("split chunk", Rule(cost=CostNotes(gradients="parts"))),
}  # fmt: skip
"""{operator name: its row}.

Operators that occur only in generated programs have rows too, with their costs.
"""
