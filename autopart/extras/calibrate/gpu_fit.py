"""Fit a GPU's hardware profile to measured calls that run as CUDA graphs (`gpu_calls.py`).

The duration of the smallest kernel is subtracted from every call, because a prediction adds this duration to every
operator. In 16-bit dtypes, products of more than 10 GFLOP all reach about the same FLOP/s, because the GPU's power is
limited. In smaller products, a small inner dim and narrow heads reduce FLOP/s most.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import geometric_mean

import numpy as np

from autopart.common.matrix_alignment import MOST_UNALIGNED, unaligned
from autopart.cost.predict.operator_work import OPTIMIZER_TRAFFIC
from autopart.extras.calibrate.measurement import Measured

POINTS_PER_DECADE = 2
"""Points of the efficiency curve per decade of FLOPs."""

MOST_TRAFFIC = 0.5
"""FLOP/s are fitted only to products for which memory traffic takes at most this share of the time."""

LARGE = 1e10
"""FLOPs above which overheads are small, so that the effect of a product's inner dim can be fitted."""

BY_GRADIENT = "weight gradient"

IN_ORDER = ("cast", "scaled", "added")
"""Names (`Measured.form`) of calls that are pointwise on contiguous tensors."""

MANY_BYTES = 5e7
"""Bytes of parameters above which an update takes longer than the CPU needs to launch its kernels."""


def is_in_order(row: Measured) -> bool:
    return row.kind == "memory" or row.form in IN_ORDER


