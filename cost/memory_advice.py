"""Error for a plan that needs more memory than a rank has, with advice on options that need less."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, takewhile
from typing import Any

from autopart.common.text import quantity
from autopart.cost.memory_kinds import RankMemory
from autopart.errors import AutopartError, MemoryLimitError
from autopart.ir.mesh import Mesh
from autopart.ir.run.schedules import FLUSHING, MULTI_STAGE, SINGLE_STAGE, SPLIT_BACKWARD, Schedule

SEARCH_S = 10.0
"""Seconds of processor time after which `does_not_fit` stops estimating the memory of changes."""

TRIES = 5
"""Maximum number of changes whose memory `helpful_remedies` estimates."""

COMBINED = 4
"""Maximum number of pairs, and of triples, of changes whose memory `does_not_fit` estimates."""

MOST_TENSOR_RANKS = 8
"""Assumed number of ranks in a node.

A mesh that already has this many `tp` ranks is enlarged along `pp`, not along `tp`.
"""

_KIND_NAMES = {
    "activations": "activations", "optimizer": "optimizer state", "parameters": "parameters", "gradients": "gradients",
    "temporary": "temporary values", "communication": "communication", "inputs": "inputs", "buffers": "buffers",
    "gathered": "gathered parameters",
}  # fmt: skip

Estimate = Callable[[Mesh, Mapping[str, Any]], Sequence[RankMemory]]
"""Function that returns the memory of all ranks, given a mesh and {option: new value}.

