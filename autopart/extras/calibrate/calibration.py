"""Calibration: fit a hardware profile to measurements, and compute its prediction errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np
import torch

from autopart.cost.hardware.profile import USUAL_DTYPES, Hardware
from autopart.cost.predict.collective_costs import PARTS, S, g, k, n, time_s
from autopart.cost.predict.operator_work import optimizer_s
from autopart.extras.calibrate import gpu_fit
from autopart.extras.calibrate.measurement import LINKS, Device, Measured

_SHORTEST_S = 1e-9
"""Latency in seconds that is assumed if a fit gives no positive latency."""

_OF_FLOPS = "[FLOPs of one matrix product, share of the dense peak]"
_OF_BYTES = "[bytes that an operator reads and writes, share of memory_bytes_per_s]"
_LINK_UNITS = "B/s per device and direction", "s per hop"

Entry = dict[str, Any]


def profile(name: str, device: Device, measurements: Sequence[Measured], date: str, base: Hardware) -> Entry:
    """Fit a hardware profile to measurements. Return the content of the profile's file.

    Args:
        date: date of the measurements.
        base: profile that supplies values that were not measured.
    """
    ranks = f"{device.num_ranks} processes at once" if device.num_ranks > 1 else "one process"
    source = f"measured on {device.name}, {device.software}, {ranks}, {date}"
    by_kind = defaultdict(list)
    for row in measurements:
        if not row.is_held_out:
            by_kind[row.kind].append(row)
    computed = _fit_cuda_graph_calls(by_kind, source) if by_kind["attention"] else _fit_timed_calls(by_kind, source)
    entries = {
        **computed,
        "memory_bytes": _entry(device.memory_bytes, "B", f"reported by {device.name}, {date}"
                               + (f", for each of {device.local_ranks} processes" * (device.kind == "cpu"))),
        "devices_per_node": _per_node(device, base, source),
        "overlap": _entry(*_overlap(device, base)),
    }  # fmt: skip
    if "causal_block" not in entries:
        entries["causal_block"] = _entry(base.causal_block, "queries", f"not measured: from profile {base.name}")
    by_collective: defaultdict[str, Entry] = defaultdict(dict)
    for link in LINKS:
        rows = [row for row in measurements if row.link == link]
        entries |= _link(link, rows, source) if rows else _not_measured(link, base)
        for kind in dict.fromkeys(row.kind for row in rows):
            by_collective[kind] |= _link(link, [row for row in rows if row.kind == kind], source)
    if by_collective:
        entries["collectives"] = dict(by_collective)
    return {"name": name, **entries}


def _fit_timed_calls(by_kind: Mapping[str, Sequence[Measured]], source: str) -> Entry:
    """Fit the profile entries of a CPU, or of a GPU with `quick=True`.

    In these measurements, times include the launch of the operator.
    """
    launch_s = min(row.time_s for row in by_kind["launch"])
    memory = _in_place(by_kind)
    peaks = _peaks(by_kind["matmul"])
    usual = _usual(peaks)
    products, pointwise = (gpu_fit.without_launch(by_kind[kind], launch_s) for kind in ("matmul", "memory"))
    return {
        "flops_per_s": _peak_entries(peaks, source),
        "matmul_efficiency": _entry(_products(products, usual, peaks[usual]), _OF_FLOPS,
                                    f"{source}: means over square, tall, wide and deep products in {usual}, "
                                    "without the launch"),
        "launch_s": _entry(launch_s, "s per operator", f"{source}: forward and backward of operators on one value"),
        "memory_bytes_per_s": _entry(memory, "B/s", f"{source}: adding in place"),
        "memory_efficiency": _entry(_traffic(pointwise, memory), _OF_BYTES,
                                    f"{source}: pointwise operators whose results are kept, without the launch"),
    }  # fmt: skip


def _fit_cuda_graph_calls(by_kind: Mapping[str, Sequence[Measured]], source: str) -> Entry:
    """Fit the profile entries of a GPU, from kernels that were recorded in CUDA graphs."""
    memory, peaks = _in_place(by_kind), _peaks(by_kind["matmul"])
    usual, launch_s = _usual(peaks), min(row.time_s for row in by_kind["launch"])

    def of(*kinds: str) -> list[Measured]:
        return gpu_fit.without_launch((row for kind in kinds for row in by_kind[kind]), launch_s)

    lone, half_depth, unaligned = gpu_fit.products(of("matmul"), usual, peaks[usual], memory)
    in_order, others = gpu_fit.by_order(of("memory", "copy", "norm"))
    kept = [row for row in of("attention", "attention backward") if row.form != "dropped"]
    half_width, block = gpu_fit.attention(kept, peaks[usual], lone)
    return {
        "flops_per_s": _peak_entries(peaks, source),
        "matmul_efficiency": _entry(lone, _OF_FLOPS, f"{source}: means over products in {usual} with large inner dims, "
                                    "whose rows are multiples of 16 bytes"),
        "matmul_half_depth": _entry(half_depth, "inner dim of a product",
                                    f"{source}: least squares over the same products"),
        "matmul_unaligned": _entry(unaligned, "share of the rate if rows have an odd number of values",
                                   f"{source}: mean over products in {usual} with such rows"),
        "launch_s": _entry(launch_s, "s per operator",
                           f"{source}: a kernel on one value, one of many in a CUDA graph"),
        "memory_bytes_per_s": _entry(memory, "B/s", f"{source}: adding in place"),
        "memory_efficiency": _entry(gpu_fit.traffic(others, memory), _OF_BYTES,
                                    f"{source}: means over permuting copies, gelu, dropout, norms, softmax, "
                                    "sums of rows, and their backward"),
        "in_order_efficiency": _entry(gpu_fit.traffic(in_order, memory), _OF_BYTES,
                                      f"{source}: means over sums, products with a number and casts"),
        "optimizer_efficiency": _entry(gpu_fit.optimizer(by_kind["optimizer"], memory), "share of memory_bytes_per_s",
                                       f"{source}: fused AdamW, mean over float32 and bfloat16"),
        "attention_half_width": _entry(half_width, "head width at which attention has half of the rate",
                                       f"{source}: least squares over attention forward and backward"),
        "causal_block": _entry(block, "queries", f"{source}: the same"),
    }  # fmt: skip


def _in_place(by_kind: Mapping[str, Sequence[Measured]]) -> float:
    (row,) = by_kind["memory in place"]
    return row.size_bytes / row.time_s


def _peaks(rows: Sequence[Measured]) -> dict[str, float]:
    peaks: dict[str, float] = defaultdict(float)
    for row in rows:
        peaks[row.dtype] = max(peaks[row.dtype], row.flops / row.time_s)
    return dict(peaks)


def _peak_entries(peaks: Mapping[str, float], source: str) -> Entry:
    return {dtype: _entry(peak, "FLOP/s", f"{source}: the best rate of any product") for dtype, peak in peaks.items()}


def predicted_s(row: Measured, hardware: Hardware) -> float:
    """Return the seconds that a profile predicts for a measured call."""
    if row.kind in ("matmul", "sustained", "between"):
        moved, depth = gpu_fit.operand_bytes(row, getattr(torch, row.dtype).itemsize), gpu_fit.depth(row)
        return hardware.matmul_time_s(row.flops, moved, row.dtype, depth, unaligned=gpu_fit.misalignment(row))
    if row.kind.startswith("attention"):
        share = hardware.causal_share(row.shape[1]) if row.form == "causal" else 1.0
        return hardware.matmul_time_s(row.flops * share, 0.0, row.dtype, row.shape[2], "attention")
    if row.kind in ("memory", "copy", "norm"):
        return hardware.traffic_time_s(row.size_bytes, gpu_fit.is_in_order(row)) + hardware.launch_s
    if row.kind == "optimizer":
        return optimizer_s(row.size_bytes, hardware)
    if row.kind == "memory in place":
        return row.size_bytes / hardware.memory_bytes_per_s
    if row.kind == "launch":
        return hardware.launch_s
    stride = 1 if row.link == "link" else hardware.devices_per_node
    return time_s(row.kind, row.num_ranks, row.size_bytes, hardware, stride)


def _overlap(device: Device, base: Hardware) -> tuple[float, str, str]:
    """Return (share of communication that overlaps with compute, unit of this number, its source).

    The share is not measured: it is 0 on a CPU, and comes from the profile `base` on a GPU.
    """
    if device.kind == "cpu":
        return 0.0, "share of communication", "the processor that computes also sends"
    return base.overlap, "share of communication", f"not measured: from profile {base.name}"


def _entry(value: Any, unit: str, source: str) -> Entry:
    return {"value": float(f"{value:.4g}") if isinstance(value, float) else value, "unit": unit, "source": source}


def _usual(peaks: Mapping[str, float]) -> str:
    return next(dtype for dtype in USUAL_DTYPES if dtype in peaks)


def _products(rows: Sequence[Measured], usual: str, peak: float) -> list[list[float]]:
    """Fit the efficiency curve of matrix products: points (FLOPs, share of peak FLOP/s).

    Args:
        usual: dtype of the products to fit, in which models are usually trained.
        peak: peak FLOP/s in that dtype.
    """
    from scipy.optimize import isotonic_regression

    shares = defaultdict(list)
    for row in rows:
        if row.dtype == usual:
            shares[row.flops].append(row.flops / row.time_s / peak)
    amounts = sorted(shares)
    rising = isotonic_regression([geometric_mean(shares[flops]) for flops in amounts]).x
    return gpu_fit.curve(zip(amounts, rising.tolist(), strict=True), most=1.0)


def _traffic(rows: Sequence[Measured], rate: float) -> list[list[float]]:
    return gpu_fit.curve((row.size_bytes, row.size_bytes / row.time_s / rate) for row in rows)


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
    """Fit bandwidth and latency of a link to measured collectives, by least squares of relative errors."""
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
    """Return the mean and the maximum relative error of pairs (predicted, measured)."""
    errors = [abs(predicted / measured - 1) for predicted, measured in rows]
    return fmean(errors), max(errors)
