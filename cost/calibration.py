"""A hardware profile made of measurements, and how well it predicts them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np
import torch

from autopart.ir.measurement import LINKS, Device, Measured

from .collectives import PARTS, S, g, k, n, time_s
from .hardware import USUAL_DTYPES, Hardware
from .work import optimizer_s

_SHORTEST_S = 1e-9
"""Where a fit finds no latency."""

_LINK_UNITS = "B/s per device and direction", "s per hop"

Entry = dict[str, Any]


def profile(name: str, device: Device, measurements: Sequence[Measured], date: str, base: Hardware) -> Entry:
    """A hardware profile, as its file holds it, of what was measured.

    Args:
        date: of the measurements.
        base: has what was not measured.
    """
    ranks = f"{device.num_ranks} processes at once" if device.num_ranks > 1 else "one process"
    source = f"measured on {device.name}, {device.software}, {ranks}, {date}"
    by_kind = defaultdict(list)
    for row in measurements:
        if not row.is_held_out:
            by_kind[row.kind].append(row)
    launch_s = min(row.time_s for row in by_kind["launch"])
    (in_place,) = by_kind["memory in place"]
    memory = in_place.size_bytes / in_place.time_s
    peaks, curve = _products(by_kind["matmul"], launch_s)
    entries = {
        "flops_per_s": {dtype: _entry(peak, "FLOP/s", f"{source}: the best rate of any product")
                        for dtype, peak in peaks.items()},
        "matmul_efficiency": _entry(curve, "[FLOPs of one matrix product, share of the dense peak]",
                                    f"{source}: means over square, tall, wide and deep products in "
                                    f"{_usual(peaks)}, without the launch"),
        "launch_s": _entry(launch_s, "s per operator", f"{source}: forward and backward of operators on one value"),
        "memory_bytes": _entry(device.memory_bytes, "B", f"what {device.name} says, {date}"
                               + (f", for each of {device.local_ranks} processes" * (device.kind == "cpu"))),
        "memory_bytes_per_s": _entry(memory, "B/s", f"{source}: adding in place"),
        "memory_efficiency": _entry(_traffic(by_kind["memory"], memory, launch_s),
                                    "[bytes that an operator reads and writes, share of memory_bytes_per_s]",
                                    f"{source}: pointwise operators whose results are kept, without the launch"),
        "devices_per_node": _per_node(device, base, source),
        "overlap": _entry(*_overlap(device, base)),
        "causal_block": _entry(base.causal_block, "queries", f"not measured: from profile {base.name}"),
    }  # fmt: skip
    by_collective: defaultdict[str, Entry] = defaultdict(dict)
    for link in LINKS:
        rows = [row for row in measurements if row.link == link]
        entries |= _link(link, rows, source) if rows else _not_measured(link, base)
        for kind in dict.fromkeys(row.kind for row in rows):
            by_collective[kind] |= _link(link, [row for row in rows if row.kind == kind], source)
    if by_collective:
        entries["collectives"] = dict(by_collective)
    return {"name": name, **entries}


def predicted_s(row: Measured, hardware: Hardware) -> float:
    """What the profile says that a measured call takes."""
    if row.kind == "matmul":
        return hardware.matmul_time_s(row.flops, _operand_bytes(row), row.dtype)
    if row.kind == "memory":
        return hardware.traffic_time_s(row.size_bytes) + hardware.launch_s
    if row.kind.startswith("attention"):
        share = hardware.causal_share(row.shape[1]) if row.form == "causal" else 1.0
        return hardware.matmul_time_s(row.flops * share, 0.0, row.dtype)
    if row.kind == "sustained":
        return hardware.matmul_time_s(row.flops, _operand_bytes(row), row.dtype)
    if row.kind in ("copy", "norm"):
        return hardware.traffic_time_s(row.size_bytes) + hardware.launch_s
    if row.kind == "optimizer":
        return optimizer_s(row.size_bytes, hardware)
    if row.kind == "memory in place":
        return row.size_bytes / hardware.memory_bytes_per_s
    if row.kind == "launch":
        return hardware.launch_s
    stride = 1 if row.link == "link" else hardware.devices_per_node
    return time_s(row.kind, row.num_ranks, row.size_bytes, hardware, stride)


def _overlap(device: Device, base: Hardware) -> tuple[float, str, str]:
    """The share of communication that runs beside compute, its unit and where it is from."""
    if device.kind == "cpu":
        return 0.0, "share of communication", "the processor that computes also sends"
    return base.overlap, "share of communication", f"not measured: from profile {base.name}"


def _entry(value: Any, unit: str, source: str) -> Entry:
    return {"value": float(f"{value:.4g}") if isinstance(value, float) else value, "unit": unit, "source": source}


def _usual(peaks: Mapping[str, float]) -> str:
    return next(dtype for dtype in USUAL_DTYPES if dtype in peaks)


def _products(rows: Sequence[Measured], launch_s: float) -> tuple[dict[str, float], list[list[float]]]:
    """The peak of each dtype, and the curve of the one that models are trained in."""
    from scipy.optimize import isotonic_regression

    peaks: dict[str, float] = defaultdict(float)
    for row in rows:
        peaks[row.dtype] = max(peaks[row.dtype], row.flops / row.time_s)
    usual = _usual(peaks)
    shares = defaultdict(list)
    for row in rows:
        if row.dtype == usual:
            shares[row.flops].append(row.flops / _work_s(row, launch_s) / peaks[usual])
    amounts = sorted(shares)
    rising = isotonic_regression([geometric_mean(shares[flops]) for flops in amounts]).x
    return dict(peaks), _curve(zip(amounts, rising.tolist(), strict=True), most=1.0)


def _traffic(rows: Sequence[Measured], rate: float, launch_s: float) -> list[list[float]]:
    return _curve((row.size_bytes, row.size_bytes / _work_s(row, launch_s) / rate) for row in rows)


def _work_s(row: Measured, launch_s: float) -> float:
    """Without the launch, of which a small operator of a library may take less than the launch that was measured."""
    return max(row.time_s - launch_s, row.time_s / 10)


def _curve(points: Iterable[tuple[float, float]], most: float = math.inf) -> list[list[float]]:
    """Points of an efficiency curve by which no larger amount takes less time: from the largest down, a share is as
    high as that asks for."""
    curve = [[amount, float(f"{min(share, most):.4g}")] for amount, share in sorted(points)]
    for smaller, larger in reversed([*pairwise(curve)]):
        least = larger[1] / (1 + math.log(larger[0] / smaller[0]))
        if smaller[1] < least:
            smaller[1] = math.ceil(least * 1e4) / 1e4
    return curve


def _operand_bytes(row: Measured) -> float:
    rows, inner, columns = row.shape
    return (rows * inner + inner * columns + rows * columns) * getattr(torch, row.dtype).itemsize


def _per_node(device: Device, base: Hardware, source: str) -> Entry:
    if device.num_ranks > 1:
        return _entry(device.local_ranks, "processes", f"{source}: as torchrun started them on a node")
    return _entry(base.devices_per_node, "devices", f"not measured: from profile {base.name}")


def _not_measured(link: str, base: Hardware) -> Entry:
    names = f"{link}_bytes_per_s", f"{link}_latency_s"
    return {
        name: _entry(getattr(base, name), unit, f"not measured: from profile {base.name}")
        for name, unit in zip(names, _LINK_UNITS, strict=True)
    }


def _link(link: str, rows: Sequence[Measured], source: str) -> Entry:
    """Rate and latency of a link: the collectives' formulas fitted by least squares of their relative errors."""
    from scipy.optimize import nnls

    hops, moved = zip(*(_hops_and_bytes(row) for row in rows), strict=True)
    taken = np.array([row.time_s for row in rows])
    (latency, per_byte), _ = nnls(np.array([hops, moved]).T / taken[:, None], np.ones(len(rows)))
    fastest = max(size / row.time_s for size, row in zip(moved, rows, strict=True))
    values = 1 / per_byte if per_byte else fastest, max(latency, _SHORTEST_S)
    kinds = ", ".join(dict.fromkeys(row.kind for row in rows))
    names = f"{link}_bytes_per_s", f"{link}_latency_s"
    return {
        name: _entry(float(value), unit, f"{source}: fit of {kinds} over {rows[0].num_ranks} ranks")
        for name, value, unit in zip(names, values, _LINK_UNITS, strict=True)
    }


def _hops_and_bytes(row: Measured) -> tuple[float, float]:
    parts, values = PARTS[row.kind], {k: 1, g: row.num_ranks, n: row.num_ranks, S: row.size_bytes}
    return float(parts.hops.subs(values)), float(parts.bytes.subs(values))


def mean_error(rows: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The mean and the largest relative error of (predicted, measured)."""
    errors = [abs(predicted / measured - 1) for predicted, measured in rows]
    return fmean(errors), max(errors)
