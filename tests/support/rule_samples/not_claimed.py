"""Shardings that hold by execution and that no rule claims, each with its reason."""

A_WEIGHT = "a weight of a norm or a loss is stored whole or sharded, never as a partial sum"
STATISTICS = "statistics are given, never partial sums"
SPACE = "space is whole: with other sizes or modes a shard needs its neighbours' edges"
BY_CHANCE = "holds for these values alone"

NOT_CLAIMED: dict[str, dict[str, str]] = {
    "aten::nan_to_num": {"P -> P": "holds for finite values alone"},
    "aten::cumsum": {"S(1) -> S(1)": BY_CHANCE},
    "aten::any": {"S(*) -> R": BY_CHANCE},
    "aten::all": {"S(*) -> R": BY_CHANCE},
    "aten::zeros_like": {"P -> P": "the values of its input are not read, so nobody has to sum them"},
    "autopart::drop": {
        "P, R -> P": "microbatches draw masks of their own, a partial sum over them needs one",
        "R(grad P), P -> P": "noise is made in the layout that is asked for",
    },
    "aten::binary_cross_entropy": {"R*, R*, P -> P": A_WEIGHT},
    "aten::binary_cross_entropy_with_logits": {"R*, R*, P, R -> P": A_WEIGHT},
    "aten::cross_entropy_loss": {"R*, R*, P -> P": A_WEIGHT, "R*, P* -> P": "labels are inputs, never partial sums"},
    "aten::nll_loss_nd": {"R*, R, P -> P": A_WEIGHT},
    "aten::layer_norm": {"R*, P -> P": A_WEIGHT, "R*, P, P -> P": A_WEIGHT},
    "aten::rms_norm": {"R*, P -> P": A_WEIGHT},
    "aten::group_norm": {"R*, P -> P": A_WEIGHT, "R*, P, P -> P": A_WEIGHT},
    "aten::scaled_dot_product_attention": {
        "R*, R*, P* -> P": "leaves the work of queries and keys on every rank; summing the values first costs the same"
    },
    "aten::embedding": {
        "S(1), R -> S(*)": "a table is cut by rows, as the head that is tied to it",
        "P, R -> P": "the rule does not speak of gradients scaled by frequency",
    },
    "aten::conv2d": {"S(2), S(2) -> P": "a kernel as large as the image", "S(3), S(3) -> P": "the same"},
    "aten::conv_transpose2d": {"R*, S(?) -> S(?; sections=3) with other arguments": SPACE},
    "aten::conv_transpose3d": {"S(2), R* -> S(2)": SPACE},
    "aten::_upsample_nearest_exact2d": {"S(3) -> S(3) with other arguments": SPACE},
    "aten::upsample_nearest2d": {"S(?) -> S(?)": SPACE, "S(?) -> S(?) with other arguments": SPACE},
    "aten::upsample_nearest3d": {
        "S(?) -> S(?) with other arguments": SPACE,
        "R* -> S(2; sections=2) with other arguments": SPACE,
    },
    "aten::adaptive_avg_pool3d": {"S(2) -> S(2) with other arguments": SPACE},
    "aten::batch_norm": {"R*, P* -> P": A_WEIGHT, "P, R*, P, P, R -> P": STATISTICS, "P, P, R -> P": STATISTICS},
    "aten::slice_scatter": {"S(0), S(0) -> S(0)": "a step that fits the shards"},
    "aten::scatter": {"P, R, R -> P": "what is multiplied"},
    "aten::add": {"P* -> P": "what is added is next to zero"},
    "aten::where": {"R, *P* -> P": BY_CHANCE},
    "aten::amin": {"S(1) -> R": BY_CHANCE},
}
"""{operator: {sharding, `*` standing for anything: reason}}."""
