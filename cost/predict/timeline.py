"""Timeline of a training step: start and end of each action of a pipeline schedule.

Ranks that differ only on `dp`, `tp`, `cp` or `ep` do the same work at the same time. One rank therefore represents
each coordinate of `pp`. Nothing is random, and time is continuous: an action starts when its rank is free and its
input has arrived.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from autopart.errors import OptionError, StageError
from autopart.ir.run.schedule_actions import Action, actions, peak_activations
from autopart.ir.run.schedules import DELAYED, MULTI_STAGE, check_schedule


@dataclass(frozen=True)
class Durations:
    """Durations of the parts of a training step, in seconds.

    Sends and durations per rank are zero if they are left out.

    Args:
        forward_s: forward of one microbatch, per stage.
        backward_s: complete backward of one microbatch, per stage.
        input_backward_s, weight_backward_s: the two parts of a split backward, per stage. Together they may take
            longer than the complete backward. Schedules that do not split the backward do not need them.
        send_forward_s, send_backward_s: entry i is the send of one microbatch's activations, or of their gradient,
            between stages i and i + 1. Stages on one rank send nothing to each other.
        grad_sum_s: gradient reduction once a step, per rank.
        grad_sum_hidden: share of the reduction, 0 to 1, that may overlap with the backward of the last microbatch.
        optimizer_s: optimizer update once a step, per rank.
        tied: groups of ranks that reduce gradients of tied parameters together.
        host_s: {kind of action: for each stage, seconds of the CPU to issue the kernels of one microbatch}; empty if
            the CPU is not counted.
        host_waits: True if the CPU issues an action only after its inputs have arrived.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    input_backward_s: Sequence[float] = ()
    weight_backward_s: Sequence[float] = ()
    send_forward_s: Sequence[float] = ()
    send_backward_s: Sequence[float] = ()
    grad_sum_s: Sequence[float] = ()
    grad_sum_hidden: float = 0.0
    optimizer_s: Sequence[float] = ()
    tied: Sequence[Sequence[int]] = ()
    host_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    host_waits: bool = False


class Span(NamedTuple):
    """An action of a rank with its start and end, in seconds from the start of the step.

    `kind` is a kind of `autopart.ir.run.schedule_actions.Action`, such as "F".
    """

    start_s: float
    end_s: float
    stage: int
    kind: str
    microbatch: int


@dataclass(frozen=True)
class Timeline:
    """Actions of every rank (one per `pp` coordinate) over one training step. Times are in seconds.

    If steps overlap, as in the schedule "1f1b_2bw", this is one step in the steady state.

    Args:
        spans: each rank's actions in order.
        grad_sums, optimizers: (start, end) of each rank's gradient reduction and optimizer update. An overlapped
            reduction begins while the rank's last backwards still run.
        begun: for each rank, the number of this step's microbatches whose forward ran in the previous step, if steps
            overlap.
        period_s: seconds from one step to the next, if steps overlap.
    """

    spans: tuple[tuple[Span, ...], ...]
    grad_sums: tuple[tuple[float, float], ...]
    optimizers: tuple[tuple[float, float], ...]
    begun: tuple[int, ...] = ()
    period_s: float | None = None

    @property
    def _end_s(self) -> float:
        return max(end for _, end in self.optimizers)

    @property
    def step_time_s(self) -> float:
        """Seconds until the last rank has updated its parameters. If steps overlap, seconds between two steps."""
        return self._end_s if self.period_s is None else self.period_s

    @property
    def pipeline_time_s(self) -> float:
        """Seconds until the last action ends, without gradient reduction and optimizer update."""
        ends_s = max(spans[-1].end_s for spans in self.spans)
        return ends_s if self.period_s is None else self.period_s - (self._end_s - ends_s)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds in which each rank runs actions."""
        return tuple(math.fsum(span.end_s - span.start_s for span in spans) for spans in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks divided by their busy time, until the last action ends.

        A rank that waits for a value is idle. For equal stages this is t_pb / t_id of PTD-P (Narayanan et al. 2021,
        arXiv 2104.04473, section 2.2): (p-1)/m for GPipe and 1F1B. It may exceed 1. Papers on zero-bubble schedules
        divide by the total time instead.
        """
        busy = math.fsum(self.busy_s)
        return (len(self.spans) * self.pipeline_time_s - busy) / busy if busy else 0.0

    @cached_property
    def in_flight(self) -> tuple[dict[int, int], ...]:
        """For each rank, {stage: microbatches saved for backward} at the time when their total is largest."""
        orders = [
            (*[Action(spans[0].stage, "F", -1)] * begun,
             *(Action(span.stage, span.kind, span.microbatch) for span in spans))
            for spans, begun in zip(self.spans, self.begun or [0] * len(self.spans), strict=True)
        ]  # fmt: skip
        return tuple(peak_activations(order, {a.stage: 1 for a in order}, {}).in_flight for order in orders)

    def memory(
        self, activation_bytes: Sequence[int], delayed_bytes: Sequence[int] = ()
    ) -> tuple[list[tuple[float, int]], ...]:
        """Return the bytes saved for backward over time: per rank, a list of (seconds, bytes from then on).

        If several entries have equal seconds, the last one is valid.

        Args:
            activation_bytes: for each stage, the bytes that one microbatch saves from the start of its forward to the
                end of its backward.
            delayed_bytes: for each stage, the bytes of output gradients that wait between the input backward and the
                weight backward.
        """
        delayed = delayed_bytes or [0] * len(activation_bytes)
        curves = []
        for spans, begun in zip(self.spans, self.begun or [0] * len(self.spans), strict=True):
            held = begun * activation_bytes[spans[0].stage]
            curve = [(0.0, held)]
            for span in spans:
                taken = {"F": activation_bytes[span.stage], "I": delayed[span.stage]}.get(span.kind, 0)
                freed = activation_bytes[span.stage] if span.kind in "BW" else 0
                freed += delayed[span.stage] if span.kind == "W" else 0
                for time_s, change in ((span.start_s, taken), (span.end_s, -freed)):
                    if change:
                        held += change
                        curve.append((time_s, held))
            curves.append(curve)
        return tuple(curves)

    def peak_memory_bytes(self, activation_bytes: Sequence[int], delayed_bytes: Sequence[int] = ()) -> tuple[int, ...]:
        """Return, for each rank, the peak of the bytes saved for backward. Takes the arguments of `memory`."""
        return tuple(max(size for _, size in curve) for curve in self.memory(activation_bytes, delayed_bytes))


