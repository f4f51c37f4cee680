"""Passes that rewrite a traced graph with fewer kinds of operators, so that few rules are needed.

No pass changes the results of the graph. `PASSES` maps names to passes, for `Pass.parse`.
"""

from __future__ import annotations

from autopart.passes.normalize.attention_forms import explicit_attention_dropout, explicit_causal_masks
from autopart.passes.normalize.batch_norm_forms import batch_statistics
from autopart.passes.normalize.creation import plain_creation, plain_numbers
from autopart.passes.normalize.decompose import take_apart
from autopart.passes.normalize.double_precision import in_double
from autopart.passes.normalize.expert_routing import looked_up_products, rows_to_experts
from autopart.passes.normalize.loss_forms import explicit_reductions, losses_of_all_positions, whole_means
from autopart.passes.normalize.matmul_forms import one_linear, pairs_of_factors, plain_products
from autopart.passes.normalize.norm_forms import plain_norms
from autopart.passes.normalize.random_ops import draws_as_data
from autopart.passes.normalize.recurrent_dropout import explicit_recurrent_dropout
from autopart.passes.normalize.sorted_experts import unsorted_experts
from autopart.passes.normalize.view_forms import (
    complex_writes,
    contiguous_operands,
    drop_no_ops,
    exact_squeeze,
    explicit_repeats,
    no_empty_parts,
    one_reshape,
    one_split,
    plain_broadcasts,
    plain_copies,
    positional_arguments,
)
from autopart.passes.pass_pipeline import Pass

__all__ = ["AS_TRACED", "IN_DOUBLE", "NORMALIZE", "PASSES"]

AS_TRACED = tuple(map(Pass, (explicit_attention_dropout, explicit_recurrent_dropout, draws_as_data, one_reshape)))
"""Passes that run first, while values still have the dtypes and memory layouts of the model."""

_FORMS = (
    positional_arguments,
    one_reshape,
    exact_squeeze,
    plain_copies,
    complex_writes,
    drop_no_ops,
    plain_broadcasts,
    no_empty_parts,
    explicit_repeats,
    one_split,
    batch_statistics,
    plain_creation,
    plain_numbers,
    plain_norms,
    unsorted_experts,
    explicit_causal_masks,
    plain_products,
    pairs_of_factors,
    one_linear,
    looked_up_products,
    losses_of_all_positions,
    explicit_reductions,
    whole_means,
    drop_no_ops,
    contiguous_operands,
    rows_to_experts,
)
NORMALIZE = tuple(map(Pass, (*_FORMS, take_apart, *_FORMS)))
IN_DOUBLE = Pass(in_double)
"""Conversion to float64, which `autopart.verify` runs after `AS_TRACED` and before `NORMALIZE`."""
PASSES = {rewrite.name: rewrite for rewrite in (*AS_TRACED, IN_DOUBLE, *NORMALIZE)}
