"""`autopart calibrate`: what is measured becomes a profile that is read again, and is predicted by it."""

import json
import math
import os
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from dist import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import autopart
from autopart.cli.main import main
from autopart.common.matrix_alignment import unaligned
from autopart.cost.hardware.profile import Hardware
from autopart.cost.predict.collective_costs import time_s
from autopart.extras.calibrate.calibration import predicted_s, profile
from autopart.extras.calibrate.gpu_calls import calls
from autopart.extras.calibrate.measurement import Device, Measured

BASE = replace(Hardware.load("cpu-gloo"), collectives={})  # all kinds see the same links
DEVICE = Device("a device", "cpu", "torch 2", memory_bytes=1e9, local_ranks=2, num_ranks=2)
WIDTHS, SIZES = (32, 128, 512), (1e4, 1e6, 1e8)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send")


def made(rates, memory_rates, launch_s=1e-6, links=None):
    """Measurements of a device with these rates of products and of memory, by size."""
    rows = [Measured("launch", launch_s), Measured("memory in place", 0.01, size_bytes=1e8)]
    flops = [2 * width**3 for width in WIDTHS]
    for width, amount in zip(WIDTHS, flops, strict=True):
        for dtype, slower in (("float32", 1), ("float64", 2)):  # so long as a product of twice the FLOPs in float32
            rate = np.interp(np.log(slower * amount), np.log(flops), rates) / slower
            rows.append(Measured("matmul", amount / rate + launch_s, dtype, (width, width, width)))
    rows += [
        Measured("memory", size / rate + launch_s, size_bytes=size)
        for size, rate in zip(SIZES, memory_rates, strict=True)
    ]
    for link, hardware in (links or {}).items():
        stride = 1 if link == "link" else hardware.devices_per_node
        for kind in KINDS:
            for size in SIZES:
                row = Measured(kind, time_s(kind, 2, size, hardware, stride), size_bytes=size, link=link, num_ranks=2)
                rows.append(row)
    return rows


def fitted(rows):
    return Hardware.parse(profile("made", DEVICE, rows, "2026-01-01", BASE))


def test_what_follows_the_model_is_predicted():
    rows = made((1e10, 5e10, 1e11), (5e9, 1e10, 4e9), links={"link": BASE})
    found = fitted(rows)
    for row in rows:
        assert predicted_s(row, found) == pytest.approx(row.time_s, rel=2e-2), row
    assert found.flops_per_s["float32"] == pytest.approx(1e11, rel=1e-2)
    assert found.flops_per_s["float64"] == pytest.approx(5e10, rel=1e-2)
    assert found.devices_per_node == 2


@pytest.mark.parametrize("link", ["link", "node_link"])
def test_links_are_fitted(link):
    """Latency and rate come back, for all kinds together and each by itself; the other link is the base's."""
    found = fitted(made((1e10, 5e10, 1e11), (1e9, 1e9, 1e9), links={link: BASE}))
    for name in ("link_bytes_per_s", "link_latency_s", "node_link_bytes_per_s", "node_link_latency_s"):
        assert getattr(found, name) == pytest.approx(getattr(BASE, name), rel=1e-3)
    assert found.collectives.keys() == set(KINDS)
    for kind in KINDS:
        assert found.links(kind) == pytest.approx(BASE.links(kind), rel=1e-3)


def test_what_was_not_measured_says_so():
    data = profile("made", DEVICE, made((1e10, 5e10, 1e11), (1e9, 1e9, 1e9)), "2026-01-01", BASE)
    for name in ("link_bytes_per_s", "node_link_latency_s"):
        assert data[name]["source"] == "not measured: from profile cpu-gloo"
        assert data[name]["value"] == getattr(BASE, name)
    assert "collectives" not in data
    assert data["launch_s"]["source"].startswith("measured on a device, torch 2, 2 processes at once, 2026-01-01")


RATE = st.floats(1e3, 1e15)


@settings(max_examples=200, deadline=None)
@given(st.lists(RATE, min_size=3, max_size=3), st.lists(RATE, min_size=3, max_size=3), st.floats(1e-9, 1.0))
def test_whatever_was_measured_is_a_profile(rates, memory_rates, launch_s):
    """Also where larger products took less time: noise makes no profile that is refused."""
    found = fitted(made(rates, memory_rates, launch_s))
    flops = [2 * width**3 for width in WIDTHS]
    times = [found.matmul_time_s(f, 0, "float32") for f in flops]
    assert times == sorted(times)
    traffic = [found.traffic_time_s(size) for size in SIZES]
    assert all(a <= b * (1 + 1e-3) for a, b in pairwise(traffic))


