"""The tensor-parallel solve finds the optimum: against one flat programme, and against every combination."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import zoo
from fuzz import Drawing, floats
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from solver_problems import cost_of, flat_cost, least_cost, pairs_of, problems
from torch import nn
from traced import run_of

import autopart
from autopart.cost.hardware.profile import Hardware
from autopart.ir.facts import ACTIVE, facts
from autopart.ir.graph import operators
from autopart.ir.mesh import Mesh
from autopart.passes.choose.solve.layout_pins import FREE
from autopart.passes.choose.solve.pairwise_solver import NoSolution
from autopart.passes.choose.solve.shard_axis import ShardingProblem, cheapest
from autopart.passes.choose.solve.sharding_costs import CostedStep
from autopart.passes.choose.storage.parameter_storage import Storage

# --- the problem of pairs ------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_least_cost_is_found(problem):
    costs, tables = problem
    least = least_cost(costs, tables)
    for collapse in (True, False):
        found = pairs_of(costs, tables).solve(collapse)
        assert abs(found.cost - least) < 1e-6
        assert abs(cost_of(costs, tables, found.chosen) - least) < 1e-6 and found.gap <= 1e-6


def test_dropped_options_are_never_needed():
    """In complete graphs, no variable has few neighbours, so that options are dropped first."""
    for seed in range(60):
        random_numbers = np.random.default_rng(seed)
        costs = [random_numbers.integers(0, 6, 3).astype(float) for _ in range(5)]
        tables = [(a, b, random_numbers.integers(0, 3, (3, 3)).astype(float)) for a in range(5) for b in range(a)]
        found = pairs_of(costs, tables).solve(True)
        assert abs(found.cost - least_cost(costs, tables)) < 1e-6, seed


# --- the problem of a model ----------------------------------------------------------------------------------------

CASES = {
    **{f"{name} on tp2": (builder, {}, 2) for name, builder in zoo.ZOO.items()},
    "gpt2 on tp4": (zoo.gpt2, {}, 4),
    "6 heads of gpt2 on tp4": (zoo.gpt2, {"hidden": 24, "heads": 6}, 4),
    "6 heads of llama on tp4": (zoo.llama, {"hidden": 48, "heads": 6, "kv_heads": 3}, 4),
    "2 kv heads on tp4": (zoo.llama, {"heads": 4, "kv_heads": 2}, 4),
    "2 fused kv heads on tp4": (zoo.phi3, {"heads": 4, "kv_heads": 2}, 4),
}


def programme_of(builder, sizes, tp):
    return ShardingProblem(run_of(builder, **sizes).traced.graph, tp, Hardware.load(), {}, {})


@pytest.mark.few
@pytest.mark.parametrize("case", CASES)
def test_collapsing_does_not_change_the_optimum(case):
    programme = programme_of(*CASES[case])
    found = programme.solve()
    assert found.bound == found.cost
    assert found.cost == pytest.approx(flat_cost(programme), rel=1e-9)


class TwoReaders(nn.Module):
    """Two ranks cannot divide the 3 features of the second linear, so that it reads what the first makes cut. The
    softmax reads it whole."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden) + self.third(hidden.softmax(-1))


def test_a_value_that_is_read_cut_and_whole():
    programme = programme_of(lambda: (TwoReaders(), {"x": torch.ones(4, 6)}), {}, 2)
    assert programme.solve().cost == pytest.approx(flat_cost(programme), rel=1e-9)


def test_another_cost_gives_another_optimum():
    """The check above can fail."""
    programme = programme_of(*CASES["gpt2 on tp2"])
    before = programme_of(*CASES["gpt2 on tp2"]).solve().cost
    links = programme.prices.links
    programme.prices.links = replace(links, link_bytes_per_s=links.link_bytes_per_s / 2)
    assert programme.solve().cost > before * (1 + 1e-6)


def test_a_conversion_that_was_priced_before_costs_what_it_did():
    programme = programme_of(*CASES["gpt2 on tp2"])
    programme.solve()
    for value in programme.values:
        places = {*value.places(), *(place for use in value.uses.values() for one in use.wanted() for place in one)}
        for place, target in itertools.product(places, repeat=2):
            anew = programme.prices.with_full_latency()
            anew.whole, anew.links = programme.prices.whole, programme.prices.links
            assert programme.prices.conversion_s(place, target, value.node) == anew.conversion_s(
                place, target, value.node
            )


# --- random graphs, against every combination of choices ------------------------------------------------------------

MOST = 20_000
STORED = Storage(Mesh.parse("dp2,tp3"))
"""Combinations that are tried; graphs with more are passed over."""


