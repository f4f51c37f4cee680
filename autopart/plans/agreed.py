"""What all ranks must have alike of versions, options and the plan, in words that can be compared; and the options that
say how the ranks watch each other."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from autopart.errors import OptionError
from autopart.plans.plan import Plan

TIMEOUT_S = 120.0
"""How long a rank waits for the others in a call, in seconds, before it says who waits for whom."""

DECIDING = ("mesh", "schedule", "parameters", "operators", "cuts", "recompute", "compile")
"""The parts of a plan that say what is run. Its figures are left out: they may be rounded otherwise elsewhere."""


def agreed(options: Any, plan: Plan | None) -> dict[str, str]:
    """{subject: text}; `options` is a dataclass. A part of a plan has a line for each of its entries."""
    version = vars(sys.modules["autopart"]).get("__version__")
    subjects = {"version": f"autopart {version}, torch {torch.__version__}"}
    subjects |= {f"option {field.name}": str(getattr(options, field.name)) for field in fields(options)}
    for part in DECIDING if plan is not None else ():
        content = getattr(plan, part)
        rows = [f"{key}: {value}" for key, value in content.items()] if isinstance(content, Mapping) else [content]
        subjects[f"the plan's {part}"] = "\n".join(map(str, rows))
    return subjects


def check_loop_options(timeout: Any, check_replicas: Any) -> None:
    """Raises OptionError for a `timeout` or a `check_replicas` that is not one."""
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not math.isfinite(timeout) or timeout <= 0:
        raise OptionError(f"timeout={timeout!r} is not a number of seconds",
                          why="it is how long a rank waits for the others", hint="timeout=600")  # fmt: skip
    if check_replicas is not None and (not isinstance(check_replicas, int) or check_replicas < 0):
        raise OptionError(f"check_replicas={check_replicas!r} is not a number of steps",
                          why="copies of parameters are compared at every so many steps",
                          hint="100, or False: never; leave it out: at steps 1, 2, 4, 8 and every 100th")  # fmt: skip
