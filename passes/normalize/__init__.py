"""Rewrite a traced graph into few forms, so that one rule per operator is enough.

Every pass is a function of the graph, runs under `run_passes`, and keeps what the graph computes.
"""

from __future__ import annotations

from .creation import plain_creation, plain_numbers
from .decompose import take_apart
from .driver import PassError, eliminate_dead_code, run_passes
from .experts import unsorted_experts
from .losses import explicit_reductions, whole_means
from .norms import plain_norms
from .precision import in_double
from .products import explicit_attention_dropout, one_linear, pairs_of_factors, plain_products
from .random import draws_as_data
from .recurrent import explicit_recurrent_dropout
from .statistics import batch_statistics
from .views import (
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

__all__ = ["AS_TRACED", "NORMALIZE", "PassError", "eliminate_dead_code", "in_double", "run_passes"]

AS_TRACED = (explicit_attention_dropout, explicit_recurrent_dropout, draws_as_data, one_reshape)
"""What comes first, while every value still has the dtype and the order in memory that the model gives it."""

_FORMS = (
    positional_arguments,
    one_reshape,
    exact_squeeze,
    plain_copies,
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
    plain_products,
    pairs_of_factors,
    one_linear,
    explicit_reductions,
    whole_means,
    drop_no_ops,
)
NORMALIZE = (*_FORMS, take_apart, *_FORMS)
