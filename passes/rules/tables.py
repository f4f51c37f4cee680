"""Tables of sharding rules: one line per operator, no logic. `rules.pattern_for` reads them.

`notation.py` explains the notation. Elementwise operators are in `operators/pointwise_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from autopart.ir.facts import CostNotes
from autopart.ir.pattern import Pattern
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
from autopart.passes.rules.rule_conditions import (
    adds_to_itself,
    has_unscaled_gradients,
    of_class_indices,
    of_class_probabilities,
    writes_zeros_or_tensors,
)

_ATTENTION = ("... b g r q k d", "... b g r q k e")
"""The two products of attention, with or without grouped heads (a factor that a line lacks counts as 1)."""

LINES: dict[str, Rule | tuple[Rule, ...]] = {
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
        local=attention_rules.ring, also=(
        "... q d, ... k d, ... k e, ... q k -> ... q e",
        "b (g r) q d, b g k d, b g k e -> b (g r) q e",
        "b (g r) q d, b g k d, b g k e, b (g r) q k -> b (g r) q e",
        "b (g r) q d, b g k d, b g k e, q k -> b (g r) q e")),
    # the sparse matrix is replicated
    "aten::_sparse_mm": Rule("m k, k n -> m n", whole="m k", linear=((1,),)),
    # tables and classes; embeddings are sharded by rows, like the head that may be tied to them
    "aten::embedding": Rule("v h, ... -> ... h", whole="h", linear=((0,),), lookup="v", when=has_unscaled_gradients,
        local=embedding_rules.embedding),
    "aten::cross_entropy_loss": (
        Rule("n c ..., n ... -> n ...", lookup="c", when=of_class_indices, local=embedding_rules.cross_entropy),
        Rule("n c ..., n ..., c -> n ...", whole="c", when=of_class_indices),
        Rule("n c ..., n c ... -> n ...", whole="c", when=of_class_probabilities, also=(
            "n c ..., n c ..., c -> n ...",))),
    "aten::nll_loss_nd": Rule("n c ..., n ... -> n ...", whole="c", linear=((0,),), when=of_class_indices, also=(
        "n c ..., n ..., c -> n ...",)),
    "autopart::ctc_loss": Rule("t n c, n s, n, n -> n", whole="t c s"),
    "aten::one_hot": Rule("... -> ... c", whole="c"),
    "autopart::drop": Rule("..., ... -> ...", local=dropout_rules.drop),
    # sampling of images, complex numbers as pairs
    "aten::grid_sampler_2d": Rule("b c x y, b u w t -> b c u w", whole="x y t", linear=((0,),)),
    "aten::grid_sampler_3d": Rule("b c x y z, b u v w t -> b c u v w", whole="x y z t", linear=((0,),)),
    "aten::view_as_real": Rule("... -> ... p", whole="p", linear=((0,),)),
    "aten::view_as_complex": Rule("... p -> ...", whole="p", linear=((0,),)),
    # triangles
    "aten::tril": Rule("... q k -> ... q k", whole="q k", linear=((0,),)),
    "aten::triu": Rule("... q k -> ... q k", whole="q k", linear=((0,),)),
    # pooling and resizing: spatial dims cannot be sharded
    **{f"aten::{name}": Rule(text, whole="x y z u v w", linear=linear) for text, linear, names in (
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
    ) for name in names.split()},
}  # fmt: skip
"""Rules of operators whose factors do not depend on their arguments."""

MOVES: dict[str, Callable[[fx.Node], Pattern | None]] = {
    "aten::reshape": view_rules.view,
    "aten::expand": view_rules.expand,
    "aten::transpose": view_rules.transpose,
    "aten::t": view_rules.reverse,
    "aten::swapaxes": view_rules.transpose,
    "aten::swapdims": view_rules.transpose,
    "aten::numpy_T": view_rules.reverse,
    "aten::mT": view_rules.matrix_transpose,
    "aten::movedim": view_rules.movedim,
    "aten::permute": view_rules.permute,
    "aten::unsqueeze": view_rules.unsqueeze,
    "aten::squeeze": view_rules.squeeze,
    "aten::flip": reduction_rules.along_dim("dims", linear=True),
    "aten::roll": reduction_rules.along_dim("dims", linear=True),
    "aten::slice": concat_rules.cut,
    "aten::narrow": concat_rules.cut,
    "aten::select": concat_rules.cut,
    "aten::split_with_sizes": concat_rules.split,
    "aten::unbind": concat_rules.cut,
    "aten::cat": concat_rules.join,
    "aten::stack": concat_rules.stack,
    "aten::pad": window_rules.pad,
    "aten::constant_pad_nd": window_rules.pad,
    "aten::unfold": window_rules.unfold,
    "aten::im2col": window_rules.im2col,
    "aten::diagonal": view_rules.diagonal,
    "aten::slice_scatter": concat_rules.overwrite,
    "aten::select_scatter": concat_rules.overwrite,
    "aten::gather": indexing_rules.gather,
    "aten::index_select": indexing_rules.index_select,
    "aten::index": indexing_rules.index,
}
"""Rules of operators that move elements and compute nothing; their factors depend on their arguments."""

SHAPED: dict[str, Callable[[fx.Node], Pattern | None]] = {
    **MOVES,
    "aten::mean": reduction_rules.mean,
    **{f"aten::{name}": rule for rule, names in (
        (reduction_rules.unsharded_reduction, """amax amin argmax argmin any all var std var_mean std_mean logsumexp
            linalg_vector_norm prod norm median nanmedian mode kthvalue"""),
        (reduction_rules.reduction, "sum nansum count_nonzero"),
        (reduction_rules.extreme, "max min"),
        (reduction_rules.along_dim("dim"),
            "softmax _softmax log_softmax _log_softmax cumprod logcumsumexp cummax cummin sort"),
        (recurrent_rules.recurrent, "lstm gru rnn_tanh rnn_relu"),
        (window_rules.convolution,
            "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution"),
    ) for name in names.split()},
    "aten::cumsum": reduction_rules.along_dim("dim", linear=True),
    "aten::topk": reduction_rules.topk,
    "aten::_fft_c2c": reduction_rules.along_dim("dim", linear=True),
    "aten::_fft_r2c": reduction_rules.half_spectrum,
    "aten::_fft_c2r": reduction_rules.half_spectrum,
    # norms
    "aten::layer_norm": norm_rules.layer_norm,
    "aten::rms_norm": norm_rules.layer_norm,
    "aten::group_norm": norm_rules.group_norm,
    "aten::batch_norm": norm_rules.batch_norm,
    # products and windows
    "aten::einsum": einsum_rules.einsum,
    "aten::col2im": window_rules.col2im,
    # writes at indices
    "aten::scatter": indexing_rules.scatter(writes_zeros_or_tensors),
    "aten::scatter_add": indexing_rules.scatter(lambda node: True),
    "aten::scatter_reduce": indexing_rules.scatter(adds_to_itself),
    "aten::index_add": indexing_rules.index_write,
    "aten::index_copy": indexing_rules.index_write,
    "aten::index_fill": indexing_rules.index_write,
    "aten::index_put": indexing_rules.index_put,
    "aten::searchsorted": indexing_rules.searchsorted,
    "aten::bucketize": indexing_rules.searchsorted,
    "aten::isin": indexing_rules.isin,
    "autopart::positions": selection_rules.positions,
}  # fmt: skip
"""Rules of all operators whose factors depend on their arguments, as functions of the call."""

LOSS_REDUCTIONS = {"aten::cross_entropy_loss", "aten::nll_loss_nd", "aten::mse_loss", "aten::l1_loss",
                   "aten::smooth_l1_loss", "aten::huber_loss", "aten::binary_cross_entropy",
                   "aten::binary_cross_entropy_with_logits"}  # fmt: skip
"""Losses with a `reduction` argument: 0 none, 1 mean (the default), 2 sum."""

OF_SPARSE = {"aten::_sparse_mm"}
"""The only operators whose rules hold for sparse tensors."""

KEEPING_WEIGHTS = {"aten::t", "aten::transpose", "aten::reshape", "aten::permute", "aten::unsqueeze", "aten::squeeze",
                   "aten::to", "aten::_to_copy", "aten::detach"}  # fmt: skip
"""Operators that convert a weight to another view or dtype. They are recomputed at each use."""

KEEPING_MASKS = {"aten::_to_copy", "aten::to", "aten::ne", "aten::permute", "aten::transpose", "aten::reshape",
                 "aten::unsqueeze", "aten::squeeze", "aten::movedim"}  # fmt: skip
"""Operators that convert a mask and select as many elements."""

PARTS = {"aten::select", "aten::eq"}
"""Operators whose second argument selects from the first: a slice, or the elements that equal a number."""

WITHOUT_GRADIENT = {"aten::detach"}
"""Operators whose result never has a gradient."""

REMADE = (
    "aten::to", "aten::_to_copy", "aten::type_as", "aten::contiguous", "aten::clone", "aten::reshape", "aten::flatten",
    "aten::repeat", "aten::expand_as", "aten::sum", "aten::mean", "aten::var", "aten::std", "aten::amax", "aten::amin",
    "aten::softmax", "aten::log_softmax", "aten::logsumexp", "aten::layer_norm", "aten::rms_norm", "aten::group_norm",
    "aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd", "aten::mse_loss", "aten::gather", "aten::index",
    "aten::index_select", "aten::arange", "aten::full", "aten::zeros", "aten::ones", "aten::zeros_like",
    "aten::ones_like", "aten::full_like", "aten::pad", "aten::constant_pad_nd", "aten::tril", "aten::triu",
    "aten::one_hot", "aten::where", "aten::glu", "autopart::cast", "autopart::pick_class", "autopart::drop",
)  # fmt: skip
"""Operators that torch.compile fuses with others, and recomputes in backward if that saves memory, in addition to
elementwise operators and views (`get_default_op_list` of torch/_functorch/partitioners.py)."""

COSTS: dict[str, CostNotes] = dict.fromkeys(REMADE, CostNotes(joins="remade")) | {
    "aten::cat": CostNotes(joins="copied"),
    "aten::stack": CostNotes(joins="copied"),
    "aten::dropout": CostNotes(joins="drawn"),
    "autopart::dropout": CostNotes(joins="drawn"),
    "aten::scaled_dot_product_attention": CostNotes(kind="attention", backward_work=2.5),
    "autopart::attention_dropout": CostNotes(kind="attention", backward_work=2.5),
    "aten::embedding": CostNotes(looks_up=True),
    "autopart::embedding_shard": CostNotes(looks_up=True),
    "aten::sum": CostNotes(gradient_is_view=True, joins="remade"),
    **dict.fromkeys(("aten::add", "aten::sub"), CostNotes(gradients="handed on")),
    **dict.fromkeys(("aten::mul", "aten::div", "aten::neg", "aten::square"), CostNotes(gradients="each")),
    **dict.fromkeys(("aten::slice", "aten::select", "aten::narrow"), CostNotes(gradients="part")),
    **dict.fromkeys(
        ("aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unbind"), CostNotes(gradients="parts")
    ),
    "aten::expand": CostNotes(gradients="repeated"),
    **dict.fromkeys(("aten::relu", "aten::leaky_relu", "aten::hardtanh"), CostNotes(keeps_sign=True)),
}
"""Cost properties of operators, traced or of local forms, that do not follow from the shapes of a call."""
