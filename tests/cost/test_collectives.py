"""Prices of collectives: rings on one kind of link, two levels where a group spans nodes, monotone in every figure."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st

import autopart
from autopart.cost.hardware import profile
from autopart.cost.hardware.profile import Hardware, names
from autopart.cost.predict.collective_costs import PARTS, TIME, S, g, k, levels, time_s, wire_bytes
from autopart.passes.choose.solve.shard_axis import ShardingProblem
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call

# The links alone: what collectives of one kind were measured to reach need not keep these laws.
PROFILES = {name: replace(Hardware.load(name), collectives={}, rates_by_nodes={}) for name in names()}
PROFILE_FOLDER = Path(profile.__file__).parent / "profiles"
RING = {
    "all_reduce": lambda n, size, rate, latency: 2 * (n - 1) * latency + 2 * (n - 1) / n * size / rate,
    "all_gather": lambda n, size, rate, latency: (n - 1) * latency + (n - 1) / n * size / rate,
    "reduce_scatter": lambda n, size, rate, latency: (n - 1) * latency + (n - 1) / n * size / rate,
    "all_to_all": lambda n, size, rate, latency: (n - 1) * latency + (n - 1) / n * (size / n) / rate,
    "send": lambda n, size, rate, latency: latency + size / rate,
}
LINKS = ("link_bytes_per_s", "node_link_bytes_per_s", "link_latency_s", "node_link_latency_s")

kinds = st.sampled_from(sorted(RING))
profiles = st.sampled_from(sorted(PROFILES)).map(PROFILES.__getitem__)
sizes = st.integers(1, 10**11)
strides = st.sampled_from([1, 2, 3, 4, 8, 16, 64, 128])
counts = st.integers(2, 96)
bounded = settings(max_examples=100, deadline=None)


def slowed(hardware: Hardware, link: str, times: float) -> Hardware:
    """A link's rate divided, or its latency multiplied."""
    value = getattr(hardware, link)
    return replace(hardware, **{link: value / times if link.endswith("bytes_per_s") else value * times})


def without_latency(hardware: Hardware) -> Hardware:
    return replace(hardware, link_latency_s=0.0, node_link_latency_s=0.0)


def test_every_kind_has_a_ring():
    assert RING.keys() == TIME.keys()


@pytest.mark.parametrize("kind", RING)
@pytest.mark.parametrize("profile", PROFILES)
def test_one_level_is_a_ring(kind, profile):
    hardware = PROFILES[profile]
    for size in (1, 10**6, 10**10):
        for n in range(2, hardware.devices_per_node + 1):
            ring = RING[kind](n, size, hardware.link_bytes_per_s, hardware.link_latency_s)
            assert time_s(kind, n, size, hardware) == pytest.approx(ring, rel=1e-12)
        for n in (2, 3, 8, 17):
            between = RING[kind](n, size, hardware.node_link_bytes_per_s, hardware.node_link_latency_s)
            far = hardware.devices_per_node
            assert time_s(kind, n, size, hardware, stride=far) == pytest.approx(between, rel=1e-12)


def test_two_levels_by_hand():
    """16 A100 in two nodes: reduce-scatter over NVLink, all-reduce of an eighth over InfiniBand, all-gather.

    Each of the 15 steps of a ring takes as long as its hop between the nodes.
    """
    hardware, size = PROFILES["a100-80gb-sxm"], 1 << 30
    inside = RING["all_gather"](8, size, 235e9, 0)
    across = RING["all_gather"](2, size / 8, 25e9, 0) + 15 * 9.6e-6
    assert time_s("all_reduce", 16, size, hardware) == pytest.approx(2 * (inside + across), rel=1e-12)
    assert time_s("all_gather", 16, size, hardware) == pytest.approx(inside + across, rel=1e-12)
    # each rank sends 15 pieces of S / 16^2, 7 of them inside its node
    moved = size / 16**2 * (7 / 235e9 + 8 / 25e9) + 7 * 3e-6 + 8 * 9.6e-6
    assert time_s("all_to_all", 16, size, hardware) == pytest.approx(moved, rel=1e-12)