def test_quick_and_alone(tmp_path):
    path = tmp_path / "here.json"
    found = autopart.calibrate(path, quick=True)
    assert Hardware.load(path) == found.hardware and found.hardware.name == "here"
    assert {"float32", "float64"} <= found.hardware.flops_per_s.keys()
    entries = json.loads(path.read_text())
    assert torch.__version__ in entries["launch_s"]["source"] and "one process" in entries["launch_s"]["source"]
    rows = found.rows()
    assert {row["kind"] for row in rows} == {"matmul", "memory", "memory in place", "launch"}
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 and math.isfinite(row["error"]) for row in rows)
    for kind, error in found.errors().items():
        assert 0 <= error["mean"] <= error["worst"] == max(abs(r["error"]) for r in rows if r["kind"] == kind)
    text = str(found)
    assert "off by" in text and "float32 256 x 256 x 256" in text and max(map(len, text.splitlines())) <= 120


@pytest.mark.large
def test_a_plan_is_priced_by_it(tmp_path):
    from zoo import gpt2

    path = tmp_path / "here.json"
    autopart.calibrate(path, quick=True)
    model, batch = gpt2()
    plan = autopart.plan(model, "tp2", example_kwargs=batch, hardware=str(path))
    assert autopart.simulate(plan).step_time_s > 0


