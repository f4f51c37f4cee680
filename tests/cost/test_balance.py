"""balance=: time and memory are those of the rank that gets most rows for its experts, in plans and their formulas."""

from __future__ import annotations

from dataclasses import replace

import expert_models
import pytest
import zoo
from expert_models import BACK, WAYS, mixture

import autopart
from autopart.errors import AutopartError
from autopart.plans.plan import Plan


@pytest.fixture
def planned(monkeypatch):
    """A plan of a mixture whose experts are nearly all of its work."""
    model, batch = expert_models.wide_mixture(monkeypatch)
    return lambda mesh, way="sent", **options: autopart.plan(
        model, mesh, example_kwargs=batch, pins=WAYS.get(way, {}), **options
    )


def most(plan):
    return max(row["total"] for row in plan.memory)


@pytest.mark.few
@pytest.mark.parametrize("way", WAYS)
def test_the_fullest_rank_counts(planned, way):
    """Of 8,192 rows, 4,096 a rank on the mean, every one with two products of 512 x 1536 and a hidden value of 1536."""
    even, fuller = planned("ep2", way), planned("ep2", way, balance=1.5)

    def products(plan):
        flops = [work.get("flops", []) for work in plan.timing["table"]["works"]]
        return max(sum(value for value, *_ in terms) for terms in flops)

    assert products(even) == 4096 * 2 * 512 * 1536
    assert products(fuller) == 1.5 * products(even)
    more = most(fuller) - most(even)
    assert more >= 2048 * (1536 + 512) * 4, "what it keeps of half as many rows again"
    assert even.cost["worst_memory_bytes"] == fuller.cost["worst_memory_bytes"] == most(planned("ep2", way, balance=2))


@pytest.mark.few
@pytest.mark.parametrize("balance", [1.0, 1.5, 2.0])
def test_the_formula_of_one_plan_tells_another(planned, balance):
    told, found = planned("ep2", balance=balance).cost.at(ep=4), planned("ep4", balance=balance)
    assert float(told) == pytest.approx(found.cost["step_time_s"], rel=1e-4)
    assert told.memory_bytes == pytest.approx(most(found), rel=1e-3)


def test_it_is_in_the_plan(planned):
    plan = planned("ep2", balance=1.25)
    assert Plan.from_json(plan.to_json()).balance == 1.25
    text = " ".join(plan.explain().split())
    assert "balance=1.25: the busiest rank gets 1.25 times the mean number of expert tokens; with all tokens it" in text
    even = planned("ep2")
    assert "balance=1: the busiest rank gets the mean number of expert tokens; with all tokens it needs" in " ".join(
        even.explain().split()
    )
    assert replace(planned("ep2", balance=1), text="").to_json() == even.to_json()


@pytest.mark.few
@pytest.mark.parametrize(("balance", "is_sent"), [(1.0, True), (4.0, False)])
def test_rows_are_not_sent_where_one_rank_gets_most(planned, balance, is_sent):
    """Of T tokens with two rows on four ranks the fullest rank gets T / 2 rows on the mean, and 2 T if all are its."""
    plan = planned("ep4", None, balance=balance)
    assert (plan.operators["/from_experts"]["ep"] == BACK) == is_sent


def test_it_runs_with_it():
    model, batch = mixture(towards=(99.0, 99.0, 0.0, 0.0))
    report = autopart.verify(model, "ep2", example_kwargs=batch, balance=2.0)
    assert report.ok, report


REFUSED = {
    "word": ({"balance": "even"}, "OptionError: balance='even' is not an expert load\n"
             "  why    it is the tokens on the most loaded rank over the mean of all ranks, at least 1\n"
             "  try    balance=1.25"),
    "small": ({"balance": 0.5}, "OptionError: balance=0.5 is not an expert load\n"
              "  why    it is the tokens on the most loaded rank over the mean of all ranks, at least 1\n"
              "  try    balance=1.25"),
    "endless": ({"balance": float("inf")}, "OptionError: balance=inf is not an expert load\n"
                "  why    it is the tokens on the most loaded rank over the mean of all ranks, at least 1\n"
                "  try    balance=1.25"),
    "large": ({"balance": 3}, "OptionError: balance=3 is too large for ep2\n"
              "  why    the most loaded of 2 ranks can have at most 2 times the mean number of tokens\n"
              "  try    balance=2, or less"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be(planned, options, text):
    with pytest.raises(AutopartError) as caught:
        planned("ep2", **options)
    assert f"{type(caught.value).__name__}: {caught.value}" == text


@pytest.mark.large
def test_a_plan_and_its_formula_keep_to_it(planned):
    plan = planned("ep4", balance=1.5)
    with pytest.raises(AutopartError, match=r"balance=1\.5 is too large for one device"):
        plan.cost.at(ep=1)
    model, batch = mixture()
    plan = autopart.plan(model, "ep2", example_kwargs=batch, balance=1.5)
    with pytest.raises(AutopartError, match=r"balance=1\.25 contradicts the plan, which has 1\.5"):
        autopart.verify(model, "ep2", example_kwargs=batch, plan=plan, balance=1.25)


@pytest.mark.large
def test_the_search_counts_it():
    model, batch = mixture()
    plans = autopart.search(model, 2, example_kwargs=batch, balance=1.5, count=8)
    assert plans and {plan.balance for plan in plans} == {1.5}
    assert not [plan for plan in plans if plan.mesh.get("ep", 1) > 1 and plan.balance > plan.mesh["ep"]]


@pytest.mark.large
def test_dense_models_do_not_know_of_it():
    model, batch = zoo.llama()
    one, other = (autopart.plan(model, "tp2", example_kwargs=batch, balance=b) for b in (1.0, 4.0))
    assert one.cost["step_time_s"] == other.cost["step_time_s"] and "worst_memory_bytes" not in other.cost