It raises AutopartError if no plan exists.
"""


@dataclass(frozen=True)
class Remedy:
    """One suggested change of the mesh or of options.

    Args:
        text: the change as a user would write it.
        mesh: the mesh with the change.
        options: {option: new value}.
        more_ranks: True if `mesh` has more ranks than the requested mesh.
    """

    text: str
    mesh: Mesh
    options: Mapping[str, Any]
    more_ranks: bool = False


def fullest(ranks: Sequence[RankMemory]) -> RankMemory:
    return max(ranks, key=lambda rank: rank.total)


def does_not_fit(
    rank: RankMemory, largest: Mapping[str, int], limit: int, mesh: Mesh, schedule: Schedule, rows: int,
    estimate: Estimate, plan_options: Mapping[str, Any],
) -> MemoryLimitError:  # fmt: skip
    """Return the error for a plan whose fullest rank needs more than `limit` bytes.

    The error lists what uses the memory, and changes that need less.

    Args:
        rank: memory of the fullest rank.
        largest: {name: bytes} of the rank's largest tensors, the largest first.
        rows: samples of the global batch.
        estimate: function that returns the memory of all ranks with a changed mesh or changed options.
        plan_options: {option: requested value}.
    """
    end_s = time.process_time() + SEARCH_S
    in_time = takewhile(lambda _: time.process_time() <= end_s, _option_changes(mesh, schedule, rows, plan_options))
    remedies = list(_tried(in_time, rank.total, estimate))
    if not any(total <= limit for way, total in remedies if not way.more_ranks):
        together = takewhile(lambda _: time.process_time() <= end_s, _combined(remedies, mesh))
        for way, total in _tried(together, min((total for _, total in remedies), default=rank.total), estimate):
            remedies.append((way, total))
            if total <= limit:
                break
    remedies.sort(key=lambda pair: (pair[1] > limit, pair[0].more_ranks, pair[1]))
    lines = [
        f"{way.text}: {quantity(total, 'B')}, {quantity(rank.total - total, 'B')} less"
        f"{'' if total <= limit else ', still too much'}"
        for way, total in remedies
    ]
    listed = ", ".join(f"{name} {quantity(size, 'B')}" for name, size in islice(largest.items(), 4))
    stages = f"stage {', '.join(map(str, rank.stages))} of {mesh}"
    return MemoryLimitError(
        f"the plan needs {quantity(rank.total, 'B')} on a rank, and memory is {quantity(limit, 'B')}",
        why=_memory_text(rank), where=f"{stages}; the largest: {listed}",
        hint="\n         ".join(lines) or "a smaller batch",
    )  # fmt: skip


def _memory_text(rank: RankMemory) -> str:
    """Format a rank's memory by kind, largest first: `activations of 4 microbatches in flight 3.41 GB`.

    Kinds below 1 % of the total are left out.
    """
    count = sum(rank.in_flight.values())
    flight = f"activations of {count} microbatch{'es' * (count != 1)} in flight"
    sizes = {kind: getattr(rank, kind) for kind in _KIND_NAMES if getattr(rank, kind) * 100 >= rank.total}
    names = _KIND_NAMES | {"activations": flight}
    return ", ".join(
        f"{names[kind]} {quantity(size, 'B')}" for kind, size in sorted(sizes.items(), key=lambda e: -e[1])
    )


def _option_changes(mesh: Mesh, schedule: Schedule, rows: int, plan_options: Mapping[str, Any]) -> Iterator[Remedy]:
    """Yield changes of options and of the mesh that may need less memory.

    Changes that keep the number of ranks come first.
    """
    if schedule.name is not None:
        same = SINGLE_STAGE if schedule.name in SINGLE_STAGE else MULTI_STAGE
        for name in (name for name in same if name in FLUSHING and name != schedule.name):
            if not (plan_options.get("compile") and name in SPLIT_BACKWARD):
                options = {"schedule": name, "microbatches": schedule.microbatches}
                yield Remedy(f"schedule='{name}'", mesh, {**options, "virtual_stages": schedule.virtual_stages})
    if mesh.storing_axis is not None and not plan_options.get("zero") and not plan_options.get("compile"):
        yield Remedy("zero=3", mesh, {"zero": 3})
    most = rows // mesh.data_parallel_size
    for microbatches in dict.fromkeys((2 * schedule.microbatches, 4 * schedule.microbatches, most)):
        if schedule.microbatches < microbatches <= most and most % microbatches == 0:
            yield Remedy(f"microbatches={microbatches}", mesh, {"microbatches": microbatches})
    if mesh.size("tp") > 1 and plan_options.get("sequence_parallel") is not True:
        yield Remedy("sequence_parallel=True", mesh, {"sequence_parallel": True})
    if plan_options.get("recompute") in (None, "none"):
        for recompute in ("selective", "full"):
            yield Remedy(f"recompute='{recompute}'", mesh, {"recompute": recompute})
    for axis in ("tp", "pp", "dp"):
        larger = Mesh.parse({**mesh.sizes, axis: 2 * mesh.size(axis)})
        yield Remedy(f"mesh='{larger}' ({larger.num_ranks} ranks)", larger, {}, more_ranks=True)


def _combined(remedies: Sequence[tuple[Remedy, int]], mesh: Mesh) -> Iterator[Remedy]:
    """Yield changes of two and then three options at once, those whose single changes save the most first.

    Args:
        remedies: single changes that need less memory, with the bytes of the fullest rank.
        mesh: the requested mesh. Changes of the mesh are not combined.
    """
    single = sorted((pair for pair in remedies if pair[0].mesh == mesh), key=lambda pair: pair[1])
    for size in (2, 3):
        for chosen in islice(_compatible(single, size), COMBINED):
            options = {name: value for way, _ in chosen for name, value in way.options.items()}
            yield Remedy(", ".join(way.text for way, _ in chosen), mesh, options)


def _compatible(
    remedies: Sequence[tuple[Remedy, int]], size: int
) -> Iterator[Sequence[tuple[Remedy, int]]]:  # fmt: skip
    """Yield groups of changes that set different options, the group with the smallest sum of bytes first."""
    groups = sorted(combinations(remedies, size), key=lambda group: sum(total for _, total in group))
    for group in groups:
        names = [name for way, _ in group for name in way.options]
        if len(names) == len(set(names)):
            yield group


def quick_remedies(mesh: Mesh, plan_options: Mapping[str, Any]) -> Iterator[Remedy]:
    """Yield the few changes that save the most memory: `zero=3`, `recompute='full'` and more ranks.

    The order is: each option alone on the requested mesh, then both options together on the requested mesh, on twice as
    many ranks, and on eight times as many ranks.
    """
    changes: list[tuple[str, dict[str, Any]]] = []
    if mesh.storing_axis is not None and not plan_options.get("zero") and not plan_options.get("compile"):
        changes.append(("zero=3", {"zero": 3}))
    if plan_options.get("recompute") in (None, "none"):
        changes.append(("recompute='full'", {"recompute": "full"}))
    for text, options in changes:
        yield Remedy(text, mesh, options)
    text = ", ".join(text for text, _ in changes)
    together = {name: value for _, options in changes for name, value in options.items()}
    if len(changes) > 1:
        yield Remedy(text, mesh, together)
    axis = "tp" if mesh.size("tp") < MOST_TENSOR_RANKS else "pp"
    for times in (2, 8):
        larger = Mesh.parse({**mesh.sizes, axis: times * mesh.size(axis)})
        on = f"mesh='{larger}' ({larger.num_ranks} ranks)"
        yield Remedy(f"{text}, {on}" if text else on, larger, together, more_ranks=True)


def helpful_remedies(remedies: Iterator[Remedy], needed: int, limit: int, estimate: Estimate) -> list[str]:
    """Return texts of the changes that need less than `needed` bytes, up to the first change that fits.

    A change fits if the fullest rank needs at most `limit` bytes. The search ends after `TRIES` changes, not after a
    time, so that all processes return the same texts.
    """
    lines = []
    for way, total in _tried(islice(remedies, TRIES), needed, estimate):
        lines.append(f"{way.text} takes {quantity(total, 'B')}{'' if total <= limit else ', still too much'}")
        if total <= limit:
            break
    return lines


def _tried(remedies: Iterable[Remedy], total: int, estimate: Estimate) -> Iterator[tuple[Remedy, int]]:
    """Yield (change, bytes of the fullest rank) for each change that needs less than `total` bytes.

    Changes with which no plan exists are skipped.
    """
    for way in remedies:
        try:
            less = fullest(estimate(way.mesh, way.options)).total
        except AutopartError:  # this change has no plan
            continue
        if less < total:
            yield way, less