def test_levels():
    assert levels(8, 8) == (8, 1) and levels(16, 8) == (8, 2) and levels(12, 8) == (6, 2) and levels(7, 4) == (1, 7)
    assert levels(4, 8, 2) == (4, 1) and levels(4, 8, 4) == (2, 2) and levels(4, 8, 8) == (1, 4)


@bounded
@given(counts, st.integers(1, 72), strides)
def test_levels_of_any_group(n, devices_per_node, stride):
    inside, nodes = levels(n, devices_per_node, stride)
    fits = [g for g in range(1, n + 1) if n % g == 0 and (g == 1 or g * stride <= devices_per_node)]
    assert inside * nodes == n and inside == max(fits)


@bounded
@given(counts, sizes, strides, profiles)
def test_half_an_all_reduce_is_under_it(n, size, stride, hardware):
    whole = time_s("all_reduce", n, size, hardware, stride)
    for half in ("all_gather", "reduce_scatter"):
        assert time_s(half, n, size, hardware, stride) == pytest.approx(whole / 2, rel=1e-12)


@bounded
@given(kinds, st.integers(2, 12), st.integers(2, 12), sizes, profiles)
def test_a_group_over_nodes_is_between_one_inside_and_one_between(kind, inside, nodes, size, hardware):
    n, far = inside * nodes, 10**6
    hardware = replace(hardware, devices_per_node=inside)
    spread = time_s(kind, n, size, hardware)
    assert spread <= time_s(kind, n, size, hardware, stride=far) * (1 + 1e-12)
    # One ring of g k ranks has more hops than one of g and one of k, so it is the bytes that are compared.
    wide, one_node = without_latency(hardware), replace(without_latency(hardware), devices_per_node=n)
    assert time_s(kind, n, size, one_node) <= time_s(kind, n, size, wide) * (1 + 1e-12)
    assert time_s(kind, n, size, wide) <= time_s(kind, n, size, wide, stride=far) * (1 + 1e-12)


@bounded
@given(kinds, counts, sizes, profiles)
def test_inside_a_node_is_under_between_nodes(kind, n, size, hardware):
    one_node = replace(hardware, devices_per_node=n)
    assert time_s(kind, n, size, one_node) < time_s(kind, n, size, one_node, stride=n)


@bounded
@given(kinds, counts, sizes, sizes, strides, profiles)
def test_a_larger_message_takes_no_less(kind, n, size, more, stride, hardware):
    assert time_s(kind, n, size, hardware, stride) < time_s(kind, n, size + more, hardware, stride)


@bounded
@given(kinds, counts, sizes, strides, profiles, st.sampled_from(LINKS), st.floats(1.0, 1e3))
def test_a_slower_link_takes_no_less(kind, n, size, stride, hardware, link, times):
    before = time_s(kind, n, size, hardware, stride)
    assert time_s(kind, n, size, slowed(hardware, link, times), stride) >= before * (1 - 1e-12)


@bounded
@given(kinds, st.integers(1, 12), st.integers(2, 12), sizes, profiles)
def test_another_rank_on_the_same_level_takes_no_less(kind, inside, nodes, size, hardware):
    """The ranks of an all-to-all hold as much each, so that another one brings more bytes with it."""
    hardware = replace(hardware, devices_per_node=inside)

    def priced(n: int, hardware: Hardware, stride: int = 1) -> float:
        return time_s(kind, n, size * n if kind == "all_to_all" else size, hardware, stride) * (1 + 1e-12)

    roomy = replace(hardware, devices_per_node=100)
    assert priced(nodes + 1, roomy) >= time_s(kind, nodes, size * nodes if kind == "all_to_all" else size, roomy)
    n = inside * nodes
    before = time_s(kind, n, size * n if kind == "all_to_all" else size, hardware)
    assert priced(inside * (nodes + 1), hardware) >= before


@bounded
@given(kinds, counts, sizes, strides, profiles)
def test_the_bytes_are_the_same_wherever_the_ranks_lie(kind, n, size, stride, hardware):
    """Time without latency is the bytes to other nodes over their links, and the rest over those inside."""
    inside, nodes = levels(n, hardware.devices_per_node, stride)
    to_nodes = float(PARTS[kind].node_bytes.subs({g: inside, k: nodes, S: size})) if n > 1 else 0.0
    to_others = wire_bytes(kind, n, size) - to_nodes
    by_hand = to_others / hardware.link_bytes_per_s + to_nodes / hardware.node_link_bytes_per_s
    assert time_s(kind, n, size, without_latency(hardware), stride) == pytest.approx(by_hand, rel=1e-9)