def timeline(
    schedule: str | None,
    num_stages: int,
    pp: int,
    microbatches: int,
    durations: Durations,
    *,
    overlap_sends: bool | None = None,
    has_tail: bool = False,
) -> Timeline:
    """Compute the timeline of a training step under a pipeline schedule with these durations.

    The actions are those of `autopart.ir.run.schedule_actions.actions`. Sends and receives follow torch 2.13
    (`schedules.py`):

    - Schedules with several stages per rank post receives ahead of time. A rank waits for each receive before the
      action that uses it, and for its sends at the end of the step. So sends overlap with compute.
    - GPipe and 1F1B post a receive right before the action that uses it, and wait for it. Nothing is sent before both
      ranks are ready, and the receiving rank is idle. GPipe waits for its sends after the last forward and the last
      backward.
    - 1F1B waits for a send before the next send. In its steady state, it waits for a send together with the next
      receive from the same neighbour. The timeline assumes that both end at the same moment, as if sending a gradient
      took as long as sending its activation.
    - If sends overlap, each direction between two ranks carries one value at a time. The timeline assumes that all
      receives are posted before the matching sends.
    - DualPipeV runs some pairs of actions as one action, and sends the results of both at the end of the pair.
    - The CPU of a rank issues actions one after another, ahead of the device. An action ends when the device has run
      it, but not before the CPU has issued all of it.
    - PipeDream-2BW receives like 1F1B. The timeline is one step in the steady state, in which each rank continues as
      soon as it has updated its weights.

    Args:
        schedule: name of the schedule (`autopart.ir.run.schedules.SCHEDULES`), or None for one stage without a
            pipeline.
        overlap_sends: True if sends overlap with compute. None: as in `torch.distributed.pipelining`.
        has_tail: True if the program has a tail, which runs once between the forwards and backwards of the last stage.
            `durations` lists the tail after the last stage.

    Raises StageError if the schedule cannot run this many stages and microbatches. Raises OptionError for durations
    that are too few, too many, negative or not finite.

    >>> step = timeline("1f1b", 2, 2, 4, Durations(forward_s=[1, 1], backward_s=[2, 2]))
    >>> step.step_time_s, step.bubble_fraction, step.in_flight
    (15.0, 0.25, ({0: 2}, {1: 1}))
    """
    if schedule is not None:
        check_schedule(schedule, num_stages, pp, microbatches)
    elif num_stages != 1 or pp != 1:
        raise StageError(f"{num_stages} stages on pp={pp} need a schedule", hint="schedule='1f1b'")
    if overlap_sends is None:
        overlap_sends = schedule in MULTI_STAGE
    if schedule in DELAYED:
        return _overlapping_steps(pp, microbatches, durations, overlap_sends)
    orders = actions(schedule, num_stages, pp, microbatches, has_tail)
    return execute(orders, durations, overlap_sends=overlap_sends, has_tail=has_tail)