def by_order(rows: Iterable[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Split calls into pointwise operators on contiguous tensors, and all other calls."""
    in_order, others = list[Measured](), list[Measured]()
    for row in rows:
        (in_order if is_in_order(row) else others).append(row)
    return in_order, others


def last_dims(row: Measured) -> tuple[int, ...]:
    """Return the sizes of the last (contiguous) dims of the operands and the result of a matrix product."""
    rows, inner, columns = row.shape
    return (rows, columns) if row.form == BY_GRADIENT else (inner, columns)


def misalignment(row: Measured) -> int:
    """Return the alignment penalty (0, 2 or 3) of the last dims of a 16-bit matrix product.

    A larger penalty means lower speed. The penalty is 0 in other dtypes.
    """
    return unaligned(last_dims(row)) if row.dtype in ("bfloat16", "float16") else 0


def depth(row: Measured) -> float:
    """Return the inner dim of a product; 0 for a weight gradient, whose inner dim (the tokens) is large."""
    return 0.0 if row.form == BY_GRADIENT else float(row.shape[1])


def products(rows: Sequence[Measured], usual: str, peak: float, rate: float) -> tuple[list[list[float]], float, float]:
    """Fit the efficiency of matrix products.

    Args:
        usual: dtype of the products to fit.
        peak: peak FLOP/s in that dtype.
        rate: memory bandwidth in bytes/s.
    Returns:
        Three values. The first is the efficiency curve: points (FLOPs of a product, share of peak FLOP/s). The second
        is the inner dim at which products reach half of the share on this curve. The third is the factor by which
        unaligned last dims reduce the share.
    """
    from scipy.optimize import minimize_scalar

    of_usual = [row for row in rows if row.dtype == usual]
    even = [
        row for row in of_usual
        if not misalignment(row) and operand_bytes(row, 2) / rate < MOST_TRAFFIC * row.time_s
    ]  # fmt: skip

    def error(half: float) -> float:
        curve = _shares(even, peak, half)
        of_large = (_predicted(row, peak, half, curve) / row.time_s for row in even if row.flops >= LARGE)
        return sum(math.log(ratio) ** 2 for ratio in of_large)

    half = float(minimize_scalar(error, bounds=(0.0, 2000.0), method="bounded").x)
    curve = _shares(even, peak, half)
    slowed = [row for row in of_usual if misalignment(row) == MOST_UNALIGNED and row.flops >= LARGE]
    left = [_predicted(row, peak, half, curve) / row.time_s for row in slowed]
    return curve, half, geometric_mean(left) if left else 1.0


def _shares(rows: Iterable[Measured], peak: float, half: float) -> list[list[float]]:
    """Return points (FLOPs, share of peak FLOP/s), each averaged over products of similar FLOPs.

    Points are adjusted so that a larger product never takes less time than a smaller one.
    """
    from scipy.optimize import isotonic_regression

    found = defaultdict(list)
    for row in rows:
        shallow = 1 + half / depth(row) if depth(row) else 1.0
        found[round(math.log10(row.flops) * POINTS_PER_DECADE)].append(row.flops / row.time_s / peak * shallow)
    places = sorted(found)
    rising = isotonic_regression([geometric_mean(found[place]) for place in places]).x
    return curve(([10 ** (place / POINTS_PER_DECADE), share] for place, share in zip(places, rising, strict=True)), 1.0)


def _predicted(row: Measured, peak: float, half: float, points: Sequence[Sequence[float]]) -> float:
    shallow = 1 + half / depth(row) if depth(row) else 1.0
    return row.flops / (peak * _share_at(row.flops, points)) * shallow


def _share_at(flops: float, points: Sequence[Sequence[float]]) -> float:
    amounts, shares = zip(*points, strict=True)
    return float(np.interp(math.log(flops), np.log(amounts), shares))


def attention(rows: Sequence[Measured], peak: float, points: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Fit two numbers of attention: (head width of half efficiency, tile size of causal masks).

    With the first number as head width, attention reaches half of the FLOP/s of matrix products. The tile size is a
    number of queries. The fit minimizes the squared relative errors over forward and backward.

    Args:
        peak: peak FLOP/s.
        points: efficiency curve of matrix products.
    """
    from scipy.optimize import least_squares

    whole_s = [row.flops / (peak * _share_at(row.flops, points)) for row in rows]

    def errors(values: Sequence[float]) -> list[float]:
        half, block = values
        found = []
        for row, seconds in zip(rows, whole_s, strict=True):
            _, queries, width = row.shape
            share = min(1.0, (queries + block) / (2 * queries)) if row.form == "causal" else 1.0
            found.append(math.log(seconds * share * (1 + half / width) / row.time_s))
        return found

    found = least_squares(errors, [32.0, 256.0], bounds=([0.0, 0.0], [1000.0, 10000.0]))
    return float(found.x[0]), float(found.x[1])


def without_launch(rows: Iterable[Measured], launch_s: float) -> list[Measured]:
    """Subtract the launch overhead from the seconds of calls, but at most nine tenths of a call's seconds.

    The limit is needed for operators that take less time than the measured launch.
    """
    return [replace(row, time_s=max(row.time_s - launch_s, row.time_s / 10)) for row in rows]


def optimizer(rows: Iterable[Measured], rate: float) -> float:
    """Return the share of memory bandwidth that optimizer updates of many parameters reach.

    The result is the mean over dtypes.

    Args:
        rate: memory bandwidth in bytes/s.
    """
    shares = [OPTIMIZER_TRAFFIC * row.size_bytes / row.time_s / rate for row in rows if row.size_bytes >= MANY_BYTES]
    return min(1.0, geometric_mean(shares)) if shares else 1.0


def traffic(rows: Sequence[Measured], rate: float) -> list[list[float]]:
    """Return points (bytes, share of memory bandwidth), each averaged over operators with similar bytes.

    Args:
        rate: memory bandwidth in bytes/s.
    """
    found = defaultdict(list)
    for row in rows:
        found[round(math.log2(row.size_bytes) / 2)].append(row.size_bytes / row.time_s / rate)
    return curve(((4.0**place, geometric_mean(shares)) for place, shares in found.items()), math.inf)


def operand_bytes(row: Measured, itemsize: int) -> float:
    """Return the bytes of the operands and the result of a matrix product."""
    rows, inner, columns = row.shape
    return (rows * inner + inner * columns + rows * columns) * itemsize


def curve(points: Iterable[Sequence[float]], most: float = math.inf) -> list[list[float]]:
    """Adjust the points of an efficiency curve, and return them sorted by amount.

    Shares are raised, from the largest amount down, so that a smaller amount never takes longer than a larger one.

    Args:
        points: (FLOPs or bytes, share of the peak rate).
        most: largest share; larger ones are reduced to it.
    """
    found = [[amount, float(f"{min(share, most):.4g}")] for amount, share in sorted(map(tuple, points))]
    for smaller, larger in reversed([*pairwise(found)]):
        least = larger[1] / (1 + math.log(larger[0] / smaller[0]))
        if smaller[1] < least:
            smaller[1] = math.ceil(least * 1e4) / 1e4
    return found
