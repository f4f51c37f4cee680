"""Actions of a pipeline schedule on each rank, as `torch.distributed.pipelining` defines them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from autopart.compat.pipelining_internals import pipeline_order, schedule_class


class Action(NamedTuple):
    """One action of a schedule: a forward or backward of one microbatch on one stage.

    Args:
        kind: `"F"` forward, `"B"` full backward, `"I"` input backward, `"W"` weight backward.
        joined: True if torch overlaps the action with the next one (DualPipeV). The results of both actions are sent
            after the second action has run.
    """

    stage: int
    kind: str
    microbatch: int
    joined: bool = False


@lru_cache(maxsize=256)
def actions(
    schedule: str | None, num_stages: int, pp: int, microbatches: int, has_tail: bool = False
) -> tuple[tuple[Action, ...], ...]:  # fmt: skip
    """Return, for each `pp` coordinate, the actions of its ranks in order.

    Without a schedule (one stage), they are the forward and backward of each microbatch.

    Args:
        has_tail: True if the program has a tail: a graph that runs once for all microbatches, before the first backward
            of the last stage. The tail is stage `num_stages`. Its actions have the number of the last microbatch.

    >>> [f"{a.stage}{a.kind}{a.microbatch}" for a in actions("gpipe", 2, 2, 2)[0]]
    ['0F0', '0F1', '0B0', '0B1']
    """
    if has_tail:
        orders = actions(schedule, num_stages, pp, microbatches)
        return tuple(tuple(_with_tail(order, num_stages, microbatches)) for order in orders)
    if schedule is None:
        return (tuple(Action(0, kind, m) for m in range(microbatches) for kind in "FB"),)
    order = pipeline_order(schedule_class(schedule), num_stages, pp, microbatches)
    return tuple(tuple(_plain(order[rank])) for rank in range(pp))


def _with_tail(order: Iterable[Action], num_stages: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of a rank. Before the first backward of the last stage, insert the tail's actions.

    The tail, a graph that runs once for all microbatches, has one forward and one backward.
    """
    has_run = False
    for action in order:
        if action.stage == num_stages - 1 and action.kind in "BI" and not has_run:
            has_run = True
            yield from (Action(num_stages, kind, microbatches - 1) for kind in "FB")
        yield action


def _plain(order: list[Any]) -> Iterator[Action]:
    for action in order:
        if action is None:
            continue
        if action.sub_actions is not None:  # torch runs an overlapped forward and backward one after the other
            *first, last = _plain(action.sub_actions)
            yield from (a._replace(joined=True) for a in first)
            yield last
        elif action.computation_type.value in "FBIW":
            yield Action(action.stage_index, action.computation_type.value, action.microbatch_index)


class PeakActivations(NamedTuple):
    """Peak bytes of saved activations of a rank, and the microbatches in flight on each stage at the peak."""

    size_bytes: int
    in_flight: dict[int, int]


def peak_activations(
    order: tuple[Action, ...], activations: Mapping[int, int], delayed: Mapping[int, int]
) -> PeakActivations:
    """Return the peak memory of activations that a rank saves for backward.

    Args:
        order: the actions of the rank.
        activations: {stage: bytes that a microbatch saves from its forward to the end of its backward}.
        delayed: {stage: bytes that a microbatch saves from its input backward to its weight backward}.
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
    """Yield each action with the numbers of microbatches that are in flight while it runs, as two dicts.

    Both are {stage: number}. The first counts microbatches whose activations are saved. The second counts microbatches
    between their input backward and weight backward.
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

    Attributes:
        held: activations that are saved from the forward to the end of the backward.
        delayed: gradients that are saved from the input backward to the weight backward.
        forward, backward: peak during a forward or a backward, in addition to the saved activations and gradients.
        first_backward: like `backward`, for the first backward of a step, which also allocates weight gradients.
        gradients: gradients of the stage's weights.
    """

    held: int
    delayed: int
    forward: int
    backward: int
    first_backward: int
    gradients: int


def peak_stage_bytes(order: tuple[Action, ...], stages: Mapping[int, StageBytes], gradients: int) -> int:
    """Return the peak bytes of activations and gradients while a rank runs its actions.

    Gradients of weights are allocated by the first backward of each stage.

    Args:
        order: the actions of the rank.
        stages: {stage: its memory}.
        gradients: bytes of the gradients of all weights of the rank. Weights that two stages share count once.
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