def execute(
    orders: Sequence[Sequence[Action]], durations: Durations, *, overlap_sends: bool, has_tail: bool = False
) -> Timeline:  # fmt: skip
    """Compute the timeline of a training step in which each rank runs a given list of actions.

    Args:
        orders: for each rank, its actions in order.
        durations: seconds of the actions.
        overlap_sends: True if sends overlap with compute.
        has_tail: True if the last stage in `orders` is a tail, which runs once for all microbatches. All backwards of
            the stage before it use its gradients.

    Raises StageError if ranks deadlock. Raises OptionError for invalid durations.

    >>> ahead = [Action(0, "F", 0), Action(0, "B", 0)]
    >>> execute([ahead], Durations(forward_s=[1], backward_s=[2]), overlap_sends=True).spans[0][1]
    Span(start_s=1.0, end_s=3.0, stage=0, kind='B', microbatch=0)
    """
    durations = _complete(durations, orders)
    return _with_ends(_EventSimulation(orders, durations, overlap_sends, has_tail=has_tail).run(), durations)


def _with_ends(spans: tuple[tuple[Span, ...], ...], durations: Durations) -> Timeline:
    """Return a timeline of actions with each rank's gradient reduction and optimizer update at the end."""
    grad_sums, optimizers = [], []
    for rank, done in enumerate(spans):
        last = {span.stage: span.end_s - span.start_s for span in done if span.kind in "BW"}
        hidden = _hidden_s(durations, rank, sum(last.values()))
        end = done[-1].end_s + durations.grad_sum_s[rank] - hidden
        grad_sums.append((done[-1].end_s - hidden, end))
        optimizers.append((end, end + durations.optimizer_s[rank]))
    return Timeline(spans, tuple(grad_sums), tuple(optimizers))


def _hidden_s(durations: Durations, rank: int, last_s: float) -> float:
    """Return the seconds of a rank's gradient reduction that overlap with its last backwards.

    Args:
        last_s: seconds of the rank's last backwards.
    """
    return min(durations.grad_sum_hidden * durations.grad_sum_s[rank], last_s)


_FILLING, _COUNTED, _EMPTYING = 4, 4, 1
"""Numbers of simulated batches that fill the pipeline, that are timed, and that drain the pipeline.

The time from batch to batch is averaged, because waiting for unequal stages and sends may differ between batches.
"""


def _overlapping_steps(pp: int, microbatches: int, durations: Durations, overlap_sends: bool) -> Timeline:
    """Return the timeline of one step if steps overlap: 1F1B that never drains the pipeline.

    After the last backward of each batch, every rank reduces its gradients and updates its weights (action "U").
    """
    batches = _FILLING + _COUNTED + _EMPTYING
    orders = [tuple(_with_updates(order, microbatches)) for order in actions("1f1b", pp, pp, batches * microbatches)]
    durations = _complete(durations, orders)
    once = [
        durations.grad_sum_s[rank] + durations.optimizer_s[rank]
        - _hidden_s(durations, rank, durations.backward_s[rank]) for rank in range(pp)
    ]  # fmt: skip
    ran = _EventSimulation(orders, durations, overlap_sends, once).run()
    updates = [[index for index, span in enumerate(spans) if span.kind == "U"] for spans in ran]
    ends = [max(spans[rank_updates[k]].end_s for spans, rank_updates in zip(ran, updates, strict=True))
            for k in (_FILLING - 1, _FILLING + _COUNTED - 1)]  # fmt: skip
    places = [rank_updates[_FILLING - 1 : _FILLING + 1] for rank_updates in updates]
    start_s = min(spans[before].end_s for spans, (before, _) in zip(ran, places, strict=True))
    step = tuple(
        tuple(span._replace(start_s=span.start_s - start_s, end_s=span.end_s - start_s,
                            microbatch=span.microbatch % microbatches) for span in spans[before + 1 : after])
        for spans, (before, after) in zip(ran, places, strict=True)
    )  # fmt: skip
    begun = tuple(pp - 1 - rank for rank in range(pp))
    return replace(_with_ends(step, durations), begun=begun, period_s=(ends[1] - ends[0]) / _COUNTED)


