"""What methods of data parallelism are said to cost: published laws, and one figure from every way of asking."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import zoo

import autopart
from autopart.cost.hardware.profile import DEFAULT, Hardware
from autopart.cost.predict.dp_sync_costs import break_even_bytes_per_s, exchanges, sync_s
from autopart.errors import OptionError
from autopart.extras.dp_sync.sync_options import METHODS, DpSync, Method
from autopart.ir.mesh import Mesh
from autopart.ir.run.sync_option import SYNC_NAMES, MethodParameters
from autopart.passes.choose.plan_codec import decode
from autopart.plans.plan import Plan
from autopart.recipe.make_plan import prepare
from autopart.tracing.trace_model import bind_call

SIZE = 4e9
EACH = [
    "qsgd:4", "top_k:0.01", "sign", "double_squeeze:sign", "ef21:0.01", "ef21_sgdm:0.01", "neolithic:0.05,2",
    "powersgd:4", "parameter_server", "gossip:ring", "gossip:one_peer,4", "exact_diffusion:exp",
    "gradient_tracking:grid", "local:4", "diloco:8",
]  # fmt: skip


def links(**changed: float) -> Hardware:
    """Alike inside nodes and between them, without bends that were measured."""
    return replace(Hardware.load(DEFAULT), collectives={}, devices_per_node=1, **changed)


def of(text: str, size: float = SIZE) -> MethodParameters:
    method = Method.parse(text)
    return MethodParameters(method, size, method.sent_bytes(round(size / 4), 4), size / 100)


def seconds(text: str, num_ranks: int, size: float = SIZE) -> float:
    """Of the exchanges alone, without passes over memory."""
    return sum(one.seconds(num_ranks, links(), 1) for one in exchanges(of(text, size), num_ranks))


def _growth(times: list[float]) -> list[float]:
    return [b / a for a, b in pairwise(times)]


def test_every_method_is_looked_at():
    assert {text.partition(":")[0] for text in EACH} | {"all_reduce"} == set(METHODS)
    assert tuple(METHODS) == SYNC_NAMES


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


@pytest.fixture(scope="module")
def exact(model):
    """Seconds of a step that sums all gradients."""
    return autopart.simulate(autopart.plan(model[0], "dp4", example_kwargs=model[1])).step_time_s


@pytest.mark.whole
@pytest.mark.parametrize("text", EACH)
def test_one_figure_from_every_way_of_asking(model, exact, text):
    plan = autopart.plan(model[0], "dp4", example_kwargs=model[1], dp_sync=text)
    predicted = autopart.simulate(plan)
    asked = [plan.cost.at(), autopart.simulate(Plan.from_json(plan.to_json()))]
    assert [one.step_time_s for one in asked] == pytest.approx([predicted.step_time_s] * 2, rel=1e-9)
    assert predicted.step_time_s != exact
    assert DpSync.parse(plan.dp_sync) == DpSync.parse(text)


def test_parts_of_the_optimizer_beside_what_is_remembered(model):
    """With zero=1: memory of the method as without, whole gradients, parts of all else; nothing is scattered."""
    plans = {zero: autopart.plan(model[0], "dp4", example_kwargs=model[1], dp_sync="ef21:0.01", zero=zero)
             for zero in (0, 1)}  # fmt: skip
    whole, parts = (plan.memory[0] for plan in plans.values())
    assert parts["communication"] == whole["communication"] == 2 * whole["gradients"]
    assert parts["optimizer"] == whole["optimizer"] / 4
    assert parts["gathered"] == 2 * whole["gradients"] - parts["gradients"]
    sent = [[(row.backward, row.bytes) for row in plan.collectives if row.backward] for plan in plans.values()]
    assert sent[0] == sent[1]
    predicted = autopart.simulate(plans[1])
    asked = [plans[1].cost.at(), autopart.simulate(Plan.from_json(plans[1].to_json()))]
    assert [one.step_time_s for one in asked] == pytest.approx([predicted.step_time_s] * 2, rel=1e-9)
    assert plans[1].cost.at().memory_bytes == pytest.approx(parts["total"], rel=1e-9)
    assert autopart.verify(model[0], "dp4", example_kwargs=model[1], plan=plans[1]).ok


def test_a_plan_that_was_edited_is_refused_as_the_option_is(model):
    plan = autopart.plan(model[0], "dp4", example_kwargs=model[1], dp_sync="ef21:0.01", zero=1)
    edited = Plan.from_json(json.dumps(json.loads(plan.to_json()) | {"zero": 2}))
    with pytest.raises(OptionError, match=r"sharded parameters \(zero=2\)(.|\n)*try    zero=1"):
        decode(prepare(model[0], bind_call(model[0], (), model[1])), edited, Mesh.parse("dp4"))


@pytest.mark.few
@pytest.mark.parametrize("options", [{"zero": 1, "dp_sync": "ef21:0.01"}, {"dp_sync": "ef21:0.01"}], ids=str)
def test_memory_on_twice_the_ranks(model, options):
    two, four = (autopart.plan(model[0], mesh, example_kwargs=model[1], **options) for mesh in ("dp2", "dp4"))
    assert two.cost.at(dp=4, b=2).memory_bytes == pytest.approx(four.memory[0]["total"], rel=0.02)


def test_what_is_scattered_is_not_summed_again(model):
    """Over `dp` all parameters of this model are cut: with zero=1 a reduce-scatter a step, else one a microbatch."""
    once = {zero: autopart.plan(model[0], "dp4", example_kwargs=model[1], zero=zero).timing["ranks"][0]
            for zero in (1, 2)}  # fmt: skip
    assert once[1]["gradient_sum_s"] == pytest.approx(once[1]["gather_s"]) and once[2]["gradient_sum_s"] == 0.0


@pytest.mark.large
def test_search_takes_what_it_is_offered_and_nothing_else(model):
    found = autopart.search(model[0], 2, example_kwargs=model[1])
    assert {row.dp_sync["strategy"] for row in found} == {"all_reduce"}
    offered = autopart.search(model[0], 2, example_kwargs=model[1], dp_sync=["local:100"])
    assert {row.dp_sync["strategy"] for row in offered} == {"all_reduce", "local"}
    with pytest.raises(OptionError, match="unknown dp_sync='topk'"):
        autopart.search(model[0], 2, example_kwargs=model[1], dp_sync=["topk:0.01"])


# ---- the tables of K. Yuan's lecture (Distributed training for LLM)

RANKS = (32, 64, 128, 256)
PSGD_HOURS, DSGD_HOURS = (371, 403, 474, 563), (355, 365, 358, 384)
"""GPU-hours of ResNet-50 on ImageNet: they grow as a step does, since ranks times steps is constant."""
RESNET_50 = 25.5e6 * 4


def test_all_reduce_grows_with_the_ranks_and_neighbours_do_not():
    """The latency from how far P-SGD's line (least squares: 350.3 + 0.854 n hours) rises; its runs, and all of D-SGD's,
    from the formulas."""

    def step_s(text, num_ranks, compute_s, latency_s):
        link = links(node_link_bytes_per_s=25e9 / 8, node_link_latency_s=latency_s)
        return compute_s + sum(one.seconds(num_ranks, link, 1) for one in exchanges(of(text, RESNET_50), num_ranks))

    def line(num_ranks):
        return 350.3 + 0.854 * num_ranks

    def hours(text, num_ranks, compute_s, latency_s):
        scale = line(RANKS[0]) / step_s("all_reduce", RANKS[0], compute_s, latency_s)
        return scale * step_s(text, num_ranks, compute_s, latency_s)

    compute_s, low, high = 0.35, 0.0, 0.01
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if hours("all_reduce", 256, compute_s, middle) < line(256) else (low, middle)
    assert 1e-4 < low < 1e-3  # of Ethernet
    found = [hours("all_reduce", n, compute_s, low) for n in RANKS]
    assert found == pytest.approx([line(n) for n in RANKS], rel=0.015)
    assert found == pytest.approx(PSGD_HOURS, rel=0.045)
    for text, near in (("gossip:ring", 0.05), ("gossip:one_peer", 0.11)):  # the lecture does not say which graph
        flat = [hours(text, n, compute_s, low) for n in RANKS]
        assert max(flat) <= 1.001 * min(flat) and max(flat) < min(found)
        assert flat[0] == pytest.approx(sum(DSGD_HOURS) / 4, rel=near)


def test_a_partial_average_of_resnet_takes_half_of_a_ring():
    """278 against 150 ms on 256 GPUs: what a ring of neighbours takes says the bandwidth, 10.9 Gb/s, and the other the
    latency, a quarter of a millisecond."""
    link = links(node_link_bytes_per_s=2 * RESNET_50 / 0.1495, node_link_latency_s=2.5e-4)
    times_s = [sum(one.seconds(256, link, 1) for one in exchanges(of(text, RESNET_50), 256))
               for text in ("all_reduce", "gossip:ring")]  # fmt: skip
    assert times_s == pytest.approx([0.278, 0.150], rel=0.02)


@pytest.mark.large
def test_bert_large_trains_in_about_half_the_time():
    """59.02 against 30.4 hours on 64 GPUs: both wait for the link, for about two sends of the gradients and for one."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    with torch.device("meta"):
        model = BertForMaskedLM(BertConfig(**large))
        ids = torch.zeros(64 * 8, 128, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    slow = links(node_link_bytes_per_s=10e9 / 8, node_link_latency_s=5e-5)
    plain, gossip = (
        autopart.plan(model, "dp64", example_kwargs=batch, dp_sync=method).cost.on(slow).step_time_s
        for method in ("all_reduce", "gossip:one_peer")
    )
    assert 1.6 < plain / gossip < 2.1


@pytest.mark.parametrize(("warm_up", "published"), [(0.15, 4.92), (0.25, 3.37)])
def test_volume_of_one_bit_adam(warm_up, published):
    """1 / (w + (1 - w) / 16) beside sums in 16 bits (Tang et al. 2021): signs both ways, exact for the first steps."""
    number = 10**8
    compressed = exchanges(MethodParameters(Method.parse("double_squeeze:sign"), 4.0 * number, number / 8, 0.0), 64)
    exact = exchanges(MethodParameters(Method.parse("all_reduce"), 2.0 * number, 2.0 * number, 0.0), 64)
    share = sum(one.sent_bytes(64) for one in compressed) / sum(one.sent_bytes(64) for one in exact)
    assert share == pytest.approx(1 / 16, rel=1e-3)
    assert 1 / (warm_up + (1 - warm_up) * share) == pytest.approx(published, rel=0.002)
