"""Which pipeline schedules there are, and how many stages and microbatches each can run. Arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

from autopart.errors import OptionError, StageError

SINGLE_STAGE = ("gpipe", "1f1b", "1f1b_2bw")
MULTI_STAGE = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev", "looped_bfs")
SCHEDULES = (*SINGLE_STAGE, *MULTI_STAGE)
V_SHAPED = ("zbv", "dualpipev")
DELAYED = ("1f1b_2bw",)
"""Schedules that leave the gradient of the batch before, so that no rank waits between two batches (PipeDream-2BW,
Narayanan et al. 2021, arXiv:2006.09503). As they train otherwise, they are never chosen, only asked for."""
FLUSHING = tuple(name for name in SCHEDULES if name not in DELAYED)
SPLIT_BACKWARD = ("interleaved_zero_bubble", *V_SHAPED)
"""Schedules that run the backward of the inputs and that of the weights separately."""
SIMPLER = {"1f1b": "gpipe", "1f1b_2bw": "gpipe", "dualpipev": "zbv"}
"""Schedules that need many microbatches, and those that place stages the same way and run with one."""


def schedule_named(name: str) -> str:
    """The schedule of a name in any case and spelling, as torch and papers write it; another name as it is.

    >>> schedule_named("1F1B"), schedule_named("Interleaved-1F1B"), schedule_named("ScheduleGPipe")
    ('1f1b', 'interleaved_1f1b', 'gpipe')
    """
    known = {_letters(schedule): schedule for schedule in SCHEDULES}
    return known.get(_letters(str(name)).removeprefix("schedule"), name)


def _letters(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def versions_of(schedule: str | None) -> int:
    """How many versions of its weights a rank holds, and of the inputs that belong to a batch."""
    return 2 if schedule in DELAYED else 1


def check_schedule(schedule: str, num_stages: int, pp: int, microbatches: int) -> None:
    """Raises StageError where a schedule cannot run so many stages on `pp` ranks with so many microbatches."""
    if schedule not in SCHEDULES:
        raise StageError(f"unknown schedule '{schedule}'", hint=", ".join(SCHEDULES))
    asked = f"schedule='{schedule}' cannot run {num_stages} stages on pp={pp} with {microbatches} microbatches"
    if num_stages % pp:
        raise StageError(asked, why=f"{num_stages} is not a multiple of {pp}", hint=f"{pp} or {2 * pp} stages")
    per_rank = num_stages // pp
    if schedule in SINGLE_STAGE and per_rank != 1:
        raise StageError(asked, why=f"it runs one stage per rank, not {per_rank}", hint="virtual_stages=1")
    if schedule in V_SHAPED and per_rank != 2:
        raise StageError(asked, why=f"it runs two stages per rank, not {per_rank}", hint="virtual_stages=2")
    least = num_stages if schedule in ("1f1b", "dualpipev", *DELAYED) else 1
    if microbatches < least:
        raise StageError(asked, why=f"it needs at least {least} microbatches", hint=f"microbatches={least}")
    rounds = max(1, microbatches // pp)
    if schedule.startswith("interleaved") and microbatches % rounds:
        why = f"{microbatches} microbatches do not fill {rounds} rounds of equal length"
        raise StageError(asked, why=why, hint=f"microbatches={rounds * pp}")


def check_compile(compile: object, schedule: str | None) -> None:
    """Raises OptionError where stages cannot be compiled."""
    if not isinstance(compile, bool):
        raise OptionError(f"compile={compile!r} is not a choice", hint="compile=True, or False")
    if compile and schedule in SPLIT_BACKWARD:
        raise OptionError(f"compile=True with schedule='{schedule}'",
                          why="the schedule runs the backward in two parts, and a compiled stage has one",
                          hint="another schedule, for example '1f1b' or 'interleaved_1f1b'")  # fmt: skip


def check_precision(schedule: str | None, precision: str | None) -> None:
    """Raises StageError for a schedule that does not scale the loss."""
    if schedule in DELAYED and precision == "fp16":
        raise StageError(f"schedule='{schedule}' with precision='fp16'",
                         why="the scale of the loss would be chosen by the batch before",
                         hint="precision='bf16', or schedule='1f1b', which finishes each batch")  # fmt: skip


def can_run(schedule: str, num_stages: int, pp: int, microbatches: int) -> bool:
    """Whether `check_schedule` lets this pass."""
    try:
        check_schedule(schedule, num_stages, pp, microbatches)
    except StageError:
        return False
    return True


def schedule_for(schedule: str, num_stages: int, pp: int, microbatches: int) -> str:
    """The schedule itself, or the simpler one for a call that has too few microbatches for it.

    >>> schedule_for("1f1b", 4, 4, 8), schedule_for("1f1b", 4, 4, 3)
    ('1f1b', 'gpipe')
    """
    return schedule if can_run(schedule, num_stages, pp, microbatches) else SIMPLER.get(schedule, schedule)


@dataclass(frozen=True)
class Schedule:
    """How microbatches run through the stages. `name` is None where there is one stage."""

    name: str | None = None
    microbatches: int = 1
    virtual_stages: int = 1