def _with_updates(order: Sequence[Action], microbatches: int) -> Iterator[Action]:
    """Yield the actions of several batches, with a weight update ("U") after each batch."""
    for action in order:
        yield action
        if action.kind == "B" and (action.microbatch + 1) % microbatches == 0:
            yield action._replace(kind="U")


def _complete(durations: Durations, orders: Sequence[Sequence[Action]]) -> Durations:
    """Return the durations, with zeros in place of omitted ones.

    Raises OptionError for a wrong number of durations, and for durations that are negative or not finite.
    """
    every_action = [action for order in orders for action in order]
    splits, num_stages = (
        any(action.kind in "IW" for action in every_action),
        len({action.stage for action in every_action}),
    )
    sizes = {
        "forward_s": num_stages, "backward_s": num_stages, "input_backward_s": num_stages,
        "weight_backward_s": num_stages, "send_forward_s": num_stages - 1, "send_backward_s": num_stages - 1,
        "grad_sum_s": len(orders), "optimizer_s": len(orders),
    }  # fmt: skip
    needed = ("forward_s", "backward_s", *(("input_backward_s", "weight_backward_s") if splits else ()))
    complete: dict[str, Any] = {}
    for name, size in sizes.items():
        listed = list(getattr(durations, name)) or [0.0] * (0 if name in needed else size)
        if len(listed) != size:
            why = f"{num_stages} stages on {len(orders)} ranks need {size}"
            raise OptionError(f"{name} has {len(listed)} durations", why=why)
        wrong = [seconds for seconds in listed if not 0 <= seconds < math.inf]
        if wrong:
            raise OptionError(f"{name} has a duration of {wrong[0]} s", hint="finite seconds, at least 0")
        complete[name] = listed
    if not 0 <= durations.grad_sum_hidden <= 1:
        raise OptionError(f"grad_sum_hidden={durations.grad_sum_hidden} is not a fraction", hint="a number from 0 to 1")
    return replace(durations, **complete)


_Result = tuple[int, str, int]
"""The result of an action, as (stage, kind, microbatch).

The kind "B" (backward) also represents "I" (input backward), whose result is the same gradient.
"""

_PREREQUISITE = {"B": "F", "I": "F", "W": "B", "U": "B"}
"""{kind of action: kind of the action that must run before it on its stage, with the same microbatch}."""