def test_local_primitives_and_single_ranks_are_free():
    hardware = Hardware.load()
    assert time_s("slice", 4, 100, hardware) == wire_bytes("slice", 4, 100) == 0.0
    assert time_s("all_reduce", 1, 100, hardware) == wire_bytes("send", 1, 100) == 0.0


# --- the prices of a plan -------------------------------------------------------------------------------------------

SPREAD = replace(Hardware.load(), devices_per_node=2)
"""Four ranks of `tp` lie in two nodes."""


@pytest.fixture(scope="module")
def graph():
    model, batch = zoo.gpt2()
    return prepare(model, bind_call(model, (), batch)).graph


def all_costs(programme: ShardingProblem) -> np.ndarray:
    """Of every option and conversion there is."""
    options = [np.array(choice.costs) for choice in programme.choices.values()]
    conversions = [
        programme.conversion_costs(value, sorted({p for use in value.uses.values() for w in use.wanted() for p in w}))
        for value in programme.values
    ]
    return np.concatenate([costs.ravel() for costs in (*options, *conversions)])


@pytest.mark.parametrize("between", ["whole", "free"])
def test_a_slower_link_makes_no_plan_cheaper(graph, between):
    programme = ShardingProblem(graph, 4, SPREAD, {}, {}, between=between)
    costs, least = all_costs(programme), programme.solve().cost
    for link in LINKS:
        for times in (2.0, 30.0):
            slower = ShardingProblem(graph, 4, slowed(SPREAD, link, times), {}, {}, between=between)
            now = all_costs(slower)
            assert np.array_equal(np.isinf(now), np.isinf(costs)) and np.all(now >= costs * (1 - 1e-12))
            hidden = link == "link_latency_s"  # every step of these rings takes as long as its hop between nodes
            assert slower.solve().cost > least * (1 + 1e-6) or hidden
            if link.endswith("latency_s") and between == "whole":  # values lie as they do however small they are
                assert slower.solve().strategies == programme.solve().strategies


@pytest.mark.few
@pytest.mark.parametrize(("mesh", "shares"), [
    ("dp2,tp4", {}),
    ("dp4,tp2", {}),
    ("dp2,tp8", {"dp": 1.0}),
    ("dp4,tp4", {"dp": 1 / 3}),
    ("pp2,dp2,tp2", {}),
    ("pp2,dp2,tp4", {"pp": 1.0}),
])  # fmt: skip
def test_a_plan_prices_each_axis_by_its_own_links(mesh, shares, tmp_path):
    """`shares`: of the bytes of an axis, those that leave a node of 8."""
    model, batch = zoo.gpt2()
    profile = json.loads((PROFILE_FOLDER / "a100-80gb-sxm.json").read_text())
    for name in ("link_latency_s", "node_link_latency_s"):
        profile[name] = {**profile[name], "value": 1e-15}
    (tmp_path / "own.json").write_text(json.dumps(profile | {"name": "own"}))
    plan = autopart.plan(model, mesh, example_kwargs=batch, hardware=str(tmp_path / "own.json"))
    hardware = Hardware.load()

    def by_hand_s(axis, size):
        share = shares.get(axis, 0.0)
        return size * ((1 - share) / hardware.link_bytes_per_s + share / hardware.node_link_bytes_per_s)

    for row in plan.timing["stages"]:
        for moved in row["collectives"]:
            assert moved["seconds"] == pytest.approx(by_hand_s(moved["axis"], moved["bytes"]), rel=1e-3)
        assert row["receives_s"] == pytest.approx(by_hand_s("pp", row["receives_bytes"]), rel=1e-3)
    sums = [c.bytes for c in plan.collectives if c.per == "step" and c.axis == "dp"]
    assert plan.timing["ranks"][0]["gradient_sum_s"] >= (1 - 1e-9) * by_hand_s("dp", sum(sums)), "copies come on top"
    step = autopart.simulate(plan)
    assert plan.cost["step_time_s"] == step.step_time_s >= max(step.timeline.busy_s)
