"""What a pipeline schedule runs on each rank, in order, as the schedules of `torch.distributed.pipelining` say it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

from autopart.compat.pipelining_internals import pipeline_order, schedule_class
from autopart.ir.run.schedules import SINGLE_STAGE


class Action(NamedTuple):
    """`"F"` forward, `"B"` whole backward, `"I"` backward of the inputs, `"W"` of the weights; of one microbatch.

    `joined`: torch runs it as one with the next action, and sends what it makes after both (DualPipeV's pairs).
    """

    stage: int
    kind: str
    microbatch: int
    joined: bool = False


@lru_cache(maxsize=256)
def actions(schedule: str | None, num_stages: int, pp: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """What the rank at each `pp` coordinate runs, in order; without a pipeline each microbatch forward and backward.

    >>> [f"{a.stage}{a.kind}{a.microbatch}" for a in actions("gpipe", 2, 2, 2)[0]]
    ['0F0', '0F1', '0B0', '0B1']
    """
    if schedule is None:
        return (tuple(Action(0, kind, m) for m in range(microbatches) for kind in "FB"),)
    order = pipeline_order(schedule_class(schedule), num_stages, pp, microbatches)
    number = _numbered if schedule in SINGLE_STAGE else tuple
    return tuple(number(_plain(order[rank])) for rank in range(pp))


def _plain(order: list[Any]) -> Iterator[Action]:
    for action in order:
        if action is None:
            continue
        if action.sub_actions is not None:  # a forward and a backward that overlap: torch runs one after the other
            *first, last = _plain(action.sub_actions)
            yield from (a._replace(joined=True) for a in first)
            yield last
        elif action.computation_type.value in "FBIW":
            yield Action(action.stage_index, action.computation_type.value, action.microbatch_index)


def _numbered(order: Iterable[Action]) -> tuple[Action, ...]:
    """With the microbatches as the step counts them, which is in order: torch's own text of 1F1B numbers the forwards
    of the last stage from 1."""
    counts = {kind: count() for kind in "FB"}
    return tuple(Action(action.stage, action.kind, next(counts[action.kind])) for action in order)


class Held(NamedTuple):
    """The most that is held at one time: its bytes, and how many microbatches of each stage that are."""

    size_bytes: int
    in_flight: dict[int, int]


def most_held(order: tuple[Action, ...], activations: Mapping[int, int], delayed: Mapping[int, int]) -> Held:
    """The most that a rank holds for backwards while it runs its actions.

    Args:
        activations: bytes that a microbatch holds by stage, from its forward to the end of its backward.
        delayed: bytes of gradients that wait for the backward of the weights where that is split off.
    """
    most = Held(-1, {})
    for _, held, waiting in _while_running(order, activations):
        size = sum(activations[s] * held[s] + delayed.get(s, 0) * waiting[s] for s in held)
        if size > most.size_bytes:
            most = Held(size, dict(held))
    return most


def _while_running(
    order: Iterable[Action], stages: Iterable[int]
) -> Iterator[tuple[Action, Mapping[int, int], Mapping[int, int]]]:
    """Each action, with how many microbatches every stage holds while it runs, and for how many of them the backward of
    the weights is still to come."""
    held = dict.fromkeys(stages, 0)
    waiting = dict(held)
    for action in order:
        held[action.stage] += action.kind == "F"
        waiting[action.stage] += action.kind == "I"
        yield action, held, waiting
        held[action.stage] -= action.kind in "BW"
        waiting[action.stage] -= action.kind == "W"


class StageBytes(NamedTuple):
    """What a microbatch of a stage takes on a rank, in bytes.

    `held`: from its forward to the end of its backward. `delayed`: gradients that wait from the backward of the inputs
    for that of the weights. `forward`, `backward`: how far either goes beyond that. `first_backward`: how far the first
    backward of a step goes beyond it, with the weights' gradients that have come into being so far. `gradients`: of the
    stage's weights.
    """

    held: int
    delayed: int
    forward: int
    backward: int
    first_backward: int
    gradients: int


def most_at_once(order: tuple[Action, ...], stages: Mapping[int, StageBytes], gradients: int) -> int:
    """The most that activations and gradients take at one time while a rank runs its actions, which begin without
    gradients.

    Args:
        gradients: bytes of those of all the rank's weights; two of its stages may share some.
    """
    begun: set[int] = set()
    most = 0
    for action, held, waiting in _while_running(order, stages):
        one, first = stages[action.stage], action.stage not in begun
        size = sum(stages[s].held * held[s] + stages[s].delayed * waiting[s] for s in stages)
        size += min(gradients, sum(stages[s].gradients for s in begun))
        most = max(most, size + (one.forward if action.kind == "F" else one.first_backward if first else one.backward))
        if action.kind != "F":
            begun.add(action.stage)
    return most