class _EventSimulation:
    """Event simulation of a step: a rank starts its next action when the action's inputs have arrived.

    Args:
        orders: for each rank, its actions in order.
        once_s: for each rank, the seconds of the action "U": gradient reduction and weight update after a batch.
        has_tail: True if the last stage is a tail, which runs once for all microbatches.
    """

    def __init__(
        self, orders: Sequence[Sequence[Action]], durations: Durations, overlap_sends: bool,
        once_s: Sequence[float] = (), has_tail: bool = False,
    ):  # fmt: skip
        self.orders, self.durations, self.overlap_sends = orders, durations, overlap_sends
        self.rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
        every_action = (action for order in orders for action in order)
        self.tail = max(every_action, key=lambda action: action.stage) if has_tail else None
        self.seconds = {
            "F": durations.forward_s, "B": durations.backward_s,
            "I": durations.input_backward_s, "W": durations.weight_backward_s, "U": once_s,
        }  # fmt: skip
        self.issued_s = [0.0] * len(orders)  # when the CPU of each rank has issued its actions so far
        self.spans: list[list[Span]] = [[] for _ in orders]
        self.unsent: list[list[Action]] = [[] for _ in orders]
        self.done: dict[_Result, float] = {}
        self.sent: dict[_Result, float] = {}  # time of arrival; without overlap, time of readiness
        self.link_free: defaultdict[tuple[int, int], float] = defaultdict(float)
        self.waiting: dict[int, _Result] = {}

    def run(self) -> tuple[tuple[Span, ...], ...]:
        able = list(range(len(self.orders)))
        while able:
            able += self._advance(able.pop())
        if self.waiting:
            raise self._deadlock_error()
        return tuple(map(tuple, self.spans))

    def _advance(self, rank: int) -> list[int]:
        """Run all actions that a rank can run now. Return the ranks that waited for results of these actions."""
        order, spans, unsent = self.orders[rank], self.spans[rank], self.unsent[rank]
        clock = spans[-1].end_s if spans else 0.0
        woken: list[int] = []
        while len(spans) < len(order):
            action = order[len(spans)]
            stage, kind, microbatch, joined = action
            received = self._received(action)
            missing = self._missing(action, received)
            if missing is not None:
                self.waiting[rank] = missing
                return woken
            start = clock if received is None else self._arrival(received, rank, clock)
            if kind == "U":
                start = max([start, *(self.done[result] for result in self._tied_backwards(action))])
            clock = start + self.seconds[kind][stage]
            if host := self.durations.host_s.get(kind):  # the device runs the kernels in a queue that the CPU fills
                before = self.issued_s[rank] if not self.durations.host_waits else max(start, self.issued_s[rank])
                self.issued_s[rank] = before + host[stage]
                clock = max(clock, self.issued_s[rank])
            spans.append(Span(start, clock, stage, kind, microbatch))
            self.done[_result(action)] = clock
            if self.durations.tied and kind == "B":
                woken += self._wake_tied(_result(action))
            unsent.append(action)
            if joined and self._receiver(action) != rank:
                continue
            for finished in unsent:
                woken += self._send(finished, rank, clock)
            unsent.clear()
        return woken

    def _received(self, action: Action) -> _Result | None:
        """Return the result of a neighbouring stage that an action uses, or None if it uses no such result."""
        if action.kind == "F":
            return (action.stage - 1, "F", action.microbatch) if action.stage else None
        comes = action.kind not in "WU" and action.stage + 1 in self.rank_of
        is_before_tail = self.tail is not None and action.stage + 1 == self.tail.stage
        microbatch = self.tail.microbatch if is_before_tail else action.microbatch
        return (action.stage + 1, "B", microbatch) if comes else None

    def _missing(self, action: Action, received: _Result | None) -> _Result | None:
        if action.kind != "F":
            needed = (action.stage, _PREREQUISITE[action.kind], action.microbatch)
            if needed not in self.done:
                return needed
            for result in self._tied_backwards(action) if action.kind == "U" else ():
                if result not in self.done:
                    return result
        return received if received is not None and received not in self.sent else None

    def _tied_backwards(self, action: Action) -> list[_Result]:
        """Return the backwards on other ranks that must end before this one's tied gradients are reduced."""
        others = {rank for group in self.durations.tied if action.stage in group for rank in group}
        return [(rank, "B", action.microbatch) for rank in sorted(others - {action.stage})]

    def _wake_tied(self, result: _Result) -> list[int]:
        """Return the ranks that waited for this backward, in order to reduce gradients of tied parameters.

        The ranks are removed from `waiting`.
        """
        waited = [rank for rank, missing in self.waiting.items() if missing == result
                  and self.orders[rank][len(self.spans[rank])].kind == "U"]  # fmt: skip
        for rank in waited:
            del self.waiting[rank]
        return waited

    def _receiver(self, action: Action) -> int | None:
        return None if action.kind in "WU" else self.rank_of.get(action.stage + (1 if action.kind == "F" else -1))

    def _send_s(self, result: _Result) -> float:
        stage, kind, _ = result
        return self.durations.send_forward_s[stage] if kind == "F" else self.durations.send_backward_s[stage - 1]

    def _arrival(self, received: _Result, rank: int, clock: float) -> float:
        begin = max(clock, self.sent[received])
        local = self.overlap_sends or self.rank_of[received[0]] == rank
        return begin if local else begin + self._send_s(received)

    def _send(self, action: Action, rank: int, clock: float) -> list[int]:
        receiver, result = self._receiver(action), _result(action)
        if receiver is None:
            return []
        if self.overlap_sends and receiver != rank:
            clock = max(clock, self.link_free[rank, receiver]) + self._send_s(result)
            self.link_free[rank, receiver] = clock
        self.sent[result] = clock
        if self.waiting.get(receiver) != result:
            return []
        del self.waiting[receiver]
        return [receiver]

    def _deadlock_error(self) -> StageError:
        """Return the error of a deadlock, which lists the result that each rank waits for."""
        stands = []
        for rank, (stage, kind, microbatch) in sorted(self.waiting.items()):
            action = self.orders[rank][len(self.spans[rank])]
            at = f"{action.stage}{action.kind}{action.microbatch}"
            stands.append(f"rank {rank} at {at} waits for {stage}{kind}{microbatch}")
        why = "; ".join(stands[:4]) + (f"; and {len(stands) - 4} ranks more" if len(stands) > 4 else "")
        return StageError("the schedule never ends: its actions wait for each other", why=why)


def _result(action: Action) -> _Result:
    return action.stage, "B" if action.kind == "I" else action.kind, action.microbatch