def test_the_command(tmp_path):
    path = tmp_path / "here.json"
    result = CliRunner().invoke(main, ["calibrate", "--quick", "--out", str(path), "--name", "mine", "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data.keys() == {"profile", "rows", "errors", "held_out"} and data["profile"] == json.loads(path.read_text())
    assert Hardware.load(path).name == data["profile"]["name"] == "mine"
    assert not result.stderr  # no bar where there is no terminal


def test_a_path_that_cannot_be(tmp_path):
    """Told before anything is measured."""
    result = CliRunner().invoke(main, ["calibrate", "--out", str(tmp_path / "none" / "here.json")])
    assert result.exit_code == 2 and "there is no folder" in result.stderr


def on_ranks(folder, local_ranks):
    os.environ["LOCAL_WORLD_SIZE"] = str(local_ranks)
    path = f"{folder}/rank0.json"
    found = autopart.calibrate(path, quick=True)
    return found.device.rank, found.profile, {(row.kind, row.link) for row in found.measured if row.link}


@pytest.mark.large
@pytest.mark.parametrize(("local_ranks", "link", "other"), [(2, "link", "node_link"), (1, "node_link", "link")])
def test_on_two_processes(tmp_path, local_ranks, link, other):
    """Of one node, or of two as torchrun would tell it. All get the same figures, and the first writes them."""
    (_, first, measured), (rank, second, _) = run_ranks(on_ranks, 2, str(tmp_path), local_ranks, timeout_s=120)
    assert rank == 1 and first == second == json.loads((tmp_path / "rank0.json").read_text())
    assert measured == {(kind, link) for kind in KINDS}
    assert first["collectives"].keys() == set(KINDS)
    assert "2 processes at once" in first[f"{link}_bytes_per_s"]["source"]
    assert first[f"{other}_bytes_per_s"]["source"] == "not measured: from profile cpu-gloo"
    assert first["devices_per_node"]["value"] == local_ranks
    Hardware.load(tmp_path / "rank0.json")


# --- GPUs, from descriptions of what is called there.

GPU = Device("a GPU", "cuda", "torch 2", memory_bytes=8e10, local_ranks=1, num_ranks=1)
PEAK, RATE, HALF, UNALIGNED, HALF_WIDTH, BLOCK = 8e14, 4e12, 150.0, 0.2, 30.0, 600.0


def taken_s(row):
    """Of a GPU whose rates are the same for all sizes, but for shallow sums, odd rows and narrow heads."""
    if row.kind in ("matmul", "sustained"):
        shallow = 1 + HALF / row.shape[1] if row.form != "weight gradient" else 1
        last = (row.shape[0], row.shape[2]) if row.form == "weight gradient" else row.shape[1:]
        odd = UNALIGNED ** (unaligned(last) / 3) if row.dtype in ("bfloat16", "float16") else 1
        return max(row.flops / PEAK * shallow / odd, 2e-6)
    if row.kind.startswith("attention"):
        _, queries, width = row.shape
        share = (queries + BLOCK) / (2 * queries) if row.form == "causal" else 1
        return row.flops / PEAK * min(1, share) * (1 + HALF_WIDTH / width)
    return row.size_bytes / RATE * (7 if row.kind == "optimizer" else 1) + 1e-6


def of_gpu():
    rows = [replace(what, time_s=taken_s(what)) for what, _ in calls()]
    rows += [Measured("launch", 1e-6), Measured("issue", 2e-5), Measured("memory in place", 3e8 / RATE, size_bytes=3e8)]
    return rows + [Measured("memory", size / RATE, size_bytes=size) for size in (1e6, 1e8)]


def test_the_numbers_of_a_gpu_come_back():
    rows = of_gpu()
    found = Hardware.parse(profile("gpu", GPU, rows, "2026-01-01", Hardware.load("h100-80gb-sxm")))
    assert found.matmul_half_depth == pytest.approx(HALF, rel=0.2)
    assert found.matmul_unaligned == pytest.approx(UNALIGNED, rel=0.03)
    assert found.attention_half_width == pytest.approx(HALF_WIDTH, rel=0.15)
    assert found.causal_block == pytest.approx(BLOCK, rel=0.03)
    assert found.launch_s == 1e-6
    held_out = [row for row in rows if row.is_held_out and row.flops > 1e10]
    assert len(held_out) > 200
    for row in held_out:
        assert predicted_s(row, found) == pytest.approx(row.time_s, rel=0.08), row


def test_what_is_held_out_is_in_no_fit():
    rows = of_gpu()
    wrong = [replace(row, time_s=100 * row.time_s) if row.is_held_out else row for row in rows]
    first, second = (profile("gpu", GPU, r, "2026-01-01", BASE) for r in (rows, wrong))
    assert first == second
    for kind, dtype, form in {(row.kind, row.dtype, row.form) for row in rows if row.kind in ("matmul", "attention")}:
        alike = [row.is_held_out for row in rows if (row.kind, row.dtype, row.form) == (kind, dtype, form)]
        assert 0.2 < sum(alike) / len(alike) < 0.45, (kind, dtype, form)


def test_over_300_shapes_of_products():
    shapes = {what.shape for what, _ in calls() if what.kind == "matmul" and what.dtype == "bfloat16" and not what.form}
    assert len(shapes) >= 300
    assert {what.dtype for what, _ in calls() if what.kind == "matmul"} == {"bfloat16", "float16", "float8_e4m3fn"}


def test_every_call_of_a_gpu_computes_what_it_says():
    """On a CPU, at small sizes: products have the shape, and work, that their description has."""
    from autopart.extras.calibrate import gpu_calls

    here = torch.device("cpu")
    for form in ("", gpu_calls.INPUT_GRADIENT, gpu_calls.WEIGHT_GRADIENT):
        with FlopCounterMode(display=False) as counter:
            assert gpu_calls.product((8, 16, 24), torch.float32, form)(here)().shape == (8, 24)
        assert counter.get_total_flops() == Measured("matmul", shape=(8, 16, 24)).flops
    for is_backward in (False, True):
        result = gpu_calls.attend((1, 2, 8, 4), True, is_backward)(here)()
        assert (result[0] if is_backward else result).shape == (1, 2, 8, 4)
    results = {what.form: maker(here)() for what, maker in gpu_calls.pointwise() if what.size_bytes < 1e6}
    one = [result[0] if isinstance(result, tuple) else result for result in results.values()]
    assert len(results) == 16 and {result.numel() for result in one} == {2**16, 16, 4096}


def test_measurements_are_kept_and_read_again(tmp_path):
    raw, first, again = (tmp_path / name for name in ("raw.json", "first.json", "again.json"))
    measured = autopart.calibrate(first, quick=True, raw=raw, name="here")
    read = autopart.calibrate(again, of=raw, name="here")
    assert read.measured == measured.measured and read.device == measured.device
    assert first.read_text() == again.read_text()
    result = CliRunner().invoke(main, ["calibrate", "--of", str(raw), "--json"])
    assert result.exit_code == 0 and len(json.loads(result.output)["rows"]) == len(measured.measured)
