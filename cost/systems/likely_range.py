"""Likely range of a measured step time, from published runs of the same kind of plan."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

DEVICES_PER_NODE = 8
"""Devices of a node in all published runs."""
FEWEST = 10
"""Smallest number of published runs of a kind for which a range is given."""


class LikelyRange(NamedTuple):
    """Likely range of a measured step time.

    Args:
        kind: the kind of plan (`kind_of_plan`).
        rows: number of published runs of this kind. No constant of the cost model was fitted to these runs.
        low_s, high_s: seconds of a step. Four of five measured times were between them.
    """

    kind: str
    rows: int
    low_s: float
    high_s: float


def kind_of_plan(num_ranks: int, pp: int, waits_for_cpu: bool) -> str:
    """Return the kind of a plan, on which the error of its predicted step time depends most.

    >>> kind_of_plan(64, 4, False)
    'several nodes, pipeline'
    """
    nodes = "one node" if num_ranks <= DEVICES_PER_NODE else "several nodes"
    return nodes + ", pipeline" * (pp > 1) + ", limited by the CPU" * waits_for_cpu


def likely_range(step_time_s: float, num_ranks: int, pp: int, waits_for_cpu: bool) -> LikelyRange | None:
    """Return the range for a predicted step; None if too few published runs are of this kind."""
    kind = kind_of_plan(num_ranks, pp, waits_for_cpu)
    found = _ratios().get(kind)
    if found is None or found[0] < FEWEST:
        return None
    rows, low, high = found
    return LikelyRange(kind, int(rows), low * step_time_s, high * step_time_s)


@lru_cache(maxsize=1)
def _ratios() -> dict[str, tuple[int, float, float]]:
    """Return {kind: (runs, 10th and 90th percentile of measured / predicted seconds)}.

    `benchmarks/published_rows.py --spread` writes the file.
    """
    text = resources.files("autopart.cost.systems").joinpath("published_ratios.json").read_text()
    return {kind: tuple(row) for kind, row in json.loads(text).items()}
