"""Texts on why a searched candidate was chosen, and why well-known configurations are slower."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from autopart.common.text import quantity
from autopart.errors import AutopartError

if TYPE_CHECKING:
    from autopart.tuning.search import Candidate, Space

TELLS = 0.001
"""Minimum difference, as a share of the step time, that a text mentions."""

SAME = 1.005
"""Ratio of step times from which a text calls a configuration slower. Below it, two estimates count as equal."""


def famous(node: int) -> dict[str, Callable[[Candidate], bool]]:
    """Return {name of a well-known configuration: function that returns True for candidates with it}.

    Args:
        node: number of devices in a node.
    """
    return {
        "data parallelism alone (DDP)": lambda c: _has_one_axis(c, "dp") and c.zero == 0,
        "data parallelism with sharded parameters (ZeRO-3, FSDP)": lambda c: _has_one_axis(c, "dp") and c.zero == 3,
        "tensor parallelism in a node, data parallelism over nodes": lambda c: (
            c.mesh.size("tp") == node and c.mesh.size("pp") == 1
        ),
        "tensor parallelism in a node, 1F1B over nodes (Megatron-LM)": lambda c: (
            c.mesh.size("tp") == node and c.schedule.name == "1f1b" and c.zero == 0
        ),
        "a pipeline alone": lambda c: _has_one_axis(c, "pp"),
    }


def _has_one_axis(candidate: Candidate, axis: str) -> bool:
    return candidate.mesh.size(axis) == candidate.mesh.num_ranks > 1


def why_others_lose(space: Space, devices: int, best: Candidate, memory: float) -> Iterator[str]:
    """Yield a line for each well-known configuration: how much slower it is, or that it does not fit."""
    swept = space.sweep(devices)
    for name, is_one in famous(space.hardware.devices_per_node).items():
        family = [candidate for candidate in swept if is_one(candidate)]
        if not family or is_one(best):
            continue
        fits = [candidate for candidate in family if candidate.memory_bytes <= memory]
        if not fits:
            least = min(candidate.memory_bytes for candidate in family)
            yield f"{name} needs {quantity(least, 'B')} a rank of {quantity(memory, 'B')}"
            continue
        try:
            other = space.simulated(fits[0])
        except AutopartError:  # too few stage boundaries
            continue
        times = other.step_time_s / best.step_time_s
        longer = f"{times:.2f} x the time" if times >= SAME else "about the same time"
        yield f"{name} takes {longer}{_longer_parts(other, best)}: {other}"


def _longer_parts(other: Candidate, best: Candidate) -> str:
    """Format up to two kinds of work that take longer in `other` than in `best`, such as ` (+2 ms idle)`."""
    if other.simulation is None or best.simulation is None:
        return ""
    mine, theirs = best.simulation.parts, other.simulation.parts
    more = {kind: seconds - mine.get(kind, 0.0) for kind, seconds in theirs.items()}
    longest = sorted(more, key=lambda kind: -more[kind])[:2]
    longer = [f"+{quantity(more[kind], 's')} {kind}" for kind in longest if more[kind] > TELLS * best.step_time_s]
    return f" ({', '.join(longer)})" if longer else ""


def reasons(candidates: Sequence[Candidate]) -> list[str]:
    """Return one text per candidate of a Pareto front of time and memory: why the candidate is listed.

    Args:
        candidates: the Pareto front, fastest first.
    """
    if not candidates:
        return []
    lines = ["the fastest that fits"]
    for before, candidate in pairwise(candidates):
        time = 100 * (candidate.step_time_s / before.step_time_s - 1)
        memory = 100 * (1 - candidate.memory_bytes / before.memory_bytes)
        changed = [
            f"{name}={value}" for name, value in _settings(candidate).items() if _settings(before)[name] != value
        ]
        lines.append(f"{memory:.0f} % less memory for {time:.1f} % more time, with {', '.join(changed)}")
    return lines


def _settings(candidate: Candidate) -> dict[str, object]:
    schedule = candidate.schedule
    return {
        "mesh": candidate.mesh, "microbatches": schedule.microbatches, "schedule": schedule.name,
        "virtual_stages": schedule.virtual_stages, "sequence_parallel": candidate.sequence_parallel,
        "recompute": candidate.recompute, "zero": candidate.zero,
    }  # fmt: skip