def least_of_all(programme):
    """The cheapest of all combinations of options, each priced on its own: options, and every value once in every
    placement in which somebody wants it."""
    choices = list(programme.choices.values())
    index = {id(choice): i for i, choice in enumerate(choices)}
    combined = np.indices([len(choice.options) for choice in choices]).reshape(len(choices), -1)
    total = np.zeros(combined.shape[1])
    for chosen, choice in zip(combined, choices, strict=True):
        total += np.array(choice.costs)[chosen]
    for value in programme.values:
        wanted = [(combined[index[id(use.choice)]], use.wanted()) for use in value.uses.values()]
        targets = sorted({place for _, options in wanted for places in options for place in places})
        costs = programme.conversion_costs(value, targets)[combined[index[id(value.producer)]]]
        for k, target in enumerate(targets):
            is_wanted = np.any([np.array([target in o for o in options])[chosen] for chosen, options in wanted], axis=0)
            total += np.where(is_wanted, costs[:, k], 0.0)
    return total.min()


@st.composite
def graphs(draw):
    """A random graph of a few operators on weights, inputs and what they make."""
    drawing = Drawing(draw, draw(st.sampled_from((2, 4))))
    drawing.pool.append(drawing.input(floats((drawing.rows, *draw(st.sampled_from([(4,), (6,), (3, 4)]))), 99)))
    drawing.pool += drawing.linear() or []
    for _ in range(draw(st.integers(1, 4))):
        drawing.step()
    return drawing.subject().traced.graph


@pytest.mark.large
@pytest.mark.parametrize("between", ["whole", "cut", "free"])
def test_no_combination_is_cheaper(between):
    tried = []

    @settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        graphs(), st.sampled_from((2, 3)), st.sampled_from((CostedStep(), CostedStep(4, 8), CostedStep(1, 2, STORED)))
    )
    def check(graph, tp, step):
        if not any(facts(node)["role"] == ACTIVE for node in operators(graph)):
            reject()
        programme = ShardingProblem(graph, tp, Hardware.load(), {}, {}, between=between, step=step)
        if math.prod(len(choice.options) for choice in programme.choices.values()) > MOST:
            reject()
        least = least_of_all(programme)
        if math.isinf(least):  # what has to be cut cannot all be
            with pytest.raises(NoSolution):
                programme.solve()
            assert between == "cut"
            cheapest(graph, tp, Hardware.load(), True, step, FREE)
            return
        found = programme.solve()
        assert found.cost == pytest.approx(least, rel=1e-9) and found.bound <= found.cost
        weighed = programme.prices.weigh(programme.price(found.options, programme.prices))
        ties = 1e-6 * programme.prices.scale
        assert weighed == pytest.approx(least, abs=ties)
        tried.append(graph)

    check()
    assert len(tried) >= 50


# --- data and tensor parallelism in one programme --------------------------------------------------------------------


@pytest.mark.large
def test_a_weight_lies_on_tp_so_that_dp_can_cut_it_too():
    """Of 8 x 6, dp4 divides the 8 alone: with ZeRO-3 tp2 takes the 6, which it would not without."""
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 12, bias=False)).double()
    batch = {"input": torch.randn(8, 6, dtype=torch.float64)}
    stored = {
        zero: autopart.plan(model, "dp4,tp2", example_kwargs=batch, zero=zero).parameters["*.weight"]
        for zero in (0, 3)
    }  # fmt: skip
    assert stored == {0: {"tp": "S(0)"}, 3: {"dp": "S(0)", "tp": "S(1)"}}
    assert autopart.verify(model, "dp4,tp2", example_kwargs=batch, zero=3).ok


def test_the_objective_counts_what_is_summed_over_dp():
    """Twice the links between nodes, and what is summed over dp alone takes half as long; no other price changes."""
    graph = run_of(zoo.gpt2).traced.graph
    hardware = Hardware.load()
    prices = {
        links: ShardingProblem(
            graph, 8, replace(hardware, node_link_bytes_per_s=links * hardware.node_link_bytes_per_s), {}, {},
            step=CostedStep(1, 4, Storage(Mesh.parse("dp4,tp8"))))
        for links in (1, 2)
    }  # fmt: skip
    found = {links: p.price(p.solve().options, p.real_prices) for links, p in prices.items()}
    alone = ShardingProblem(graph, 8, hardware, {}, {}, step=CostedStep(1, 4))
    before = alone.price(alone.solve().options, alone.real_prices)
    over_dp = {links: price.gradient_sync_s - before.gradient_sync_s for links, price in found.items()}
    assert over_dp[1] == pytest.approx(2 * over_dp[2], rel=0.05) and over_dp[2] > 0
    assert found[1].communication_s == before.communication_s
