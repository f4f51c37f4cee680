"""Placements print and parse; conversions are complete, and named as the runtime has them; shards add up."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopart.ir.collective_nodes import OPERATORS
from autopart.ir.layout import (
    CONVERSIONS,
    DISPATCH_CONVERSIONS,
    R_GRAD_P,
    Conversion,
    P,
    Placement,
    R,
    conversion,
    format_layout,
    section_sizes,
    shard,
    shard_sizes,
)
from autopart.ops.operators import all_operators
from autopart.runtime.comm.collectives import PRIMITIVES
from autopart.runtime.comm.list_collectives import LIST_PRIMITIVES

SIZES = st.integers(1, 10_000)
SECTIONS = st.one_of(st.just(()), st.tuples(st.integers(2, 9)), st.lists(SIZES, min_size=2, max_size=5).map(tuple))
PLACEMENTS = st.one_of(st.sampled_from([R, R_GRAD_P, P]), st.builds(shard, st.integers(0, 7), SECTIONS))
KINDS = ("R", "R(grad P)", "S", "P")


@given(PLACEMENTS)
def test_a_placement_parses_back(placement):
    assert Placement.parse(str(placement)) == placement
    assert Placement.parse(f"  {placement} ") == placement
    assert str(Placement.parse(str(placement))) == str(placement)


@given(PLACEMENTS, PLACEMENTS)
def test_different_placements_print_differently(one, other):
    assert (str(one) == str(other)) == (one == other)


NO_PLACEMENT = [
    "",
    "r",
    "S",
    "S()",
    "S(-1)",
    "S(a)",
    "S(1;)",
    "S(1; sections=)",
    "S(1; sections=a)",
    "P(0)",
    "R(grad S)",
]
NO_PLACEMENT += ["S(1; sections=3+)", "S(1; sections=+3)", "S(1; sections=3++4)", "S(0) S(1)"]


@pytest.mark.parametrize("text", NO_PLACEMENT)
def test_what_is_no_placement_is_told(text):
    with pytest.raises(ValueError, match=r"is not a placement; try R, R\(grad P\), P, S\(0\) or S\(0; sections=3\)"):
        Placement.parse(text)


def test_sections_have_one_spelling():
    assert shard(1, (8, 8, 8)) == shard(1, (3,)) == Placement.parse("S(1; sections=3)")
    assert shard(1, (1,)) == shard(1) == Placement.parse("S(1; sections=1)")
    assert str(shard(0, (64, 16, 16))) == "S(0; sections=64+16+16)"
    assert Placement.parse("S(0; sections=16+16)") == shard(0, (2,))


def test_a_layout_prints_without_what_is_replicated():
    assert format_layout({"dp": shard(0), "tp": P}) == "{dp:S(0) tp:P}"
    assert format_layout({"dp": R, "tp": shard(1, (3,))}) == "{tp:S(1; sections=3)}"
    assert format_layout({"dp": R}) == "{}"


# --- conversions ---------------------------------------------------------------------------------------------------

NONE = {("S", "P"), ("P", "P"), ("R", "R"), ("R(grad P)", "R(grad P)")}  # the same, or to a sum of shards
TRANSPOSE = {"identity": "identity", "all_reduce": "all_reduce", "own": "own", "slice": "pad", "pad": "slice",
             "all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all": "all_to_all"}  # fmt: skip


def test_the_table_is_complete():
    assert set(CONVERSIONS) == set(itertools.product(KINDS, KINDS)) - NONE


def test_operators_and_primitives_are_the_runtime_s():
    operators = [step.operator for step in CONVERSIONS.values()]
    assert len(set(operators)) == len(operators), "one operator per pair"
    assert {step.operator: step for step in CONVERSIONS.values()} == OPERATORS
    assert set(operators) < set(all_operators())
    used = {
        name
        for step in (*CONVERSIONS.values(), *DISPATCH_CONVERSIONS.values())
        for name in (step.forward, step.backward)
    }
    assert used == set(PRIMITIVES) == set(LIST_PRIMITIVES)


GRADIENT = {"R": "R", "R(grad P)": "P", "S": "S", "P": "R"}
DOES = {
    ("R", "R"): {"identity"}, ("R", "P"): {"own"}, ("R", "S"): {"slice"},
    ("P", "R"): {"all_reduce"}, ("P", "P"): {"identity"}, ("P", "S"): {"reduce_scatter"},
    ("S", "R"): {"all_gather"}, ("S", "P"): {"pad"}, ("S", "S"): {"all_to_all"},
}  # fmt: skip


@pytest.mark.parametrize(("source", "target"), CONVERSIONS)
def test_a_conversion_takes_value_and_gradient_where_they_belong(source, target):
    """Forward goes from the source's value to the target's; backward from the target's gradient to the source's."""
    value = {"R(grad P)": "R"}
    step = CONVERSIONS[source, target]
    assert step.forward in DOES[value.get(source, source), value.get(target, target)]
    assert step.backward in DOES[GRADIENT[target], GRADIENT[source]]


@given(PLACEMENTS, PLACEMENTS)
def test_conversion_finds_the_table_s_entry(source, target):
    step = conversion(source, target)
    if source == target or (source.is_shard and target == P):
        assert step is None
    else:
        assert step == CONVERSIONS[source.kind, target.kind]
        assert isinstance(step, Conversion)


def test_megatron_s_pair():
    assert conversion(R, R_GRAD_P) == Conversion("sum_grad", "identity", "all_reduce")
    assert conversion(P, R) == Conversion("all_reduce", "all_reduce", "identity")


# --- sizes ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(1, 64))
def test_shards_add_up_and_shrink_towards_the_end(size, num_shards):
    sizes = shard_sizes(size, num_shards)
    assert len(sizes) == num_shards
    assert sum(sizes) == size
    assert list(sizes) == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 1 or size % num_shards


def test_shards_are_those_of_torch_chunk():
    import torch

    for size, num_shards in itertools.product(range(1, 30), range(1, 9)):
        chunks = [len(chunk) for chunk in torch.empty(size).chunk(num_shards)]
        assert list(shard_sizes(size, num_shards)) == chunks + [0] * (num_shards - len(chunks))


@given(SECTIONS, st.integers(1, 50))
def test_sections_add_up(sections, times):
    size = sum(sections) if len(sections) > 1 else times * (sections[0] if sections else 1)
    sizes = section_sizes(size, sections)
    assert sum(sizes) == size
    assert len(sizes) == (sections[0] if len(sections) == 1 else max(1, len(sections)))
