"""The actions of a pipeline schedule on each rank, in the terms of `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from autopart.compat.pipelining_internals import pipeline_order, schedule_class


class Action(NamedTuple):
    """One action of a schedule: a forward or backward of one microbatch on one stage.

    `kind`: `"F"` forward, `"B"` full backward, `"I"` input backward, `"W"` weight backward.

    `joined`: torch runs the action together with the next one and sends the results of both afterwards (DualPipeV).
    """

    stage: int
    kind: str
    microbatch: int
    joined: bool = False


@lru_cache(maxsize=256)
def actions(schedule: str | None, num_stages: int, pp: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of the ranks at each `pp` coordinate, in order.

    With one stage they are the forward and backward of each microbatch.

    >>> [f"{a.stage}{a.kind}{a.microbatch}" for a in actions("gpipe", 2, 2, 2)[0]]
    ['0F0', '0F1', '0B0', '0B1']
    """
    if schedule is None:
        return (tuple(Action(0, kind, m) for m in range(microbatches) for kind in "FB"),)
    order = pipeline_order(schedule_class(schedule), num_stages, pp, microbatches)
    return tuple(tuple(_plain(order[rank])) for rank in range(pp))


def _plain(order: list[Any]) -> Iterator[Action]:
    for action in order:
        if action is None:
            continue
        if action.sub_actions is not None:  # an overlapped forward and backward: torch runs them one after the other
            *first, last = _plain(action.sub_actions)
            yield from (a._replace(joined=True) for a in first)
            yield last
        elif action.computation_type.value in "FBIW":
            yield Action(action.stage_index, action.computation_type.value, action.microbatch_index)


class PeakActivations(NamedTuple):
    """Peak bytes of saved activations, and the microbatches in flight on each stage at the peak."""

    size_bytes: int
    in_flight: dict[int, int]


def peak_activations(
    order: tuple[Action, ...], activations: Mapping[int, int], delayed: Mapping[int, int]
) -> PeakActivations:
    """Return the peak memory that a rank saves for backward while it runs its actions.

    Args:
        order: the actions of the rank.
        activations: {stage: bytes that a microbatch saves from its forward to the end of its backward}.
        delayed: {stage: bytes of gradients that wait for a separate weight backward}.
    """
    peak = PeakActivations(-1, {})
    for _, in_flight, waiting in _while_running(order, activations):
        size = sum(activations[s] * in_flight[s] + delayed.get(s, 0) * waiting[s] for s in in_flight)
        if size > peak.size_bytes:
            peak = PeakActivations(size, dict(in_flight))
    return peak


def _while_running(
    order: Iterable[Action], stages: Iterable[int]
) -> Iterator[tuple[Action, Mapping[int, int], Mapping[int, int]]]:
    """Yield each action, with two counts per stage while the action runs.

    The first counts microbatches whose activations are saved. The second counts microbatches that wait for their weight
    backward.
    """
    in_flight = dict.fromkeys(stages, 0)
    waiting = dict(in_flight)
    for action in order:
        in_flight[action.stage] += action.kind == "F"
        waiting[action.stage] += action.kind == "I"
        yield action, in_flight, waiting
        in_flight[action.stage] -= action.kind in "BW"
        waiting[action.stage] -= action.kind == "W"


class StageBytes(NamedTuple):
    """Memory of one microbatch of a stage on a rank, in bytes.

    `held`: saved from its forward to the end of its backward. `delayed`: gradients that wait from the input backward to
    the weight backward. `forward`, `backward`: peak above `held` during either. `first_backward`: peak above `held`
    during the first backward of a step, which includes the weight gradients allocated so far. `gradients`: gradients of
    the stage's weights.
    """

    held: int
    delayed: int
    forward: int
    backward: int
    first_backward: int
    gradients: int


def peak_stage_bytes(order: tuple[Action, ...], stages: Mapping[int, StageBytes], gradients: int) -> int:
    """Return the peak bytes of activations and gradients while a rank runs its actions.

    Before the first action no gradient is allocated.

    Args:
        order: the actions of the rank.
        stages: {stage: its memory}.
        gradients: bytes of the gradients of all weights of the rank. Tied weights of two stages count once.
    """
    with_gradients: set[int] = set()
    peak = 0
    for action, in_flight, waiting in _while_running(order, stages):
        memory, is_first = stages[action.stage], action.stage not in with_gradients
        size = sum(stages[s].held * in_flight[s] + stages[s].delayed * waiting[s] for s in stages)
        size += min(gradients, sum(stages[s].gradients for s in with_gradients))
        peak = max(
            peak,
            size + (memory.forward if action.kind == "F" else memory.first_backward if is_first else memory.backward),
        )
        if action.kind != "F":
            with_gradients.add(action.stage)
    return peak
