"""Stage pins ("cut before this module", "keep these modules together"), as operator indices."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass

from torch import fx

from autopart.cost.predict.stage_balance import Partition
from autopart.errors import OptionError, StageError
from autopart.ir.blocks.deduplication import DeduplicatedBlocks
from autopart.ir.facts import facts
from autopart.ir.graph import active_operators, describe, parents
from autopart.ir.mesh import Mesh
from autopart.passes.choose.solve.layout_pins import no_match, pins_cannot_hold, smallest_conflict
from autopart.passes.choose.stages.stage_partition import boundary_bytes, find_partition, num_boundaries, partition
from autopart.plans.pins import CutPin, Pins, TogetherPin

StagePin = CutPin | TogetherPin


@dataclass(frozen=True)
class StagePins:
    """Operator indices at which a stage must begin (`begins`), or must not begin (`inside`).

    Indices count only operators that depend on parameters.
    """

    begins: frozenset[int] = frozenset()
    inside: frozenset[int] = frozenset()


def pinned_partition(
    graph: fx.Graph, mesh: Mesh, num_stages: int, pins: Pins, folds: DeduplicatedBlocks = (),
    send_cost: float = 0.0, tail: Set[fx.Node] = frozenset(),
) -> Partition:  # fmt: skip
    """Return the best partition into stages that the user's stage pins allow.

    Raises StageError with the conflicting pins if no partition follows all pins.

    Args:
        folds: deduplicated blocks of the trace (each represents several), used if there are no stage pins.
        send_cost: cost of one sent byte in FLOPs, added to both the sending and the receiving stage.
        tail: operators that run on the last stage after all microbatches.
    """
    every: list[StagePin] = [*pins.cuts, *pins.together]
    if not every:
        return partition(graph, num_stages, folds, send_cost, tail)
    if "pp" not in mesh.sizes:
        raise OptionError(
            f"the pin {every[0]} is for an axis that the mesh {mesh} lacks: pp", where=pins.where(every[0]),
            hint=f"leave it out, or mesh='pp2,{mesh}'",
        )  # fmt: skip
    nodes = active_operators(graph)
    best = _partition(nodes, num_stages, _positions(nodes, every, pins), send_cost, tail)
    if best is not None:
        return best
    partition(graph, num_stages)  # raises an error if the partition is impossible even without pins
    raise _conflict(nodes, num_stages, pins)


def _partition(
    nodes: list[fx.Node], num_stages: int, pinned: StagePins, send_cost: float = 0.0,
    tail: Set[fx.Node] = frozenset(),
) -> Partition | None:  # fmt: skip
    if pinned.begins & pinned.inside:
        return None
    return find_partition(nodes, num_stages, pinned.begins, pinned.inside, send_cost=send_cost, tail=tail)


def _positions(nodes: list[fx.Node], some: Sequence[StagePin], pins: Pins) -> StagePins:
    begins: set[int] = set()
    inside: set[int] = set()
    for pin in some:
        if isinstance(pin, CutPin):
            begins |= {_beginning(nodes, at, pin, pins) for at in _cases(nodes, pin, pin.name, pins).values()}
            continue
        together: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for name in pin.names:
            for case, at in _cases(nodes, pin, name, pins).items():
                together[case] += at
        for positions in together.values():
            inside |= set(range(min(positions) + 1, max(positions) + 1))
    return StagePins(frozenset(begins), frozenset(inside))


def _cases(nodes: list[fx.Node], pin: StagePin, name: str, pins: Pins) -> dict[tuple[str, ...], list[int]]:
    """Group the operators that a name matches by the text that each `*` of the name matches.

    For example, for the name `layers.*` the result has the operator indices of layer 3 under the key `("3",)`.
    """
    pattern = re.compile(re.escape(name).replace(r"\*", "([^./]+)"))
    positions: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, node in enumerate(nodes):
        key = facts(node)["key"]
        for path in [key] if "/" in name else parents(key):
            if match := pattern.fullmatch(path):
                positions[match.groups()].append(i)
    if not positions:
        known = [facts(n)["group"] if "/" in name else path for n in nodes for path in parents(facts(n)["key"])]
        raise no_match(str(pin), known, name, pins.where(pin))
    return positions


def _beginning(nodes: list[fx.Node], positions: list[int], pin: CutPin, pins: Pins) -> int:
    """Return the first operator index in `positions`. Raise StageError if no stage can begin at it."""
    first = min(positions)
    why = "the model begins with it: a stage would be empty" if first == 0 else ""
    if boundary_bytes(nodes)[first] == float("inf"):
        why = "a value without gradient would have to be sent to the next stage"
    if why:
        raise StageError(
            f"cannot {pin}", why=why, where=", ".join(filter(None, (describe(nodes[first]), pins.where(pin)))),
            hint="begin the stage a few operators later",
        )  # fmt: skip
    return first


def _why_inside(nodes: list[fx.Node], position: int, conflict: Sequence[StagePin], pins: Pins) -> str:
    for pin in conflict:
        for name in pin.names if isinstance(pin, TogetherPin) else ():
            if any(position in at for at in _cases(nodes, pin, name, pins).values()):
                return "is kept on one stage with the operators before it"
    return "is between modules that are kept on one stage"


def _conflict(nodes: list[fx.Node], num_stages: int, pins: Pins) -> StageError:
    def hold(some: Sequence[StagePin]) -> bool:
        return _partition(nodes, num_stages, _positions(nodes, some, pins)) is not None

    every: list[StagePin] = [*pins.cuts, *pins.together]
    conflict = smallest_conflict(every, hold)
    pinned = _positions(nodes, conflict, pins)
    stages = f"{num_stages} stage{'s' * (num_stages > 1)} (pp times virtual_stages)"
    if both := pinned.begins & pinned.inside:
        why = f"{describe(nodes[min(both)])} {_why_inside(nodes, min(both), conflict, pins)}"
    elif len(pinned.begins) >= num_stages:
        why = f"they request {len(pinned.begins)} stage boundaries; {stages} have {num_stages - 1}"
    else:
        left = num_boundaries(nodes, pinned.inside)
        why = "operators between modules that are kept on one stage are on this stage too; "
        why += f"possible stage boundaries left: {left}, and {stages} need {num_stages - 1}"
    return StageError(
        pins_cannot_hold(conflict), why=why, where=", ".join(dict.fromkeys(filter(None, map(pins.where, conflict)))),
        hint="leave one of them out" if len(conflict) > 1 else "other modules, or another number of stages",
    )  # fmt: skip
