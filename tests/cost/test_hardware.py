"""Hardware profiles: every number has a unit and a source, and the time of a matrix product behaves. Their errors are
in test_errors.py."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopart.cost.hardware import profile
from autopart.cost.hardware.profile import DEFAULT, OPTIONAL, Hardware, names
from autopart.cost.predict.collective_costs import time_s
from autopart.cost.predict.operator_work import Exponents, Size, Work, optimizer_s
from autopart.errors import OptionError
from autopart.ir.mesh import Mesh

OWN = {path.stem: json.loads(path.read_text()) for path in (Path(profile.__file__).parent / "profiles").iterdir()}
FILES = {name: {**OWN.get(data.get("extends"), {}), **data} for name, data in OWN.items()}
PROFILES = {name: Hardware.load(name) for name in names()}
flops = st.floats(1.0, 1e17)
bounded = settings(max_examples=200, deadline=None)


def test_the_profiles():
    assert DEFAULT == "a100-80gb-sxm"
    assert names() == sorted(FILES) == [
        "a100-40gb-sxm", "a100-80gb-sxm", "a100-80gb-sxm-scaled", "b200-180gb-sxm", "cpu-gloo", "h100-80gb-sxm",
        "h100-80gb-sxm-measured", "h100-ultrascale", "h200-141gb-sxm",
        "v100-32gb-sxm",
    ]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_profile_has_nothing_but_numbers_with_units_and_sources(name):
    data = dict(FILES[name])
    assert data.pop("extends", DEFAULT) in names()
    assert data.keys() | OPTIONAL == {f.name for f in fields(Hardware)} and data.pop("name") == name
    groups = [data.pop("flops_per_s"), *data.pop("collectives", {}).values()]
    entries = {**data, **{(number, key): group[key] for number, group in enumerate(groups) for key in group}}
    for entry in entries.values():
        assert entry.keys() == {"value", "unit", "source"} and entry["unit"] and entry["source"]


@pytest.mark.parametrize("name", PROFILES)
def test_a_node_is_nearer_than_other_nodes(name):
    profile = PROFILES[name]
    assert profile.link_bytes_per_s > profile.node_link_bytes_per_s
    assert profile.link_latency_s < profile.node_link_latency_s
    assert profile.memory_bytes_per_s > profile.link_bytes_per_s


def test_a_profile_can_be_a_key():
    assert len({Hardware.load(), Hardware.load(), Hardware.load("h100-80gb-sxm")}) == 2


def test_matrix_work_is_counted_in_16_bits_where_there_are_any():
    assert PROFILES["a100-80gb-sxm"].matmul_flops_per_s == PROFILES["a100-80gb-sxm"].flops_per_s["bfloat16"] == 312e12
    assert PROFILES["v100-32gb-sxm"].matmul_flops_per_s == PROFILES["v100-32gb-sxm"].flops_per_s["float16"]
    assert PROFILES["cpu-gloo"].matmul_flops_per_s == PROFILES["cpu-gloo"].flops_per_s["float32"]


@pytest.mark.parametrize(("name", "reached"), [
    ("a100-40gb-sxm", 271.2e12), ("a100-80gb-sxm", 271.2e12), ("h100-80gb-sxm", 794.5e12), ("h200-141gb-sxm", 710.8e12),
    ("b200-180gb-sxm", 1745e12),
])  # fmt: skip
def test_the_large_end_is_what_was_measured(name, reached):
    profile = PROFILES[name]
    work_s = profile.matmul_time_s(1e15, 0, torch.bfloat16) - profile.launch_s
    assert 1e15 / work_s == pytest.approx(reached * profile.matmul_sustained, rel=1e-3)


def test_the_efficiency_between_two_points():
    profile = replace(PROFILES["a100-80gb-sxm"], matmul_sustained=1.0)
    assert profile.efficiency(1e10) == 0.6 and profile.efficiency(1e11) == 0.78
    assert profile.efficiency(10**10.5) == pytest.approx(0.69)
    assert profile.efficiency(1.0) == 0.012 and profile.efficiency(1e20) == 0.869


def test_a_slower_dtype_has_the_share_of_what_takes_as_long():
    profile = replace(PROFILES["a100-80gb-sxm"], matmul_sustained=1.0)
    slower = 312 / 19.5
    assert profile.efficiency(1e10 / slower, "float32") == pytest.approx(profile.efficiency(1e10))
    assert profile.half_depth("matmul", "float32") == pytest.approx(550 / slower)
    usual_s, slower_s = (profile.matmul_time_s(flops, 0, dtype, depth) for flops, dtype, depth in
                         ((1e10, "bfloat16", 64), (1e10 / slower, "float32", 64 / slower)))  # fmt: skip
    assert usual_s == pytest.approx(slower_s)


def test_arithmetic_and_optimizers_have_rates_of_their_own():
    plain = PROFILES["h100-80gb-sxm"]
    own = replace(plain, in_order_efficiency=((1e6, 1.0),), optimizer_efficiency=0.5)
    assert own.traffic_time_s(1e6, in_order=True) == pytest.approx(1e6 / own.memory_bytes_per_s)
    assert own.traffic_time_s(1e6) == plain.traffic_time_s(1e6) == plain.traffic_time_s(1e6, in_order=True)
    work = Work("other", Size.of(1e6, Exponents()), in_order=True)
    assert work.seconds(own, Mesh.parse("dp1")) == pytest.approx(1e6 / own.memory_bytes_per_s + own.launch_s)
    assert optimizer_s(1e9, own, 1e9) == pytest.approx((14 + 2) / 7 * optimizer_s(1e9, plain))


def test_what_a_profile_may_leave_out():
    """The rate of memory is then one for all, and all collectives see the same links."""
    data = {name: entry for name, entry in FILES["h100-80gb-sxm"].items() if name not in OPTIONAL}
    plain = Hardware.parse(data)
    assert plain.traffic_time_s(1e6) == pytest.approx(1e6 / plain.memory_bytes_per_s)
    assert plain.links("send") == plain.links("all_reduce")
    entry = {"unit": "", "source": "said"}
    own = Hardware.parse({
        **data, "memory_efficiency": {**entry, "value": [[1e3, 2.0], [1e6, 0.5]]},
        "collectives": {"send": {"link_latency_s": {**entry, "value": 1.0}}},
    })  # fmt: skip
    assert own.traffic_time_s(1e6) == pytest.approx(2 * plain.traffic_time_s(1e6))
    assert own.traffic_time_s(1e2) == pytest.approx(plain.traffic_time_s(1e2) / 2)
    work = Work("other", Size.of(1e6, Exponents()))
    assert work.seconds(own, Mesh.parse("dp1")) == pytest.approx(own.traffic_time_s(1e6) + own.launch_s)
    in_place = work._replace(in_place=True).seconds(own, Mesh.parse("dp1"))
    assert in_place == pytest.approx(1e6 / own.memory_bytes_per_s + own.launch_s)
    assert own.matmul_time_s(1.0, 1e6, "float32") == pytest.approx(own.traffic_time_s(1e6) + own.launch_s)
    assert own.links("send")[1] == 1.0 and own.links("send")[0] == plain.link_bytes_per_s
    assert own.links("all_reduce") == plain.links("all_reduce")
    assert time_s("send", 2, 1e6, own) > 1 > time_s("all_reduce", 2, 1e6, own)


def by_nodes(value):
    """A profile with measured rates of all-reduces between nodes."""
    entry = {"unit": "", "source": "said"}
    data = FILES["h100-80gb-sxm"] | {"collectives": {"all_reduce": {"bytes_per_s_by_nodes": {**entry, "value": value}}}}
    return Hardware.parse(data)


def test_a_collective_between_nodes_has_the_rate_that_was_measured():
    plain, own = PROFILES["h100-80gb-sxm"], by_nodes([[2, 1e9], [8, 3e8]])
    hop = own.node_link_latency_s
    assert time_s("all_reduce", 16, 1e8, own) == pytest.approx(2 * hop + 2 * 15 / 16 * 1e8 / 1e9)
    assert time_s("all_reduce", 4, 1e8, own, stride=8) == pytest.approx(6 * hop + 2 * 3 / 4 * 1e8 / 6.5e8)  # 4 nodes
    assert time_s("all_reduce", 128, 1e8, own) == pytest.approx(30 * hop + 2 * 127 / 128 * 1e8 / 3e8)  # beyond 8 nodes
    assert time_s("all_reduce", 8, 1e8, own) == time_s("all_reduce", 8, 1e8, plain)  # inside a node
    assert time_s("all_gather", 16, 1e8, own) == time_s("all_gather", 16, 1e8, plain)


@pytest.mark.parametrize(("value", "why"), [
    ([], "it is not a list of points [nodes, B/s]"),
    ([[2, "fast"]], "it is not a list of points [nodes, B/s]"),
    ([[2, 1e9], [2, 1e8]], "nodes must rise, and rates be above zero"),
    ([[2, 0]], "nodes must rise, and rates be above zero"),
])  # fmt: skip
def test_rates_between_nodes_that_are_none(value, why):
    with pytest.raises(OptionError) as raised:
        by_nodes(value)
    assert str(raised.value).startswith(
        f"the hardware profile has bytes_per_s_by_nodes of all_reduce = {value!r}\n  why    {why}"
    )


def test_a_product_by_hand():
    profile = PROFILES["a100-80gb-sxm"]
    share = 0.869 * 0.87
    assert profile.matmul_time_s(1e12, 1e9, "bfloat16") == pytest.approx(1e12 / (312e12 * share) + 5e-6)
    assert profile.matmul_time_s(1e12, 0, "bfloat16", 550) == pytest.approx(2e12 / (312e12 * share) + 5e-6)
    assert profile.matmul_time_s(1e9, 1e9, "float16") == pytest.approx(1e9 / (0.65 * 2e12) + 5e-6)
    assert profile.matmul_time_s(1e12, 0, "float32") == pytest.approx(1e12 / (19.5e12 * share) + 5e-6)


@bounded
@given(st.sampled_from(sorted(PROFILES)), flops, flops, st.floats(0, 1e12))
def test_a_larger_product_takes_no_less(name, some, more, size_bytes):
    profile, (less, more) = PROFILES[name], sorted((some, more))
    shares = profile.efficiency(less), profile.efficiency(more)
    assert 0 < shares[0] <= shares[1] <= 1
    for dtype in profile.flops_per_s:
        time_s = profile.matmul_time_s(less, size_bytes, dtype)
        assert time_s <= profile.matmul_time_s(more, size_bytes, dtype) * (1 + 1e-12)
        assert time_s <= profile.matmul_time_s(less, 2 * size_bytes, dtype)
        assert time_s >= profile.launch_s + less / profile.flops_per_s[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_a_dtype_or_its_name(dtype):
    reached = 989e12 * 0.803 * 0.87
    assert PROFILES["h100-80gb-sxm"].matmul_time_s(1e12, 1, dtype) == pytest.approx(1e12 / reached + 5e-6)
