"""What methods of data parallelism are said to cost: published laws, and one figure from every way of asking."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import zoo

import autopart
from autopart.cost.dp_sync import Carried, break_even_bytes_per_s, exchanges, sync_s
from autopart.cost.hardware import DEFAULT, Hardware
from autopart.errors import OptionError
from autopart.ir.dp_sync import METHODS, DpSync, Method, sent_bytes
from autopart.ir.mesh import Mesh
from autopart.plans.plan import Plan

SIZE = 4e9
EACH = [
    "qsgd:4", "top_k:0.01", "sign", "double_squeeze:sign", "ef21:0.01", "ef21_sgdm:0.01", "neolithic:0.05,2",
    "powersgd:4", "parameter_server", "gossip:ring", "gossip:one_peer,4", "exact_diffusion:exp",
    "gradient_tracking:grid", "local:4", "diloco:8",
]  # fmt: skip


def links(**changed: float) -> Hardware:
    """Alike inside nodes and between them, without bends that were measured."""
    return replace(Hardware.load(DEFAULT), collectives={}, devices_per_node=1, **changed)


def of(text: str, size: float = SIZE) -> Carried:
    method = Method.parse(text)
    return Carried(method, size, sent_bytes(method, round(size / 4), 4), size / 100)


def seconds(text: str, num_ranks: int, size: float = SIZE) -> float:
    """Of the exchanges alone, without passes over memory."""
    return sum(one.seconds(num_ranks, links(), 1) for one in exchanges(of(text, size), num_ranks))


def _growth(times: list[float]) -> list[float]:
    return [b / a for a, b in pairwise(times)]


def test_every_method_is_looked_at():
    assert {text.partition(":")[0] for text in EACH} | {"all_reduce"} == set(METHODS)


def test_a_server_takes_as_long_as_there_are_ranks_and_a_ring_does_not():
    """Of large gradients: O(n) against O(1) (Yuan, lecture; Patarasuk and Yuan 2009)."""
    server, ring = (_growth([seconds(name, n) for n in (8, 16, 32, 64)]) for name in ("parameter_server", "all_reduce"))
    assert server == pytest.approx([15 / 7, 31 / 15, 63 / 31], rel=0.01)
    assert ring == pytest.approx([1.0] * 3, abs=0.08)


def test_neighbours_do_not_grow_with_the_ranks():
    """A ring's neighbours are two, of one-peer graphs one, however many ranks; of exponential graphs log n."""
    for text, expected in (("gossip:ring", [2, 2, 2]), ("gossip:one_peer", [1, 1, 1]), ("gossip:exp", [3, 4, 5])):
        assert [exchanges(of(text), n)[0].often for n in (8, 16, 32)] == expected


@pytest.mark.parametrize(("text", "share"), [
    ("qsgd:4", 4 / 32), ("sign", 1 / 32), ("top_k:0.01", 0.02), ("ef21:0.01", 0.02),
])  # fmt: skip
def test_what_is_gathered_grows_with_the_ranks(text, share):
    """Every rank gets what every other sends, so a method that sends 1/c of a gradient sends more from 2 c ranks on."""
    for num_ranks in (2, 8, 64):
        (one,) = exchanges(of(text), num_ranks)
        assert one.sent_bytes(num_ranks) == pytest.approx((num_ranks - 1) * share * SIZE, rel=1e-3)


def test_a_server_of_each_part_sends_the_same_from_any_number():
    found = [sum(x.sent_bytes(n) for x in exchanges(of("double_squeeze:sign"), n)) for n in (8, 64)]
    assert found == pytest.approx([7 / 8 * SIZE / 32 * 2, 63 / 64 * SIZE / 32 * 2], rel=1e-3)


def test_local_steps_share_one_sum():
    exact = exchanges(of("all_reduce"), 8)[0].sent_bytes(8)
    for every in (1, 4, 100):
        assert exchanges(of(f"local:{every}"), 8)[0].sent_bytes(8) == pytest.approx(exact / every)


@pytest.mark.parametrize("text", ["qsgd:4", "top_k:0.01", "double_squeeze:sign", "powersgd:4"])
def test_it_pays_on_links_slower_than_that(text):
    mesh = Mesh.parse("dp8")
    link = break_even_bytes_per_s(of(text), mesh, "dp", links())
    assert link is not None

    def gain(bytes_per_s: float) -> float:
        there = links(node_link_bytes_per_s=bytes_per_s)
        return sync_s(of("all_reduce"), 8, 1, there) - sync_s(of(text), 8, 1, there)

    assert gain(0.99 * link) > 0 > gain(1.01 * link)


@pytest.fixture(scope="module")
def model():
    return zoo.gpt2()


@pytest.mark.whole
@pytest.mark.parametrize("text", EACH)
def test_one_figure_from_every_way_of_asking(model, text):
    plan = autopart.plan(model[0], "dp4", example_kwargs=model[1], dp_sync=text)
    predicted = autopart.simulate(plan)
    asked = [plan.cost.at(), autopart.simulate(Plan.from_json(plan.to_json()))]
    assert [one.step_time_s for one in asked] == pytest.approx([predicted.step_time_s] * 2, rel=1e-9)
    exact = autopart.simulate(autopart.plan(model[0], "dp4", example_kwargs=model[1]))
    assert predicted.step_time_s != exact.step_time_s
    assert DpSync.parse(plan.dp_sync) == DpSync.parse(text)


def test_search_takes_what_it_is_offered_and_nothing_else(model):
    found = autopart.search(model[0], 2, example_kwargs=model[1])
    assert {row.dp_sync["strategy"] for row in found} == {"all_reduce"}
    offered = autopart.search(model[0], 2, example_kwargs=model[1], dp_sync=["local:100"])
    assert {row.dp_sync["strategy"] for row in offered} == {"all_reduce", "local"}
    with pytest.raises(OptionError, match="unknown dp_sync='topk'"):
        autopart.search(model[0], 2, example_kwargs=model[1], dp_sync=["topk:0.01"])
