"""The numbers of a GPU's profile that calls recorded as CUDA graphs tell (`extras/calibrate/gpu_calls.py`).

What the least kernel takes comes off every time, as a profile adds it to every operator. Rates in 16 bits hardly rise
beyond 10 GFLOP, as the device's power limits them; below, short sums and narrow heads cost most.
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
"""Of the curve of rates by FLOPs."""

MOST_TRAFFIC = 0.5
"""Products whose operands take a larger share of the time to move tell nothing of matrix units."""

LARGE = 1e10
"""FLOPs of a product that takes longer than what is around it, so that the depth of its sums tells."""

BY_GRADIENT = "weight gradient"

IN_ORDER = ("cast", "scaled", "added")
"""The forms of calls that go through memory in its order."""

MANY_BYTES = 5e7
"""Of parameters whose update takes longer than what the host and the launch of its kernels do."""


def is_in_order(row: Measured) -> bool:
    return row.kind == "memory" or row.form in IN_ORDER


def by_order(rows: Iterable[Measured]) -> tuple[list[Measured], list[Measured]]:
    """The calls that go through memory in its order, and all others."""
    in_order, others = list[Measured](), list[Measured]()
    for row in rows:
        (in_order if is_in_order(row) else others).append(row)
    return in_order, others


def last_dims(row: Measured) -> tuple[int, ...]:
    """Of the operands and the result of a product, in memory: what a row of them has."""
    rows, inner, columns = row.shape
    return (rows, columns) if row.form == BY_GRADIENT else (inner, columns)


def odd(row: Measured) -> int:
    """`unaligned` of a product's rows, in 16 bits."""
    return unaligned(last_dims(row)) if row.dtype in ("bfloat16", "float16") else 0


def depth(row: Measured) -> float:
    """The features that an element is the sum of; 0 where it is one of rows and positions."""
    return 0.0 if row.form == BY_GRADIENT else float(row.shape[1])


def products(rows: Sequence[Measured], usual: str, peak: float, rate: float) -> tuple[list[list[float]], float, float]:
    """The curve of shares of the peak by FLOPs, the depth at which a share is half, and the share that is left where
    rows have an odd number of values.

    Args:
        usual: the dtype of which the curve is.
        rate: of memory, in B/s.
    """
    from scipy.optimize import minimize_scalar

    of_usual = [row for row in rows if row.dtype == usual]
    even = [
        row for row in of_usual
        if not odd(row) and operand_bytes(row, 2) / rate < MOST_TRAFFIC * row.time_s
    ]  # fmt: skip

    def error(half: float) -> float:
        curve = _shares(even, peak, half)
        of_large = (_predicted(row, peak, half, curve) / row.time_s for row in even if row.flops >= LARGE)
        return sum(math.log(ratio) ** 2 for ratio in of_large)

    half = float(minimize_scalar(error, bounds=(0.0, 2000.0), method="bounded").x)
    curve = _shares(even, peak, half)
    slowed = [row for row in of_usual if odd(row) == MOST_UNALIGNED and row.flops >= LARGE]
    left = [_predicted(row, peak, half, curve) / row.time_s for row in slowed]
    return curve, half, geometric_mean(left) if left else 1.0


def _shares(rows: Iterable[Measured], peak: float, half: float) -> list[list[float]]:
    """Points [FLOPs, share of the peak], means over products of about as many FLOPs; they rise, and no larger product
    takes less time."""
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
    """The width of heads at which attention has half the rate of products, and the queries that a causal kernel takes
    at a time, by least squares of relative errors, forward and backward."""
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
    """The same calls without the launch, of which a small operator of a library may take less than was measured."""
    return [replace(row, time_s=max(row.time_s - launch_s, row.time_s / 10)) for row in rows]


def optimizer(rows: Iterable[Measured], rate: float) -> float:
    """The share of memory's rate that the update of many parameters reaches: the mean over their dtypes."""
    shares = [OPTIMIZER_TRAFFIC * row.size_bytes / row.time_s / rate for row in rows if row.size_bytes >= MANY_BYTES]
    return min(1.0, geometric_mean(shares)) if shares else 1.0


def traffic(rows: Sequence[Measured], rate: float) -> list[list[float]]:
    """The share of memory's rate by bytes: means over kinds of operators that compute little."""
    found = defaultdict(list)
    for row in rows:
        found[round(math.log2(row.size_bytes) / 2)].append(row.size_bytes / row.time_s / rate)
    return curve(((4.0**place, geometric_mean(shares)) for place, shares in found.items()), math.inf)


def operand_bytes(row: Measured, itemsize: int) -> float:
    """What a product reads and writes."""
    rows, inner, columns = row.shape
    return (rows * inner + inner * columns + rows * columns) * itemsize


def curve(points: Iterable[Sequence[float]], most: float = math.inf) -> list[list[float]]:
    """Points of an efficiency curve by which no larger amount takes less time: from the largest down, a share is as
    high as that asks for."""
    found = [[amount, float(f"{min(share, most):.4g}")] for amount, share in sorted(map(tuple, points))]
    for smaller, larger in reversed([*pairwise(found)]):
        least = larger[1] / (1 + math.log(larger[0] / smaller[0]))
        if smaller[1] < least:
            smaller[1] = math.ceil(least * 1e4) / 1e4
    return found
