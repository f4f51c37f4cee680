"""The options that `parallelize`, `plan`, `verify` and `search` share: their defaults, and what they may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from autopart.cost.hardware import DEFAULT
from autopart.cost.memory import parse_size
from autopart.errors import OptionError
from autopart.ir.program import Rng
from autopart.ir.recomputation import Recompute, parse_recompute
from autopart.ir.schedules import check_compile, schedule_named
from autopart.passes.choose.decide import NO_PINS
from autopart.passes.choose.shard import SequenceParallel
from autopart.plans.agreed import TIMEOUT_S, check_loop_options
from autopart.plans.pins import Pins

NOT_BUILT = {
    "precision": "mixed precision",
}


@dataclass(frozen=True)
class Options:
    """The options of `parallelize` and `plan`; None: chosen for you."""

    schedule: str | None = None
    microbatches: int | None = None
    virtual_stages: int | None = None
    sequence_parallel: SequenceParallel = "auto"
    hardware: str = DEFAULT
    rng: Rng = "fast"
    pins: Pins = NO_PINS
    zero: int | None = None
    memory: int | str | None = None
    recompute: Recompute | None = None
    compile: bool = False
    timeout: float = TIMEOUT_S
    check_replicas: int | bool | None = None

    def __post_init__(self) -> None:
        check_loop_options(self.timeout, self.check_replicas)
        check_compile(self.compile, self.schedule, self.zero)
        if self.zero in (1, 2) and not isinstance(self.zero, bool):
            cut = "the optimizer's state" if self.zero == 1 else "the optimizer's state and gradients"
            raise OptionError(f"zero={self.zero} is not built yet", why=f"it cuts {cut} over dp, not the parameters",
                              hint="zero=3, which cuts all three, or zero=0")  # fmt: skip
        if self.zero not in (None, 0, 3) or isinstance(self.zero, bool):
            raise OptionError(f"unknown zero={self.zero!r}", hint="0 (parameters whole on dp) or 3 (cut over dp)")
        if self.rng not in get_args(Rng):
            raise OptionError(f"unknown rng={self.rng!r}", hint="rng='fast', or rng='exact'")
        if self.recompute is not None:
            object.__setattr__(self, "recompute", parse_recompute(self.recompute))
        if self.sequence_parallel not in (True, False, "auto"):
            raise OptionError(f"unknown sequence_parallel={self.sequence_parallel!r}", hint="True, False or 'auto'")
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_size(self.memory))
        for name, number in (("microbatches", self.microbatches), ("virtual_stages", self.virtual_stages)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
                counted = name.replace("_", " ")
                raise OptionError(f"{name}={number!r} is not a number of {counted}", why="it is a whole number from 1")


def read_options(unknown: Mapping[str, Any], **given: Any) -> Options:
    """The options that `parallelize`, `plan` and `verify` share; None: the default.

    Raises OptionError for one that is unknown, not built yet, or out of range.
    """
    for name in unknown:
        if name in NOT_BUILT:
            raise OptionError(
                f"option {name}= is not built yet", why=f"it is for {NOT_BUILT[name]}", hint="leave it out"
            )
        raise OptionError(
            f"unknown option {name}=",
            hint="one of plan, schedule, microbatches, virtual_stages, sequence_parallel, hardware, pins, zero, "
            "memory, recompute, compile, rng, timeout, check_replicas, example_args, example_kwargs",
        )
    if isinstance(given.get("schedule"), str):
        given["schedule"] = schedule_named(given["schedule"])
    if given.get("pins") is not None:
        given["pins"] = Pins.parse(given["pins"])
    return Options(**{name: option for name, option in given.items() if option is not None})
