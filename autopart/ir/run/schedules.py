"""Pipeline schedules, and the numbers of stages and microbatches that each supports.

This file does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopart.common.extras import load_extra
from autopart.errors import OptionError, StageError

SINGLE_STAGE = ("gpipe", "1f1b", "1f1b_2bw")
MULTI_STAGE = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev", "looped_bfs")
SCHEDULES = (*SINGLE_STAGE, *MULTI_STAGE)
V_SHAPED = ("zbv", "dualpipev")
DELAYED = ("1f1b_2bw",)
"""Schedules that return the gradient of the previous batch, so that no rank waits between two batches.

They are PipeDream-2BW (Narayanan et al. 2021, arXiv:2006.09503). They change training, so autopart never chooses them
on its own.
"""
FLUSHING = tuple(name for name in SCHEDULES if name not in DELAYED)
SPLIT_BACKWARD = ("interleaved_zero_bubble", *V_SHAPED)
"""Schedules that run the backward of inputs separately from the backward of weights."""
WITH_TAIL = ("gpipe",)
"""Schedules that can run a tail (`Program.tail`): operators that run once for all microbatches.

They run all forwards before the first backward, so the tail can run between.
"""
SIMPLER = {"1f1b_2bw": "1f1b", "dualpipev": "zbv"}
"""{schedule that needs many microbatches: schedule that can run one microbatch on the same stages}."""


def schedule_named(name: str) -> str:
    """Convert a schedule name to autopart's spelling. Case, separators and torch's prefix do not matter.

    An unknown name is returned unchanged.

    >>> schedule_named("1F1B"), schedule_named("Interleaved-1F1B"), schedule_named("ScheduleGPipe")
    ('1f1b', 'interleaved_1f1b', 'gpipe')
    """
    by_letters = {_letters(schedule): schedule for schedule in SCHEDULES}
    return by_letters.get(_letters(str(name)).removeprefix("schedule"), name)


def _letters(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def versions_of(schedule: str | None) -> int:
    """Return how many versions of weights and batch inputs a rank stores: 2 for PipeDream-2BW, else 1."""
    return 2 if schedule in DELAYED else 1


def schedule_extra(schedule: str | None) -> Any:
    """Import the optional package that runs an asynchronous schedule (PipeDream-2BW).

    Returns None for all other schedules.
    """
    return load_extra("pipedream_2bw") if schedule in DELAYED else None


def check_schedule(schedule: str, num_stages: int, pp: int, microbatches: int) -> None:
    """Raise StageError if a schedule cannot run this number of stages and microbatches on `pp` ranks."""
    if schedule not in SCHEDULES:
        raise StageError(f"unknown schedule '{schedule}'", hint=", ".join(SCHEDULES))
    cannot_run = f"schedule='{schedule}' cannot run {num_stages} stages on pp={pp} with {microbatches} microbatches"
    if num_stages % pp:
        raise StageError(
            cannot_run, why=f"the number of stages is not a multiple of pp={pp}", hint=f"{pp} or {2 * pp} stages"
        )
    per_rank = num_stages // pp
    if schedule in SINGLE_STAGE and per_rank != 1:
        raise StageError(
            cannot_run, why=f"this schedule runs one stage per rank, not {per_rank}", hint="virtual_stages=1"
        )
    if schedule in V_SHAPED and per_rank != 2:
        raise StageError(
            cannot_run, why=f"this schedule runs two stages per rank, not {per_rank}", hint="virtual_stages=2"
        )
    least = num_stages if schedule in ("dualpipev", *DELAYED) else 1
    if microbatches < least:
        raise StageError(
            cannot_run, why=f"this schedule needs at least {least} microbatches", hint=f"microbatches={least}"
        )
    rounds = max(1, microbatches // pp)
    if schedule.startswith("interleaved") and microbatches % rounds:
        raise StageError(
            cannot_run,
            why=f"{microbatches} microbatches cannot be split into {rounds} equal rounds of one microbatch or "
            "more per rank", hint=f"microbatches={rounds * pp}",
        )  # fmt: skip


def check_compile(compile: object, schedule: str | None) -> None:
    """Raise OptionError if `compile` is invalid, or if the schedule does not support compiled stages."""
    if not isinstance(compile, bool):
        raise OptionError(f"compile={compile!r} is neither True nor False", hint="compile=True, or False")
    if compile and schedule in SPLIT_BACKWARD:
        raise OptionError(
            f"compile=True cannot be combined with schedule='{schedule}'",
            why="the schedule runs the backward in two parts, and a compiled stage has one backward",
            hint="another schedule, for example '1f1b' or 'interleaved_1f1b'",
        )


def check_precision(schedule: str | None, precision: str | None) -> None:
    """Raise StageError for fp16 with an asynchronous schedule, which cannot scale the loss."""
    if schedule in DELAYED and precision == "fp16":
        raise StageError(
            f"precision='fp16' cannot be combined with schedule='{schedule}'",
            why="step() leaves the gradient of the previous batch, so the loss scale would change one batch late",
            hint="precision='bf16', or schedule='1f1b', which finishes each batch",
        )


def can_run(schedule: str, num_stages: int, pp: int, microbatches: int) -> bool:
    """Return True if the schedule supports these numbers of stages, ranks and microbatches."""
    try:
        check_schedule(schedule, num_stages, pp, microbatches)
    except StageError:
        return False
    return True


def schedule_for(schedule: str, num_stages: int, pp: int, microbatches: int) -> str:
    """Return the schedule, or its simpler replacement if a call has too few microbatches for it.

    >>> schedule_for("dualpipev", 4, 2, 8), schedule_for("dualpipev", 4, 2, 3)
    ('dualpipev', 'zbv')
    """
    return schedule if can_run(schedule, num_stages, pp, microbatches) else SIMPLER.get(schedule, schedule)


@dataclass(frozen=True)
class Schedule:
    """Pipeline schedule, its number of microbatches and its number of stages per rank.

    `name` is None if there is one stage.
    """

    name: str | None = None
    microbatches: int = 1
    virtual_stages: int = 1
